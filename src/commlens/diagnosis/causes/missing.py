"""Find the ranks that others wait for: decide whether they work or are missing, and whom to blame.

Say ranks 0, 1 and 3 wait in ``all_reduce #7``, and rank 2 has not come to it. If rank 2 visibly
loads data, it may still come: the cause is :class:`Working`, and no fault. If it stands still, it
is missing, and to blame. If rank 2 has ended well, either it ran one round too few or the others
one too many: the majority decides, else how often the ranks of the job came to that line, else
their routines.

The ranks that do not come are an :class:`Absence`: rank 2, its activity, and the waits for it.
:func:`find_missing` adds one case for each. "Waiting" ranks are those in the collective: 0, 1, 3.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import NamedTuple

import msgspec

from commlens.diagnosis.align.call_paths import Path, parting_paths_of_ranks
from commlens.diagnosis.align.routine import Loop, count_rounds, ever_leaves_routine, find_loop
from commlens.diagnosis.align.tie_break import (
    by_majority,
    by_midway,
    by_rounds,
    by_routine,
    first_decision,
)
from commlens.diagnosis.causes.context import (
    TOO_LONG,
    Case,
    Context,
    doing_of,
    most_waited,
    op_at,
    processes_of,
    waits_of,
)
from commlens.diagnosis.causes.messages import find_recomputed
from commlens.diagnosis.graph.wait_graph import Edge, Instance, WaitNode
from commlens.diagnosis.index.activity import (
    Activity,
    is_locked_out,
    longest_gap_ns,
    may_wait_for_child,
)
from commlens.diagnosis.index.job_index import RankView, Track
from commlens.matching.error_texts import is_refusal
from commlens.model.cause import (
    Confidence,
    Decision,
    Doubt,
    Missing,
    Outcome,
    Recomputed,
    Rounds,
    Working,
)
from commlens.model.collective import Collective, Frame, FrameKind, Stack, State
from commlens.model.ranklog import RankLog

_LOOPS_MAX = 64  # ranks whose loops are looked at
_RECENT = 512  # records in which a line is looked for
_NEED_NO_OBSERVATION = frozenset(
    {"finished", "stopped", "holding-gil", "throttled", "uninterruptible-io"}
)
"""Reasons that are certain at first sight; the others need observation over time."""
_LONGER_THAN_BEFORE = 3  # times the longest time between two collectives


class Absence(NamedTuple):
    """Ranks that do the same thing while others wait for them in one collective."""

    ranks: list[int]
    activities: list[Activity]  # one for each rank
    # the representative wait: of the first rank in the collective in which most ranks wait
    edge: Edge
    edges: list[Edge]  # all waits in that collective
    elsewhere: list[Edge]  # waits for the same ranks in other collectives
    waiting: list[int]  # ranks that wait in the representative's collective
    blocked: list[int]  # also the ranks that wait elsewhere or behind them

    @property
    def doing(self) -> Activity:
        """The activity, which the ranks share."""
        return self.activities[0]

    @property
    def all_edges(self) -> list[Edge]:
        """All waits for the ranks."""
        return [*self.edges, *self.elsewhere]

    @property
    def is_for_ranks(self) -> bool:
        """Whether one of the waits can be ended by ranks of the job alone. Any process may make a
        ``TCPStore``.
        """
        return any(not edge.op.is_for_store for edge in self.all_edges)

    @property
    def finished(self) -> bool:
        """Whether the ranks have ended well, or are about to."""
        return self.doing.why == "finished"

    @property
    def over(self) -> bool:
        """Whether the ranks chose to take no more part: they finished, or destroyed their group."""
        return self.finished or self.doing.state == "left"

    @property
    def is_certain(self) -> bool:
        """Whether it is certain that the ranks do what their activity shows."""
        return self.doing.observed or self.doing.why in _NEED_NO_OBSERVATION


class ExtraLine(NamedTuple):
    """A line that only the waiting ranks came to, or came to once more, before they wait. What they
    issued there met another line's collective of the absent ranks, so one is left over in the end.
    """

    op: Collective  # which they issued there
    met: Collective  # the others' collective of the same number
    path: Path  # of ``op``, from where it leaves the path of ``met``
    ranks: list[int]  # that came to the line as often as the waiting ones, these included


class LockHolder(NamedTuple):
    """A rank whose process holds the lock that a missing rank waits for."""

    rank: int  # the missing one
    pid: int
    holder: int  # the rank with this pid
    edge: Edge | None  # the holder's wait for the missing rank, if it waits for it


class Blame(NamedTuple):
    """The ranks to blame, and what decided: perhaps their rounds, or a message that is issued
    again.
    """

    decision: Decision
    rounds: Rounds | None = None
    recomputed: Recomputed | None = None


@dataclass(kw_only=True)
class MissingCase(Case[Missing]):
    """Ranks that do not arrive."""

    absence: Absence
    loop: Loop | None  # inside of which the first of the culprits ended
    extra: ExtraLine | None
    lock_holders: list[LockHolder]
    notified: bool  # the first absent rank waits for another thread to wake it
    strayed: Collective | None  # that an absent rank issued once in another group, from that line
    # the last collective of ranks that have finished without any optimizer step
    ended_after: Collective | None


@dataclass(kw_only=True)
class WorkingCase(Case[Working]):
    """Ranks that visibly work."""

    absence: Absence


def find_missing(context: Context, nodes: list[WaitNode]) -> None:
    """Find the ranks that others wait for. Ranks that do the same while others wait for them in
    the same collective share a cause.
    """
    groups: dict[tuple[object, ...], list[tuple[WaitNode, Activity]]] = defaultdict(list)
    _follow_awaited_threads(context, nodes)
    activities = {node: context.doing(context.job.views[node.rank]) for node in nodes}
    may_arrive = {node for node, doing in activities.items() if _may_arrive(context, node, doing)}
    may_arrive |= _sleep_beside(context, activities, may_arrive)
    # receives from any source whose message a working rank may still send: there, no other rank is
    # missing
    may_be_served = {
        id(edge.op)
        for node in may_arrive
        for edge in context.graph.edges_into(node)
        if edge.is_from_any
    }
    for node, doing in activities.items():
        edges = context.graph.edges_into(node)
        if node not in may_arrive and all(id(edge.op) in may_be_served for edge in edges):
            continue
        first = most_waited(context, edges)
        awaited = id(first.op) if first.is_from_any else first.instance
        groups[(awaited, node in may_arrive, doing.why, doing.frame)].append((node, doing))
    for members in sorted(groups.values(), key=lambda members: [node for node, _ in members]):
        absence, first_node = absence_of(context, members), members[0][0]
        if first_node in may_arrive:
            _add_working(context, absence, first_node)
        else:
            _add_missing(context, absence)


def absence_of(context: Context, members: Sequence[tuple[WaitNode, Activity]]) -> Absence:
    """Return the absence of ranks that do the same thing."""
    absent = [node for node, _ in members]
    edges = context.graph.edges_into_all(absent)
    edge = most_waited(context, edges)
    # a receive from any source is one wait, with an edge to each rank that may send
    same: list[Edge] = []
    elsewhere: list[Edge] = []
    for other in edges:
        is_same = other.instance == edge.instance or (other.op is edge.op and edge.is_from_any)
        (same if is_same else elsewhere).append(other)
    return Absence(
        [node.rank for node in absent],
        [doing for _, doing in members],
        edge,
        same,
        elsewhere,
        sorted({other.rank for other in same}),
        context.blocked_by(absent),
    )


def _follow_awaited_threads(context: Context, nodes: Sequence[WaitNode]) -> None:
    """Let the stack of each absent rank be that of the thread that issues on the channel in which
    others wait, if that is not its main thread.
    """
    for node in nodes:
        view = context.job.views[node.rank]
        track = view.tracks.get(most_waited(context, context.graph.edges_into(node)).op.channel.key)
        of_user = {stack.thread for stack in view.log.stacks if stack.source is not None}
        if track is not None and track.thread in of_user - {view.main_thread}:
            view.log = msgspec.structs.replace(view.log, awaited_thread=track.thread)


# --- ranks that work or sleep, and may still arrive


def _may_arrive(context: Context, node: WaitNode, doing: Activity) -> bool:
    """Return whether an absent rank works or sleeps, and may still arrive."""
    sleep = context.job.views[node.rank].log.sleep
    if not doing.works and sleep.left_s <= 0:
        return False
    edges = context.graph.edges_into(node)
    if _is_wait_over(doing, edges) or any(context.timed_out(edge) for edge in edges):
        return False
    waited_ns = context.held_up_ns(edges)
    if doing.works:
        limit = _patience_ns(context, node.rank, doing)
        return limit is None or waited_ns < limit
    # One long sleep ends at a known time; a thread that polls sleeps again and again.
    is_one = sleep.length_s >= waited_ns / 2e9
    until_ns = waited_ns + sleep.left_s * 1e9
    return is_one and doing.state == "runs" and until_ns < TOO_LONG * context.job.stall_timeout_ns


def _sleep_beside(
    context: Context, activities: Mapping[WaitNode, Activity], may_arrive: Set[WaitNode]
) -> set[WaitNode]:
    """Return the absent ranks that sleep while another one visibly works, for which the same
    collective waits: they may poll for what it makes.
    """

    def awaited_in(node: WaitNode) -> Instance:
        return most_waited(context, context.graph.edges_into(node)).instance

    views = context.job.views
    asleep = [
        node
        for node, doing in activities.items()
        if doing.state == "runs" and views[node.rank].log.sleep.left_s > 0
    ]
    working = (node for node in may_arrive if activities[node].works)
    busy = {awaited_in(node) for node in working if asleep and not activities[node].unclear}
    return {node for node in asleep if busy and awaited_in(node) in busy}


def _is_wait_over(doing: Activity, edges: Iterable[Edge]) -> bool:
    """Return whether it is too late for a rank to come: strict verification refused one of the
    calls that wait for it, or one of them failed while the rank was shutting down.
    """
    return any(
        is_refusal(edge.op.error) or (doing.why == "finished" and edge.op.state is State.FAILED)
        for edge in edges
    )


def _patience_ns(context: Context, rank: int, doing: Activity) -> int | None:
    """Return how long others may wait for a working rank, in ns, before it counts as stuck: it may
    be in an endless loop.

    None: visible compilation, a checkpoint that is being written, a block marked as slow and a
    server without a request may take any time, but not longer than the process group's timeout.
    """
    log = context.job.views[rank].log
    is_in_view = doing.why in ("compilation", "checkpoint-io") and not doing.unclear
    if log.expecting is not None or is_in_view or doing.state == "serves":
        return None
    timeouts = 2 * TOO_LONG if doing.unclear else TOO_LONG
    return max(timeouts * context.job.stall_timeout_ns, _LONGER_THAN_BEFORE * longest_gap_ns(log))


def _add_working(context: Context, absence: Absence, first: WaitNode) -> None:
    ranks, doing = absence.ranks, absence.doing
    patience = _patience_ns(context, ranks[0], doing)
    cause = Working(
        kind="waiting",
        why=doing.why,
        root_cause=False,
        blamed_by="nobody",
        victims=sorted(set(absence.blocked) - set(ranks)),
        confidence="low" if doing.unclear else "high" if doing.observed else "medium",
        ranks=ranks,
        activity=doing_of(doing),
        expected=context.job.views[ranks[0]].log.expecting is not None,
        waits=waits_of(context, absence.all_edges),
        held_up_s=_held_up_s(context, absence),
        patience_s=None if patience is None else patience / 1e9,
        wakes_in_s=None
        if doing.works
        else max(context.job.views[rank].log.sleep.left_s for rank in ranks),
    )
    blocked = context.blocked_by([first])
    op = absence.edge.op
    context.cases.append(WorkingCase(cause, op, doing.frame, blocked=blocked, absence=absence))


# --- ranks that are missing


def _add_missing(context: Context, absence: Absence) -> None:
    """Add the case of ranks that are missing. It blames these, or the ranks that wait for them
    (``blames_waiting``), or none.
    """
    views, doing = context.job.views, absence.doing
    blame, extra = _decide(context, absence), _extra_line(context, absence)
    blamed, by = list(blame.decision.culprits), blame.decision.by
    refused = _were_refused_elsewhere(context, absence, blamed)
    culprits = [] if refused else blamed
    confidence, doubt = _confidence(context, absence, blame.decision, extra, refused=refused)
    blames_waiting = blamed == absence.waiting
    holders = _lock_holders(context, absence)
    locked_out = [rank for rank in absence.ranks if is_locked_out(views[rank].log)]
    cause = Missing(
        kind="missing",
        why=doing.why,
        root_cause=True,
        culprits=culprits,
        blamed_by="unknown" if refused else by,
        victims=sorted(set(absence.blocked) - set(culprits)),
        confidence=confidence,
        certain=doubt != "completion-unknown"
        and _can_never_arrive(context, absence, locked_out, holders),
        ranks=absence.ranks,
        came=_ranks_that_came(context, absence, extra),
        processes=processes_of(context, absence.ranks),
        outcome=_outcome(context, absence, extra, blames_waiting=blames_waiting),
        activity=doing_of(doing),
        waits=waits_of(context, absence.all_edges),
        held_up_s=_held_up_s(context, absence),
        timed_out=context.timed_out(absence.edge),
        over=bool(blamed) and all(views[rank].exit.ended for rank in blamed),
        works_too_long=doing.works and not _is_wait_over(doing, absence.all_edges),
        blames_waiting=blames_waiting,
        rounds=blame.rounds,
        recomputed=blame.recomputed,
        locked_out=locked_out,
        new_line=absence.finished and _is_first_of_its_line(context, absence.edge),
        doubt=doubt,
    )
    first = views[absence.ranks[0]]
    context.cases.append(
        MissingCase(
            cause,
            absence.edge.op if extra is None else extra.op,
            _frame(context, absence, extra, blames_waiting=blames_waiting),
            blocked=absence.blocked,
            absence=absence,
            loop=find_loop(views[blamed[0]]) if by == "midway" else None,
            extra=extra,
            lock_holders=holders,
            notified=_waits_to_be_woken(first),
            strayed=_strayed(context, absence),
            ended_after=first.last_op if absence.finished and not first.log.steps else None,
        )
    )


# --- ... whom to blame


def _decide(context: Context, absence: Absence) -> Blame:
    """Decide whom to blame: the ranks that are missing; if some ranks finished or destroyed their
    group and the others wait for them, the ranks that ran one round too few or too many.

    The majority of the group decides; else how often all ranks of the job came to these lines; else
    the ranks' routine. A rank alone is to blame if it waits for a message that activation
    checkpointing issued again.
    """
    op, sides = absence.edge.op, (sorted(absence.ranks), absence.waiting)
    recomputed = find_recomputed(context.job, absence.edge.rank, op)
    if recomputed is not None and absence.waiting == [recomputed.rank]:
        return Blame(Decision((recomputed.rank,), "recomputation"), recomputed=recomputed)
    if any(context.job.views[rank].unknown_message for rank in absence.ranks):
        return Blame(Decision((), "unknown"))  # they may wait for their devices in a message
    if not absence.over or op.is_setup or op.is_store_wait:
        if _doubt_of_blame(context, absence) is not None:
            return Blame(Decision((), "undecided"))
        return Blame(Decision(tuple(sides[0]), "absence"))
    lines = [op, _other_side(context, absence)]
    counted = [count_rounds(context.job, each) for each in lines if each is not None]
    rounds = [each for each in counted if each is not None]
    decision = first_decision(
        lambda: _by_majority(context, absence),
        lambda: by_rounds({*sides[0], *sides[1]}, [one.odd for one in rounds]),
        lambda: by_routine(sides, _first_to_leave(context, sides)),
        lambda: _by_midway(context, absence),
    )
    return Blame(decision, rounds[0] if decision.by == "rounds" else None)


def _doubt_of_blame(context: Context, absence: Absence) -> Doubt | None:
    """Return why the absent ranks may not be to blame for not coming; None if they are.

    If they poll a lock, a rank that waits for them may hold it. If most of the group stand in
    their line of the program, that line may be a barrier that torch does not see, and the ranks
    that wait in the collective may have left it out.
    """
    op, doing = absence.edge.op, absence.doing
    logs = [context.job.views[rank].log for rank in absence.ranks]
    if op.is_setup or op.is_store_wait or op.is_point_to_point or doing.works or absence.over:
        return None
    if all(log.main_stack is not None and _polls_lock(log.main_stack.frames) for log in logs):
        return "lock-holder-unknown"
    most = 2 * _count_at_line(context, absence) > len(op.channel.group.ranks)
    is_clear = (doing.state, doing.why) != ("runs", "user-code") or any(map(is_locked_out, logs))
    return "many-outside" if most and not is_clear else None


def _count_at_line(context: Context, absence: Absence) -> int:
    """Return how many ranks of the group stand in the line of the absent ones, also if one just
    moved. A rank that waits in a collective below that line does not stand there as they do.
    """
    views, blocked = context.job.views, set(absence.blocked) - set(absence.ranks)
    ranks = set(absence.edge.op.channel.group.ranks) - blocked
    stacks = [views[rank].log.main_stack for rank in ranks if rank in views]
    return sum(stack is not None and stack.source == absence.doing.frame for stack in stacks)


def _polls_lock(frames: Stack) -> bool:
    """Return whether a thread is in the ``filelock`` library or torch's ``FileBaton``, which
    poll.
    """
    library = takewhile(lambda frame: frame.kind is not FrameKind.USER, frames)
    return any(
        frame.file.endswith("/torch/utils/file_baton.py") or "/filelock/" in frame.file
        for frame in library
    )


def _by_majority(context: Context, absence: Absence) -> Decision | None:
    """Blame the ranks that waited if most of the group finished, those that finished if most came
    further; in a smaller group than the job's, only if most of the job did as often, too.
    """
    op, ended = absence.edge.op, sorted(absence.ranks)
    if op.is_point_to_point:
        return None
    tracks, members = context.job.tracks_on(op.channel.key), len(op.channel.group.ranks)
    got_to = max((tracks[rank].last for rank in ended if rank in tracks), default=0)
    # also ranks that have completed it: a collective with a root can complete without all
    further = [rank for rank, track in tracks.items() if track.last > got_to]
    decision = by_majority([ended, further], of=members)
    if decision is None:
        return None
    if decision.culprits == tuple(sorted(further)):
        decision = decision._replace(culprits=tuple(absence.waiting))
    rounds = count_rounds(context.job, op)
    differ = rounds is not None and not rounds.odd.isdisjoint(decision.culprits)
    return decision if members == context.job.size or differ else None


def _by_midway(context: Context, absence: Absence) -> Decision | None:
    """Blame the ranks that ended in the middle of a round of their loop, if those that wait for
    them go on with theirs.
    """
    if len(absence.ranks) + len(absence.waiting) > _LOOPS_MAX:
        return None
    views = context.job.views
    loops = {rank: find_loop(views[rank]) for rank in (*absence.ranks, *absence.waiting)}
    midway = [rank for rank, loop in loops.items() if loop is not None and loop.more]
    going_on = [rank for rank, loop in loops.items() if loop is not None]
    return by_midway(absence.ranks, absence.waiting, midway, going_on)


def _first_to_leave(context: Context, sides: Iterable[Sequence[int]]) -> list[int]:
    """Return the first rank of each side that ever left its routine."""
    views = context.job.views
    leaving = ((rank for rank in side if ever_leaves_routine(views[rank])) for side in sides)
    return [rank for ranks in leaving for rank in islice(ranks, 1)]


def _other_side(context: Context, absence: Absence) -> Collective | None:
    """Return the finished rank's own last message to or from the waiting rank: the other side of
    the message that is waited for.
    """
    op, view = absence.edge.op, context.job.views[absence.ranks[0]]
    back = "recv" if op.op == "send" else "send"
    messages = view.pairs.get((op.channel.key, absence.edge.rank, back), [None])
    return messages[-1] if op.is_point_to_point else None


def _were_refused_elsewhere(context: Context, absence: Absence, blamed: Sequence[int]) -> bool:
    """Return whether strict verification ended the wait of the ranks to blame in another
    collective, so that they never came: what they waited for there is the cause.
    """
    views = [context.job.views[rank] for rank in blamed]
    return bool(views) and all(
        view.exit.refused and op_at(view, absence.edge.instance) is None for view in views
    )


# --- ... how sure that is

_LIMITS_TO_LOW = frozenset(
    {
        "may-wait-in-message",
        "completion-unknown",
        "only-issued",
        "may-be-working",
        "helper-unseen",
    }
)


def _confidence(
    context: Context,
    absence: Absence,
    decision: Decision,
    extra: ExtraLine | None,
    *,
    refused: bool,
) -> tuple[Confidence, Doubt | None]:
    """Return the confidence in the culprits, and the reason why it is not higher. ``refused``:
    strict verification ended the wait of those to blame elsewhere.
    """
    doubt_of_records = _doubt_of_records(context, absence)
    if refused or doubt_of_records in _LIMITS_TO_LOW:
        return "low", doubt_of_records or "refused-elsewhere"
    if decision.by == "midway":
        return "medium", doubt_of_records or "loop-may-end-there"
    shows_excess = extra is not None or decision.by == "recomputation"
    blames_absent = list(decision.culprits) != absence.waiting
    is_clear = absence.is_certain and decision.culprits and (shows_excess or blames_absent)
    if is_clear and not context.assumed(absence.waiting):
        return ("high", doubt_of_records) if absence.is_for_ranks else ("medium", "store-elsewhere")
    return "medium", doubt_of_records or _doubt_of_decision(context, absence, decision)


def _doubt_of_decision(context: Context, absence: Absence, decision: Decision) -> Doubt:
    """Return why the decision is not certain, although the records suffice."""
    if not decision.culprits:
        return _doubt_of_blame(context, absence) or "undecided"
    blames_waiting = list(decision.culprits) == absence.waiting
    return "majority-assumed" if blames_waiting else "wait-inferred"


def _doubt_of_records(context: Context, absence: Absence) -> Doubt | None:
    """Return the facts about the ranks that the records lack; None if they suffice."""
    views, doing = [context.job.views[rank] for rank in absence.ranks], absence.doing
    if any(view.unknown_message for view in views):
        return "may-wait-in-message"
    if any(_may_wait_for_unseen_helper(view.log, doing) for view in views):
        return "helper-unseen"
    if context.completion_unknown(absence.waiting):
        return "completion-unknown"
    if _is_only_issued([context.job.views[rank] for rank in absence.waiting]):
        return "only-issued"
    if doing.works and not _is_wait_over(doing, absence.all_edges):
        return "may-be-working"
    if absence.is_certain:
        return None
    if not context.job.has_stack(absence.ranks[0]):
        return "outside-not-recorded"
    return "ended-unobserved" if any(view.exit.ended for view in views) else "not-observed"


def _is_only_issued(waiting: Sequence[RankView]) -> bool:
    """Return whether records tell what ranks issued, and not whether it completed."""
    return any(view.dump is not None and view.dump.issued_only for view in waiting) or all(
        view.is_log and not view.timed_out for view in waiting
    )


def _may_wait_for_unseen_helper(log: RankLog, doing: Activity) -> bool:
    """Return whether a rank may wait for a process that it started, whose stack is unknown."""
    unseen = any(not helper.stack for helper in log.observation.helpers)
    return unseen and may_wait_for_child(log, doing)


# --- ... what they did instead, or the waiting ranks too much


def _outcome(
    context: Context, absence: Absence, extra: ExtraLine | None, *, blames_waiting: bool
) -> Outcome:
    """Return what the missing ranks did instead of coming, or the waiting ones too much."""
    op, views = absence.edge.op, context.job.views
    if extra is not None:
        return "extra-line"
    if blames_waiting:
        return "extra-message" if op.is_point_to_point else "extra-collective"
    if op.is_store_wait:
        return "key-missing"
    if op.is_point_to_point:
        return "message-missing"
    if absence.finished:
        return "finished"
    came = all(op_at(views[rank], absence.edge.instance) is not None for rank in absence.ranks)
    return "reached-too-late" if came else "never-reached"


def _extra_line(context: Context, absence: Absence) -> ExtraLine | None:
    """Return the first collective from the line that only the waiting ranks reach, or reach more
    often, if it is not where they wait.

    Collectives of one op pair up in order, wherever they are issued. So the one that is left over
    comes from a line that all ranks reach, and the one too many met another line's: with an
    all_reduce at lines 20 and 30 in each step, and one more at line 25 once, the ranks that passed
    line 25 wait at line 30 in the end.
    """
    op = absence.edge.op
    if not absence.finished or op.is_point_to_point or op.is_setup or op.is_store_wait:
        return None
    tracks = context.job.tracks_on(op.channel.key)
    if any(
        rank not in tracks or context.job.views[rank].wrapped
        for rank in (*absence.waiting, *absence.ranks)
    ):
        return None
    by_waiting = _lines_of(tracks[rank] for rank in absence.waiting)
    by_absent = _lines_of(tracks[rank] for rank in absence.ranks)
    surplus = _only_surplus(by_waiting, by_absent)
    if surplus is None or _line_of(op) in surplus:
        return None
    rank, other = absence.edge.rank, absence.ranks[0]
    extra = _first_surplus(tracks[rank], surplus)
    met = tracks[other].ops.get(extra.sequence_number)
    if met is None:  # its record is torn: these ranks issued that number, too
        return None
    path, _ = parting_paths_of_ranks(context.job, rank, extra, other, met)
    alike = [other for other in tracks if _lines_of([tracks[other]]) == by_waiting]
    return ExtraLine(extra, met, path, sorted(alike))


_Line = tuple[str, tuple[tuple[str, int], ...]]
_Lines = Counter[_Line]
"""How often each op was issued from each line."""


def _line_of(op: Collective) -> _Line:
    return op.op, op.call_lines


def _lines_of(tracks: Iterable[Track]) -> _Lines | None:
    """Return how often ranks issued each op from each line; None if they differ."""
    counts = [Counter(map(_line_of, track.ops.values())) for track in tracks]
    return counts[0] if all(each == counts[0] for each in counts) else None


def _only_surplus(by_waiting: _Lines | None, by_absent: _Lines | None) -> _Lines | None:
    """Return the op and line that the waiting ranks issued more often, and how much more often;
    None unless the ranks differ in one known line alone.
    """
    if by_waiting is None or by_absent is None:
        return None
    surplus, lack = by_waiting - by_absent, by_absent - by_waiting
    is_only_one = len(surplus) == 1 and not lack and all(lines for _, lines in surplus)
    return surplus if is_only_one else None


def _first_surplus(track: Track, surplus: _Lines) -> Collective:
    """Return the first op that a rank issued from a line after the others last did."""
    at_line = [op for _, op in sorted(track.ops.items()) if _line_of(op) in surplus]
    return at_line[-surplus.total()]


# --- ... what else is known of them


def _ranks_that_came(context: Context, absence: Absence, extra: ExtraLine | None) -> list[int]:
    """Return the ranks that issued the collective that the missing ranks lack: the ranks that wait
    in it, and the ranks that have completed it.
    """
    if extra is not None:
        return extra.ranks
    views, at = context.job.views, absence.edge.instance
    members = [rank for rank in at.members if rank in views and rank not in absence.ranks]
    done = [rank for rank in members if op_at(views[rank], at) is not None]
    return sorted({*absence.waiting, *done})


def _held_up_s(context: Context, absence: Absence) -> float | None:
    """Return how long the job has been held up; None if that is as long as the longest wait."""
    waiting = sorted(set(absence.blocked) - set(absence.ranks))
    held_up_ns = context.held_up_ns(absence.all_edges)
    return held_up_ns / 1e9 if held_up_ns < context.longest_wait(waiting) else None


def _can_never_arrive(
    context: Context,
    absence: Absence,
    locked_out: Sequence[int],
    holders: Sequence[LockHolder],
) -> bool:
    """Return whether the ranks can never arrive, and nobody in their place: they have ended,
    nothing releases the lock that each waits for, or the lock's holder waits for them.
    """
    locked = {*locked_out, *(one.rank for one in holders if one.edge is not None)}
    return absence.is_for_ranks and all(
        context.job.views[rank].exit.kind == "clean" or rank in locked for rank in absence.ranks
    )


def _lock_holders(context: Context, absence: Absence) -> list[LockHolder]:
    """Return the ranks that hold the locks that the missing ones wait for."""
    views, holders = context.job.views, []
    by_process = {(view.log.host, view.log.pid): rank for rank, view in views.items()}
    waits = {edge.rank: edge for edge in absence.all_edges[::-1]}
    for rank in absence.ranks:
        log = views[rank].log
        pid = log.observation.waits_for_pid
        holder = by_process.get((log.host, pid)) if pid else None
        if holder is not None:
            holders.append(LockHolder(rank, pid, holder, waits.get(holder)))
    return holders


def _strayed(context: Context, absence: Absence) -> Collective | None:
    """Return the one collective that an absent rank issued in another group from the line where
    the others wait; None if it did so more often, or if a waiting rank did, too.
    """
    op, views = absence.edge.op, context.job.views
    if op.is_point_to_point or not op.call_lines or op.is_setup or op.is_store_wait:
        return None
    line = _line_of(op)

    def elsewhere(rank: int) -> list[Collective]:
        at_line = (each for each in views[rank].history if _line_of(each) == line)
        return [each for each in at_line if each.channel.key != op.channel.key]

    own = elsewhere(absence.ranks[0])
    return own[0] if len(own) == 1 and not elsewhere(absence.edge.rank) else None


def _waits_to_be_woken(view: RankView) -> bool:
    """Return whether a rank's main thread waits in a condition of Python's, as queues and events
    do.
    """
    stack = view.log.main_stack
    frames = stack.frames if stack is not None else ()
    inner = next((frame for frame in frames if frame.kind is not FrameKind.NATIVE), None)
    return inner is not None and inner.function == "wait" and inner.file.endswith("/threading.py")


def _is_first_of_its_line(context: Context, edge: Edge) -> bool:
    """Return whether a waiting rank issued nothing from this line before: then it is not one more
    iteration.
    """
    view, op = context.job.views[edge.rank], edge.op
    if op.is_point_to_point or op.source is None or view.wrapped:
        return False
    return not view.has_been_at(op, among_last=_RECENT)


def _frame(
    context: Context, absence: Absence, extra: ExtraLine | None, *, blames_waiting: bool
) -> Frame | None:
    """Return the line to look at: where the culprits are, or were last."""
    if extra is not None:
        return extra.op.source
    frame = absence.edge.op.source if blames_waiting else absence.doing.frame
    view = context.job.views[absence.ranks[0]]
    last = view.last_op
    return last.source if frame is None and absence.finished and last is not None else frame
