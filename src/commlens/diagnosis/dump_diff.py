"""Two dumps of one job, taken one after the other: which ranks went on, and which stand where they stood."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from commlens.model.collective import user_frame
from commlens.model.movement import Moved, Movement, MovementKind, Place
from commlens.text import capital, count, duration, group_phrase, ranks_phrase, verb

if TYPE_CHECKING:
    from commlens.formats.columns import RankColumns

__all__ = ["Standing", "compare_standings", "standing_of"]

_ORDER = ("still", "moved", "finished", "again", "only-before", "only-after")


class Standing(msgspec.Struct, frozen=True):
    """Where a rank stands, from its dump."""

    rank: int
    place: Place
    identity: tuple[str, int, str] = ("", -1, "")  # group, number and op of what is in flight
    newest_ns: int = 0
    job: str = ""


def standing_of(rows: RankColumns) -> Standing:
    """Of one rank's operations, the oldest that has not ended."""
    import numpy as np

    newest = max(int(rows.created_ns.max(initial=0)), int(rows.completed_ns.max(initial=0)), rows.captured_ns)
    flying = np.flatnonzero((rows.state < 2) & ~((rows.coalesced > 0) & ~rows.closes))
    if not len(flying):
        return Standing(rows.rank, Place(rows.issued), newest_ns=newest, job=rows.job)
    at = int(flying[0])
    asked, channel = rows.args[int(rows.args_index[at])], rows.channels[int(rows.channel[at])]
    sequence, peer = int(rows.sequence[at]), int(rows.peer[at])
    towards = "" if peer < 0 else f" to rank {peer}" if asked.op == "send" else f" from rank {peer}"
    frame = user_frame(rows.stacks[int(rows.stack[at])]) if rows.stack[at] >= 0 else None
    place = Place(
        rows.issued,
        f"{asked.op} #{sequence}{towards} of {group_phrase(channel.group)}",
        f"{frame.where} {frame.function}" if frame is not None else "",
    )
    return Standing(rows.rank, place, (channel.group.name, sequence, asked.op), newest, rows.job)


def compare_standings(before: Iterable[Standing], after: Iterable[Standing]) -> Movement:
    """Say what moved from one dump to the other. Ranks of which the same is to be said are said together."""
    first, second = {one.rank: one for one in before}, {one.rank: one for one in after}
    found: dict[tuple[str, str], Moved] = {}

    def say(rank: int, kind: MovementKind, key: str, sentence: Callable[[list[int]], str]) -> None:
        moved = found.setdefault((kind, key), Moved([], kind, ""))
        moved.ranks.append(rank)
        moved.sentence = sentence(moved.ranks)
        if len(moved.ranks) == 1:
            moved.before = first[rank].place if rank in first else None
            moved.after = second[rank].place if rank in second else None

    for rank in sorted(first.keys() | second.keys()):
        if rank not in second:
            say(rank, "only-before", "", lambda ranks: f"{ranks_phrase(ranks)}: a dump only in the first set.")
        elif rank not in first:
            say(rank, "only-after", "", lambda ranks: f"{ranks_phrase(ranks)}: a dump only in the second set.")
        else:
            _compare(first[rank], second[rank], say)
    movement = Movement(ranks=sorted(found.values(), key=lambda one: (_ORDER.index(one.kind), -len(one.ranks), one.ranks)))
    movement.apart_s = _apart(first, second)
    both = sorted(first.keys() & second.keys())
    movement.answer = _answer(movement, both)
    jobs = {one.job for one in [*first.values(), *second.values()] if one.job}
    if len(jobs) > 1:
        movement.notes.append(f"These are dumps of different jobs: {', '.join(sorted(jobs)[:4])}.")
    return movement


Say = Callable[[int, MovementKind, str, Callable[[list[int]], str]], None]


def _compare(old: Standing, new: Standing, say: Say) -> None:
    a, b = old.place, new.place
    more = b.issued - a.issued
    line = f" ({b.line})" if b.line else ""
    if more < 0:
        say(
            new.rank, "again", "", lambda ranks: f"{ranks_phrase(ranks)} issued fewer operations than before: restarted, or of another job."
        )
    elif not more and old.identity == new.identity:
        if not b.in_flight:
            say(
                new.rank,
                "still",
                "",
                lambda ranks: f"{ranks_phrase(ranks)} issued nothing, and {verb(ranks, 'has', 'have')} nothing in flight.",
            )
        else:
            text = f"still in {b.in_flight}{line}."
            say(new.rank, "still", text, lambda ranks: f"{ranks_phrase(ranks)} {verb(ranks, 'is', 'are')} {text}")
    else:
        went = f"issued {count(more, 'operation')} more" if more else "issued nothing more"
        if not b.in_flight:
            text = f"{went}, and {'it has ended' if more == 1 else 'all have ended'}" if more else f"{went}, and {a.in_flight} has ended"
            say(new.rank, "finished" if not more else "moved", text, lambda ranks: f"{ranks_phrase(ranks)} {text}.")
        elif old.identity == new.identity:
            text = f"{went} behind it, but {{}} still in {b.in_flight}{line}."
            say(new.rank, "moved", text, lambda ranks: f"{ranks_phrase(ranks)} {text.format(verb(ranks, 'is', 'are'))}")
        else:
            text = f"moved on from {a.in_flight or 'between operations'} to {b.in_flight}{line}: {went}."
            say(new.rank, "moved", text, lambda ranks: f"{ranks_phrase(ranks)} {text}")


def _apart(first: Mapping[int, Standing], second: Mapping[int, Standing]) -> float:
    old, new = max((one.newest_ns for one in first.values()), default=0), max((one.newest_ns for one in second.values()), default=0)
    return (new - old) / 1e9 if old and new > old else 0.0


def _answer(movement: Movement, both: list[int]) -> str:
    if not both:
        return "No rank has a dump in both sets: nothing was compared."
    by_kind: dict[str, list[int]] = defaultdict(list)
    for one in movement.ranks:
        by_kind[one.kind] += one.ranks
    within = f" in {duration(int(movement.apart_s * 1e9))}" if movement.apart_s else ""
    still, moved = by_kind["still"], sorted(by_kind["moved"] + by_kind["finished"] + by_kind["again"])
    if not moved:
        return f"No rank moved{within}: {count(len(both), 'rank')} {verb(both, 'is', 'are')} in the same place."
    if not still:
        return f"All {count(len(both), 'rank')} moved{within}." if len(both) > 1 else f"The rank moved{within}."
    return f"{capital(ranks_phrase(moved))} moved{within}, {ranks_phrase(still)} did not."
