"""All ranks of a job wait in calls: compare the calls, and find the rank that waits where no other
rank does.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Final

from commlens.model.cause import (
    Arguments,
    Cycle,
    Doing,
    Issued,
    Kind,
    LoopRound,
    Mismatch,
    Missing,
    RingWait,
    StuckInside,
)
from commlens.outside.sample import DEFAULT_GROUP, Call, RankSample
from commlens.outside.seen import (
    Found,
    FoundInside,
    FoundOutOfRound,
    FoundRing,
    FoundSides,
    FoundUnmet,
    SeenJob,
    collective_of,
    ranks_of,
    source_of,
)

_BLIND: Final = frozenset({"request", "device"})
"""Calls that do not show which ranks they wait for."""


def compare_waits(job: SeenJob) -> Found:
    """Find the cause if all ranks of a job wait in calls."""
    return _ring(job) or _unmet(job) or _sides(job)


def needs_all(call: Call | None) -> bool:
    """Return whether every rank of the job must reach a call."""
    return call is not None and (call.group == DEFAULT_GROUP or call.op == "init_process_group")


def _ring(job: SeenJob) -> Found | None:
    """Find ranks whose messages wait for each other."""
    peer = {
        one.rank: one.call.peer
        for one in job.stuck
        if one.call is not None and one.call.kind == "message"
    }
    for start in sorted(peer):
        path = [start]
        while (following := peer.get(path[-1])) is not None and following not in path:
            path.append(following)
        if following is not None:
            ring = path[path.index(following) :]
            return _ring_of(job, [one for one in job.stuck if one.rank in ring])
    return None


def _ring_of(job: SeenJob, members: Sequence[RankSample]) -> Found:
    ahead = _ahead(*members) if len(members) == 2 else None
    # which of them called in the wrong order cannot be seen
    culprits = [ahead.rank] if ahead is not None else []
    first = next((one for one in members if one.rank in culprits), members[0])
    cause = Cycle(
        kind="cycle",
        why="skipped" if ahead is not None else "in-collective",
        root_cause=True,
        culprits=culprits,
        blamed_by="rounds" if ahead is not None else "undecided",
        victims=[rank for rank in ranks_of(job.stuck) if rank not in culprits],
        confidence="medium",
        ranks=ranks_of(members),
        ring=[
            RingWait(one.rank, one.call.peer, collective_of(one.call), source=source_of(one))
            for one in members
            if one.call is not None and one.call.peer is not None
        ],
        other_round=ahead,
    )
    return FoundRing(cause, members, frame=first.line)


def _unmet(job: SeenJob) -> Found | None:
    """Find a message whose other rank is in a collective: that rank left out its part, or the
    message is one too many.
    """
    by_rank = {one.rank: one for one in job.stuck}
    for one in job.stuck:
        if one.call is None or one.call.kind != "message" or one.call.peer is None:
            continue
        other = by_rank.get(one.call.peer)
        if other is not None and other.call is not None and other.call.kind != "message":
            return FoundUnmet(_unmet_cause(job, one, other), one, other, frame=one.line)
    return None


def _unmet_cause(job: SeenJob, one: RankSample, other: RankSample) -> Missing:
    return Missing(
        kind="missing",
        why="skipped",
        root_cause=True,
        blamed_by="undecided",
        victims=ranks_of(job.stuck),
        confidence="low",
        ranks=[other.rank],
        processes=["alive"],
        outcome="message-missing",
        came=[one.rank],
        activity=Doing(
            "in-collective", works=False, observed=True, unclear=False, source=source_of(other)
        ),
        waits=job.waits(),
        doubt="undecided",
    )


def _sides(job: SeenJob) -> Found:
    """Compare the calls in which all ranks wait. The majority decides if every rank must reach one
    of the two calls.
    """
    classes: dict[object, list[RankSample]] = defaultdict(list)
    for one in job.stuck:
        assert one.call is not None
        classes[(one.call.kind, one.call.op, one.call.root, one.path)].append(one)
    sides = sorted(classes.values(), key=lambda members: (len(members), members[0].rank))
    if len(sides) == 1:
        return _out_of_round(job) or _inside(job)
    return FoundSides(_disagreement(job, sides), sides, frame=sides[0][0].line)


def _disagreement(job: SeenJob, sides: Sequence[Sequence[RankSample]]) -> Mismatch | Cycle:
    odd, most = sides[0], sides[-1]
    ahead = _ahead(odd[0], most[0])
    decided = _is_decided(sides)
    kind = _kind_of(odd[0], most[0], decided=decided)
    if kind == "cycle":
        return Cycle(
            kind="cycle",
            why="in-collective",
            root_cause=True,
            blamed_by="undecided",
            victims=ranks_of(job.stuck),
            confidence="low",
            ranks=ranks_of(job.stuck),
            waits=job.waits(),
            other_round=ahead,
        )
    call = odd[0].call
    return Mismatch(
        kind=kind,
        why="skipped" if kind == "missing" else "in-collective",
        root_cause=True,
        culprits=ranks_of(odd) if decided else [],
        blamed_by="majority" if decided else "undecided",
        victims=ranks_of(most if decided else job.stuck),
        confidence="medium" if decided else "low",
        group=job.group_of(call) if call is not None else None,
        number=0,
        issued=[
            Issued(
                ranks_of(side),
                collective_of(side[0].call),
                Arguments(root=side[0].call.root),
                source_of(side[0]),
            )
            for side in sides[:-9:-1]
            if side[0].call is not None
        ],
        other_round=ahead,
        doubt="groups-may-differ" if decided else "undecided",
    )


def _is_decided(sides: Sequence[Sequence[RankSample]]) -> bool:
    """Return whether the ranks of the first side are to blame: it has fewer than the only other
    one, and one of the calls needs all ranks.
    """
    odd, most = sides[0], sides[-1]
    if len(sides) != 2 or len(odd) == len(most):
        return False
    calls = [call for call in (odd[0].call, most[0].call) if call is not None]
    # A rank that alone waits for a key waits for one other, which may be any of them.
    waits_for_key = odd[0].call is not None and odd[0].call.kind == "store"
    comparable = any(map(needs_all, calls)) and not any(call.kind in _BLIND for call in calls)
    return comparable and not waits_for_key


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


def _out_of_round(job: SeenJob) -> Found | None:
    """Find the rank that waits at the same line as all others, in another round of its loop."""
    ahead = _odd_counter(job.stuck)
    if ahead is None:
        return None
    odd = next(one for one in job.stuck if one.rank == ahead.rank)
    call = odd.call
    assert call is not None
    cause = Mismatch(
        kind="missing",
        why="skipped",
        root_cause=True,
        culprits=[ahead.rank],
        blamed_by="rounds",
        victims=[rank for rank in ranks_of(job.stuck) if rank != ahead.rank],
        confidence="low",
        group=job.group_of(call),
        number=0,
        issued=[
            Issued(ranks_of(job.stuck), collective_of(call), Arguments(), source_of(odd)),
        ],
        departure="either",
        other_round=ahead,
        doubt="groups-may-differ",
    )
    return FoundOutOfRound(cause, ahead, frame=odd.line)


def _inside(job: SeenJob) -> Found:
    """Report ranks that all wait at the same line: the call itself does not complete."""
    busy = [one.rank for one in job.stuck if job.doing[one.rank].works]
    cause = StuckInside(
        kind="waiting" if busy else "stuck-inside",
        why="in-collective",
        root_cause=not busy,
        blamed_by="nobody" if busy else "unknown",
        victims=ranks_of(job.stuck),
        confidence="low",
        state="moving" if busy else "no-progress",
        ranks=ranks_of(job.stuck),
        waits=job.waits(),
        busy=busy,
    )
    return FoundInside(cause, frame=job.stuck[0].line)


def _ahead(first: RankSample, other: RankSample) -> LoopRound | None:
    """Return the one of two ranks whose loop is ahead; None if neither is, or no loop variable is
    on both stacks.
    """
    for name, value in first.counters.items():
        theirs = other.counters.get(name)
        if theirs is not None and theirs != value:
            rank = first.rank if value > theirs else other.rank
            return LoopRound(rank, _variable(name), max(value, theirs), min(value, theirs))
    return None


def _odd_counter(members: Sequence[RankSample]) -> LoopRound | None:
    """Return the only rank whose loop variable differs from the value that all others have; None if
    there is none.
    """
    for name in members[0].counters if len(members) > 2 else ():
        values = {one.rank: one.counters[name] for one in members if name in one.counters}
        counts = Counter(values.values()).most_common()
        if len(values) == len(members) and len(counts) == 2 and counts[1][1] == 1:
            (usual, _), (odd, _) = counts
            rank = next(rank for rank, value in values.items() if value == odd)
            return LoopRound(rank, _variable(name), odd, usual)
    return None


def _variable(counter: str) -> str:
    """``"main.step" -> "step"``."""
    return counter.rpartition(".")[2]
