"""Find ranks that others wait for and whose calls no record shows, and keys of the job's store that
no rank writes.

Say rank 3 of 4 has no record, and the others wait for it. If all ranks run on this machine, it
ended before it could record anything: it is presumed dead. If it may run on another node, whose
records are not here, it is only the suspect, with low confidence. If its newest records are
damaged, it may have come, and nobody is blamed.

Say all ranks but rank 0 wait for the key ``step-7``, and rank 0, which wrote ``step-6``, waits for
them in a barrier: it skipped the write. If no rank ever wrote such a key, nobody is blamed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from commlens.diagnosis.align.tie_break import UNDECIDED, by_majority
from commlens.diagnosis.causes.context import (
    MOTIONLESS,
    Case,
    Context,
    most_waited,
    processes_of,
    waits_of,
)
from commlens.diagnosis.causes.groups_differ import calls_that_differ
from commlens.diagnosis.graph.wait_graph import Edge, Instance, WaitNode, listens_at, writes_of_kind
from commlens.model.cause import (
    Confidence,
    Decision,
    GroupName,
    NoRecord,
    Unrecorded,
    Unwritten,
)
from commlens.model.collective import Collective
from commlens.model.store_identity import parse_address

_LOG_TELLS_NOTHING = ("silent", "watchdog-stuck")


def find_unrecorded(context: Context, nodes: list[WaitNode]) -> None:
    """Presume ranks without a record on this machine dead; those of another node, or with damaged
    records, may be anywhere.

    Args:
        context: the job.
        nodes: the ranks that others wait for, of the kinds ``no-record`` and ``elsewhere``. A rank
            whose newest records are damaged is among them.
    """
    explained = calls_that_differ(context)
    nodes = [
        node
        for node in nodes
        if any(id(edge.op) not in explained for edge in context.graph.edges_into(node))
    ]
    # A rank whose dump could not be read may hold up the others, as well as one without a dump.
    unreadable = context.job.foreign and any(node.rank in context.job.views for node in nodes)
    if context.job.only_logs:
        nodes = [node for node in nodes if not _waits_ended_early(context, node)]
    is_known = any(case.cause.root_cause for case in context.cases)
    for (_, kind, reason, _), members in sorted(_alike(context, nodes).items()):
        has_ended = kind == "no-record" and reason == "out-of-sight" and not unreadable
        why = "left-nothing" if has_ended else reason
        _add_unrecorded(context, members, why, other_cause_known=is_known)


def _waits_ended_early(context: Context, node: WaitNode) -> bool:
    """Return whether all ranks that waited for this one failed before their timeout, because a peer
    had ended: then a silent rank may have come to the collective.
    """
    waiting = [context.job.views[edge.rank] for edge in context.graph.edges_into(node)]
    return all(view.exit.kind == "peer" and not view.timed_out for view in waiting)


def _alike(
    context: Context, nodes: list[WaitNode]
) -> dict[tuple[Instance, str, NoRecord, str], list[WaitNode]]:
    """Return the nodes by the collective in which most ranks wait for them, their kind, why no
    record shows their calls, and why their process records nothing, if it is known.
    """
    groups: dict[tuple[Instance, str, NoRecord, str], list[WaitNode]] = defaultdict(list)
    # If 4000 ranks never started, the same ranks wait for all of them, in the same collectives: the
    # one with the most ranks is looked for once.
    instances: dict[frozenset[WaitNode], Instance] = {}
    for node in nodes:
        waiters = frozenset(context.graph.waiters.get(node, ()))
        shared = all(waiter.kind == "at" for waiter in waiters)
        same_for = waiters if shared else frozenset({node})
        if same_for not in instances:
            instances[same_for] = most_waited(context, context.graph.edges_into(node)).instance
        stranger = context.job.strangers.get(node.rank)
        unrecorded = stranger.unrecorded if stranger is not None else ""
        reason = _reason(context, node.rank)
        groups[instances[same_for], node.kind, reason, unrecorded].append(node)
    return groups


def _reason(context: Context, rank: int) -> NoRecord:
    """Return why no record shows a rank's calls, as far as its own records tell."""
    view = context.job.views.get(rank)
    if view is not None and view.is_log and view.lost_newest:
        return "unreadable"  # a line that could not be read may say that it came
    if context.job.only_logs:
        return "silent"
    if rank in context.job.strangers:
        return "not-recorded"
    if view is None:
        return "out-of-sight"
    return "silent" if view.is_log else "unreadable"


def _closer_reason(
    context: Context, ranks: Sequence[int], reason: NoRecord, op: Collective
) -> NoRecord:
    """Return the reason, or a closer one that only the wait for these ranks in ``op`` shows."""
    if reason == "silent" and _stuck_watchdog_s(context, ranks):
        return "watchdog-stuck"
    if reason == "unreadable" and context.job.views[ranks[0]].is_older_than(op.announced_ns):
        return "outdated"
    if reason == "out-of-sight" and op.op == "init_process_group":
        return "not-started" if context.job.meets_here else "fewer-than-expected"
    return reason


def _add_unrecorded(
    context: Context, nodes: list[WaitNode], reason: NoRecord, *, other_cause_known: bool
) -> None:
    """Add a cause for ranks that others wait for in the same collective, and whose calls no record
    shows for the same reason.
    """
    ranks = [node.rank for node in nodes]
    edges, blocked = context.graph.edges_into(nodes[0]), context.blocked_by(nodes)
    op = most_waited(context, edges).op
    reason = _closer_reason(context, ranks, reason, op)
    culprits = _culprits(context, nodes, reason)
    # of a rank whose log says nothing, it is not even known that it waits
    no_victims = ranks if reason in _LOG_TELLS_NOTHING else culprits
    cause = Unrecorded(
        kind="dead" if reason == "left-nothing" else "missing",
        why="unknown",
        root_cause=(reason == "left-nothing" and not context.job.foreign) or not other_cause_known,
        culprits=culprits,
        blamed_by="absence",
        victims=sorted(set(blocked) - set(no_victims)),
        confidence=_confidence(reason, ranks),
        ranks=ranks,
        processes=processes_of(context, ranks),
        reason=reason,
        stuck_s=_stuck_watchdog_s(context, ranks) if reason == "watchdog-stuck" else 0,
        waits=waits_of(context, edges),
        # a group of more ranks than the job has: one of its members may run under another number
        idle=_idle(context) if min(ranks) >= context.job.size else [],
        job_size=context.job.size,
    )
    context.cases.append(Case(cause, op, None, edges, blocked))


def _culprits(context: Context, nodes: list[WaitNode], reason: NoRecord) -> list[int]:
    """Return the ranks to blame: a single one, or those that have ended. If the waits for several
    broke off because a peer had ended, one ended first, and the others may have because of it.
    """
    ranks = [node.rank for node in nodes]
    alone = len(ranks) == 1 and (reason in _LOG_TELLS_NOTHING or ranks[0] not in context.job.views)
    all_ended = reason == "left-nothing" and not all(
        _waits_ended_early(context, node) for node in nodes
    )
    return [rank for rank in ranks if rank < context.job.size] if alone or all_ended else []


def _idle(context: Context) -> list[int]:
    """Return the ranks that live and wait for no other rank."""
    waiting = {node.rank for node in context.graph.blocks}
    views = context.job.views
    return sorted(rank for rank in views.keys() - waiting if not views[rank].exit.ended)


def _confidence(reason: NoRecord, ranks: Sequence[int]) -> Confidence:
    is_likely = reason in ("left-nothing", "not-started")
    return "medium" if is_likely or (reason == "watchdog-stuck" and len(ranks) == 1) else "low"


def _stuck_watchdog_s(context: Context, ranks: Sequence[int]) -> int:
    """Return how long a watchdog of these ranks was stuck, in seconds, as their logs tell; 0: none
    was.
    """
    dumps = [context.job.views[rank].dump for rank in ranks if rank in context.job.views]
    return max((dump.stuck_watchdog_s for dump in dumps if dump is not None), default=0)


@dataclass(kw_only=True)
class UnwrittenCase(Case[Unwritten]):
    """A key that no rank writes."""

    involved: list[int]  # ranks that wait for it, or for one another
    write: Collective | None = None  # the culprit's first one of such a key
    own: Collective | None = None  # in which the culprit waits for these ranks


def find_skipped_writes(context: Context) -> None:
    """Find the cycles in which ranks wait for a key, and the rank that wrote such keys before waits
    for these ranks. Take them out of the graph's deadlocks.

    That rank is to blame if most of the ranks in the cycle wait for the key. Otherwise these may be
    where they should not be.
    """
    graph, left = context.graph, []
    for component in graph.deadlocks:
        waits = [node for node in component if node.kind == "wait"]
        for_key = [node for node in waits if graph.blocks[node].op.is_store_wait]
        ends = [end for node in for_key for end in graph.edges[node].items()]
        edges = [edge for _, edge in ends]
        wrote = writes_of_kind(context.job, edges[0].op) if edges else {}
        writers_and_keys = {(target.rank, edge.instance) for target, edge in ends}
        # if they wait for several keys or writers, the cycle has no single cause
        writer = writers_and_keys.pop()[0] if len(writers_and_keys) == 1 else -1
        if writer in wrote and len(for_key) > len(waits) - len(for_key):
            _skipped_write(context, writer, wrote[writer], waits, edges)
        else:
            left.append(component)
    graph.deadlocks = left


def _skipped_write(
    context: Context, writer: int, write: Collective, waits: list[WaitNode], edges: list[Edge]
) -> None:
    op, ranks = edges[0].op, sorted({node.rank for node in waits})
    own = next(context.graph.blocks[node].op for node in waits if node.rank == writer)
    blocked = context.blocked_by(waits)
    cause = Unwritten(
        kind="missing",
        why="skipped",
        root_cause=True,
        culprits=[writer],
        blamed_by="routine",
        victims=sorted({*ranks, *blocked} - {writer}),
        confidence="medium",
        certain=True,
        key=op.channel.group.name,
        ranks=sorted({edge.rank for edge in edges}),
        waits=waits_of(context, edges),
        written_before=True,
    )
    context.cases.append(
        UnwrittenCase(
            cause,
            op,
            write.source,
            edges,
            blocked,
            weight=len({*ranks, *blocked}),
            involved=ranks,
            write=write,
            own=own,
        )
    )


def find_unwritten(context: Context, nodes: list[WaitNode]) -> None:
    """Find the keys that ranks wait for and whose writer the records do not show. No rank is
    blamed, except ranks that wait for a store at another address than most.

    If all ranks wait like that, a process outside of the job may be meant to write the key, so they
    must have waited for long.
    """
    edges_of = {node: context.graph.edges_into(node) for node in nodes}
    waiting = {edge.rank for edges in edges_of.values() for edge in edges}
    if len(waiting) == context.job.size and not context.waits_too_long(
        waiting, timeouts=MOTIONLESS
    ):
        return
    for node, edges in edges_of.items():
        op, ranks = edges[0].op, sorted({edge.rank for edge in edges})
        blocked, listens = context.blocked_by([node]), listens_at(context.job, op)
        elsewhere = _rest_of_group(context, ranks, op) if listens is False else None
        agent = listens is False and _are_clients_of_agent(context, ranks)
        decision = _decide_address(elsewhere, ranks)
        culprits = list(decision.culprits)
        cause = Unwritten(
            # a server that has just begun to listen: its clients try again only after a pause
            kind="waiting" if listens and not context.waits_too_long(ranks) else "missing",
            why="unknown",
            root_cause=True,
            culprits=culprits,
            blamed_by=decision.by,
            victims=sorted({*ranks, *blocked} - {*culprits}),
            confidence="medium" if culprits or agent else "low",
            key=op.channel.group.name,
            ranks=ranks,
            waits=waits_of(context, edges),
            written_before=False,
            listens=listens,
            agent=agent,
            elsewhere=elsewhere,
        )
        case = UnwrittenCase(cause, op, op.source, edges, blocked, involved=sorted(waiting))
        context.cases.append(case)


def _decide_address(elsewhere: GroupName | None, ranks: list[int]) -> Decision:
    sides = [elsewhere.ranks, ranks] if elsewhere is not None else []
    return by_majority(sides) or UNDECIDED


def _are_clients_of_agent(context: Context, ranks: list[int]) -> bool:
    """Return whether torch chose that these ranks make no store, since their launcher has one."""
    logs = [context.job.views[rank].log for rank in ranks]
    stacks = [log.main_stack.frames if log.main_stack is not None else () for log in logs]
    stores = [log.observation.store for log in logs]
    return all(store is not None and store.agent for store in stores) and all(
        any(frame.function == "_create_c10d_store" for frame in frames) for frames in stacks
    )


def _rest_of_group(context: Context, ranks: list[int], op: Collective) -> GroupName | None:
    """Return the group made by hand, at another address than the store that these ranks wait for,
    of which they seem to be the missing members; else None.

    Ranks 0-2 wait at ``host:29600`` for a group of 4, rank 3 for the store at ``host:29601``, and
    no rank of the job does anything else: so rank 3 was to be the fourth.
    """
    views, waiting = context.job.views, defaultdict(list)
    for rank in views.keys() - {*ranks}:
        for call in views[rank].log.setups[-1:]:
            port = parse_address(call.channel.group.name).port
            if call.in_flight and port not in ("", parse_address(op.channel.group.name).port):
                waiting[call.channel.group].append(rank)
    if len(waiting) != 1 or not all(view.blocks for view in views.values()):
        return None
    ((group, came),) = waiting.items()
    is_rest = len(group.ranks) == len(came) + len(ranks)
    return GroupName(sorted(came), group.name) if is_rest else None
