"""The faults of a job that is only seen from outside: which rank stands where no other rank stands,
in which call.

A pure function of the samples. Stacks hold no sequence numbers and no members of groups, so each
cause says how sure it can be, and names no rank where the evidence does not decide.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from commlens.diagnosis.causes.context import doing_of
from commlens.diagnosis.index.activity import Activity
from commlens.model.cause import (
    Confidence,
    Dead,
    Doing,
    Doubt,
    Missing,
    NoneWaits,
    Unrecorded,
    Working,
)
from commlens.outside.sample import RankSample
from commlens.outside.seen import Found, SeenJob, ranks_of
from commlens.outside.waits import compare_waits


def find_causes(job: SeenJob) -> list[Found[Any]]:
    """Return the causes, the most important first; nothing if no rank waits."""
    if job.absent:
        return [_dead(job)]
    if not job.stuck:
        return []
    if job.outside:
        return _absent(job)
    if job.moving:
        return [_moving(job)]
    return [_unread(job)] if job.unread else [compare_waits(job)]


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
    ranks = sorted(job.absent)
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


def _absent(job: SeenJob) -> list[Found[Missing | Working]]:
    """Find the ranks that are in no call while others wait, grouped by place. Leave out ranks that
    work, unless all of them do.
    """
    places: dict[object, list[RankSample]] = defaultdict(list)
    for one in job.outside:
        places[_place_of(job.doing[one.rank])].append(one)
    sides = sorted(places.values(), key=lambda each: (len(each), each[0].rank))
    idle = [side for side in sides if not job.doing[side[0].rank].works]
    sure, doubt = _confidence(job, len(places))
    if not idle:
        return [_working(job, side, doubt) for side in sides]
    # of several worlds, any rank that waits for no other one may be where it should be
    unsure = job.worlds.are_several and sure == "low"
    if unsure or not all(map(job.may_hold_up_all, job.outside)):
        return [_missing(job, idle, sure, doubt, named=False)]
    return [_missing(job, [side], sure, doubt, named=True) for side in idle]


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
    return Found("absent", working, doing.frame or members[0].line, [members], doubt)


def _missing(
    job: SeenJob,
    sides: Sequence[Sequence[RankSample]],
    sure: Confidence,
    doubt: Doubt | None,
    *,
    named: bool,
) -> Found[Missing | Working]:
    """Return the cause of ranks that are outside of calls, each side at a place of its own."""
    doing, ranks = job.doing[sides[0][0].rank], ranks_of(one for side in sides for one in side)
    missing = Missing(
        kind="missing",
        why=doing.why,
        root_cause=True,
        culprits=ranks if named else [],
        blamed_by="absence" if named else "undecided",
        victims=ranks_of(job.stuck),
        confidence=sure,
        ranks=ranks,
        processes=["alive" for _ in ranks],
        outcome="never-reached",
        activity=doing_of(doing),
        waits=job.waits(),
        came=ranks_of(job.stuck),
        doubt=doubt,
    )
    return Found("absent", missing, doing.frame or sides[0][0].line, sides, doubt)


def _unread(job: SeenJob) -> Found[Unrecorded]:
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
