"""Processes that ended of their own cause, in words."""

from __future__ import annotations

from collections import defaultdict

from commlens.diagnosis.alignment import Trouble
from commlens.diagnosis.findings.context import Context, make_finding
from commlens.diagnosis.findings.next_steps import death_step
from commlens.diagnosis.index import View
from commlens.diagnosis.wait_graph import Node
from commlens.model.collective import Frame, user_frame
from commlens.model.verdict import Confidence
from commlens.text import capital, frame_phrase, op_phrase, ranks_phrase, verb


def is_absorbed(context: Context, rank: int) -> bool:
    """Whether a death follows from a disagreement: gloo aborts the process whose tensor does not fit."""
    fate = context.world.views[rank].fate
    if not fate.says_disagreement:
        return False
    return any(trouble.absorbs and rank in trouble.key[2] and _reached(context, rank, trouble) for trouble in context.troubles)


def _reached(context: Context, rank: int, trouble: Trouble) -> bool:
    if trouble.pair is not None:
        return rank in trouble.ops
    track = context.world.views[rank].tracks.get(trouble.key)
    return track is not None and track.last >= trouble.number and not (trouble.silent and track.completed >= trouble.number)


def find_deaths(context: Context, sinks: dict[int, Node]) -> None:
    """Ranks that died of the same are one finding; who ended later, and not of an exception, may have ended because of the first."""
    groups: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for rank in sorted(context.world.views):
        fate = context.world.views[rank].fate
        if fate.kind == "own" or fate.kind == "gone":
            if is_absorbed(context, rank):
                continue
            groups[(fate.why, fate.text, fate.source.where if fate.source else "")].append(rank)
    moments = {key: min(context.world.views[r].fate.at_ns for r in ranks) for key, ranks in groups.items()}
    first = min((moment for moment in moments.values() if moment), default=0)
    for key, ranks in sorted(groups.items(), key=lambda item: (moments[item[0]] or 1 << 62, item[1])):
        nodes = [sinks[rank] for rank in ranks if rank in sinks]
        fate = context.world.views[ranks[0]].fate
        # An exception in user code stands for itself; a later signal or exit may follow from the first end.
        follows = bool(first) and moments[key] > first + 1_000_000_000 and fate.why != "exception"
        _death(context, ranks, nodes, not follows)
        context.cases[-1].blocked = len(context.blocked_by(nodes))
        context.cases[-1].order = (moments[key],)


def _death(context: Context, ranks: list[int], nodes: list[Node], root: bool) -> None:
    views = [context.world.views[rank] for rank in ranks]
    fate = views[0].fate
    edges = [edge for node in nodes for edge in context.edges_into(node)]
    held = context.blocked_by(nodes)
    peers = [r for r, v in context.world.views.items() if v.fate.kind in ("peer", "told")]
    victims = sorted((set(held) | set(peers)) - set(ranks))
    op = edges[0].op if edges else views[0].last_op
    frame = fate.source or _last_line(views[0])
    who = ranks_phrase(ranks)
    gone = "are gone, and nobody saw how they ended" if fate.kind == "gone" and len(ranks) > 1 else fate.text
    summary = f"{who} {gone}"
    if fate.source is not None:
        summary += f" at {frame_phrase(fate.source)}"
    waiting = sorted({edge.rank for edge in edges})
    if edges:
        summary += f"; {ranks_phrase(waiting)} {verb(waiting, 'was', 'were')} waiting for it in {op_phrase(edges[0].op)}"
    explanation = f"{context.name(ranks[0])}: {context.last(ranks[0])}"
    if frame is not None and fate.source is None:
        explanation += (
            f", issued at {frame_phrase(frame)}"
            if views[0].last_op is not None and frame == views[0].last_op.source
            else f"; it was last seen at {frame_phrase(frame)}"
        )
    explanation += ". "
    if edges:
        explanation += capital(context.waiting_at(edges)) + ". "
    explanation += context.behind(waiting, sorted(set(held) - set(ranks)))
    if peers:
        explanation += f"{capital(ranks_phrase(peers))} ended because of it."
    evidence = [f"rank {r} {context.world.views[r].fate.text}." for r in sorted(peers) if not context.world.views[r].fate.refused][:4]
    confidence: Confidence = "high" if fate.kind == "own" else "medium"
    more = (
        None
        if fate.kind == "own"
        else "Start the job with `commlens launch`, or look into the system's log (dmesg, the scheduler): nobody saw how it ended."
    )
    context.add(
        make_finding(
            "dead", fate.why, ranks, victims, confidence, summary, explanation.strip(), death_step(views[0], frame), op, frame,
            evidence, more, root=root,
        )
    )  # fmt: skip


def _last_line(view: View) -> Frame | None:
    """Where a rank that ended was last seen: its stack if it is newer than its last collective, else that one's line."""
    op, stack = view.last_op, view.log.main_stack
    latest = max(op.announced_ns, op.done_ns, op.wait_ended_ns) if op is not None else 0
    if stack is not None and stack.taken_ns > latest and user_frame(stack.frames) is not None:
        return user_frame(stack.frames)
    return op.source if op is not None else None
