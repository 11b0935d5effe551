"""Collectives that all ranks have entered and that do not complete."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from commlens.diagnosis.causes.context import Context, op_at
from commlens.diagnosis.graph.wait_graph import Edge, Instance, Node
from commlens.diagnosis.index import activity
from commlens.diagnosis.index.activity import Activity
from commlens.diagnosis.index.job_index import JobIndex, RankView
from commlens.diagnosis.words import phrases
from commlens.diagnosis.words.next_steps import (
    compare_step,
    left_behind_step,
    missing_step,
    not_started_step,
    stuck_step,
)
from commlens.diagnosis.words.phrases import (
    COMPLETION_UNKNOWN,
    collective_phrase,
    first_line,
    prose,
)
from commlens.matching.answer import Agree, Answer, Unknown
from commlens.matching.collectives import compare_coalesced
from commlens.matching.point_to_point import compare_pair
from commlens.model.collective import Collective, State
from commlens.model.ops import ROOTED
from commlens.model.verdict import Finding
from commlens.text import duration, joined, numbered, op_phrase, ranks_and_verb, ranks_phrase, verb

RECORD_COMPLETION = (
    "start the job with TORCH_FR_BUFFER_SIZE=2000 (before torch 2.8: TORCH_NCCL_TRACE_BUFFER_SIZE)"
    " and without blocking wait"
)

_HELD_UP = frozenset({"stopped", "uninterruptible-io", "throttled", "holding-gil"})
"""Activities that keep a rank from taking part in a collective that it has entered."""


_ASPECTS = {
    "args": "arguments",
    "shape": "sizes",
    "reduce-op": "reduce op",
    "layout": "memory layout",
}
_HARMLESS = frozenset({"reduce-op", "dtype"})
"""Aspects that are left open without a word: ranks that disagree on the reduce op do not hang, and
log lines never tell the dtype.
"""


class Meeting(NamedTuple):
    """A collective or message that all its ranks have entered."""

    instance: Instance
    op: Collective
    views: list[RankView]  # of its ranks that have a record
    edges: Sequence[Edge]  # the waits in it
    waiting: list[int]  # ranks of these edges
    blocked: list[int]  # also the ranks that wait behind them

    @property
    def name(self) -> str:
        """``"all_reduce #41 of group dp [0-3]"``, ``"message #3 from rank 0 to rank 1"``."""
        at = self.instance
        return (
            op_phrase(self.op)
            if at.sender < 0
            else f"{numbered('message', at.number)} from rank {at.sender} to rank {at.receiver}"
        )


def may_be_running(context: Context, nodes: Sequence[Node]) -> bool:
    """Return whether all that is known is that groups of one name are in the same collective, as in
    a running job.

    The time of the dump, an error, a timeout or any other finding would tell more. If it completed
    on some ranks of each group, the others are stuck: see :func:`find_left_behind`.
    """
    if context.cases or len(nodes) < 2 or context.job.knows.capture_time or context.job.timed_out:
        return False
    instances = [context.graph.instances[node.detail] for node in nodes]
    if any(instance.sender >= 0 for instance in instances):
        return False
    edges = [edge for node in nodes for edge in context.graph.edges_into(node)]
    if (
        len({(edge.op.op, edge.op.sequence_number, edge.op.channel.group.label) for edge in edges})
        > 1
    ):
        return False
    waiting = {edge.rank for edge in edges}
    if _failed(context, sorted(waiting)) or any(
        context.job.views[rank].log.captured_ns for rank in waiting
    ):
        return False
    return any(
        all(
            not _has_ended(context.job.views[rank], at)
            for rank in at.key[2]
            if rank in context.job.views
        )
        for at in instances
    )


def find_undecided(context: Context, nodes: Sequence[Node]) -> None:
    """Report one collective of several groups, of which one dump does not tell whether it is
    stuck.
    """
    edges = [edge for node in nodes for edge in context.graph.edges_into(node)]
    waiting, blocked = sorted({edge.rank for edge in edges}), context.blocked_by(nodes)
    finding = Finding(
        kind="waiting",
        why="in-collective",
        root_cause=False,
        culprits=[],
        victims=blocked,
        confidence="low",
        summary=(
            f"{ranks_and_verb(waiting, 'is', 'are')} inside"
            f" {collective_phrase([edge.op for edge in edges])}; these dumps do not tell whether it"
            " is stuck or was under way"
        ),
        explanation=prose(
            phrases.waiting(context, edges),
            phrases.waiting_behind(context, waiting, blocked),
            "All ranks of these groups have reached it. Several groups in one collective are what a"
            " running job looks like, and a job whose network failed.",
        ),
        next_step=(
            "dump the job again and compare (commlens compare BEFORE AFTER); if the same collective"
            " is still in flight, "
        )
        + stuck_step(edges[0].op, [context.job.views[rank] for rank in waiting]),
        would_raise_confidence="A second dump would show whether the job moves.",
    )
    context.add(finding, edges[0].op, edges[0].op.source, blocked=len(blocked))


def find_stuck_inside(context: Context, node: Node) -> None:
    """Blame a rank that is stopped or starved inside; else report that data still moves, or suspect
    the network.
    """
    instance, edges = context.graph.instances[node.detail], context.graph.edges_into(node)
    views = [context.job.views[rank] for rank in instance.members if rank in context.job.views]
    meeting = Meeting(
        instance,
        edges[0].op,
        views,
        edges,
        sorted({edge.rank for edge in edges}),
        context.blocked_by([node]),
    )
    failed = _failed(context, meeting.waiting)
    if (
        not failed
        and context.job.knows.capture_time
        and _since_last_arrival(meeting) < context.job.stalled_after_ns
    ):
        return
    activities = {view.rank: context.doing(view) for view in views}
    culprits = [
        rank for rank, doing in activities.items() if doing.why in _HELD_UP and not doing.works
    ]
    busy = [view.rank for view in views if _burns_cpu(view) and not meeting.op.channel.runs_ahead]
    if context.completion_unknown(meeting.waiting):
        finding = _completion_unknown(context, meeting)
    elif culprits:
        finding = _held_up(context, meeting, culprits, activities[culprits[0]])
    elif busy and not failed and not context.waits_too_long(meeting.waiting):
        finding = _still_moving(context, meeting, busy)
    elif not_started := _not_started(meeting):
        finding = _never_started(context, meeting, not_started)
    else:
        finding = _no_progress(context, meeting)
    context.add(finding, meeting.op, meeting.op.source, blocked=len(meeting.blocked))


def _held_up(context: Context, meeting: Meeting, culprits: list[int], doing: Activity) -> Finding:
    others = sorted(set(meeting.waiting) - set(culprits)) or meeting.waiting
    return Finding(
        kind="stuck-inside",
        why=doing.why,
        root_cause=True,
        culprits=culprits,
        victims=sorted(set(meeting.blocked) - set(culprits)),
        confidence="high",
        summary=(
            f"{ranks_phrase(culprits)} {doing.phrase} inside {meeting.name}; "
            f"{ranks_and_verb(others, 'waits', 'wait')} there"
        ),
        explanation=_explanation(context, meeting),
        next_step=missing_step(doing, culprits),
        evidence=_errors(meeting),
    )


def _completion_unknown(context: Context, meeting: Meeting) -> Finding:
    waiting = meeting.waiting
    return Finding(
        kind="waiting",
        why="in-collective",
        root_cause=False,
        culprits=[],
        victims=meeting.blocked,
        confidence="low",
        summary=(
            f"{ranks_and_verb(waiting, 'stands', 'stand')} still after {meeting.name}; "
            "whether their devices have completed it is not known"
        ),
        explanation=prose(
            "All ranks have issued it and agree on what was compared.",
            "Nothing tells how far their devices are: " + COMPLETION_UNKNOWN,
        ),
        next_step=RECORD_COMPLETION + "; for this run, " + stuck_step(meeting.op, meeting.views),
        would_raise_confidence=(
            "C++ stacks of these ranks (py-spy dump --native) would show whether they wait for"
            " their devices."
        ),
    )


def _still_moving(context: Context, meeting: Meeting, busy: list[int]) -> Finding:
    ranks = ranks_phrase(view.rank for view in meeting.views)
    return Finding(
        kind="waiting",
        why="in-collective",
        root_cause=False,
        culprits=[],
        victims=meeting.blocked,
        confidence="medium",
        summary=(
            f"{ranks} are in {meeting.name}, which still moves data,"
            f" {duration(context.longest_wait(meeting.waiting))} so far"
        ),
        explanation=phrases.waiting(context, meeting.edges),
        next_step="wait",
        evidence=[f"{ranks_and_verb(busy, 'uses', 'use')} CPU inside it."],
        would_raise_confidence="CPU time shows work, not that it ends.",
    )


def _not_started(meeting: Meeting) -> list[int]:
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


def _never_started(context: Context, meeting: Meeting, ranks: list[int]) -> Finding:
    """Report devices that have not come to a collective: the work before it holds them up, and no
    network has a part in that.

    Ranks whose device has begun wait in it for the others. Without any such rank, or if the others
    are the most, no rank is named.
    """
    started = [
        view.rank for view in meeting.views if _is_waiting(view, meeting.instance, started=True)
    ]
    culprits = ranks if 0 < len(ranks) <= len(started) else []
    device = verb(ranks, "its device has", "their devices have")
    return Finding(
        kind="stuck-inside",
        why="in-collective",
        root_cause=True,
        culprits=culprits,
        victims=sorted({*meeting.blocked, *ranks} - set(culprits)),
        confidence="medium",
        summary=f"{ranks_phrase(ranks)} enqueued {meeting.name}, but {device} not started it"
        + (
            f"; {ranks_and_verb(started, 'has started it and waits', 'have started it and wait')}"
            if started
            else ""
        ),
        explanation=_explanation(context, meeting),
        next_step=not_started_step(meeting.op, ranks),
        evidence=_errors(meeting),
        would_raise_confidence="What the device does before it is not recorded.",
    )


def _no_progress(context: Context, meeting: Meeting) -> Finding:
    done = [view.rank for view in meeting.views if _has_completed(view, meeting.instance)]
    inside = [view.rank for view in meeting.views if view.rank not in done]
    answer = _compared(context, meeting)
    unknown = answer.aspects if isinstance(answer, Unknown) else ()
    open_question = joined(
        [_ASPECTS.get(aspect, aspect) for aspect in unknown if aspect not in _HARMLESS]
    )
    rest = f"; {ranks_phrase(done)} completed it"
    if not done:
        rest = f"{_agreed(answer) if len(inside) > 1 else ''}, but no rank has completed it"
    if open_question:
        rest += f"; it is not known whether they agree on its {open_question}"
    if others := _may_be_members(context, meeting):
        rest += (
            f"; no line tells whether {ranks_phrase(others)} {verb(others, 'is', 'are')} in that"
            " group"
        )
    errors = _errors(meeting)
    more = (
        "C++ stacks of these ranks (COMMLENS_CPP_STACK=1, py-spy --native) would show where they"
        " are stuck."
    )
    if open_question:
        more = f"These records do not tell its {open_question}; `commlens launch` records them."
    elif (
        not context.job.knows.capture_time
        and not errors
        and not any(view.log.captured_ns for view in meeting.views)
    ):
        more += (
            " If the job may still be running, a second dump would show whether it moves (commlens"
            " compare BEFORE AFTER)."
        )
    return Finding(
        kind="stuck-inside",
        why="in-collective",
        root_cause=True,
        culprits=[],
        victims=meeting.blocked,
        confidence="low" if open_question or others else "medium",
        summary=f"{ranks_and_verb(inside, 'is', 'are')} inside {meeting.name}{rest}",
        explanation=_explanation(context, meeting),
        next_step=(
            compare_step(meeting.op, open_question)
            if open_question
            else stuck_step(meeting.op, meeting.views)
        ),
        evidence=errors,
        would_raise_confidence=more,
    )


def _may_be_members(context: Context, meeting: Meeting) -> list[int]:
    """Return the other ranks of which there are logs, if these do not list the group's ranks: some
    may be in it, and missing.
    """
    group = meeting.op.channel.group
    if not context.job.only_logs or meeting.instance.key not in context.job.unlisted:
        return []
    return sorted(set(context.job.views) - set(group.ranks))


def _compared(context: Context, meeting: Meeting) -> Answer:
    """Compare what the ranks passed to a collective or message, as far as their records tell it."""
    at = meeting.instance
    ops = {view.rank: op for view in meeting.views if (op := op_at(view, at)) is not None}
    if not set(at.members) <= set(ops):
        return Unknown(("args",))
    if at.sender >= 0:
        return compare_pair(at.sender, ops[at.sender].args, at.receiver, ops[at.receiver].args)
    args = {view.rank: view.tracks[at.key].args_of(at.number) for view in meeting.views}
    return compare_coalesced(args, at.key[2], splits_known=context.job.knows.splits)


def _agreed(answer: Answer) -> str:
    """``" and agree on it"``: on all that was compared. Empty if something that matters was not."""
    if isinstance(answer, Unknown) and _HARMLESS.issuperset(answer.aspects):
        sizes = "sizes" if "dtype" in answer.aspects else "sizes and dtypes"
        return f" and agree on its {sizes}"
    return " and agree on it" if isinstance(answer, Agree) else ""


def _explanation(context: Context, meeting: Meeting) -> str:
    return prose(
        phrases.waiting(context, meeting.edges),
        phrases.waiting_behind(context, meeting.waiting, meeting.blocked),
    )


def _errors(meeting: Meeting) -> list[str]:
    """Return sentences with the errors of the ranks on which the collective failed, three at
    most.
    """
    ops = (op_at(view, meeting.instance) for view in meeting.views)
    errors = sorted({first_line(op.error) for op in ops if op is not None and op.error})
    return [f"It failed with: {error}." for error in errors[:3]]


def find_left_behind(context: Context, nodes: list[Node]) -> list[Node]:
    """Find ranks that are stuck in collectives that completed on other ranks; one finding for all
    groups in the same place.

    Returns:
        The nodes that are not of this kind.
    """
    others: list[Node] = []
    found: dict[tuple[str, int, str], list[tuple[Node, list[int]]]] = defaultdict(list)
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


def _left_behind(context: Context, nodes: list[Node], ranks: list[int]) -> None:
    op = context.graph.edges_into(nodes[0])[0].op
    done = sorted(
        {rank for node in nodes for rank in context.graph.instances[node.detail].key[2]}
        - set(ranks)
    )
    blocked = context.blocked_by(nodes)
    victims = sorted(set(blocked) - set(ranks))
    subject = ranks_phrase(ranks)
    name = collective_phrase([context.graph.edges_into(node)[0].op for node in nodes])
    finding = Finding(
        kind="stuck-inside",
        why="in-collective",
        root_cause=True,
        culprits=ranks,
        victims=victims,
        confidence="high",
        summary=(
            f"{ranks_and_verb(ranks, 'is', 'are')} stuck in {name}, which completed on"
            f" {ranks_phrase(done)}"
        ),
        explanation=prose(
            "It needs data from every rank, so all of it had arrived: a device, driver or process"
            f" of {subject} makes no progress.",
            phrases.waiting_behind(context, ranks, victims),
        ),
        next_step=left_behind_step(op, ranks),
    )
    context.add(finding, op, op.source, blocked=len(blocked))


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
    ended = _has_ended if job.knows.completion_times else _has_completed
    return [view.rank for view in views if ended(view, instance) or _has_completed(view, instance)]


def _has_completed(view: RankView, instance: Instance) -> bool:
    op = op_at(view, instance)
    return op is not None and op.state is State.COMPLETED


def _since_last_arrival(meeting: Meeting) -> int:
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
