"""Ranks that wait for each other, and which of them left the order, in words."""

from __future__ import annotations

from collections import defaultdict
from typing import Literal

from commlens.diagnosis.findings.context import Context, at_line, make_finding, of_group
from commlens.diagnosis.findings.next_steps import cycle_step
from commlens.diagnosis.routine import leaves_routine_at
from commlens.diagnosis.wait_graph import Instance, Node, edges_of
from commlens.model.collective import Collective
from commlens.text import capital, duration, op_phrase, ranks_phrase, verb


def find_cycles(context: Context) -> None:
    """One finding for each cycle, printed edge by edge."""
    for component in context.graph.closed:
        _cycle(context, component)


def _cycle(context: Context, component: list[Node]) -> None:
    path = edges_of(context.graph, component)
    component = [node for node in component if node.kind == "wait"]
    ranks = sorted({node.rank for node in component})
    culprits, odd, how = _odd_ones(context, component, ranks, sorted({node.rank for node, _, _ in path}))
    held = context.blocked_by(component)
    first = culprits[0]
    op, usual = odd.get(first, (None, None))
    if op is None:
        op = next((edge.op for node, _, edge in path if node.rank == first), None)
    if op is None:
        op = next(context.graph.blocks[node].op for node in component if node.rank == first)
    steps = [f"rank {a.rank} waits in {op_phrase(edge.op)}{at_line(edge.op)} for rank {b.rank}" for a, b, edge in path]
    everybody = ranks_phrase(ranks)
    who = ranks_phrase(culprits)
    if usual is not None and usual.op == "send" and usual.peer in ranks:
        summary = f"rank {first} did not send to rank {usual.peer}, as it did every time before; {everybody} wait for each other"
    elif len(culprits) < len(ranks):
        before = f", not to {_kind_of(usual)} as before" if usual is not None else ""
        summary = f"{who} went to {op_phrase(op)}{before}: {everybody} wait for each other"
    else:
        across = " across groups" if len({edge.instance.key for _, _, edge in path}) > 1 else ""
        summary = f"{everybody} wait for each other{across}"
    told = {
        "history": f"{capital(who)} {verb(culprits, 'leaves its', 'leave their')} own routine here; the others keep to theirs.",
        "order": f"The order of {who} differs from that of the others.",
        "tie": "None of them leaves its own routine, and no order has a majority: it cannot be told which is wrong.",
    }
    evidence = [told[how], *(f"{step}." for step in steps)]
    waited = context.longest(ranks)
    explanation = "; ".join(steps) + (f", for {duration(waited)}. " if waited else ". ") + context.behind(ranks, held)
    finding = make_finding(
        "cycle", "in-collective", culprits, sorted({*held, *ranks} - set(culprits)), "high" if how == "history" else "medium",
        summary, explanation, cycle_step(culprits, op, usual), op, op.source, evidence,
        None if how == "history" else "A run in which some steps succeed before the fault shows which rank leaves its routine.",
    )  # fmt: skip
    context.add(finding, component[0])
    context.cases[-1].blocked = len({*held, *ranks})


def _kind_of(op: Collective) -> str:
    """``"all_reduce of group dp [0-3]"``, ``"recv from rank 1"``: what it is, without a number."""
    if op.is_point_to_point:
        return f"{op.op} {'to' if op.op == 'send' else 'from'} rank {op.peer}"
    return op.op + of_group(op)


_Departures = dict[int, tuple[Collective | None, Collective | None]]
"""By rank: the op with which it leaves its routine, and the one that it used to issue in its place."""


def _odd_ones(
    context: Context, component: list[Node], ranks: list[int], on_path: list[int]
) -> tuple[list[int], _Departures, Literal["history", "order", "tie"]]:
    """Who left the routine; else whose place differs from the others'; else all."""
    odd: _Departures = {}
    for rank in ranks:
        view = context.world.views[rank]
        found = leaves_routine_at(view.history, view.routine_since)
        if found is not None:
            odd[rank] = found
    if odd and len(odd) < len(ranks):
        return sorted(odd), odd, "history"
    at: dict[Instance, set[int]] = defaultdict(set)
    for node in component:
        op = context.graph.blocks[node].op
        if not op.is_point_to_point:
            at[Instance(op.channel.key, op.sequence_number)].add(node.rank)
    if len(at) > 1:
        sides = sorted(at.values(), key=len)
        if len(sides[0]) < len(sides[1]) and len(sides[0]) * 2 < len(ranks):
            return sorted(sides[0]), odd, "order"
    return on_path or ranks, odd, "tie"
