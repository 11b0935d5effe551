"""Collectives that all ranks have entered and that do not complete: decide what keeps the ranks
inside.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from commlens.diagnosis.causes.context import Case, Context, doing_of, op_at, waits_of
from commlens.diagnosis.graph.wait_graph import Edge, Instance, WaitNode
from commlens.diagnosis.index import activity
from commlens.diagnosis.index.activity import Activity
from commlens.diagnosis.index.job_index import JobIndex, RankView
from commlens.matching.answer import Agree, Answer, Unknown
from commlens.matching.collectives import compare_coalesced
from commlens.matching.point_to_point import compare_pair
from commlens.model.cause import Agreement, Confidence, StalledTransfer, StuckInside
from commlens.model.collective import Collective, State
from commlens.model.nccl import NcclTransfer
from commlens.model.ops import BARRIERS, ROOTED, WITHOUT_TENSORS

_HELD_UP = frozenset({"stopped", "uninterruptible-io", "throttled", "holding-gil"})
"""Activities that keep a rank from taking part in a collective that it has entered."""
_HARMLESS = frozenset({"reduce-op", "dtype"})
"""Aspects that are left open without a word: ranks that disagree on the reduce op do not hang, and
log lines never tell the dtype.
"""


_STANDS_NS = 1_000_000_000  # a transfer that has not moved for so long stands
_CONNECTS_NS = 10_000_000_000  # a new group may connect its ranks for so long
_MAKES_GROUPS = WITHOUT_TENSORS - BARRIERS
_STOP_STANDS_NS = 2_000_000_000  # a debugger that looks at a process stops it for less


class EnteredOp(NamedTuple):
    """A collective or message that all its ranks have entered."""

    instance: Instance
    op: Collective
    views: list[RankView]  # of its ranks that have a record
    edges: Sequence[Edge]  # the waits in it
    waiting: list[int]  # ranks of these edges
    blocked: list[int]  # also the ranks that wait behind them


@dataclass(kw_only=True)
class StuckCase(Case[StuckInside]):
    """Ranks inside of one collective."""

    meeting: EnteredOp
    doing: Activity | None = None  # of the culprits, if their processes cannot run


def may_be_running(context: Context, nodes: Sequence[WaitNode]) -> bool:
    """Return whether all that is known is that groups of one name are in the same collective, as in
    a running job.

    The time of the dump, an error, a timeout or any other finding would tell more. If it completed
    on some ranks of each group, the others are stuck: see :func:`find_left_behind`.
    """
    if context.cases or len(nodes) < 2 or not context.job.foreign or context.job.timed_out:
        return False
    instances = [context.graph.instances[node.detail] for node in nodes]
    if any(instance.sender >= 0 for instance in instances):
        return False
    edges = context.graph.edges_into_all(nodes)
    if (
        len({(edge.op.op, edge.op.sequence_number, edge.op.channel.group.label) for edge in edges})
        > 1
    ):
        return False
    waiting, views = sorted({edge.rank for edge in edges}), context.job.views
    if _failed(context, waiting) or any(views[rank].log.captured_ns for rank in waiting):
        return False
    return not all(_has_ended_on_some(context, instance) for instance in instances)


def _has_ended_on_some(context: Context, at: Instance) -> bool:
    views = context.job.views
    return any(_has_ended(views[rank], at) for rank in at.key[2] if rank in views)


def find_undecided(context: Context, nodes: Sequence[WaitNode]) -> None:
    """Find a collective of several groups that may or may not be stuck, as far as one dump
    shows.
    """
    edges = context.graph.edges_into_all(nodes)
    blocked = context.blocked_by(nodes)
    cause = StuckInside(
        kind="waiting",
        why="in-collective",
        root_cause=False,
        blamed_by="nobody",
        victims=blocked,
        confidence="low",
        state="may-be-running",
        ranks=sorted({edge.rank for edge in edges}),
        waits=waits_of(context, edges),
    )
    context.cases.append(Case(cause, edges[0].op, edges[0].op.source, edges, blocked))


def find_stuck_inside(context: Context, node: WaitNode) -> None:
    """Blame a rank that is stopped or starved inside; else find that data still moves, or suspect
    the network.
    """
    meeting = _meeting(context, node)
    failed = _failed(context, meeting.waiting)
    if (
        not failed
        and not context.job.foreign
        and _since_last_arrival(meeting) < _may_take_ns(context.job, meeting.op)
    ):
        return
    cause, doing = _what_holds_up(context, meeting, failed=failed)
    op, blocked = meeting.op, meeting.blocked
    context.cases.append(
        StuckCase(cause, op, op.source, blocked=blocked, meeting=meeting, doing=doing)
    )


def _may_take_ns(job: JobIndex, op: Collective) -> int:
    """Return how long a collective may take after the last rank has come to it. Between the ranks
    of a new group, connections are made, which takes seconds on a busy machine.
    """
    if op.op in _MAKES_GROUPS and not job.foreseen:
        return max(job.stalled_after_ns, min(_CONNECTS_NS, job.stall_timeout_ns // 2))
    return job.stalled_after_ns


def _meeting(context: Context, node: WaitNode) -> EnteredOp:
    instance, edges = context.graph.instances[node.detail], context.graph.edges_into(node)
    return EnteredOp(
        instance,
        edges[0].op,
        [context.job.views[rank] for rank in instance.members if rank in context.job.views],
        edges,
        sorted({edge.rank for edge in edges}),
        context.blocked_by([node]),
    )


def _what_holds_up(
    context: Context, meeting: EnteredOp, *, failed: bool
) -> tuple[StuckInside, Activity | None]:
    activities = {view.rank: context.doing(view) for view in meeting.views}
    is_unknown = context.completion_unknown(meeting.waiting)
    victims = meeting.blocked
    if is_unknown:
        culprits, victims = _stand_stopped(context, meeting.views)
    else:
        culprits = _cannot_run(activities)
    runs_ahead = meeting.op.channel.runs_ahead
    busy = [view.rank for view in meeting.views if _burns_cpu(view) and not runs_ahead]
    inside = partial(
        StuckInside,
        why="in-collective",
        victims=meeting.blocked,
        ranks=[view.rank for view in meeting.views],
        waits=waits_of(context, meeting.edges),
    )
    if culprits:
        doing = activities[culprits[0]]
        inside = partial(inside, victims=sorted(set(victims) - set(culprits)))
        return _held_up(inside, doing, culprits, "medium" if is_unknown else "high"), doing
    if is_unknown:
        return inside(
            kind="waiting",
            root_cause=False,
            blamed_by="nobody",
            confidence="low",
            state="completion-unknown",
        ), None
    if busy and not failed and not context.waits_too_long(meeting.waiting):
        return inside(
            kind="waiting",
            root_cause=False,
            blamed_by="nobody",
            confidence="medium",
            state="moving",
            busy=busy,
        ), None
    if not_started := _not_started(meeting):
        return _never_started(inside, meeting, not_started), None
    return _no_progress(inside, context, meeting), None


def _held_up(
    inside: partial[StuckInside], doing: Activity, culprits: list[int], confidence: Confidence
) -> StuckInside:
    return inside(
        kind="stuck-inside",
        why=doing.why,
        root_cause=True,
        culprits=culprits,
        blamed_by="process",
        confidence=confidence,
        state="held-up",
        activity=doing_of(doing),
    )


def _cannot_run(activities: Mapping[int, Activity]) -> list[int]:
    return [rank for rank, doing in activities.items() if doing.why in _HELD_UP and not doing.works]


def find_stopped(context: Context) -> None:
    """Find a rank that stays stopped while all others stand in messages, one of them with it,
    where nothing tells whether these are complete: then no rank counts as blocked.
    """
    views = list(context.job.views.values())
    culprits, victims = _stand_stopped(context, views)
    by = context.job.views[culprits[0]] if culprits else None
    if (
        by is None
        or by.last_op is None
        or not len(culprits) + len(victims) == len(views) == context.job.size
        or not any(peer in culprits for rank in victims for peer in _peers(context.job.views[rank]))
    ):
        return
    op, doing = by.last_op, context.doing(by)
    instance = Instance(op.channel.key, op.sequence_number)
    meeting = EnteredOp(instance, op, views, [], victims, victims)
    inside = partial(StuckInside, victims=victims, ranks=sorted(context.job.views), waits=[])
    cause = _held_up(inside, doing, culprits, "medium")
    context.cases.append(
        StuckCase(cause, op, op.source, blocked=victims, meeting=meeting, doing=doing)
    )


def _peers(view: RankView) -> set[int | None]:
    """Return the other ranks of the message, or of the batch of messages, of unknown state."""
    last = view.unknown_message
    batch = last.coalescing_id if last is not None else 0
    return {op.peer for op in view.history if op is last or (batch and op.coalescing_id == batch)}


def _stand_stopped(context: Context, views: list[RankView]) -> tuple[list[int], list[int]]:
    """Return the ranks that are stopped and hold others up, and these others.

    A rank counts if it has been stopped for at least half of the time for which the others have
    stood still: a short stop in a long step says nothing. One that was stopped only after they had
    stood for the stall timeout is itself a victim, which a person examines.
    """
    stopped = {view.rank: ns for view in views if (ns := _stopped_ns(view))}
    others = (view for view in views if view.rank not in stopped)
    stood = {view.rank: ns for view in others if (ns := _stood_ns(view))}
    longest_ns = max(stood.values(), default=0)
    least_ns = max(_STOP_STANDS_NS, longest_ns // 2, longest_ns - context.job.stall_timeout_ns)
    culprits = [rank for rank, ns in stopped.items() if stood and ns >= least_ns]
    return culprits, sorted(stood)


def _stood_ns(view: RankView) -> int:
    """Return for how long a rank has stood still after a call, as far as that is known; else 0."""
    ages = [block.age_ns for block in view.blocks.values()]
    if view.unknown_message is not None:
        ages.append(view.now_ns - view.unknown_message.announced_ns)
    return max(ages, default=0)


def _stopped_ns(view: RankView) -> int:
    """Return for how long a process has been stopped by a signal, not by a debugger, which looks at
    victims: since the last beat of its watchdog.
    """
    seen = view.log.observation
    if seen.suspended != "stopped" or (seen.stopped_fraction or 0.0) <= 0.5:
        return 0
    return view.now_ns - view.log.heartbeat_ns if view.log.heartbeat_ns else 0


def _never_started(
    inside: partial[StuckInside], meeting: EnteredOp, ranks: list[int]
) -> StuckInside:
    """Decide of devices that have not come to a collective: the work before it holds them up, and
    no network has a part in that.

    Ranks whose device has begun wait in it for the others. Without any such rank, or if the others
    are the most, no rank is named.
    """
    started = [
        view.rank for view in meeting.views if _is_waiting(view, meeting.instance, started=True)
    ]
    culprits = ranks if 0 < len(ranks) <= len(started) else []
    return inside(
        kind="stuck-inside",
        root_cause=True,
        culprits=culprits,
        blamed_by="device" if culprits else "undecided",
        victims=sorted({*meeting.blocked, *ranks} - set(culprits)),
        confidence="medium",
        state="not-started",
        not_started_on=ranks,
        started_on=started,
    )


def _no_progress(inside: partial[StuckInside], context: Context, meeting: EnteredOp) -> StuckInside:
    answer = _compared(context, meeting)
    unknown = answer.aspects if isinstance(answer, Unknown) else ()
    not_compared = [str(aspect) for aspect in unknown if aspect not in _HARMLESS]
    others = _may_be_members(context, meeting)
    return inside(
        kind="stuck-inside",
        root_cause=True,
        blamed_by="undecided",
        confidence="low" if not_compared or others else "medium",
        state="no-progress",
        completed_on=[
            view.rank for view in meeting.views if _has_completed(view, meeting.instance)
        ],
        started_on=[
            view.rank for view in meeting.views if _is_waiting(view, meeting.instance, started=True)
        ],
        transfer=_stalled_transfer(meeting),
        agreement=_agreement(meeting.op, answer),
        not_compared=not_compared,
        perhaps_members=others,
    )


Sides = dict[bool, NcclTransfer]
"""The two sides of a transfer: the sender's (True) and the receiver's, as far as they are known."""


def _stalled_transfer(meeting: EnteredOp) -> StalledTransfer | None:
    """Return the transfer between two ranks that is behind all others; None if both sides are not
    known of one, if several pairs of ranks are equally far, if one still moves, or if their steps
    cannot be compared.
    """
    sides = _transfers(meeting)
    if len({side.steps for both in sides.values() for side in both.values()}) > 1:
        return None
    far = {link: min(side.done for side in both.values()) for link, both in sides.items()}
    lowest = min(far.values(), default=0)
    least = [link for link in sorted(sides) if far[link] == lowest]
    if len({(sender, receiver) for sender, receiver, _ in least}) != 1 or len(sides[least[0]]) < 2:
        return None
    sender, receiver, channel = least[0]
    sent, received = sides[least[0]][True], sides[least[0]][False]
    return StalledTransfer(
        sender, receiver, channel, lowest, sent.steps, sent.state, received.state
    )


def _transfers(meeting: EnteredOp) -> dict[tuple[int, int, int], Sides]:
    """Return the transfers under way, by sender, receiver and channel; none if one still moves, or
    is with a process that is not in the group, or if two are between the same ends.
    """
    found: dict[tuple[int, int, int], Sides] = defaultdict(dict)
    ranks = meeting.op.channel.group.all_ranks
    ops = [(view, op) for view in meeting.views if (op := op_at(view, meeting.instance))]
    for view, each in ((view, one) for view, op in ops for t in op.nccl for one in t.transfers):
        if not 0 <= each.peer < len(ranks) or _moves(each, view):
            return {}
        ends = (view.rank, ranks[each.peer])
        sender, receiver = ends if each.is_send else ends[::-1]
        link = found[sender, receiver, each.channel]
        if each.is_send in link:
            return {}
        link[each.is_send] = each
    return found


def _moves(transfer: NcclTransfer, view: RankView) -> bool:
    return view.now_ns - transfer.moved_ns < _STANDS_NS


def _agreement(op: Collective, answer: Answer) -> Agreement:
    """Return on what the ranks agree: nothing is known if something that matters was not compared.
    Calls that make groups pass nothing that this compares.
    """
    if op.op in _MAKES_GROUPS:
        return "unknown"
    if isinstance(answer, Unknown) and _HARMLESS.issuperset(answer.aspects):
        return "sizes" if "dtype" in answer.aspects else "sizes-and-dtypes"
    return "all" if isinstance(answer, Agree) else "unknown"


def _not_started(meeting: EnteredOp) -> list[int]:
    """Return the ranks that enqueued a collective which their device never began, as far as their
    dumps record that.
    """
    return [
        view.rank
        for view in meeting.views
        if view.timed and _is_waiting(view, meeting.instance, started=False)
    ]


def _is_waiting(view: RankView, instance: Instance, *, started: bool) -> bool:
    op = op_at(view, instance)
    return op is not None and op.in_flight and (op.index in view.running) == started


def _may_be_members(context: Context, meeting: EnteredOp) -> list[int]:
    """Return the other ranks with logs, if the logs do not list the group's ranks: some may be in
    it, and missing.
    """
    group = meeting.op.channel.group
    if not context.job.only_logs or meeting.instance.key not in context.job.unlisted:
        return []
    return sorted(set(context.job.views) - set(group.ranks))


def _compared(context: Context, meeting: EnteredOp) -> Answer:
    """Compare what the ranks passed to a collective or message, as far as their records tell it."""
    at = meeting.instance
    ops = {view.rank: op for view in meeting.views if (op := op_at(view, at)) is not None}
    if not set(at.members) <= set(ops):
        return Unknown(("args",))
    if at.sender >= 0:
        return compare_pair(at.sender, ops[at.sender].args, at.receiver, ops[at.receiver].args)
    args = {view.rank: view.tracks[at.key].args_of(at.number) for view in meeting.views}
    return compare_coalesced(args, at.key[2], splits_known=not context.job.foreign)


def find_left_behind(context: Context, nodes: list[WaitNode]) -> list[WaitNode]:
    """Find ranks that are stuck in collectives that completed on other ranks; one finding for all
    groups in the same place.

    Returns:
        The nodes that are not of this kind.
    """
    others: list[WaitNode] = []
    found: dict[tuple[str, int, str], list[tuple[WaitNode, list[int]]]] = defaultdict(list)
    for node in nodes:
        instance = context.graph.instances[node.detail]
        op = context.graph.edges_into(node)[0].op
        members = (
            [rank for rank in instance.key[2] if rank in context.job.views]
            if instance.sender < 0
            else []
        )
        stuck = [rank for rank in members if not _has_ended(context.job.views[rank], instance)]
        if op.op in ROOTED or not stuck or len(stuck) == len(members):
            others.append(node)
        else:
            found[(op.op, instance.number, op.channel.group.label)].append((node, stuck))
    for several in found.values():
        _left_behind(
            context,
            [node for node, _ in several],
            sorted({rank for _, stuck in several for rank in stuck}),
        )
    return others


def _left_behind(context: Context, nodes: list[WaitNode], ranks: list[int]) -> None:
    edges = context.graph.edges_into_all(nodes)
    members = {rank for node in nodes for rank in context.graph.instances[node.detail].key[2]}
    blocked = context.blocked_by(nodes)
    cause = StuckInside(
        kind="stuck-inside",
        why="in-collective",
        root_cause=True,
        culprits=ranks,
        blamed_by="device",
        victims=sorted(set(blocked) - set(ranks)),
        confidence="high",
        state="left-behind",
        ranks=ranks,
        waits=waits_of(context, edges),
        completed_on=sorted(members - set(ranks)),
    )
    context.cases.append(Case(cause, edges[0].op, edges[0].op.source, edges, blocked))


def _failed(context: Context, ranks: list[int]) -> bool:
    views = [context.job.views[rank] for rank in ranks]
    return any(
        view.exit.failed or any(block.how == "failed" for block in view.blocks.values())
        for view in views
    )


def _has_ended(view: RankView, instance: Instance) -> bool:
    """Return whether a dump of another tool shows that the rank has left a collective, if only by a
    later one in flight.
    """
    if instance.sender >= 0:
        return False
    track = view.tracks.get(instance.key)
    return track is not None and instance.number <= track.last and instance.number not in track.open


def completed_on(job: JobIndex, instance: Instance) -> list[int]:
    """Return the ranks on which a collective or message has completed."""
    views = [job.views[rank] for rank in instance.members if rank in job.views]
    ended = _has_ended if job.foreign else _has_completed
    return [view.rank for view in views if ended(view, instance) or _has_completed(view, instance)]


def _has_completed(view: RankView, instance: Instance) -> bool:
    op = op_at(view, instance)
    return op is not None and op.state is State.COMPLETED


def _since_last_arrival(meeting: EnteredOp) -> int:
    ages = [
        view.now_ns - op.announced_ns
        for view in meeting.views
        if (op := op_at(view, meeting.instance)) is not None
    ]
    return min(ages, default=1 << 62)


def _burns_cpu(view: RankView) -> bool:
    seen = view.log.observation
    return bool(
        seen.cpu_s is not None
        and seen.window_s > 0.4
        and seen.cpu_s / seen.window_s >= activity.CPU_WORKING
    )
