"""Turn the sinks and cycles of the wait-for graph, the mismatches and the deaths into findings, and
separate causes from consequences.
"""

from __future__ import annotations

from commlens.diagnosis.align.alignment import Mismatch
from commlens.diagnosis.causes.context import Case, Context
from commlens.diagnosis.causes.cycle import find_cycles, find_departures
from commlens.diagnosis.causes.dead import find_deaths
from commlens.diagnosis.causes.ended import find_ended
from commlens.diagnosis.causes.fewer import find_fewer
from commlens.diagnosis.causes.groups_differ import find_groups_that_differ
from commlens.diagnosis.causes.mismatch import find_mismatches
from commlens.diagnosis.causes.missing import find_missing
from commlens.diagnosis.causes.motionless import find_motionless
from commlens.diagnosis.causes.no_such_peer import find_no_such_peer
from commlens.diagnosis.causes.refused import demote_refused, find_refused
from commlens.diagnosis.causes.slow import find_slow
from commlens.diagnosis.causes.started_twice import find_started_twice
from commlens.diagnosis.causes.stuck_inside import (
    find_left_behind,
    find_stuck_inside,
    find_undecided,
    may_be_running,
)
from commlens.diagnosis.causes.told_by_errors import find_told_by_errors
from commlens.diagnosis.causes.unrecorded import find_unrecorded
from commlens.diagnosis.causes.unwritten import find_skipped_writes, find_unwritten
from commlens.diagnosis.graph.wait_graph import Graph
from commlens.diagnosis.index.job_index import JobIndex
from commlens.diagnosis.words.describe import describe
from commlens.model.verdict import Finding
from commlens.text import ranks_phrase

# a rank that was awaited for less when the job was ended may only have been late
_LATE_NS = 5_000_000_000


def find_all(job: JobIndex, mismatches: list[Mismatch], graph: Graph) -> list[Finding]:
    """Return all findings, root causes first, sorted by the number of ranks that they block."""
    context = Context(job, mismatches, graph)
    sinks = graph.sinks()
    find_groups_that_differ(context)
    groups = len(context.cases)
    find_mismatches(context, {node.detail: node for node in sinks if node.kind == "mismatch"})
    dead = {node.rank: node for node in sinks if node.kind == "dead"}
    find_deaths(context, dead, told=find_told_by_errors(context, dead))
    find_skipped_writes(context)
    find_cycles(context)
    nowhere = find_no_such_peer(context)
    left = find_departures(context, [node for node in sinks if node.rank not in nowhere])
    find_missing(context, [node for node in left if node.kind == "absent"])
    find_unwritten(context, [node for node in sinks if node.kind == "key"])
    stuck = [node for node in sinks if node.kind == "stuck" and not graph.is_alone(node)]
    if context.cases:  # the head of a rank whose ring lost it is weaker evidence than any finding
        stuck = [
            node
            for node in stuck
            if not all(job.views[edge.rank].head_lost for edge in graph.edges_into(node))
        ]
    if not may_be_running(context, stuck):
        for node in find_left_behind(context, stuck) if job.knows.completion_times else stuck:
            find_stuck_inside(context, node)
    else:
        find_undecided(context, stuck)
    find_unrecorded(context, [node for node in left if node.kind in ("no-record", "elsewhere")])
    find_fewer(context)
    for case in context.cases[:groups]:  # the groups are not what the program takes them for
        for other in context.cases[groups:]:
            other.claim.root_cause = (
                other.claim.root_cause and other.claim.kind == "dead" and not case.claim.culprits
            )
    if not context.cases:
        find_motionless(context)
    _demote_cut_waits(context)
    demote_refused(context)
    for find_last in (find_refused, find_ended):
        if not any(case.claim.root_cause for case in context.cases):
            find_last(context)
    if job.knows.completion_times and not context.cases:
        find_slow(context)
    _demote_consequences(context.cases)
    find_started_twice(context)
    _demote_ended_victims(context)
    context.cases.sort(key=_weight)
    findings = [describe(context, case) for case in context.cases]
    _add_refusals(context, findings)
    return findings


def _weight(case: Case) -> tuple[bool, bool, int, tuple[int, ...], list[int]]:
    finding = case.claim
    return (
        not finding.root_cause,
        finding.kind == "waiting",
        -case.blocked,
        case.order,
        finding.culprits,
    )


def _add_refusals(context: Context, findings: list[Finding]) -> None:
    """If strict verification raised, add to the first root cause that nothing was sent."""
    refused = [rank for rank, view in sorted(context.job.views.items()) if view.exit.refused]
    cause = next((finding for finding in findings if finding.root_cause), None)
    op = cause.collective if cause is not None else None
    if not refused or cause is None or (op is None and cause.why == "exception"):
        return  # or the cause tells it: a function's call was refused
    known = op is not None and cause.kind.startswith("mismatch/")
    name = (
        f"{op.op} #{op.sequence_number}"
        if op is not None and known
        else "the collective in which the others waited"
    )
    cause.evidence = [
        *cause.evidence,  # which may be a list that other findings share
        f"Strict verification refused {name} before it was issued: {ranks_phrase(refused)} raised"
        " DistributedOperationException.",
    ]


def _demote_consequences(cases: list[Case]) -> None:
    """Of several findings that blame the same ranks, keep the earliest disagreement as the root
    cause.
    """
    roots = [case for case in cases if case.claim.root_cause]
    disagreements = [
        case for case in roots if case.mismatch is not None or case.claim.why == "skipped"
    ]
    for case in roots:
        for other in disagreements:
            if (
                other is not case
                and other.claim.root_cause
                and _follows(case, other, case in disagreements)
            ):
                case.claim.root_cause = False
                other.blocked = max(other.blocked, case.blocked)
                victims = {*other.claim.victims, *case.claim.victims} - set(other.claim.culprits)
                other.claim.victims = sorted(victims)
                break


def _demote_cut_waits(context: Context) -> None:
    """Demote ranks that may only have been late: the waits for them ended early, because others
    disagreed, one died, or all were ended.
    """
    views = context.job.views
    roots = [case for case in context.cases if case.claim.root_cause]
    disagree, died = (
        any(case.mismatch is not None for case in roots),
        any(case.claim.kind == "dead" for case in roots),
    )
    for finding in (case.claim for case in roots if case.claim.kind == "missing"):
        refused = [views[rank].exit.refused for rank in finding.victims if rank in views]
        ended = bool(finding.culprits) and all(
            views[rank].exit.kind == "terminated" for rank in finding.culprits if rank in views
        )
        limit_ns = (
            context.job.stall_timeout_ns
            if died
            else min(context.job.stall_timeout_ns, _LATE_NS)
            if ended
            else 0
        )
        timed_out = any(views[rank].exit.gave_up for rank in finding.victims if rank in views)
        was_late = (
            finding.why != "finished"
            and not timed_out
            and context.longest_wait(finding.victims) < limit_ns
        )
        if was_late or (disagree and refused and all(refused)):
            finding.root_cause = False


def _demote_ended_victims(context: Context) -> None:
    """Where a rank ended, ranks that are absent because they ended because of a peer are a
    consequence, and so is what broke off.
    """
    if any(
        case.claim.root_cause and (case.claim.kind == "dead" or case.claim.why == "finished")
        for case in context.cases
    ):
        for finding in (case.claim for case in context.cases):
            exits = [
                context.job.views[rank].exit.kind
                for rank in finding.culprits
                if rank in context.job.views
            ]
            ended = finding.kind == "missing" and exits and {*exits} <= {"peer", "terminated"}
            if ended or (finding.kind == "stuck-inside" and not finding.culprits):
                finding.root_cause = False


def _follows(case: Case, other: Case, disagrees: bool) -> bool:
    """Return whether ``case`` is a consequence of the disagreement ``other``."""
    mine, theirs = case.claim, other.claim
    if not _blamed(case) or not _blamed(case) <= _blamed(other):
        return False
    if mine.kind == "dead":
        return mine.why == "exit" and other.blocked > 0
    if disagrees:
        return case.order > other.order
    return other.blocked > 0 or (mine.why == "finished" and theirs.why == "skipped")


def _blamed(case: Case) -> set[int]:
    """Return the culprits; of a tie, all ranks that disagree."""
    finding = case.claim
    return set(finding.culprits or (finding.victims if case.mismatch is not None else ()))
