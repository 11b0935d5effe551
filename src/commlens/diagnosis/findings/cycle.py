"""Ranks that wait for each other, and the ranks among them that left the usual order."""

from __future__ import annotations

from collections import defaultdict
from typing import Literal

from commlens.diagnosis.findings.context import Context, prose
from commlens.diagnosis.findings.next_steps import cycle_step
from commlens.diagnosis.routine import leaves_routine_at
from commlens.diagnosis.wait_graph import Edge, Instance, Node, shortest_cycle
from commlens.model.collective import Collective
from commlens.model.verdict import Finding
from commlens.text import capital, duration, group_phrase, op_phrase, ranks_phrase, verb

How = Literal["history", "order", "tie"]
Departures = dict[int, tuple[Collective, Collective | None]]
"""By rank: the op with which it leaves its routine, and the op that it used to issue in its place."""
Path = list[tuple[Node, Node, Edge]]


def find_cycles(context: Context) -> None:
    """Make one finding for each cycle; its explanation lists the cycle edge by edge."""
    for component in context.graph.deadlocks:
        _cycle(context, shortest_cycle(context.graph, component), [node for node in component if node.kind == "wait"])


def _cycle(context: Context, path: Path, waits: list[Node]) -> None:
    ranks = sorted({node.rank for node in waits})
    culprits, departures, how = _odd_ones(context, waits, ranks, sorted({node.rank for node, _, _ in path}))
    first = culprits[0]
    op, usual = departures.get(first, (None, None))
    if op is None:
        op = next((edge.op for node, _, edge in path if node.rank == first), None)
    if op is None:
        op = next(context.graph.blocks[node].op for node in waits if node.rank == first)
    lines = [f" ({edge.op.source.where})" if edge.op.source is not None else "" for _, _, edge in path]
    steps = [
        f"rank {a.rank} waits in {op_phrase(edge.op)}{line}" + ("" if edge.op.peer == b.rank else f" for rank {b.rank}")
        for (a, b, edge), line in zip(path, lines, strict=True)
    ]
    blocked = context.blocked_by(waits)
    waited = context.longest_wait(ranks)
    finding = Finding(
        kind="cycle", why="in-collective", root_cause=True, culprits=culprits, victims=sorted({*blocked, *ranks} - set(culprits)),
        confidence="high" if how == "history" else "medium", summary=_summary(path, ranks, culprits, op, usual),
        explanation=prose(
            f"{'; '.join(steps)}.",
            f"The longest wait is {duration(waited)}." if waited else "",
            context.waiting_behind(ranks, blocked),
        ),
        next_step=cycle_step(culprits, op, usual), evidence=[_how_decided(how, culprits), *(f"{step}." for step in steps)],
        would_raise_confidence=None
        if how == "history"
        else "A run with some successful steps before the fault would show which rank departs from its routine.",
    )  # fmt: skip
    context.add(finding, op, op.source, blocked=len({*blocked, *ranks}))


def _summary(path: Path, ranks: list[int], culprits: list[int], op: Collective, usual: Collective | None) -> str:
    they_wait = f"{ranks_phrase(ranks)} wait for each other"
    if usual is not None and usual.op == "send" and usual.peer in ranks:
        return f"rank {culprits[0]} did not send to rank {usual.peer} this time, as it always had before; {they_wait}"
    if len(culprits) < len(ranks):
        before = f", not to {_without_number(usual)} as before" if usual is not None else ""
        return f"{ranks_phrase(culprits)} moved on to {op_phrase(op)}{before}; {they_wait}"
    return they_wait + (" across groups" if len({edge.instance.key for _, _, edge in path}) > 1 else "")


def _how_decided(how: How, culprits: list[int]) -> str:
    subject = ranks_phrase(culprits)
    if how == "history":
        return (
            f"{capital(subject)} {verb(culprits, 'departs from its', 'depart from their')} usual routine here; the others keep to theirs."
        )
    if how == "order":
        return f"The order of {subject} differs from that of the others."
    return "No rank departs from its usual routine, and no order has a majority, so the rank at fault cannot be determined."


def _without_number(op: Collective) -> str:
    """``"all_reduce of group dp [0-3]"``, ``"recv from rank 1"``."""
    if op.is_point_to_point:
        return f"{op.op} {'to' if op.op == 'send' else 'from'} rank {op.peer}"
    return f"{op.op} of {group_phrase(op.channel.group)}"


def _odd_ones(context: Context, waits: list[Node], ranks: list[int], on_path: list[int]) -> tuple[list[int], Departures, How]:
    """Return the ranks that left their routine; else those whose place differs from the majority's; else all."""
    departures: Departures = {}
    for rank in ranks:
        view = context.job.views[rank]
        departure = leaves_routine_at(view.history, view.routine_since)
        if departure is not None:
            departures[rank] = departure
    if departures and len(departures) < len(ranks):
        return sorted(departures), departures, "history"
    sides: dict[Instance, set[int]] = defaultdict(set)
    for node in waits:
        op = context.graph.blocks[node].op
        if not op.is_point_to_point:
            sides[Instance(op.channel.key, op.sequence_number)].add(node.rank)
    if len(sides) > 1:
        smallest, second, *_ = sorted(sides.values(), key=len)
        if len(smallest) < len(second) and len(smallest) * 2 < len(ranks):
            return sorted(smallest), departures, "order"
    return on_path or ranks, departures, "tie"
