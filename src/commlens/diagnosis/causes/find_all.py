"""Find all causes of a fault, and mark those that are only consequences of another one.

The wait-for graph ends at its sinks (a dead rank, an absent one, a mismatch, a collective that all
its ranks have reached) and in its cycles: each becomes a :class:`Case`. Then the causes are
compared. Say rank 1 issued an all_gather where the others issued an all_reduce, and then exited
with status 1: the mismatch stays the root cause, the death becomes a consequence of it
(``root_cause`` is False), and its victims are added to those of the mismatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commlens.diagnosis.align.alignment import RecordMismatch
from commlens.diagnosis.causes.circumstances import (
    add_compiler,
    add_init_meetings,
    add_ras_witnesses,
    add_shared_places,
)
from commlens.diagnosis.causes.context import Case, Context
from commlens.diagnosis.causes.cycle import find_cycles, find_departures
from commlens.diagnosis.causes.dead import find_deaths, find_ended, find_kept_addresses
from commlens.diagnosis.causes.groups_differ import find_groups_that_differ, find_started_twice
from commlens.diagnosis.causes.hardware import add_hardware
from commlens.diagnosis.causes.helper_processes import find_awaited_helpers
from commlens.diagnosis.causes.messages import find_no_such_peer, find_taken_messages
from commlens.diagnosis.causes.mismatch import find_mismatches
from commlens.diagnosis.causes.missing import find_missing
from commlens.diagnosis.causes.straggler import find_slow
from commlens.diagnosis.causes.stuck_inside import (
    find_left_behind,
    find_perhaps_running,
    find_stopped,
    find_stuck_inside,
)
from commlens.diagnosis.causes.told_by_errors import (
    demote_refused,
    find_refused,
    find_told_by_errors,
)
from commlens.diagnosis.causes.unrecorded import (
    find_skipped_writes,
    find_unrecorded,
    find_unwritten,
)
from commlens.diagnosis.causes.whole_job import find_fewer, find_motionless
from commlens.diagnosis.graph.wait_graph import Graph, WaitNode
from commlens.diagnosis.index.job_index import JobIndex
from commlens.model.cause import Cause, ToldByErrors


def find_all(job: JobIndex, mismatches: list[RecordMismatch], graph: Graph) -> Context:
    """Find all causes. The cases are sorted: root causes first, by the number of ranks that they
    block.
    """
    context = Context(job, mismatches, graph)
    find_groups_that_differ(context)
    find_kept_addresses(context)
    of_groups = list(context.cases)
    _find_what_blocks(context, graph.sinks())
    find_fewer(context)
    if not context.cases:
        find_stopped(context)
    if not context.cases:
        find_motionless(context)
    _demote_consequences(context, of_groups)
    # The reasons for which processes ended count only if nothing shows why the job stood still.
    if not _has_root_cause(context):
        find_refused(context)
    if not _has_root_cause(context):
        find_ended(context)
    if job.foreign and not context.cases:
        find_slow(context)
    find_started_twice(context)
    add_init_meetings(context)
    add_compiler(context)
    add_hardware(context)
    add_ras_witnesses(context)
    add_shared_places(context)
    context.cases.sort(key=_sort_key)
    return context


def _has_root_cause(context: Context) -> bool:
    return any(case.cause.root_cause for case in context.cases)


def _sort_key(case: Case[Any]) -> tuple[bool, bool, int, tuple[int, ...], list[int]]:
    cause = case.cause
    is_wait = cause.kind == "waiting"
    return (not cause.root_cause, is_wait, -case.weight, case.order, cause.culprits)


# --- what the ranks wait for


def _find_what_blocks(context: Context, sinks: Sequence[WaitNode]) -> None:
    """Find what the ranks wait for, and what they disagree on.

    Each step gets the sinks that no earlier one explains: a death that a mismatch explains is no
    cause, and a rank whose message a wrong receive took is not missing.
    """
    find_mismatches(context, {node.detail: node for node in sinks if node.kind == "mismatch"})
    dead = {node.rank: node for node in sinks if node.kind == "dead"}
    find_deaths(context, dead, told=find_told_by_errors(context, dead))
    find_skipped_writes(context)
    explained = find_taken_messages(context)
    find_cycles(context)
    explained |= find_no_such_peer(context)
    left = find_departures(context, [node for node in sinks if node.rank not in explained])
    absent = find_awaited_helpers(context, [node for node in left if node.kind == "absent"])
    find_missing(context, absent)
    find_unwritten(context, [node for node in sinks if node.kind == "key"])
    _find_stuck(context, [node for node in sinks if node.kind == "stuck"])
    find_unrecorded(context, [node for node in left if node.kind in ("no-record", "elsewhere")])


def _find_stuck(context: Context, sinks: Sequence[WaitNode]) -> None:
    job, graph = context.job, context.graph
    stuck = [node for node in sinks if not graph.is_alone(node)]
    if context.cases:
        # Where the record of the op that blocks a rank is overwritten, its wait is only presumed:
        # weaker evidence than any cause.
        stuck = [
            node
            for node in stuck
            if not all(job.views[edge.rank].head_lost for edge in graph.edges_into(node))
        ]
    if find_perhaps_running(context, stuck):
        return
    for node in find_left_behind(context, stuck) if job.foreign else stuck:
        find_stuck_inside(context, node)


# --- which causes are consequences of others


def _demote_consequences(context: Context, of_groups: Sequence[Case[Any]]) -> None:
    """Demote the causes that follow from another one. A step sees the root causes that the steps
    before it left.

    Args:
        context: the job.
        of_groups: the causes in the making of groups, which come first in the context.
    """
    if of_groups:
        _demote_behind_groups(of_groups, context.cases[len(of_groups) :])
    _demote_cut_waits(context)
    demote_refused(context)
    _demote_behind_disagreements(context.cases)
    _demote_ended_victims(context)


def _demote_behind_groups(of_groups: Sequence[Case[Any]], others: Sequence[Case[Any]]) -> None:
    """Demote all causes behind one in the making of groups: ranks whose groups differ cannot meet
    afterwards. Only a death stays a root cause, if no rank is blamed for the groups.
    """
    nobody_blamed = not any(case.cause.culprits for case in of_groups)
    for cause in (case.cause for case in others):
        if cause.kind != "dead" or not nobody_blamed:
            cause.root_cause = False


_LATE_NS = 5_000_000_000
"""A rank that was awaited for less, when the job was ended, may only have been late."""


def _demote_cut_waits(context: Context) -> None:
    """Demote ranks that may only have been late: the waits for them ended early, because others
    disagreed, one died, or all were ended.
    """
    views = context.job.views
    roots = [case for case in context.cases if case.cause.root_cause]
    disagree = any(case.mismatch is not None for case in roots)
    died = any(case.cause.kind == "dead" for case in roots)
    for cause in (case.cause for case in roots if case.cause.kind == "missing"):
        refused = [views[rank].exit.refused for rank in cause.victims if rank in views]
        if _was_late(context, cause, died=died) or (disagree and refused and all(refused)):
            cause.root_cause = False


def _was_late(context: Context, cause: Cause, *, died: bool) -> bool:
    """Return whether the missing ranks may only have been late when the wait for them ended."""
    views = context.job.views
    if cause.why == "finished" or isinstance(cause, ToldByErrors):  # whose wait timed out
        return False
    if any(views[rank].exit.gave_up for rank in cause.victims if rank in views):
        return False
    ended = bool(cause.culprits) and all(
        views[rank].exit.kind == "terminated" for rank in cause.culprits if rank in views
    )
    limit_ns = 0
    if died:
        limit_ns = context.job.stall_timeout_ns
    elif ended:
        limit_ns = min(context.job.stall_timeout_ns, _LATE_NS)
    return context.longest_wait(cause.victims) < limit_ns


def _demote_behind_disagreements(cases: list[Case[Any]]) -> None:
    """Of several causes that blame the same ranks, keep the earliest disagreement as the root
    cause.
    """
    roots = [case for case in cases if case.cause.root_cause]
    disagreements = [case for case in roots if _is_disagreement(case)]
    for case in roots:
        first = next((other for other in disagreements if _follows(case, other)), None)
        if first is not None:
            case.cause.root_cause = False
            first.weight = max(first.weight, case.weight)
            first.cause.victims = sorted(
                {*first.cause.victims, *case.cause.victims} - set(first.cause.culprits)
            )


def _follows(case: Case[Any], other: Case[Any]) -> bool:
    """Return whether a cause is a consequence of the disagreement ``other``, which blames the same
    ranks, or more.
    """
    mine, theirs = case.cause, other.cause
    if other is case or not theirs.root_cause:
        return False
    if not _blamed(case) or not _blamed(case) <= _blamed(other):
        return False
    if mine.kind == "dead":
        # torch raises where the arguments of a call are wrong in themselves
        refused = theirs.blamed_by == "arguments" and case.frame == other.frame
        return refused or (mine.why == "exit" and other.weight > 0)
    if _is_disagreement(case):
        return case.order > other.order
    return other.weight > 0 or (mine.why == "finished" and theirs.why == "skipped")


def _is_disagreement(case: Case[Any]) -> bool:
    return case.mismatch is not None or case.cause.why == "skipped"


def _blamed(case: Case[Any]) -> set[int]:
    """Return the culprits; of a tie, all ranks that disagree."""
    cause = case.cause
    return set(cause.culprits or (cause.victims if case.mismatch is not None else ()))


def _demote_ended_victims(context: Context) -> None:
    """Where a rank ended, demote ranks that are absent because a peer's end ended them, and
    collectives that broke off.
    """
    views, causes = context.job.views, [case.cause for case in context.cases]
    for cause in causes:
        exits = {views[rank].exit.kind for rank in cause.culprits if rank in views}
        were_ended = cause.kind == "missing" and exits and exits <= {"peer", "terminated"}
        broke_off = cause.kind == "stuck-inside" and not cause.culprits
        if (were_ended or broke_off) and any(
            other.root_cause and (other.kind == "dead" or other.why == "finished")
            for other in causes
            if other is not cause
        ):
            cause.root_cause = False
