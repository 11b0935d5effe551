"""The faults of a job that is only seen from outside: which rank stands where no other rank stands,
in which call. If all ranks wait in calls, the calls are compared.

For example, of the stacks of a job of 4 ranks that was not recorded::

    ranks 0, 1, 3    all_reduce at train.py:81
    rank 2           sleep at data.py:12           Missing, culprit 2, confidence "high"

    ranks 0, 1, 3    all_reduce at train.py:81
    rank 2           broadcast at train.py:80      Mismatch of the op, culprit 2: the majority

    ranks 0 to 3     all_reduce at train.py:81, ``step`` is 7 on rank 2 and 6 on the others
                                                   Mismatch by rounds, culprit 2

A pure function of the samples. Stacks hold no sequence numbers and no members of groups, so each
cause says how sure it can be, and names no rank where the evidence does not decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from commlens.diagnosis.causes.context import doing_of
from commlens.diagnosis.index.activity import Activity
from commlens.model.cause import (
    Arguments,
    Confidence,
    Cycle,
    Dead,
    Doing,
    Doubt,
    Issued,
    Kind,
    LoopRound,
    Mismatch,
    Missing,
    NoneWaits,
    RingWait,
    StuckInside,
    Unrecorded,
    Working,
)
from commlens.model.grouping import grouped
from commlens.outside.sample import RankSample
from commlens.outside.seen import Found, SeenJob, collective_of, ranks_of, source_of


def find_causes(job: SeenJob) -> list[Found[Any]]:
    """Return the causes, the most important first; nothing if no rank waits. The first sign that
    explains why ranks wait decides.
    """
    if job.gone:
        return [_dead(job)]
    if not job.stuck:
        return []
    if job.outside:
        return _outside(job)
    if job.moving:
        return [_moving(job)]
    if job.unread:
        return [_unread(job)]
    # all ranks wait in calls: compare these
    return [_ring(job) or _unmet(job) or _sides_of_a_world(job) or _sides(job, job.stuck)]


def none_waits(job: SeenJob) -> NoneWaits:
    """Return that no rank is seen to wait."""
    moving = [one.rank for one in job.samples if one.moved or job.doing[one.rank].works]
    whole = len(job.ranks) == job.size
    return NoneWaits(
        kind="healthy",
        why="unknown",
        root_cause=False,
        blamed_by="nobody",
        confidence="high" if moving and moving == job.ranks and whole else "medium",
        ranks=job.ranks,
        moving=moving,
        unreadable=ranks_of(job.unread),
        whole_job=whole,
    )


def _dead(job: SeenJob) -> Found[Dead]:
    """Return the ranks whose processes are gone."""
    ranks = sorted(job.gone)
    return Found(
        "dead",
        Dead(
            kind="dead",
            why="unknown",
            root_cause=True,
            culprits=ranks,
            blamed_by="exit",
            victims=ranks_of(job.stuck),
            confidence="medium",
            ranks=ranks,
            processes=["gone" for _ in ranks],
            waits=job.waits(),
            doubt="unobserved",
        ),
    )


def _outside(job: SeenJob) -> list[Found[Missing | Working]]:
    """Find the ranks that are in no call while others wait, one cause for each place where they
    stand. Leave out ranks that work, unless all of them do.
    """
    places = grouped((_place_of(job.doing[one.rank]), one) for one in job.outside)
    sides = sorted(places.values(), key=lambda each: (len(each), each[0].rank))
    idle = [side for side in sides if not job.doing[side[0].rank].works]
    confidence, doubt = _confidence(job, len(places))
    if not idle:
        return [_working(job, side, doubt) for side in sides]
    # of several worlds, any rank that waits for no other one may be where it should be
    may_be_right = job.worlds.are_several and confidence == "low"
    if may_be_right or not all(map(job.may_hold_up_all, job.outside)):
        return [_missing(job, idle, confidence, doubt, named=False)]
    return [_missing(job, [side], confidence, doubt, named=True) for side in idle]


def _place_of(doing: Activity) -> object:
    """Return a key that ranks share if they do the same at one line."""
    line = None
    if doing.frame is not None and doing.state not in ("stopped", "debugged"):
        line = doing.frame.where, doing.frame.function
    return doing.why, doing.works, doing.state, doing.stack.why, line


def _confidence(job: SeenJob, places: int) -> tuple[Confidence, Doubt | None]:
    """Return the confidence that the ranks outside of calls are to blame, and the reason why it is
    not higher.
    """
    if places > 1 or len(job.outside) > len(job.stuck):
        return "low", "many-outside"
    if not all(map(job.may_hold_up_all, job.outside)):
        return "low", "members-unknown"
    whole = len(job.samples) - len(job.unread) == job.size
    if whole and all(map(job.is_needed, job.outside)):
        return "high", None
    return "medium", "members-unknown"


def _working(
    job: SeenJob, members: Sequence[RankSample], doubt: Doubt | None
) -> Found[Missing | Working]:
    """Return that ranks at one place work while the others wait for them."""
    doing, ranks = job.doing[members[0].rank], ranks_of(members)
    working = Working(
        kind="waiting",
        why=doing.why,
        root_cause=False,
        culprits=ranks,
        blamed_by="absence",
        victims=ranks_of(job.stuck),
        confidence="low",
        ranks=ranks,
        activity=doing_of(doing),
        waits=job.waits(),
    )
    return Found("outside", working, doing.frame or members[0].line, [members], doubt)


def _missing(
    job: SeenJob,
    sides: Sequence[Sequence[RankSample]],
    confidence: Confidence,
    doubt: Doubt | None,
    *,
    named: bool,
) -> Found[Missing | Working]:
    """Return the cause of ranks that are outside of calls, each side at a place of its own;
    ``named``: they are to blame.
    """
    doing, ranks = job.doing[sides[0][0].rank], ranks_of(one for side in sides for one in side)
    missing = Missing(
        kind="missing",
        why=doing.why,
        root_cause=True,
        culprits=ranks if named else [],
        blamed_by="absence" if named else "undecided",
        victims=ranks_of(job.stuck),
        confidence=confidence,
        ranks=ranks,
        processes=["alive" for _ in ranks],
        outcome="never-reached",
        activity=doing_of(doing),
        waits=job.waits(),
        came=ranks_of(job.stuck),
        doubt=doubt,
    )
    return Found("outside", missing, doing.frame or sides[0][0].line, sides, doubt)


def _unread(job: SeenJob) -> Found[Unrecorded]:
    """Return the ranks whose stacks could not be read: the others may wait for them."""
    ranks = ranks_of(job.unread)
    return Found(
        "unread",
        Unrecorded(
            kind="missing",
            why="unknown",
            root_cause=True,
            blamed_by="unknown",
            victims=ranks_of(job.stuck),
            confidence="low",
            ranks=ranks,
            processes=["alive" for _ in ranks],
            reason="unreadable",
            waits=job.waits(),
            job_size=job.size,
        ),
    )


def _moving(job: SeenJob) -> Found[Working]:
    """Return that ranks are in calls and moved between the two looks: the others wait for them,
    and may go on.
    """
    return Found(
        "moving",
        Working(
            kind="waiting",
            why="in-collective",
            root_cause=False,
            blamed_by="nobody",
            victims=ranks_of(job.stuck),
            confidence="low",
            ranks=ranks_of(job.moving),
            activity=Doing("in-collective", works=True, observed=True, unclear=False),
            waits=job.waits(),
        ),
    )


# --- all ranks wait in calls

_SIDES_LISTED: Final = 8  # the largest
_BLIND: Final = frozenset({"request", "device"})
"""Calls that do not show which ranks they wait for."""


def _ring(job: SeenJob) -> Found[Cycle] | None:
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


def _ring_of(job: SeenJob, members: Sequence[RankSample]) -> Found[Cycle]:
    """Return the cause of ranks whose messages wait for each other. Of two, the one that is a round
    ahead is to blame.
    """
    ahead = _odd_round(members) if len(members) == 2 else None
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
    return Found("ring", cause, first.line, [members])


def _unmet(job: SeenJob) -> Found[Missing] | None:
    """Find a message whose other rank is in a collective: that rank left out its part, or the
    message is one too many.
    """
    by_rank = {one.rank: one for one in job.stuck}
    for one in job.stuck:
        if one.call is None or one.call.kind != "message" or one.call.peer is None:
            continue
        other = by_rank.get(one.call.peer)
        if other is not None and other.call is not None and other.call.kind != "message":
            return Found("unmet", _unmet_cause(job, one, other), one.line, [[one], [other]])
    return None


def _unmet_cause(job: SeenJob, one: RankSample, other: RankSample) -> Missing:
    """Return that a rank waits for a message of another one, which is in a call without it."""
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


def _sides_of_a_world(job: SeenJob) -> Found[Any] | None:
    """Compare the calls in which the ranks of one of several worlds wait, if each of these calls
    needs the whole world.
    """
    for world in job.worlds.worlds if job.worlds.are_several else ():
        members = [one for one in job.stuck if one.rank in world.numbers]
        if len(members) == world.size and all(map(job.own_world, members)):
            found = _sides(job, members)
            if found.seen == "sides":
                return found
    return None


def _sides(job: SeenJob, stuck: Sequence[RankSample]) -> Found[Any]:
    """Compare the calls in which ranks wait. The majority decides if every rank must reach one of
    the two calls, and the ranks are of one world.
    """
    classes = grouped(
        ((one.call.kind, one.call.op, one.call.root, job.own_world(one), one.path), one)
        for one in stuck
        if one.call is not None
    )
    sides = sorted(classes.values(), key=lambda members: (len(members), members[0].rank))
    if len(sides) == 1:
        return _out_of_round(job) or _find_stuck_inside(job)
    world = job.world_of(stuck[0].rank)
    are_of_one_world = all(one.rank in world for one in stuck)
    # a group made by hand may have members in other worlds
    are_calls_of_it = not any(one.call is not None and one.call.by_hand for one in stuck)
    if are_of_one_world and are_calls_of_it:
        return Found("sides", _disagreement(job, sides, stuck), sides[0][0].line, sides)
    return Found("apart", _stuck_inside_cause(job, []), sides[0][0].line, sides)


def _disagreement(
    job: SeenJob, sides: Sequence[Sequence[RankSample]], stuck: Sequence[RankSample]
) -> Mismatch | Cycle:
    """Return the cause of ranks that wait in different calls, each side in one: a cycle if it is
    not decided which side is wrong, and each may wait for the other.
    """
    odd, most = sides[0], sides[-1]
    other_round = _odd_round(stuck)
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
            other_round=other_round,
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
        group=job.group_of(call, odd[0].rank) if call is not None else None,
        number=0,
        issued=[
            Issued(
                ranks_of(side),
                collective_of(side[0].call),
                Arguments(root=side[0].call.root),
                source_of(side[0]),
            )
            for side in [*reversed(sides)][:_SIDES_LISTED]
            if side[0].call is not None
        ],
        other_round=other_round,
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
    comparable = any(call.needs_world for call in calls) and not any(
        call.kind in _BLIND for call in calls
    )
    return comparable and not waits_for_key


def _kind_of(odd: RankSample, most: RankSample, *, decided: bool) -> Kind:
    """Return how the calls of two sides disagree: in the root or the op of one call, or they are
    two calls.
    """
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


def _out_of_round(job: SeenJob) -> Found[Mismatch] | None:
    """Find the rank that waits at the same line as all others, in another round of its loop."""
    several = job.worlds.are_several  # their loops need not be in step
    ahead = _odd_round(job.stuck) if len(job.stuck) > 2 and not several else None
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
        group=job.group_of(call, odd.rank),
        number=0,
        issued=[
            Issued(ranks_of(job.stuck), collective_of(call), Arguments(), source_of(odd)),
        ],
        departure="either",
        other_round=ahead,
        doubt="groups-may-differ",
    )
    return Found("out-of-round", cause, odd.line)


def _find_stuck_inside(job: SeenJob) -> Found[StuckInside]:
    """Report ranks that all wait at the same line: the call itself does not complete."""
    busy = [
        one.rank
        for one in job.stuck
        if job.doing[one.rank].works and not job.doing[one.rank].unclear
    ]
    return Found("inside", _stuck_inside_cause(job, busy), job.stuck[0].line)


def _stuck_inside_cause(job: SeenJob, busy: list[int]) -> StuckInside:
    return StuckInside(
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


def _odd_round(members: Sequence[RankSample]) -> LoopRound | None:
    """Return the only rank whose loop is in another round than all others', or the one of two ranks
    that is ahead; None if there is none. The first loop variable that shows such a rank decides.
    """
    for name in members[0].counters:
        if any(name not in one.counters for one in members):
            continue
        ranks_at = grouped((one.counters[name], one.rank) for one in members)
        if len(ranks_at) == 2:
            odd, others = sorted(ranks_at, key=lambda value: (len(ranks_at[value]), -value))
            if len(ranks_at[odd]) == 1:
                variable = name.rpartition(".")[2]  # "main.step" -> "step"
                return LoopRound(ranks_at[odd][0], variable, odd, others)
    return None
