"""The output of CommDebugMode: one section per module, for the table and the JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from commlens.model.trace import Cause, Phase
from commlens.tracing.comm_debug.modules import SeenModule, SeenModules
from commlens.tracing.ops import OpRecord

PASSES = {
    Phase.FORWARD: "forward",
    Phase.OUTSIDE: "forward",  # outside all modules; CommDebugMode's users expect it here
    Phase.BACKWARD: "backward",
    Phase.RECOMPUTATION: "checkpointing",
    Phase.OPTIMIZER: "optimizer",
    None: "unclassified",
}
"""The pass under which each phase is counted."""

TRIVIAL = frozenset(
    (
        "aten.detach.default",
        "aten.t.default",
        "aten.view.default",
        "aten._to_copy.default",
        "aten.as_strided.default",
        "aten.transpose.int",
    )
)


class Section(NamedTuple):
    """One module of a context, or ``"Global"``, with what was counted in it."""

    module: SeenModule
    collectives: Mapping[str, Mapping[Any, int]]  # by pass and packet, including modules inside
    operations: Mapping[str, list[OpRecord]]  # by pass, own ops only
    causes: Mapping[str, Mapping[Any, Mapping[Cause, int]]]  # of the collectives, likewise


def sections(
    modules: SeenModules,
    counts: Mapping[str, Mapping[str, Mapping[Any, int]]],
    records: list[OpRecord],
    causes: Mapping[str, Mapping[str, Mapping[Any, Mapping[Cause, int]]]],
) -> list[Section]:
    """Return the sections in the order of the tree, ``"Global"`` first."""
    operations: dict[str, dict[str, list[OpRecord]]] = {}
    for record in records:
        by_pass = operations.setdefault(modules.nearest(record.site).path, {})
        by_pass.setdefault(PASSES[record.phase], []).append(record)
    tree = modules.root.with_descendants()
    return [
        Section(
            module,
            counts.get(module.path, {}),
            operations.get(module.path, {}),
            causes.get(module.path, {}),
        )
        for module in tree
    ]


def shown(records: list[OpRecord], noise_level: int) -> list[OpRecord]:
    """Return the ops that a noise level shows: 1 DTensor ops, 2 also others, both without trivial
    ops; 3 all ops.
    """
    if noise_level <= 0:
        return []
    if noise_level >= 3:
        return records
    return [
        r
        for r in records
        if str(r.op) not in TRIVIAL
        and (noise_level == 2 or (r.layout is not None and r.layout.shapes))
    ]
