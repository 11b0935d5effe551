"""The output of CommDebugMode as plain data: one section per module, for the table and the JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from commlens.model.trace import Phase
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
    ("aten.detach.default", "aten.t.default", "aten.view.default", "aten._to_copy.default", "aten.as_strided.default", "aten.transpose.int")
)


@dataclass
class Section:
    """One module of a context, or ``"Global"``."""

    path: str
    depth: int
    module_type: str
    parameters: dict[str, Any]  # placements by name
    collectives: Mapping[str, Mapping[Any, int]]  # by pass and packet, including modules inside
    operations: dict[str, list[OpRecord]]  # by pass, own ops only
    children: list[Section] = field(default_factory=list)


def sections(modules: SeenModules, counts: Mapping[str, Mapping[str, Mapping[Any, int]]], records: list[OpRecord]) -> Section:
    """Return the tree of sections, rooted at ``"Global"``."""
    operations: dict[str, dict[str, list[OpRecord]]] = {}
    for record in records:
        by_pass = operations.setdefault(modules.nearest(record.site).path, {})
        by_pass.setdefault(PASSES[record.phase], []).append(record)

    def section(module: SeenModule) -> Section:
        own = operations.get(module.path, {})
        return Section(module.path, module.depth, module.type, module.placements, counts.get(module.path, {}), own)

    made: dict[str, Section] = {}
    for module in modules.root.with_descendants():
        made[module.path] = section(module)
        if module.parent is not None:
            made[module.parent.path].children.append(made[module.path])
    return made[modules.root.path]


def shown(records: list[OpRecord], noise_level: int) -> list[OpRecord]:
    """Return the ops that a noise level shows: 1 DTensor ops, 2 also others, both without trivial ops; 3 all ops."""
    if noise_level <= 0:
        return []
    if noise_level >= 3:
        return records
    return [r for r in records if str(r.op) not in TRIVIAL and (noise_level == 2 or (r.layout is not None and r.layout.shapes))]
