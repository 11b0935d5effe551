"""Processes that ended, not because a peer had."""

from __future__ import annotations

import re
from collections import defaultdict

from commlens.diagnosis.align.alignment import Mismatch
from commlens.diagnosis.causes.context import Context, most_waited
from commlens.diagnosis.graph.wait_graph import Node
from commlens.diagnosis.index.job_index import RankView
from commlens.diagnosis.words import phrases
from commlens.diagnosis.words.next_steps import death_step
from commlens.diagnosis.words.phrases import prose
from commlens.model.collective import Collective, Frame
from commlens.model.verdict import Finding
from commlens.text import capital, frame_phrase, ranks_phrase, verb

_SAME_MOMENT_NS = 1_000_000_000
# in which the same error differs between ranks: a rank, a size, an address
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


def is_absorbed(context: Context, rank: int) -> bool:
    """Return whether a death follows from a mismatch: gloo aborts the process whose tensor has the
    wrong size.
    """
    if not context.job.views[rank].exit.suggests_mismatch:
        return False
    return any(
        mismatch.absorbs and rank in mismatch.key[2] and _reached(context, rank, mismatch)
        for mismatch in context.mismatches
    )


def _reached(context: Context, rank: int, mismatch: Mismatch) -> bool:
    if mismatch.pair is not None:
        return rank in mismatch.ops
    track = context.job.views[rank].tracks.get(mismatch.key)
    return (
        track is not None
        and track.last >= mismatch.number
        and not (mismatch.silent and track.completed >= mismatch.number)
    )


def find_deaths(
    context: Context, sinks: dict[int, Node], *, told: frozenset[int] = frozenset()
) -> None:
    """Make one finding for all ranks that ended in the same way, but for the numbers in their
    errors.

    A rank that ended later, and not with an exception, may have ended because of the first one.

    Args:
        context: the evidence.
        sinks: the nodes of ranks that died.
        told: ranks whose end another finding tells.
    """
    groups: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for rank, view in sorted(context.job.views.items()):
        end = view.exit
        if rank in told:
            continue
        if (
            end.kind == "own" or (end.kind == "gone" and _is_missed(context, sinks.get(rank)))
        ) and not is_absorbed(context, rank):
            text = _NUMBER.sub("#", end.text) if end.why == "exception" else end.text
            groups[(end.why, text, end.source.where if end.source else "")].append(rank)
    _keep_the_first(context, groups, sinks)
    moments = {
        key: min(context.job.views[rank].exit.at_ns for rank in ranks)
        for key, ranks in groups.items()
    }
    first = min((moment for moment in moments.values() if moment), default=0)
    for key, ranks in sorted(
        groups.items(), key=lambda item: (moments[item[0]] or 1 << 62, item[1])
    ):
        # An exception in user code is a cause of its own; a later signal or exit may follow from
        # the first end.
        follows = bool(first) and moments[key] > first + _SAME_MOMENT_NS and key[0] != "exception"
        _death(
            context,
            ranks,
            [sinks[rank] for rank in ranks if rank in sinks],
            moments[key],
            root_cause=not follows,
        )


def _keep_the_first(
    context: Context, groups: dict[tuple[str, str, str], list[int]], sinks: dict[int, Node]
) -> None:
    """Of ranks that are gone, drop those that seem to have been ended because of the others: nobody
    saw in which order they ended.

    A refusal that a rank raised before says which rank had ended by then. While a rank lives, one
    that waited for another did not end first. If all have ended, one that waited may have been
    killed like any other: only its last sign of life tells.
    """
    views = context.job.views
    gone = sorted(rank for rank, view in views.items() if view.exit.kind == "gone")
    all_ended = all(view.exit.ended for view in views.values())
    named = {
        rank
        for view in views.values()
        if view.log.refusal is not None and view.log.refusal.kind == "dead"
        for rank in view.log.refusal.absent
    }
    for key, ranks in groups.items():
        if views[ranks[0]].exit.kind != "gone":
            continue
        if all_ended:
            groups[key] = (
                [rank for rank in ranks if rank in named] or _ended_first(context, gone) or gone
            )
        elif len(ranks) > 1:
            waiting = {
                edge.rank
                for rank in ranks
                if rank in sinks
                for edge in context.graph.edges_into(sinks[rank])
            }
            groups[key] = (
                [rank for rank in ranks if rank in named]
                or [rank for rank in ranks if rank not in waiting]
                or ranks
            )


def _ended_first(context: Context, gone: list[int]) -> list[int]:
    """Return the rank whose last sign of life is clearly the oldest; none if there is no such
    rank.
    """
    beats = sorted((context.job.views[rank].log.heartbeat_ns, rank) for rank in gone)
    return [
        rank
        for beat, rank in beats[:1]
        if beat and len(beats) > 1 and beat < beats[1][0] - _SAME_MOMENT_NS
    ]


def _is_missed(context: Context, node: Node | None) -> bool:
    """Return whether others wait for a rank that is gone. Otherwise, it may have ended well: nobody
    saw how.
    """
    views = context.job.views

    def never_issued(op: Collective) -> bool:
        track = views[node.rank].tracks.get(op.channel.key) if node is not None else None
        return op.is_point_to_point or track is None or track.last < op.sequence_number

    return node is not None and any(
        not views[edge.rank].exit.ended or never_issued(edge.op)
        for edge in context.graph.edges_into(node)
    )


def _death(
    context: Context, ranks: list[int], nodes: list[Node], moment: int, *, root_cause: bool
) -> None:
    views = context.job.views
    view = views[ranks[0]]
    end = view.exit
    edges = [edge for node in nodes for edge in context.graph.edges_into(node)]
    waiting = sorted({edge.rank for edge in edges})
    blocked = context.blocked_by(nodes)
    peers = sorted(
        rank
        for rank, other in views.items()
        if other.exit.kind in ("peer", "terminated", "gone") and rank not in ranks
    )
    op = most_waited(edges).op if edges else view.last_op
    frame = end.source or _last_line(view)
    unseen = end.kind == "gone"
    # Ranks come to init_process_group at any time: who waits there may have ended first.
    starting = bool(edges) and all(edge.op.is_setup for edge in edges)
    perhaps_aborted = _may_be_aborted(context, view)
    undecided = perhaps_aborted or (
        unseen
        and (len(ranks) > 1 or starting)
        and all(other.exit.ended for other in views.values())
    )
    summary = f"{ranks_phrase(ranks)} " + (
        "are gone; how they ended was not observed" if unseen and len(ranks) > 1 else end.text
    )
    if perhaps_aborted:
        summary += (
            "; no line tells whether of an error, or because NCCL's watchdog gave up waiting for"
            " another rank"
        )
    awaited = [node.rank for node in nodes] if undecided else ranks
    if len({views[rank].exit.text for rank in ranks}) > 1:
        summary += f" (on rank {ranks[0]}; the same on the others, but for numbers)"
    if end.source is not None:
        summary += f" at {frame_phrase(end.source)}"
    if edges:
        waited = (
            "waiting for"
            f" {verb(ranks, 'it', 'them') if awaited == ranks else ranks_phrase(awaited)}"
        )
        summary += f"; {phrases.waits(context, edges, f'was {waited}', f'were {waited}')}"
    others = [rank for rank in peers if not (views[rank].exit.refused or views[rank].exit.gave_up)]
    last_seen = ""
    if frame is not None and end.source is None:
        issued = view.last_op is not None and frame == view.last_op.source
        last_seen = f"; it was {'issued' if issued else 'last seen'} at {frame_phrase(frame)}"
    finding = Finding(
        kind="dead",
        why=end.why,
        root_cause=root_cause,
        culprits=[] if undecided else ranks,
        victims=sorted(
            {*blocked, *peers, *(ranks if undecided else ())} - set(() if undecided else ranks)
        ),
        confidence="low" if undecided else "medium" if unseen else "high",
        summary=summary,
        explanation=prose(
            f"{phrases.name(context, ranks[0])}: {phrases.last(context, ranks[0])}{last_seen}.",
            phrases.waiting(context, edges) if edges else "",
            phrases.waiting_behind(context, waiting, set(blocked) - set(ranks)),
            f"{capital(ranks_phrase(peers))} ended because of it." if peers else "",
        ),
        next_step=(
            death_step(view, frame)
            if not undecided
            else f"look at the output of {ranks_phrase(ranks)}"
        ),
        evidence=[
            *(f"rank {rank} {views[rank].exit.text}." for rank in others),
            *phrases.aborted(context, peers),
        ][:4],
        would_raise_confidence=(
            "The system's log (dmesg, the scheduler) may show how it ended; `commlens launch`"
            " records it."
            if unseen
            else (
                "No line tells how it ended; the records of `commlens launch` do."
                if undecided
                else None
            )
        ),
    )
    context.add(finding, op, frame, blocked=len(blocked), order=(moment,))


def _may_be_aborted(context: Context, view: RankView) -> bool:
    """Return whether a launcher's message that a rank aborted is all that is known of it: then
    others may be the cause.
    """
    bare = view.columns is not None and not view.history and not view.log.exception
    return bare and "SIGABRT" in view.exit.text and context.job.size > 1


def _last_line(view: RankView) -> Frame | None:
    """Return the line where a rank was last seen: in its stack if that is newer than its last
    collective, else the collective's.
    """
    stack = view.log.current_stack
    if stack is not None and stack.source is not None:
        return stack.source
    return view.last_op.source if view.last_op is not None else None
