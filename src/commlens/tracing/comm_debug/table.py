"""The table of CommDebugMode, in PyTorch's exact layout, indents and colours."""

from __future__ import annotations

import re
from collections.abc import Iterator

from commlens.tracing.comm_debug.sections import Section, shown

_YELLOW, _RED, _PLAIN = "\033[1;33m", "\033[1;31m", "\033[0m"
_ANSI = re.compile(r"\033\[[0-9;]*m")
HEADINGS = {
    "forward": "FORWARD PASS",
    "backward": "BACKWARD PASS",
    "checkpointing": "ACTIVATION CHECKPOINTING",
    "optimizer": "OPTIMIZER",
    "unclassified": "UNCLASSIFIED",
}


def table(root: Section, noise_level: int) -> str:
    """Return the table with ANSI colours."""
    return "".join(f"{line}\n" for line in _lines(root, noise_level))


def without_colours(text: str) -> str:
    """Remove ANSI colours, for a file."""
    return _ANSI.sub("", text)


def _lines(root: Section, noise_level: int) -> Iterator[str]:
    todo = [root]
    while todo:
        section = todo.pop()
        todo.extend(reversed(section.children))
        yield from _section(section, noise_level)


def _section(section: Section, noise_level: int) -> Iterator[str]:
    indent = " " * 4 * section.depth
    yield f"{indent}{section.path}"
    if noise_level > 0:
        if section.module_type:
            yield f"{indent}*module type: {section.module_type}"
        if section.parameters:
            yield f"{indent}*Parameter List"
            for name, placements in section.parameters.items():
                yield f"{indent} *{name}: {placements}"
    for which, heading in HEADINGS.items():
        collectives = section.collectives.get(which, {})
        operations = section.operations.get(which, []) if noise_level > 0 else []
        if not collectives and not operations:
            continue
        yield f"{indent}  {heading}"
        for packet, count in collectives.items():
            yield f"{_YELLOW}{indent}    *{packet}: {count}{_PLAIN}"
        for record in shown(operations, noise_level):
            yield f"{_YELLOW}{indent}    **{record.op}{_PLAIN}"
            layout = record.layout
            if layout is not None and layout.shapes:
                yield f"{_RED}{indent}      shape: {list(layout.shapes)}{_PLAIN}"
                yield f"{_RED}{indent}      sharding: {list(layout.placements)}{_PLAIN}"
                yield f"{_RED}{indent}      device mesh: {layout.mesh}{_PLAIN}"
