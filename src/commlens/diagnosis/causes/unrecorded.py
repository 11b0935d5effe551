"""Ranks that others wait for, and of which no record tells what they did."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from commlens.diagnosis.causes.context import Context, most_waited, processes_of, waits_of
from commlens.diagnosis.graph.wait_graph import Edge, Instance, Node
from commlens.model.cause import Confidence, NoRecord, Unrecorded

_LOG_TELLS_NOTHING = ("silent", "watchdog-stuck")


@dataclass
class FoundUnrecorded:
    """Ranks without a record, and the evidence."""

    cause: Unrecorded
    edges: list[Edge]  # the waits for them
    blocked: list[int]  # ranks that wait for them, directly or behind others
    stuck_watchdog_s: int = 0


def find_unrecorded(context: Context, nodes: list[Node]) -> None:
    """Presume ranks without a record on this node dead; those of another node, or with damaged
    records, may be anywhere.
    """
    others = any(case.claim.root_cause for case in context.cases)
    # Where a dump could not be read, its rank may as well be the one that holds up the others as
    # one without a dump.
    unknown = not context.job.knows.every_process and any(
        node.rank in context.job.views for node in nodes
    )
    if context.job.only_logs:
        nodes = [node for node in nodes if not _waits_ended_early(context, node)]
    for (_, kind, record), members in sorted(_alike(context, nodes).items()):
        present = kind == "no-record" and not unknown
        _add(context, members, record, present=present, others=others)


def _waits_ended_early(context: Context, node: Node) -> bool:
    """Return whether all ranks that waited for this one failed before their timeout, because a peer
    had ended: then a silent rank may have come to the collective.
    """
    waiting = [context.job.views[edge.rank] for edge in context.graph.edges_into(node)]
    return all(view.exit.kind == "peer" and not view.timed_out for view in waiting)


def _alike(context: Context, nodes: list[Node]) -> dict[tuple[Instance, str, str], list[Node]]:
    """Return the nodes by the collective that waits for them, their kind, and what is known of
    their records.
    """
    groups: dict[tuple[Instance, str, str], list[Node]] = defaultdict(list)
    # by the collectives whose ranks wait for a node: for many nodes the same
    instances: dict[frozenset[Node], Instance] = {}
    for node in nodes:
        sources = frozenset(context.graph.waiters.get(node, ()))
        sources = sources if all(source.kind == "at" for source in sources) else frozenset({node})
        if sources not in instances:
            instances[sources] = most_waited(context.graph.edges_into(node)).instance
        groups[(instances[sources], node.kind, _record_of(context, node.rank))].append(node)
    return groups


def _record_of(context: Context, rank: int) -> str:
    """Return why a rank is not recorded, or that its records are ``"silent"`` or ``"damaged"``;
    empty if it has none.
    """
    view, stranger = context.job.views.get(rank), context.job.strangers.get(rank)
    if view is not None and view.is_log and view.lost_newest:
        return "damaged"  # a line that could not be read may tell it
    if context.job.only_logs:
        return "silent"
    if stranger is not None:
        return stranger.unrecorded
    if view is None:
        return ""
    return "silent" if view.is_log else "damaged"


def _add(context: Context, nodes: list[Node], record: str, *, present: bool, others: bool) -> None:
    """Add a cause for ranks that are alike.

    Args:
        context: the job.
        nodes: of the ranks.
        record: of :func:`_record_of`.
        present: whether they were on this machine, if they ever were.
        others: whether another root cause is known.
    """
    views, ranks = context.job.views, [node.rank for node in nodes]
    edges, blocked = context.graph.edges_into(nodes[0]), context.blocked_by(nodes)
    op = most_waited(edges).op
    stuck_s = _stuck_watchdog_s(context, ranks) if record == "silent" else 0
    if record == "silent":
        reason: NoRecord = "watchdog-stuck" if stuck_s else "silent"
    else:
        reason = _reason(context, ranks, edges, dead=present and not record)
    dead = reason == "left-nothing"
    alone = len(ranks) == 1 and (reason in _LOG_TELLS_NOTHING or ranks[0] not in views)
    culprits = ranks if dead or alone else []
    cause = Unrecorded(
        kind="dead" if dead else "missing",
        why="unknown",
        root_cause=(dead and context.job.knows.every_process) or not others,
        culprits=culprits,
        blamed_by="absence",
        victims=sorted(set(blocked) - set(ranks if reason in _LOG_TELLS_NOTHING else culprits)),
        confidence=_confidence(reason, ranks),
        ranks=ranks,
        processes=processes_of(context, ranks),
        reason=reason,
        waits=waits_of(context, edges),
        job_size=context.job.size,
    )
    found = FoundUnrecorded(cause, edges, blocked, stuck_s)
    context.add(found, op, None, blocked=len(blocked))


def _reason(
    context: Context, ranks: Sequence[int], edges: Sequence[Edge], *, dead: bool
) -> NoRecord:
    view, op = context.job.views.get(ranks[0]), most_waited(edges).op
    if any(rank in context.job.strangers for rank in ranks):
        return "not-recorded"
    if view is not None:
        return "outdated" if view.is_older_than(op.announced_ns) else "unreadable"
    if dead:
        return "left-nothing"
    if op.op == "init_process_group":
        return "not-started" if context.job.meets_here else "fewer-than-expected"
    return "out-of-sight"


def _confidence(reason: NoRecord, ranks: Sequence[int]) -> Confidence:
    if reason in ("left-nothing", "not-started"):
        return "medium"
    return "medium" if reason == "watchdog-stuck" and len(ranks) == 1 else "low"


def _stuck_watchdog_s(context: Context, ranks: Sequence[int]) -> int:
    """Return for how long a watchdog of these ranks was stuck, in seconds, as their logs tell."""
    columns = [context.job.views[rank].columns for rank in ranks if rank in context.job.views]
    return max((one.dump.stuck_watchdog_s for one in columns if one is not None), default=0)
