"""Ranks that others wait for in vain, and those that visibly work, in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from commlens.diagnosis.activity import Doing
from commlens.diagnosis.findings.context import Context, make_finding, most_waited, op_at
from commlens.diagnosis.findings.next_steps import missing_step
from commlens.diagnosis.index import View
from commlens.diagnosis.wait_graph import Edge, Node
from commlens.matching.error_texts import is_refusal
from commlens.model.collective import State
from commlens.model.verdict import Confidence
from commlens.text import capital, duration, frame_phrase, op_phrase, ranks_phrase, verb


def find_absences(context: Context, nodes: list[Node]) -> None:
    """Ranks that do the same while the same collective waits for them are one finding."""
    groups: dict[tuple[object, ...], list[tuple[Node, Doing]]] = defaultdict(list)
    for node in nodes:
        view = context.world.views[node.rank]
        what = context.doing(view)
        edges = context.edges_into(node)
        first = most_waited(edges)
        # Strict verification has given up waiting: that the rank works does not help any more.
        in_time = what.works and not is_refusal(first.op.error)
        groups[(first.instance, in_time, what.why, what.frame)].append((node, what))
    for (_, works, _, _), members in sorted(groups.items(), key=lambda item: [m[0] for m in item[1]]):
        if works:
            _waiting(context, members)
        else:
            _missing(context, members)


_SURE = frozenset({"finished", "stopped", "holding-gil", "throttled", "uninterruptible-io"})
"""Reasons that need no observation over time."""


def _who_waits(context: Context, nodes: list[Node]) -> tuple[Edge, list[Edge], list[int]]:
    """What is waited for most of these nodes, all who wait in it, and their ranks."""
    edges = [edge for node in nodes for edge in context.edges_into(node)]
    main = most_waited(edges)
    same = [edge for edge in edges if edge.instance == main.instance]
    return main, same, sorted({edge.rank for edge in same})


def _missing(context: Context, members: list[tuple[Node, Doing]]) -> None:
    nodes = [node for node, _ in members]
    ranks = [node.rank for node in nodes]
    what = members[0][1]
    main, same, direct = _who_waits(context, nodes)
    held = context.blocked_by(nodes)
    culprits = ranks
    views = [context.world.views[rank] for rank in ranks]
    op, frame = main.op, what.frame
    name = op_phrase(op)
    who = ranks_phrase(ranks)
    they_wait = f"{ranks_phrase(direct)} {verb(direct, 'waits', 'wait')} for {verb(ranks, 'it', 'them')}"
    alone = what.why == "finished" and not op.is_point_to_point and len(direct) < len(ranks)
    if alone:  # then the odd ones are those that go on
        culprits = direct
        summary = f"{ranks_phrase(direct)} {verb(direct, 'issues', 'issue')} {name}, but {who} {verb(ranks, 'has', 'have')} finished"
        frame = op.source
    elif op.is_point_to_point:
        did = f"sent message #{op.sequence_number} to" if op.op == "recv" else f"received message #{op.sequence_number} from"
        summary = f"{who} never {did} rank {main.rank}, which waits for it"
    elif what.why == "finished":
        summary = f"{who} finished without {name}; {they_wait}"
    elif all(op_at(view, main.instance) is not None for view in views):
        summary = f"{who} came to {name} when {ranks_phrase(direct)} had given up waiting for {verb(ranks, 'it', 'them')}"
    else:
        summary = f"{who} never reached {name}; {they_wait}"
    if frame is None and what.why == "finished" and views[0].last_op is not None:
        frame = views[0].last_op.source
    explanation = f"{context.name(ranks[0])} {what.phrase}; {context.last(ranks[0])}. "
    if len(ranks) > 1 and not alone:
        explanation = f"{capital(who)}: " + explanation
    explanation += capital(context.waiting_at(same)) + ". "
    explanation += context.behind(direct, sorted(set(held) - set(ranks)))
    evidence = _signs(ranks, members)
    if what.why != "finished" and not context.world.foreign:
        evidence += _stack_evidence(views[0])
    failed = next((op for op in views[0].log.collectives[-1:] if op.state is State.FAILED), None)
    if failed is not None and failed.error:
        evidence.append(f"rank {ranks[0]}: {op_phrase(failed)} failed with {failed.error.splitlines()[0][:160]}.")
    confidence: Confidence = "high" if what.observed or what.why in _SURE else "medium"
    more = None
    if confidence == "medium":
        more = "Whether it moves was not observed: run `commlens dump` on its node, which looks at the process for a while."
        if context.world.foreign:
            more = f"A recorder of collectives does not say what a rank does between them: a stack of {who} (py-spy dump) would."
    if alone or context.assumed(direct):
        confidence = "medium"
    victims = sorted(set(held) - set(culprits))
    context.add(
        make_finding(
            "missing", what.why, sorted(culprits), victims, confidence, summary, explanation, missing_step(what, sorted(culprits)), op,
            frame, evidence, more,
        ),
        nodes[0],
    )  # fmt: skip
    context.cases[-1].blocked = len(held)


def _waiting(context: Context, members: list[tuple[Node, Doing]]) -> None:
    nodes = [node for node, _ in members]
    ranks = [node.rank for node in nodes]
    what = members[0][1]
    main, same, direct = _who_waits(context, nodes)
    held = sorted(set(context.blocked_by(nodes)) - set(ranks))
    label = {
        "checkpoint-io": "which handles a checkpoint",
        "compilation": "which is compiling",
        "initialising": "which is initialising",
        "data-loading": "which is loading data",
        "finished": "which is shutting down",
    }.get(what.why, "which is at work")
    expecting = context.world.views[ranks[0]].log.expecting
    if expecting is not None:
        label = f"which is in a block marked as slow ({expecting})"
    if len(ranks) > 1:
        label = label.replace("which is", "which are").replace("handles", "handle")
    length = f", {duration(context.longest(direct))} so far" if context.longest(direct) else ""
    summary = f"{ranks_phrase(direct)} {verb(direct, 'waits', 'wait')} in {op_phrase(main.op)} for {ranks_phrase(ranks)}, {label}{length}"
    explanation = f"{context.name(ranks[0])} {what.phrase}; {context.last(ranks[0])}. {capital(context.waiting_at(same))}. "
    explanation += context.behind(direct, held)
    signs = _signs(ranks, members)
    step = f"wait; if {ranks_phrase(ranks)} should not take this long, look at {frame_phrase(what.frame)}" if what.frame else "wait"
    finding = make_finding(
        "waiting", what.why, [], held, "high" if what.observed else "medium", summary, explanation.strip(), step, main.op, what.frame,
        signs, None, root=False,
    )  # fmt: skip
    context.add(finding, nodes[0])


def _stack_evidence(view: View) -> list[str]:
    stack = view.log.main_stack
    if stack is None:
        note = view.log.observation.stacks_note
        return [f"There is no stack of rank {view.rank}" + (f": {note}." if note else ".")]
    frames = [frame_phrase(f) for f in stack.frames if f.kind.value == "user"][:4]
    return [f"rank {view.rank} was in " + ", called by ".join(frames) + "."] if len(frames) > 1 else []


def _signs(ranks: Sequence[int], members: Sequence[tuple[Node, Doing]]) -> list[str]:
    """``"rank 2: its stack does not move, it uses no CPU."``, for ranks with the same signs once."""
    same: dict[str, list[int]] = defaultdict(list)
    for rank, (_, doing) in zip(ranks, members, strict=True):
        if doing.signs:
            same[", ".join(doing.signs)].append(rank)
    return [f"{ranks_phrase(who)}: {text}." for text, who in same.items()][:4]
