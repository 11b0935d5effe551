"""Collectives and messages that all of their ranks have entered and that do not complete: decide
what keeps the ranks inside.

Say ranks 0-3 are in ``all_reduce #41``. If rank 2 is stopped by a signal, it is to blame. If the
device of rank 2 never began the collective, the work before it is. If the processes still use CPU,
data moves and nobody is to blame yet. Otherwise the network or a driver is suspected. Where it
completed on ranks 0-2, the device or process of rank 3 is at fault.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
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
"""Aspects that may stay uncompared: ranks that disagree on the reduce op do not hang, and log lines
never tell the dtype.
"""
_MAKES_GROUPS = WITHOUT_TENSORS - BARRIERS

_WATCHED_S = 0.4  # CPU time over less says nothing
_STANDS_NS = 1_000_000_000  # a transfer that has not moved for so long stands
_CONNECTS_NS = 10_000_000_000  # a new group may connect its ranks for so long
_STOP_STANDS_NS = 2_000_000_000  # a debugger that looks at a process stops it for less


class EnteredOp(NamedTuple):
    """A collective or message that all its ranks have entered."""

    instance: Instance
    op: Collective
    views: list[RankView]  # of its ranks that have a record

    @property
    def records(self) -> list[tuple[RankView, Collective]]:
        """The ranks with their own records of it, where these are not overwritten."""
        return [(view, op) for view in self.views if (op := op_at(view, self.instance)) is not None]

    @property
    def started_on(self) -> list[int]:
        """The ranks whose device has begun it and not ended it."""
        return [view.rank for view, op in self.records if op.in_flight and op.index in view.running]

    @property
    def not_started_on(self) -> list[int]:
        """The ranks that enqueued it and whose device never began it, as far as is recorded."""
        return [
            view.rank
            for view, op in self.records
            if view.timed and op.in_flight and op.index not in view.running
        ]


@dataclass(kw_only=True)
class StuckCase(Case[StuckInside]):
    """Ranks inside of one collective."""

    entered: EnteredOp
    doing: Activity | None  # of the culprits, if their processes cannot run

    @property
    def waiting(self) -> list[int]:
        """The ranks that wait in it, or that stand still after it."""
        return sorted({edge.rank for edge in self.edges} or self.blocked)


def find_stuck_inside(context: Context, node: WaitNode) -> None:
    """Add the cause for one collective or message, unless it may still complete.

    Args:
        context: the job.
        node: of the kind "stuck".
    """
    job, instance = context.job, context.graph.instances[node.detail]
    edges, blocked = context.graph.edges_into(node), context.blocked_by([node])
    op = edges[0].op
    members = [job.views[rank] for rank in instance.members if rank in job.views]
    entered = EnteredOp(instance, op, members)
    failed = _has_failed(context, edges)
    if not failed and not job.foreign:
        ages = (view.now_ns - own.announced_ns for view, own in entered.records)
        if min(ages, default=1 << 62) < _may_take_ns(job, op):
            return
    cause, doing = _what_keeps_inside(context, entered, edges, blocked, failed=failed)
    context.cases.append(
        StuckCase(cause, op, op.source, edges, blocked, entered=entered, doing=doing)
    )


def _may_take_ns(job: JobIndex, op: Collective) -> int:
    """Return how long a collective may take after the last rank has come to it. Between the ranks
    of a new group, connections are made, which takes seconds on a busy machine.
    """
    if op.op in _MAKES_GROUPS and not job.foreseen:
        return max(job.stalled_after_ns, min(_CONNECTS_NS, job.stall_timeout_ns // 2))
    return job.stalled_after_ns


def _what_keeps_inside(
    context: Context,
    entered: EnteredOp,
    edges: Sequence[Edge],
    blocked: Sequence[int],
    *,
    failed: bool,
) -> tuple[StuckInside, Activity | None]:
    """Return the cause, and what its culprits do if their processes cannot run.

    Args:
        context: the job.
        entered: the collective or message.
        edges: the waits in it.
        blocked: the ranks that wait in it or behind these.
        failed: whether such a wait failed, or a rank that waited.
    """
    waiting = {edge.rank for edge in edges}
    activities = {view.rank: context.doing(view) for view in entered.views}
    inside = partial(
        StuckInside,
        why="in-collective",
        victims=[*blocked],
        ranks=list(activities),
        waits=waits_of(context, edges),
    )
    is_unknown = context.completion_unknown(waiting)
    if is_unknown:
        culprits, victims = _stopped_and_standing(context, entered.views)
    else:
        held_up = (rank for rank, doing in activities.items() if doing.why in _HELD_UP)
        culprits = [rank for rank in held_up if not activities[rank].works]
        victims = sorted(set(blocked) - set(culprits))
    if culprits:
        doing = activities[culprits[0]]
        inside = partial(inside, victims=victims)
        return _held_up(inside, doing, culprits, "medium" if is_unknown else "high"), doing
    not_at_fault = partial(inside, kind="waiting", root_cause=False, blamed_by="nobody")
    if is_unknown:
        return not_at_fault(confidence="low", state="completion-unknown"), None
    busy = _busy(entered)
    if busy and not failed and not context.waits_too_long(waiting):
        return not_at_fault(confidence="medium", state="moving", busy=busy), None
    if entered.not_started_on:
        return _never_started(inside, entered, blocked), None
    return _no_progress(inside, context, entered), None


def _busy(entered: EnteredOp) -> list[int]:
    """Return the ranks whose processes use CPU; none if the collective runs on a device: a thread
    that waits for one spins, so its CPU time shows no work.
    """
    seen = {view.rank: view.log.observation for view in entered.views}
    return [
        rank
        for rank, of in seen.items()
        if not entered.op.channel.runs_ahead
        and of.cpu_s is not None
        and of.window_s > _WATCHED_S
        and of.cpu_s / of.window_s >= activity.CPU_WORKING
    ]


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


def _never_started(
    inside: partial[StuckInside], entered: EnteredOp, blocked: Sequence[int]
) -> StuckInside:
    """Decide of devices that have not come to a collective: the work before it holds them up, and
    no network has a part in that.

    Ranks whose device has begun wait in it for the others. Without any such rank, or if the others
    are the most, no rank is named.
    """
    ranks, started = entered.not_started_on, entered.started_on
    culprits = ranks if len(ranks) <= len(started) else []
    return inside(
        kind="stuck-inside",
        root_cause=True,
        culprits=culprits,
        blamed_by="device" if culprits else "undecided",
        victims=sorted({*blocked, *ranks} - set(culprits)),
        confidence="medium",
        state="not-started",
        not_started_on=ranks,
        started_on=started,
    )


def _no_progress(inside: partial[StuckInside], context: Context, entered: EnteredOp) -> StuckInside:
    """Return the cause if nothing shows what keeps the ranks inside: with what is known of their
    arguments, devices and transfers.
    """
    answer = _compared(context, entered)
    unknown = answer.aspects if isinstance(answer, Unknown) else ()
    not_compared = [str(aspect) for aspect in unknown if aspect not in _HARMLESS]
    others: list[int] = []
    if context.job.only_logs and entered.instance.key in context.job.unlisted:
        # no log lists the group's ranks: some of these may be in it, and missing
        others = sorted(set(context.job.views) - set(entered.op.channel.group.ranks))
    return inside(
        kind="stuck-inside",
        root_cause=True,
        blamed_by="undecided",
        confidence="low" if not_compared or others else "medium",
        state="no-progress",
        completed_on=[view.rank for view, op in entered.records if op.state is State.COMPLETED],
        started_on=entered.started_on,
        transfer=_stalled_transfer(entered),
        agreement=_agreement(entered.op, answer),
        not_compared=not_compared,
        perhaps_members=others,
    )


def _compared(context: Context, entered: EnteredOp) -> Answer:
    """Compare what the ranks passed to a collective or message, as far as their records tell it."""
    at = entered.instance
    ops = {view.rank: op for view, op in entered.records}
    if not set(at.members) <= set(ops):
        return Unknown(("args",))
    if at.sender >= 0:
        return compare_pair(at.sender, ops[at.sender].args, at.receiver, ops[at.receiver].args)
    args = {view.rank: view.tracks[at.key].args_of(at.number) for view in entered.views}
    return compare_coalesced(args, at.key[2], splits_known=not context.job.foreign)


def _agreement(op: Collective, answer: Answer) -> Agreement:
    """Return on what the ranks agree: nothing is known if something that matters was not compared.
    Calls that make groups pass nothing that this compares.
    """
    if op.op in _MAKES_GROUPS:
        return "unknown"
    if isinstance(answer, Unknown) and _HARMLESS.issuperset(answer.aspects):
        return "sizes" if "dtype" in answer.aspects else "sizes-and-dtypes"
    return "all" if isinstance(answer, Agree) else "unknown"


# --- the transfers of NCCL inside of a collective

Sides = dict[bool, NcclTransfer]
"""The two sides of a transfer: the sender's (True) and the receiver's, as far as they are known."""


def _stalled_transfer(entered: EnteredOp) -> StalledTransfer | None:
    """Return the transfer between two ranks that is behind all others; None if both sides are not
    known of one, if several pairs of ranks are equally far, if one still moves, or if their steps
    cannot be compared.
    """
    sides = _transfers(entered)
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


def _transfers(entered: EnteredOp) -> dict[tuple[int, int, int], Sides]:
    """Return the transfers under way, by sender, receiver and channel; none if one still moves, or
    is with a process that is not in the group, or if two are between the same ends.
    """
    found: dict[tuple[int, int, int], Sides] = defaultdict(dict)
    ranks = entered.op.channel.group.all_ranks
    under_way = (
        (view, each) for view, op in entered.records for told in op.nccl for each in told.transfers
    )
    for view, each in under_way:
        moves = view.now_ns - each.moved_ns < _STANDS_NS
        if moves or not 0 <= each.peer < len(ranks):
            return {}
        ends = (view.rank, ranks[each.peer])
        sender, receiver = ends if each.is_send else ends[::-1]
        sides = found[sender, receiver, each.channel]
        if each.is_send in sides:
            return {}
        sides[each.is_send] = each
    return found


# --- ranks that a signal stopped, where nothing tells what completed


def find_stopped(context: Context) -> None:
    """Find a rank that stays stopped while all others stand in messages, one of them with it,
    where nothing tells whether these are complete: then no rank counts as blocked.
    """
    views = list(context.job.views.values())
    culprits, victims = _stopped_and_standing(context, views)
    by = context.job.views[culprits[0]] if culprits else None
    if (
        by is None
        or by.last_op is None
        or not len(culprits) + len(victims) == len(views) == context.job.size
        or not any(peer in culprits for rank in victims for peer in _peers(context.job.views[rank]))
    ):
        return
    op, doing = by.last_op, context.doing(by)
    entered = EnteredOp(Instance.of(op), op, views)
    inside = partial(StuckInside, victims=victims, ranks=sorted(context.job.views), waits=[])
    cause = _held_up(inside, doing, culprits, "medium")
    context.cases.append(
        StuckCase(cause, op, op.source, blocked=victims, entered=entered, doing=doing)
    )


def _peers(view: RankView) -> set[int | None]:
    """Return the other ranks of the message, or of the batch of messages, of unknown state."""
    last = view.unknown_message
    batch = last.coalescing_id if last is not None else 0
    return {op.peer for op in view.history if op is last or (batch and op.coalescing_id == batch)}


def _stopped_and_standing(context: Context, views: list[RankView]) -> tuple[list[int], list[int]]:
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


# --- dumps of other tools, which tell on which ranks a collective has ended


def find_perhaps_running(context: Context, nodes: Sequence[WaitNode]) -> bool:
    """Add a wait that blames nobody if all that is known is that groups of one name are in the same
    collective, as in a running job; return whether it was added.

    The time of the dump, an error, a timeout or any other finding would tell more. If it completed
    on some ranks of each group, the others are stuck: see :func:`find_left_behind`.
    """
    job = context.job
    if context.cases or len(nodes) < 2 or not job.foreign or job.timed_out:
        return False
    instances = [context.graph.instances[node.detail] for node in nodes]
    edges = context.graph.edges_into_all(nodes)
    waiting = sorted({edge.rank for edge in edges})
    if (
        not _are_alike(edges)
        or _has_failed(context, edges)
        or any(job.views[rank].log.captured_ns for rank in waiting)
        or all(any(_ended_on(job, instance).values()) for instance in instances)
    ):
        return False
    blocked = context.blocked_by(nodes)
    cause = StuckInside(
        kind="waiting",
        why="in-collective",
        root_cause=False,
        blamed_by="nobody",
        victims=blocked,
        confidence="low",
        state="may-be-running",
        ranks=waiting,
        waits=waits_of(context, edges),
    )
    context.cases.append(Case(cause, edges[0].op, edges[0].op.source, edges, blocked))
    return True


def _are_alike(edges: Sequence[Edge]) -> bool:
    """Return whether the waits are all in one collective of groups with the same name."""
    ops = [edge.op for edge in edges]
    names = {(op.op, op.sequence_number, op.channel.group.label) for op in ops}
    return len(names) == 1 and not ops[0].is_point_to_point


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
        ended = _ended_on(context.job, instance)
        stuck = [rank for rank, has_ended in ended.items() if not has_ended]
        # the root of a broadcast may complete it before the others
        if op.op in ROOTED or not 0 < len(stuck) < len(ended):
            others.append(node)
        else:
            found[(op.op, instance.number, op.channel.group.label)].append((node, stuck))
    for several in found.values():
        ranks = sorted({rank for _, stuck in several for rank in stuck})
        _add_left_behind(context, [node for node, _ in several], ranks)
    return others


def _ended_on(job: JobIndex, at: Instance) -> dict[int, bool]:
    """Return, by rank with a record, whether it has left a collective; nothing for a message."""
    members = at.members if at.sender < 0 else ()
    return {rank: _has_ended(job.views[rank], at) for rank in members if rank in job.views}


def _has_ended(view: RankView, instance: Instance) -> bool:
    """Return whether a dump of another tool shows that the rank has left a collective, if only by a
    later one in flight.
    """
    track = view.tracks.get(instance.key)
    return track is not None and instance.number <= track.last and instance.number not in track.open


def _add_left_behind(context: Context, nodes: list[WaitNode], ranks: list[int]) -> None:
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


def completed_on(job: JobIndex, instance: Instance) -> list[int]:
    """Return the ranks on which a collective or message has completed."""
    ended = _ended_on(job, instance) if job.foreign else {}
    views = [job.views[rank] for rank in instance.members if rank in job.views]
    return [
        view.rank
        for view in views
        if ended.get(view.rank)
        or ((op := op_at(view, instance)) is not None and op.state is State.COMPLETED)
    ]


def _has_failed(context: Context, edges: Iterable[Edge]) -> bool:
    """Return whether one of the ranks that wait ended badly, or its wait failed."""
    views = [context.job.views[edge.rank] for edge in edges]
    return any(
        view.exit.failed or any(block.how == "failed" for block in view.blocks.values())
        for view in views
    )
