"""Compare two dumps of one job, taken one after the other: find the ranks that made progress and
those in the same place.

If ranks 1-3 had ``all_reduce #41`` in flight and then #55, and rank 0 has #41 in flight in both
dumps, the answer is "Ranks 1-3 moved in 12 s, rank 0 did not.", and rank 0's sentence "rank 0 is
still in all_reduce #41 of group dp [0-3] (train.py:81 step)."
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, get_args

import msgspec

from commlens.model.collective import FrameKind, user_frame
from commlens.model.grouping import grouped
from commlens.text import (
    capital,
    count,
    duration,
    format_ranks,
    frame_phrase,
    group_phrase,
    ranks_and_verb,
    ranks_phrase,
    verb,
)

if TYPE_CHECKING:
    from commlens.formats.columns import RankColumns

MOVEMENT_SCHEMA: Final = "commlens.movement/1"

MovementKind = Literal["still", "moved", "finished", "again", "only-before", "only-after"]


class DumpPosition(msgspec.Struct, frozen=True, omit_defaults=True):
    """The position of a rank in a dump."""

    issued: int  # operations that the rank ever issued
    # the oldest operation in flight: "all_reduce #41 of group dp [0-3]"; "" if none
    in_flight: str = ""
    line: str = ""  # the user's line that issued it: "train.py:81 step"


class Moved(msgspec.Struct):
    """Ranks that made the same progress."""

    ranks: list[int]
    # finished: the op in flight has ended and no new one was issued. again: fewer operations than
    # before, so restarted
    kind: MovementKind
    sentence: str
    before: DumpPosition | None = None  # position of the first of these ranks
    after: DumpPosition | None = None


class Movement(msgspec.Struct, kw_only=True):
    """The progress of all ranks. It is false if each rank has both dumps and none made progress."""

    schema: str = MOVEMENT_SCHEMA
    answer: str = ""  # in one sentence
    apart_s: float = 0.0  # seconds between the last signs of life in the two dumps; 0 if unknown
    ranks: list[Moved] = []  # ranks with the same progress together, ranks that stand still first
    # sentences about ranks that were not compared or files that could not be read
    notes: list[str] = []

    def __bool__(self) -> bool:
        return any(one.kind != "still" for one in self.ranks)


_ORDER = get_args(MovementKind)


class JobTraits(msgspec.Struct, frozen=True):
    """The facts in one rank's dump about its job that do not change while the job runs. Empty or 0:
    unknown.
    """

    name: str = ""
    world_size: int = 0
    groups: dict[str, frozenset[str]] = {}  # by name: the ranks of each group of that name, "0-3"
    program: str = ""  # file


class RankInDump(msgspec.Struct, frozen=True):
    """A rank in one dump: its position, and what identifies its job."""

    rank: int
    place: DumpPosition
    # group, sequence number and op of the oldest operation in flight
    identity: tuple[str, int, str] = ("", -1, "")
    newest_ns: int = 0  # the rank's last sign of life
    job: JobTraits = JobTraits()


# --- where a rank is in one dump


def shows_position(rows: RankColumns) -> bool:
    """Return whether a dump shows how far its rank had come: another tool's dump that was cut off
    lacks the newest entries.
    """
    return rows.origin == "commlens" or not rows.lost_entries


def position_of(rows: RankColumns) -> RankInDump:
    """Return the position of a rank: its oldest operation in flight."""
    import numpy as np

    newest = max(
        int(rows.created_ns.max(initial=0)), int(rows.completed_ns.max(initial=0)), rows.captured_ns
    )
    # scheduled or started; of a coalesced group, the entry that closes it stands for all
    in_flight = np.flatnonzero((rows.state < 2) & ~((rows.coalesced > 0) & ~rows.closes))
    if not len(in_flight):
        return RankInDump(rows.rank, DumpPosition(rows.issued), newest_ns=newest, job=_traits(rows))
    row = int(in_flight[0])
    op, group = rows.args[int(rows.args_index[row])].op, rows.channels[int(rows.channel[row])].group
    number, peer = int(rows.sequence[row]), int(rows.peer[row])
    towards = "" if peer < 0 else f" to rank {peer}" if op == "send" else f" from rank {peer}"
    frame = user_frame(rows.stack_at(row))
    place = DumpPosition(
        rows.issued, f"{op} #{number}{towards} of {group_phrase(group)}", frame_phrase(frame)
    )
    return RankInDump(rows.rank, place, (group.name, number, op), newest, _traits(rows))


def _traits(rows: RankColumns) -> JobTraits:
    """Return the facts of a dump about its job. The program is the file of the outermost user frame
    of a ``<module>``.
    """
    groups: dict[str, set[str]] = defaultdict(set)
    for group in {
        channel.group for channel in [*rows.channels, *rows.groups] if channel.group.ranks
    }:
        groups[group.label].add(format_ranks(group.ranks))
    programs = (
        frame.file
        for stack in rows.call_stacks
        for frame in reversed(stack)
        if frame.function == "<module>" and frame.kind is FrameKind.USER
    )
    return JobTraits(
        rows.job,
        rows.world_size,
        {name: frozenset(ranks) for name, ranks in groups.items()},
        next(programs, ""),
    )


# --- whether two dumps are of one job


def other_job(before: Iterable[RankInDump], after: Iterable[RankInDump]) -> str:
    """Return in a clause why two dumps are not of one job; empty if they may be."""
    first, second = {one.rank: one.job for one in before}, {one.rank: one.job for one in after}
    names, other_names = (
        {job.name for job in jobs.values() if job.name} for jobs in (first, second)
    )
    if names and other_names and not names & other_names:
        return f"{', '.join(sorted(names)[:4])} and {', '.join(sorted(other_names)[:4])}"
    size, other_size = (
        max((job.world_size for job in jobs.values()), default=0) for jobs in (first, second)
    )
    if size and other_size and size != other_size:
        return f"one has {count(size, 'rank')}, the other {count(other_size, 'rank')}"
    both = sorted(first.keys() & second.keys())
    return next(filter(None, (_other_rank(rank, first[rank], second[rank]) for rank in both)), "")


def _other_rank(rank: int, old: JobTraits, new: JobTraits) -> str:
    """Return in a clause why a rank's dumps are not of one job; empty if they may be."""
    if old.program and new.program and old.program != new.program:
        return f"rank {rank} ran {old.program} in one, {new.program} in the other"
    described, others = (
        {name for name in job.groups if name != "default_pg" and not name.isdecimal()}
        for job in (old, new)
    )
    if described and others and not described & others:
        return f"rank {rank} has the group {min(described)} in one, {min(others)} in the other"
    for name in sorted(old.groups.keys() & new.groups.keys()):
        if not old.groups[name] & new.groups[name]:
            return (
                f"the group {name} of rank {rank} has the ranks {min(old.groups[name])} in one,"
                f" {min(new.groups[name])} in the other"
            )
    return ""


# --- from one dump to the other


def compare_positions(before: Iterable[RankInDump], after: Iterable[RankInDump]) -> Movement:
    """Return the ranks' progress from one dump to the other. Ranks with the same change share a
    sentence.
    """
    first, second = {one.rank: one for one in before}, {one.rank: one for one in after}
    ranks_by_change = grouped(
        (_change(first.get(rank), second.get(rank)), rank)
        for rank in sorted(first.keys() | second.keys())
    )
    moved = []
    for change, ranks in ranks_by_change.items():
        old, new = first.get(ranks[0]), second.get(ranks[0])
        sentence = ranks_and_verb(ranks, change.singular, change.plural or change.singular)
        moved.append(
            Moved(
                ranks,
                change.kind,
                sentence,
                old.place if old is not None else None,
                new.place if new is not None else None,
            )
        )
    movement = Movement(
        ranks=sorted(moved, key=lambda one: (_ORDER.index(one.kind), -len(one.ranks), one.ranks))
    )
    old_ns, new_ns = (
        max((one.newest_ns for one in positions.values()), default=0)
        for positions in (first, second)
    )
    movement.apart_s = (new_ns - old_ns) / 1e9 if 0 < old_ns < new_ns else 0.0
    movement.answer = _answer(movement, sorted(first.keys() & second.keys()))
    return movement


class _PositionChange(NamedTuple):
    """The change of a rank's position, and its sentence without the subject: for one rank, and for
    several.
    """

    kind: MovementKind
    singular: str
    plural: str = ""  # empty: the same


def _change(old: RankInDump | None, new: RankInDump | None) -> _PositionChange:
    """Return how a rank's position changed; None: it has no dump there."""
    if new is None:
        return _PositionChange(
            "only-before",
            "has a readable dump only in the first set.",
            "have a readable dump only in the first set.",
        )
    if old is None:
        return _PositionChange(
            "only-after",
            "has a readable dump only in the second set.",
            "have a readable dump only in the second set.",
        )
    before, now = old.place, new.place
    issued = now.issued - before.issued
    line = f" ({now.line})" if now.line else ""
    if issued < 0:
        return _PositionChange(
            "again", "issued fewer operations than before: restarted, or of another job."
        )
    if not issued and old.identity == new.identity:
        if not now.in_flight:
            return _PositionChange(
                "still",
                "issued nothing, and has nothing in flight.",
                "issued nothing, and have nothing in flight.",
            )
        return _PositionChange(
            "still", f"is still in {now.in_flight}{line}.", f"are still in {now.in_flight}{line}."
        )
    more = f"issued {count(issued, 'more operation')}" if issued else "issued nothing more"
    if not now.in_flight:
        if not issued:
            return _PositionChange("finished", f"{more}, and {before.in_flight} has ended.")
        return _PositionChange(
            "moved", f"{more}, and {'it has ended' if issued == 1 else 'all have ended'}."
        )
    if old.identity == new.identity:
        behind, place = f"{more} behind it", f"still in {now.in_flight}{line}."
        return _PositionChange("moved", f"{behind}, but is {place}", f"{behind}, but are {place}")
    if not before.in_flight:
        was, place = "between operations, and", f"now in {now.in_flight}{line}: {more}."
        return _PositionChange("moved", f"was {was} is {place}", f"were {was} are {place}")
    return _PositionChange(
        "moved", f"moved on from {before.in_flight} to {now.in_flight}{line}: {more}."
    )


def _answer(movement: Movement, both: list[int]) -> str:
    """Say which of the ranks with both dumps moved."""
    if not both:
        return "No rank has a dump in both sets: nothing was compared."
    by_kind: dict[str, list[int]] = defaultdict(list)
    for one in movement.ranks:
        by_kind[one.kind] += one.ranks
    within = f" in {duration(int(movement.apart_s * 1e9))}" if movement.apart_s else ""
    still = by_kind["still"]
    moved = sorted(by_kind["moved"] + by_kind["finished"] + by_kind["again"])
    if not moved:
        return (
            f"No rank moved{within}: {count(len(both), 'rank')} {verb(both, 'is', 'are')} in the"
            " same place."
        )
    if not still:
        return (
            f"All {count(len(both), 'rank')} moved{within}."
            if len(both) > 1
            else f"The rank moved{within}."
        )
    return f"{capital(ranks_phrase(moved))} moved{within}, {ranks_phrase(still)} did not."
