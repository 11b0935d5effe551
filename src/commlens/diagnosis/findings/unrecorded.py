"""Ranks of which there is no record, in words."""

from __future__ import annotations

from collections import defaultdict

from commlens.diagnosis.findings.context import Context, make_finding, most_waited
from commlens.diagnosis.wait_graph import Instance, Node
from commlens.text import capital, count, op_phrase, ranks_phrase, verb


def find_unrecorded(context: Context, nodes: list[Node]) -> None:
    """Ranks that left no record here are thought dead; those of another node may be anywhere."""
    others = any(case.finding.root_cause for case in context.cases)
    by_instance: dict[tuple[Instance, str], list[Node]] = defaultdict(list)
    for node in nodes:
        by_instance[(most_waited(context.edges_into(node)).instance, node.kind)].append(node)
    for (_, kind), members in sorted(by_instance.items()):
        ranks = [node.rank for node in members]
        edges = context.edges_into(members[0])
        op = most_waited(edges).op
        direct = sorted({edge.rank for edge in edges})
        held = context.blocked_by(members)
        who, they_wait = ranks_phrase(ranks), f"{ranks_phrase(direct)} {verb(direct, 'waits', 'wait')} in {op_phrase(op)}"
        left = kind == "no-record"
        if left:
            summary = f"{who} left no record; {they_wait} for {verb(ranks, 'it', 'them')}"
            step = f"look into the output of {who}: it ended before it could record anything, or its black box is lost"
        else:
            summary = f"{they_wait}, as all ranks with a record do; there is none of {who}"
            step = f"dump the node of {who} too (`commlens dump`), and diagnose all nodes' dumps together"
        culprits = ranks if left or len(ranks) == 1 else []
        found = make_finding(
            "dead" if left else "missing", "unknown", culprits, sorted(set(held) - set(culprits)), "medium" if left else "low", summary,
            capital(context.waiting_at(edges)) + ". " + context.behind(direct, held), step, op, None,
            [f"There are records of {count(len(context.world.views), 'rank')} of {context.world.size}."],
            f"The records of {who} would tell.", root=(left and not context.world.foreign) or not others,
        )  # fmt: skip
        context.add(found, members[0])
        context.cases[-1].blocked = len(held)
