"""The JSON of CommDebugMode, as PyTorch's browser page reads it: a tree that contains each module
once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from commlens.tracing.comm_debug.modules import GLOBAL
from commlens.tracing.comm_debug.sections import Section, shown
from commlens.tracing.ops import OpRecord

_EXTRA_PASSES = ("checkpointing", "optimizer", "unclassified")
"""Passes for which PyTorch's format lacks some or all keys. Those keys are written only when they
have content.
"""


def document(sections: Iterable[Section], noise_level: int) -> dict[str, Any]:
    """Return the whole tree."""
    documents: dict[str, dict[str, Any]] = {}
    for section in sections:
        module = section.module
        entry = documents[module.path] = _section(section, noise_level)
        if module.parent is not None:
            documents[module.parent.path]["children"].append(entry)
    return documents[GLOBAL]


def _section(section: Section, noise_level: int) -> dict[str, Any]:
    with_modules = noise_level > 0

    def collectives(which: str) -> list[list[Any]]:
        return [
            [str(packet), count] for packet, count in section.collectives.get(which, {}).items()
        ]

    def operations(which: str) -> list[dict[str, Any]]:
        return [
            _operation(record) for record in shown(section.operations.get(which, []), noise_level)
        ]

    entry = {
        "fqn": section.module.path,
        "module_type": section.module.type if with_modules else "",
        "parameters": (
            [[name, str(placements)] for name, placements in section.module.placements.items()]
            if with_modules
            else []
        ),
        "children": [],
        "collectives_forward": collectives("forward"),
        "collectives_backward": collectives("backward"),
        "operations_forward": operations("forward"),
        "operations_backward": operations("backward"),
        "operations_checkpointing": operations("checkpointing"),
    }
    for which in _EXTRA_PASSES:
        for kind, found in (("collectives", collectives(which)), ("operations", operations(which))):
            if found:
                entry[f"{kind}_{which}"] = found
    return entry


def _operation(record: OpRecord) -> dict[str, Any]:
    entry = described(record)
    entry["name"] = str(entry["name"])
    for key in ("input_shape", "input_sharding"):
        entry[key] = [str(value) for value in entry[key]]
    return entry


def described(record: OpRecord) -> dict[str, Any]:
    """Return an op in the form of ``comm_module_operation_counts``."""
    layout = record.layout
    which = record.phase.value if record.phase is not None else ""
    return {
        "name": record.op,
        "input_shape": list(layout.shapes) if layout is not None else [],
        "input_sharding": list(layout.placements) if layout is not None else [],
        "device_mesh": layout.mesh if layout is not None else "",
        "is_bw": which in ("backward", "recomputation"),
        "is_activation_checkpointing": which == "recomputation",
    }
