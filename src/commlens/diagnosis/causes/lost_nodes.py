"""Nodes that have fallen silent, in the causes found in the evidence of those that remain."""

from __future__ import annotations

from collections.abc import Sequence

from commlens.diagnosis.causes.context import Case, Context, group_of
from commlens.model.cause import Cause, LostNode


def name_lost_nodes(context: Context, lost: Sequence[LostNode]) -> None:
    """Name the lost nodes in the causes found so far, and blame no rank of a node that is only
    silent: its ranks may still run.
    """
    vanished = [node for node in lost if node.vanished]
    silent = [node for node in lost if not node.vanished]
    for case in context.cases:
        cause = case.claim
        if cause.kind == "dead":
            _name(cause, cause.culprits, vanished)
        elif cause.kind == "missing" and _name(cause, _awaited(case), silent):
            if cause.culprits:
                cause.culprits, cause.blamed_by = [], "unknown"
            cause.confidence = "low"


def _name(cause: Cause, ranks: Sequence[int], nodes: Sequence[LostNode]) -> bool:
    """Name the nodes on which some of these ranks run, if all culprits run on them."""
    found = [node for node in nodes if not set(ranks).isdisjoint(node.ranks)]
    on_them = {rank for node in found for rank in node.ranks}
    if found and on_them.issuperset(cause.culprits):
        cause.lost_nodes = found
    return bool(cause.lost_nodes)


def _awaited(case: Case) -> Sequence[int]:
    group = group_of(case.op) if case.op is not None else None
    return group.ranks if group is not None else ()
