"""All ranks of a job wait in calls: compare the calls, and find the rank that waits where no other
rank does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from commlens.model.cause import Kind
from commlens.model.verdict import Finding
from commlens.outside.sample import DEFAULT_GROUP, Call, RankSample
from commlens.text import capital, duration, frame_phrase, joined, ranks_and_verb, ranks_phrase

_MORE: Final = (
    "Sequence numbers would decide it: start the job with `commlens launch`, or with torch's Flight"
    " Recorder and a pipe for dumps."
)
_BLIND: Final = frozenset({"request", "device"})
"""Calls of which it is not known for which ranks they wait."""


class Waits(NamedTuple):
    """Ranks that all wait in calls."""

    members: Sequence[RankSample]
    busy: Sequence[int]  # ranks that use CPU or the network meanwhile
    window_s: float


class Ahead(NamedTuple):
    """A rank whose loop is not in step with the others."""

    rank: int
    name: str  # of the loop's variable
    value: int
    others: int

    @property
    def phrase(self) -> str:
        """``"rank 2 is in step 7, the others in step 6"``."""
        return (
            f"rank {self.rank} is in {self.name} {self.value}, the others in {self.name}"
            f" {self.others}"
        )


def compare_waits(waits: Waits) -> Finding:
    """Make the finding for a job of which all ranks wait in calls."""
    return _cycle(waits) or _left_alone(waits) or _odd_one_out(waits)


def _cycle(waits: Waits) -> Finding | None:
    """Find ranks whose messages wait for each other."""
    peer = {
        one.rank: one.call.peer
        for one in waits.members
        if one.call is not None and one.call.kind == "message"
    }
    for start in sorted(peer):
        path = [start]
        while (following := peer.get(path[-1])) is not None and following not in path:
            path.append(following)
        if following is not None:
            return _cycle_of(
                waits, [one for one in waits.members if one.rank in path[path.index(following) :]]
            )
    return None


def _cycle_of(waits: Waits, members: Sequence[RankSample]) -> Finding:
    ahead = _ahead(members) if len(members) == 2 else None
    # which of them called in the wrong order cannot be seen
    culprits = [ahead.rank] if ahead is not None else []
    first = next((one for one in members if one.rank in culprits), members[0])
    skipped = f"{capital(ahead.phrase)}: it has left out a message. " if ahead is not None else ""
    return locate(
        Finding(
            kind="cycle",
            why="skipped" if ahead is not None else "in-collective",
            root_cause=True,
            culprits=culprits,
            victims=[rank for rank in ranks_of(waits.members) if rank not in culprits],
            confidence="medium",
            summary=(
                f"{ranks_phrase(ranks_of(members))} wait for each other:"
                f" {joined(map(_stand, members))}"
            ),
            explanation=skipped + unmoved(waits.members, waits.window_s),
            next_step=f"compare the order of sends and receives up to {frame_phrase(first.line)}",
            evidence=places(waits.members),
            would_raise_confidence=_MORE,
        ),
        first,
    )


def _left_alone(waits: Waits) -> Finding | None:
    """Report a message whose other rank is in a collective: that rank left out its part, or the
    message is one too many.
    """
    by_rank = {one.rank: one for one in waits.members}
    for one in waits.members:
        if one.call is None or one.call.kind != "message" or one.call.peer is None:
            continue
        other = by_rank.get(one.call.peer)
        if other is None or other.call is None or other.call.kind == "message":
            continue
        part = "recv" if one.call.op == "send" else "send"
        return locate(
            Finding(
                kind="missing",
                why="skipped",
                root_cause=True,
                culprits=[],
                victims=ranks_of(waits.members),
                confidence="low",
                summary=f"{_stand(one)}, but {_stand(other)}",
                explanation=(
                    f"Rank {other.rank} has left out its {part}, or has not come to it because it"
                    f" waits itself; or rank {one.rank} calls {one.call.op} where it should not. "
                )
                + unmoved(waits.members, waits.window_s),
                next_step=(
                    f"compare the messages between ranks {one.rank} and {other.rank} before"
                    f" {frame_phrase(one.line)}"
                ),
                evidence=places(waits.members),
                would_raise_confidence=_MORE,
            ),
            one,
        )
    return None


def _odd_one_out(waits: Waits) -> Finding:
    """Compare the calls in which all ranks wait. The majority decides if every rank must reach one
    of the two calls.
    """
    classes: dict[object, list[RankSample]] = defaultdict(list)
    for one in waits.members:
        assert one.call is not None
        classes[(one.call.kind, one.call.op, one.call.root, one.path)].append(one)
    ordered = sorted(classes.values(), key=lambda members: (len(members), members[0].rank))
    if len(ordered) == 1:
        return _all_inside(waits)
    odd, most = ordered[0], ordered[-1]
    calls = [call for call in (odd[0].call, most[0].call) if call is not None]
    # A rank that alone waits for a key waits for one other, which may be any of them.
    waits_for_key = odd[0].call is not None and odd[0].call.kind == "store"
    comparable = any(map(needs_all, calls)) and not any(call.kind in _BLIND for call in calls)
    decided = len(ordered) == 2 and len(odd) < len(most) and comparable and not waits_for_key
    if decided:
        why = (
            f"{capital(ranks_and_verb(ranks_of(odd), 'stands', 'stand'))} where no other rank"
            " stands: the majority decides."
        )
    elif len(ordered) == 2 and len(odd) == len(most):
        why = "As many ranks stand in one call as in the other, so no rank is named."
    else:
        why = (
            "Which ranks are in which group, and in which order they called them, cannot be seen"
            " from outside, so no rank is named."
        )
    ahead = _ahead([odd[0], most[0]])
    step = f" {capital(ahead.phrase)}." if ahead is not None else ""
    kind = _kind_of(odd[0], most[0], decided=decided)
    return locate(
        Finding(
            kind=kind,
            why="skipped" if kind == "missing" else "in-collective",
            root_cause=True,
            culprits=ranks_of(odd) if decided else [],
            victims=ranks_of(most if decided else waits.members),
            confidence="medium" if decided else "low",
            summary="; ".join(_stands(each) for each in ordered),
            explanation=(
                f"The ranks wait in different calls, so none can complete. {why}{step}"
                f" {unmoved(waits.members, waits.window_s)}"
            ),
            next_step=(
                f"find out how rank {odd[0].rank} comes to {frame_phrase(odd[0].line)} while rank"
                f" {most[0].rank} is at {frame_phrase(most[0].line)}"
            ),
            evidence=places(waits.members),
            would_raise_confidence=_MORE,
        ),
        odd[0],
    )


def _kind_of(odd: RankSample, most: RankSample, *, decided: bool) -> Kind:
    if odd.call is None or most.call is None:
        return "missing"
    if odd.path == most.path and odd.call.op == most.call.op and odd.call.root != most.call.root:
        return "mismatch/root"
    if (
        odd.call.op != most.call.op
        and odd.call.kind == most.call.kind == "collective"
        and (decided or odd.call.group == most.call.group)
    ):
        return "mismatch/op"
    return "missing" if decided else "cycle"


def _all_inside(waits: Waits) -> Finding:
    """Report ranks that all wait at the same line: one is in another round of its loop, or the call
    itself does not complete.
    """
    first = waits.members[0]
    ahead = _odd_counter(waits.members)
    evidence = places(waits.members)
    if ahead is not None:
        odd = next(one for one in waits.members if one.rank == ahead.rank)
        return locate(
            Finding(
                kind="missing",
                why="skipped",
                root_cause=True,
                culprits=[ahead.rank],
                victims=[rank for rank in ranks_of(waits.members) if rank != ahead.rank],
                confidence="low",
                summary=f"{ahead.phrase}; {_stands(waits.members)}",
                explanation=(
                    "Its loop is not in step with the others'."
                    f" {unmoved(waits.members, waits.window_s)}"
                ),
                next_step=f"find out which round of its loop rank {ahead.rank} left out or added",
                evidence=evidence,
                would_raise_confidence=_MORE,
            ),
            odd,
        )
    if waits.busy:
        evidence.insert(
            0,
            f"{capital(ranks_and_verb(waits.busy, 'uses', 'use'))} CPU or the network: the call may"
            " be at work.",
        )
    return locate(
        Finding(
            kind="waiting" if waits.busy else "stuck-inside",
            why="in-collective",
            root_cause=not waits.busy,
            culprits=[],
            victims=ranks_of(waits.members),
            confidence="low",
            summary=f"{_stands(waits.members)}, and none has left it within {waits.window_s:.1f} s",
            explanation="All ranks stand at the same line.",
            next_step=(
                "look again with --window 30; if they still stand there, compare the tensors'"
                " shapes, and look at the network"
            ),
            evidence=evidence,
            would_raise_confidence=_MORE,
        ),
        first,
    )


def _ahead(members: Sequence[RankSample]) -> Ahead | None:
    """Return the one of two ranks whose loop is ahead; None if neither is, or no loop variable is
    on both stacks.
    """
    first, other = members
    for name, value in first.counters.items():
        theirs = other.counters.get(name)
        if theirs is not None and theirs != value:
            rank = first.rank if value > theirs else other.rank
            return Ahead(rank, name.rpartition(".")[2], max(value, theirs), min(value, theirs))
    return None


def _odd_counter(members: Sequence[RankSample]) -> Ahead | None:
    """Return the only rank whose loop variable differs from the value that all others have; None if
    there is none.
    """
    for name in members[0].counters if len(members) > 2 else ():
        values = {one.rank: one.counters[name] for one in members if name in one.counters}
        counts = sorted(set(values.values()), key=list(values.values()).count)
        if (
            len(values) == len(members)
            and len(counts) == 2
            and list(values.values()).count(counts[0]) == 1
        ):
            rank = next(rank for rank, value in values.items() if value == counts[0])
            return Ahead(rank, name.rpartition(".")[2], counts[0], counts[1])
    return None


def needs_all(call: Call | None) -> bool:
    """Return whether every rank of the job must reach a call."""
    return call is not None and (call.group == DEFAULT_GROUP or call.op == "init_process_group")


def ranks_of(samples: Sequence[RankSample]) -> list[int]:
    """Return the ranks, sorted."""
    return sorted(one.rank for one in samples)


def locate(finding: Finding, sample: RankSample) -> Finding:
    """Add where a rank stands to a finding."""
    line = sample.line
    if line is not None:
        finding.source, finding.source_file, finding.function = (
            line.where,
            f"{line.file}:{line.line}",
            line.function,
        )
    return finding


def unmoved(members: Sequence[RankSample], window_s: float) -> str:
    """Return the sentence that ranks did not move."""
    return (
        f"{capital(ranks_phrase(ranks_of(members)))} did not move for {duration(window_s * 1e9)}."
    )


def places(members: Sequence[RankSample], otherwise: Mapping[int, str] | None = None) -> list[str]:
    """Return where each class of ranks stands, the smallest first.

    Args:
        members: the ranks.
        otherwise: what the ranks do that are in no call.
    """
    found: dict[str, list[int]] = defaultdict(list)
    for one in members:
        where = f" at {frame_phrase(one.line)}" if one.line is not None else ""
        text = (
            f"in {one.call.phrase}{where}"
            if one.call is not None
            else (otherwise or {}).get(one.rank, "in no call")
        )
        found[text].append(one.rank)
    return [
        f"{capital(ranks_phrase(ranks))}: {text}."
        for text, ranks in sorted(found.items(), key=lambda item: len(item[1]))
    ]


def _stands(members: Sequence[RankSample]) -> str:
    where = frame_phrase(members[0].line)
    phrase = members[0].call.phrase if members[0].call is not None else "no call"
    return f"{ranks_and_verb(ranks_of(members), 'waits', 'wait')} in {phrase}" + (
        f" at {where}" if where else ""
    )


def _stand(one: RankSample) -> str:
    return _stands([one])
