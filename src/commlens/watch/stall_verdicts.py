"""What follows from a verdict on a stall, and from a later one: which ranks are waited for, how the
wait ended, whether the verdicts say the same, and whether the job may be ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence, Set

from commlens.model.cause import StuckInside, Unrecorded
from commlens.model.collective import State
from commlens.model.ranklog import RankLog
from commlens.model.verdict import Verdict
from commlens.model.worlds import ONE_WORLD
from commlens.text import naming_worlds, ranks_phrase
from commlens.watch.roster import Member
from commlens.watch.strangers import why_unrecorded


def waited_for(verdict: Verdict) -> list[int]:
    """Return the ranks that the others wait for. A verdict of kind waiting has no culprits, so they
    are the group's other ranks.
    """
    if verdict.kind == "missing":
        return verdict.culprits
    all_came = isinstance(verdict.cause, StuckInside)
    if verdict.kind == "waiting" and verdict.group is not None and not all_came:
        return sorted(set(verdict.group.ranks) - set(verdict.victims))
    return []


def end_of_wait(
    verdict: Verdict | None, since_ns: int, logs: Sequence[RankLog], now_ns: int
) -> str:
    """Return a line that says how a reported wait ended; empty if a rank has raised an exception,
    or gave up waiting and has issued nothing since: the ranks may be ending.

    Args:
        verdict: the last one that was printed on the wait.
        since_ns: when the wait began, CLOCK_MONOTONIC.
        logs: of this node's ranks, with their newest records.
        now_ns: CLOCK_MONOTONIC.
    """
    began_ns = time.time_ns() - (now_ns - since_ns)
    late: list[int] = []
    gave_up: list[int] = []
    worlds = ONE_WORLD
    if verdict is not None:
        if any(log.exception for log in logs):
            return ""
        worlds, late = verdict.worlds, waited_for(verdict)
        waited = {*verdict.victims, *verdict.culprits} if not worlds.are_several else set()
        for log in logs:
            ops = [op for op in log.collectives if op.done_ns >= began_ns or op.in_flight]
            if log.rank in waited and any(op.state is State.FAILED for op in ops):
                gave_up.append(log.rank)
                if ops[-1].state is State.FAILED:
                    return ""
    with naming_worlds(worlds):
        what = (
            f"{ranks_phrase(gave_up)} gave up waiting"
            if gave_up
            else f"{ranks_phrase(late)} arrived"
            if late
            else "the wait ended"
        )
    return f"{what} after {(now_ns - since_ns) / 1e9:.0f} s; the job goes on."


def explains(death: Verdict, earlier: Verdict) -> bool:
    """Return whether a death explains an earlier verdict: it is about the same collective, but
    named other ranks.
    """
    return (
        death.kind == "dead"
        and earlier.is_fault
        and death.collective is not None
        and death.collective == earlier.collective
        and death.group == earlier.group
        and not set(death.culprits) & {*earlier.culprits, *earlier.victims}
    )


def leaves_standing(death: Verdict, earlier: Verdict) -> bool:
    """Return whether the verdict after a death says what an earlier one said, or only that ranks of
    a job that hung were killed.

    A user or the launcher kills them: Ctrl-C does so after half a minute.
    """
    deaths = [
        finding for finding in death.findings if finding.kind == "dead" and finding.root_cause
    ]
    known = {*earlier.culprits, *earlier.victims}
    were_killed = bool(deaths) and all(
        each.why == "killed" and set(each.culprits) <= known for each in deaths
    )
    return earlier.is_fault and (were_killed or _fault_of(death) == _fault_of(earlier))


def reason_to_go_on(verdict: Verdict, members: Sequence[Member], elsewhere: Set[int]) -> str:
    """Return why a job must not be ended because of a verdict: it is not sure, or ranks are out of
    sight; "" if it may be.

    A verdict may be certain that something is wrong for good, and of low confidence about who is to
    blame.

    Args:
        verdict: of a fault.
        members: the ranks of this node.
        elsewhere: the ranks of other nodes whose evidence is known.
    """
    seen = [
        member
        for member in members
        if member.here
        and not member.unreadable
        and (
            member.box is not None or (member.alive and not why_unrecorded(member.pid, joined=True))
        )
    ]
    concerned: Iterable[int] = range(max((member.world_size for member in seen), default=0))
    if verdict.group is not None and verdict.kind.startswith("mismatch"):
        concerned = verdict.group.ranks if not verdict.worlds.are_several else concerned
    known = {member.rank for member in seen} | elsewhere | _never_started(verdict)
    if unseen := sorted(set(concerned) - known):
        with naming_worlds(verdict.worlds):
            return f"there is no record of {ranks_phrase(unseen)} here"
    return (
        "the verdict's confidence is low"
        if verdict.confidence == "low" and not verdict.certain
        else ""
    )


def _never_started(verdict: Verdict) -> set[int]:
    """Return the ranks that belong on this node and were never started, by the verdict."""
    cause = verdict.cause
    if isinstance(cause, Unrecorded) and cause.reason == "not-started":
        return {*cause.ranks}
    return set()


def identity_of(verdict: Verdict) -> tuple[object, ...]:
    """Return what a verdict says: it is printed again only when this changes."""
    return (verdict.is_fault and verdict.confidence == "low", *_fault_of(verdict))


def _fault_of(verdict: Verdict) -> tuple[object, ...]:
    """Return a verdict's fault without its confidence."""
    collective, group = verdict.collective, verdict.group
    return (
        verdict.kind,
        tuple(verdict.culprits or waited_for(verdict)),
        (collective.op, collective.sequence_number) if collective else None,
        (group.name, tuple(group.ranks)) if group else None,
    )
