"""The table of CommDebugMode, in PyTorch's exact layout, indents and colours."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from commlens.traces.wording import cause_words
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


def table(sections: Iterable[Section], noise_level: int, *, causes: bool = False) -> str:
    """Return the table with ANSI colours."""
    return "".join(
        f"{line}\n"
        for section in sections
        for line in _section(section, noise_level, causes=causes)
    )


def without_colours(text: str) -> str:
    """Remove ANSI colours, for a file."""
    return _ANSI.sub("", text)


def _section(section: Section, noise_level: int, *, causes: bool) -> Iterator[str]:
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
