"""The output of CommDebugMode: one section per module, for the table and the JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from commlens.model.trace import Phase, Redistribution
from commlens.traces.wording import cause_words
from commlens.tracing.comm_debug.modules import GLOBAL, SeenModule, SeenModules
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
    causes: Mapping[str, Mapping[Any, Mapping[Redistribution, int]]]  # of the collectives, likewise


def sections(
    modules: SeenModules,
    counts: Mapping[str, Mapping[str, Mapping[Any, int]]],
    records: list[OpRecord],
    causes: Mapping[str, Mapping[str, Mapping[Any, Mapping[Redistribution, int]]]],
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


# --- the table, in PyTorch's exact layout, indents and colours

_YELLOW, _RED, _PLAIN = "\033[1;33m", "\033[1;31m", "\033[0m"
ANSI = re.compile(r"\033\[[0-9;]*m")
HEADINGS = {
    "forward": "FORWARD PASS",
    "backward": "BACKWARD PASS",
    "checkpointing": "ACTIVATION CHECKPOINTING",
    "optimizer": "OPTIMIZER",
    "unclassified": "UNCLASSIFIED",
}


def table(sections: Iterable[Section], noise_level: int, *, causes: bool = False) -> str:
    """Return the table with ANSI colours."""
    return "".join(
        f"{line}\n" for section in sections for line in _lines(section, noise_level, causes=causes)
    )


def _lines(section: Section, noise_level: int, *, causes: bool) -> Iterator[str]:
    module = section.module
    indent = " " * 4 * module.depth
    yield f"{indent}{module.path}"
    if noise_level > 0:
        if module.type:
            yield f"{indent}*module type: {module.type}"
        if module.placements:
            yield f"{indent}*Parameter List"
            for name, placements in module.placements.items():
                yield f"{indent} *{name}: {placements}"
    for which, heading in HEADINGS.items():
        collectives = section.collectives.get(which, {})
        operations = section.operations.get(which, []) if noise_level > 0 else []
        if not collectives and not operations:
            continue
        yield f"{indent}  {heading}"
        for packet, count in collectives.items():
            yield f"{_YELLOW}{indent}    *{packet}: {count}{_PLAIN}"
            found = section.causes.get(which, {}).get(packet, {}) if causes else {}
            for cause, times in found.items():
                yield f"{indent}      {times} × {cause_words(cause)}"
        for record in shown(operations, noise_level):
            yield f"{_YELLOW}{indent}    **{record.op}{_PLAIN}"
            layout = record.layout
            if layout is not None and layout.shapes:
                yield f"{_RED}{indent}      shape: {list(layout.shapes)}{_PLAIN}"
                yield f"{_RED}{indent}      sharding: {list(layout.placements)}{_PLAIN}"
                yield f"{_RED}{indent}      device mesh: {layout.mesh}{_PLAIN}"


# --- the JSON, as PyTorch's browser page reads it: a tree that contains each module once

_EXTRA_PASSES = ("checkpointing", "optimizer", "unclassified")
"""Passes for which PyTorch's format lacks some or all keys. Those keys are written only when they
have content.
"""


def document(sections: Iterable[Section], noise_level: int) -> dict[str, Any]:
    """Return the whole tree."""
    documents: dict[str, dict[str, Any]] = {}
    for section in sections:
        module = section.module
        entry = documents[module.path] = _entry(section, noise_level)
        if module.parent is not None:
            documents[module.parent.path]["children"].append(entry)
    return documents[GLOBAL]


def _entry(section: Section, noise_level: int) -> dict[str, Any]:
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
