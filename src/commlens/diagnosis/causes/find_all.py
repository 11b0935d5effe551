"""Find all causes: of the sinks and cycles of the wait-for graph, the mismatches and the deaths.
Separate them from consequences.
"""

from __future__ import annotations

from collections.abc import Sequence

from commlens.diagnosis.align.alignment import Mismatch
from commlens.diagnosis.causes.any_source import find_taken_messages
from commlens.diagnosis.causes.consequences import (
    demote_consequences,
    demote_cut_waits,
    demote_ended_victims,
)
from commlens.diagnosis.causes.context import Case, Context
from commlens.diagnosis.causes.cycle import find_cycles, find_departures
from commlens.diagnosis.causes.dead import find_deaths
from commlens.diagnosis.causes.ended import find_ended
from commlens.diagnosis.causes.fewer import find_fewer
from commlens.diagnosis.causes.groups_differ import find_groups_that_differ
from commlens.diagnosis.causes.hardware import add_hardware
from commlens.diagnosis.causes.mismatch import find_mismatches
from commlens.diagnosis.causes.missing import find_missing
from commlens.diagnosis.causes.motionless import find_motionless
from commlens.diagnosis.causes.no_such_peer import find_no_such_peer
from commlens.diagnosis.causes.ras import add_ras
from commlens.diagnosis.causes.refused import demote_refused, find_refused
from commlens.diagnosis.causes.shared_place import add_shared_places
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
from commlens.diagnosis.graph.wait_graph import Graph, Node
from commlens.diagnosis.index.job_index import JobIndex


def find_all(job: JobIndex, mismatches: list[Mismatch], graph: Graph) -> Context:
    """Find all causes. The cases are sorted: root causes first, by the number of ranks that they
    block.
    """
    context = Context(job, mismatches, graph)
    find_groups_that_differ(context)
    groups = len(context.cases)
    _find_what_blocks(context, graph.sinks())
    find_fewer(context)
    _demote_behind_groups(context.cases[:groups], context.cases[groups:])
    if not context.cases:
        find_motionless(context)
    demote_cut_waits(context)
    demote_refused(context)
    for find_last in (find_refused, find_ended):
        if not any(case.claim.root_cause for case in context.cases):
            find_last(context)
    if job.knows.completion_times and not context.cases:
        find_slow(context)
    demote_consequences(context.cases)
    find_started_twice(context)
    demote_ended_victims(context)
    add_hardware(context)
    add_ras(context)
    add_shared_places(context)
    context.cases.sort(key=_weight)
    return context


def _find_what_blocks(context: Context, sinks: Sequence[Node]) -> None:
    """Find what the ranks wait for, and what they disagree on."""
    find_mismatches(context, {node.detail: node for node in sinks if node.kind == "mismatch"})
    dead = {node.rank: node for node in sinks if node.kind == "dead"}
    find_deaths(context, dead, told=find_told_by_errors(context, dead))
    find_skipped_writes(context)
    explained = find_taken_messages(context)
    find_cycles(context)
    explained |= find_no_such_peer(context)
    left = find_departures(context, [node for node in sinks if node.rank not in explained])
    find_missing(context, [node for node in left if node.kind == "absent"])
    find_unwritten(context, [node for node in sinks if node.kind == "key"])
    _find_stuck(context, [node for node in sinks if node.kind == "stuck"])
    find_unrecorded(context, [node for node in left if node.kind in ("no-record", "elsewhere")])


def _find_stuck(context: Context, sinks: Sequence[Node]) -> None:
    job, graph = context.job, context.graph
    stuck = [node for node in sinks if not graph.is_alone(node)]
    if context.cases:  # the head of a rank whose ring lost it is weaker evidence than any cause
        stuck = [
            node
            for node in stuck
            if not all(job.views[edge.rank].head_lost for edge in graph.edges_into(node))
        ]
    if may_be_running(context, stuck):
        find_undecided(context, stuck)
        return
    for node in find_left_behind(context, stuck) if job.knows.completion_times else stuck:
        find_stuck_inside(context, node)


def _demote_behind_groups(groups: Sequence[Case], others: Sequence[Case]) -> None:
    """Demote what was found with groups that are not what the program takes them for."""
    for case in groups:
        for other in others:
            other.claim.root_cause = (
                other.claim.root_cause and other.claim.kind == "dead" and not case.claim.culprits
            )


def _weight(case: Case) -> tuple[bool, bool, int, tuple[int, ...], list[int]]:
    claim = case.claim
    return (
        not claim.root_cause,
        claim.kind == "waiting",
        -case.blocked,
        case.order,
        claim.culprits,
    )
