"""Phrases for the terms of a trace: groups, places, causes, source lines and folded module
paths.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from commlens.model.collective import Frame, ProcessGroup
from commlens.model.trace import Phase, Redistribution, TraceEvent
from commlens.text import format_ranks, group_label, size


def label(group: ProcessGroup) -> str:
    """Return the group's short name: its mesh dimension, else its description, else torch's
    name.
    """
    return group_label(group, "default")


def on_group(group: ProcessGroup) -> str:
    """Return ``"tp [0-3]"``; the label alone where the ranks are unknown."""
    return f"{label(group)} [{format_ranks(group.ranks)}]" if group.ranks else label(group)


def phase_name(phase: Phase | None) -> str:
    """Return the phase's name."""
    return "unclassified" if phase is None else phase.value


def place(phase: Phase | None, site: str | None) -> str:
    """Return ``"forward of MLP.net2"``, ``"the optimizer step"`` or ``"outside all modules"``."""
    if phase is Phase.OUTSIDE:
        return "outside all modules" if site is None else f"outside, in {site}"
    if phase is Phase.OPTIMIZER:
        return "the optimizer step" if site is None else f"the optimizer step, in {site}"
    if phase is None:
        return "an unknown phase" if site is None else f"an unknown phase of {site}"
    return f"{phase.value} of {site}" if site is not None else f"{phase.value}, module unknown"


def place_of(event: TraceEvent) -> str:
    """Return the place of one collective, with its microbatch: ``"forward of Stage (microbatch
    2)"``.
    """
    return place(event.phase, event.site) + (
        "" if event.microbatch is None else f" (microbatch {event.microbatch})"
    )


def within(phase: Phase | None, site: str | None) -> str:
    """Return the place with its preposition: ``"in forward of MLP.net2"``, ``"outside all
    modules"``.
    """
    text = place(phase, site)
    return text if phase is Phase.OUTSIDE else f"in {text}"


_MASK = re.compile(r"_?MaskPartial\((?:[^()]|\([^()]*\))*\)")
"""torch prints a mask's shapes and dimensions with it."""


def placements(text: str) -> str:
    """Shorten ``"(Shard(dim=0),)"`` to ``"Shard(0)"``; placements on several mesh dimensions keep
    their brackets.
    """
    text = _MASK.sub("MaskPartial", text).replace("dim=", "").strip()
    if text.startswith("(") and text.endswith(",)"):
        return text[1:-2]
    return text


def short_op(name: str) -> str:
    """Shorten ``"aten.addmm.default"`` to ``"addmm"``."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[0] in ("aten", "prims") else name


def cause_words(cause: Redistribution) -> str:
    """Return ``"DTensor Partial(sum) -> Replicate(), to run addmm (implicit)"``."""
    change = f"{placements(cause.before)} -> {placements(cause.after)}"
    needed = f", to run {short_op(cause.op)}" if cause.op else ""
    return f"DTensor {change}{needed} ({'implicit' if cause.implicit else 'explicit'})"


def source_words(frame: Frame | None, through: str | None = None) -> str:
    """Return ``"train.py:57 (clip_grad_norm_)"``; empty if no line is known."""
    if frame is None:
        return through or ""
    return f"{frame.where} ({through})" if through else frame.where


def payload(event: TraceEvent) -> str:
    """Return dtype and size, ``"float32 16.8 kB"``: the larger of input and output."""
    most = max(event.input_bytes, event.output_bytes)
    if not event.dtype and not most:
        return ""
    return f"{event.dtype} {size(most)}".strip()


def pattern(path: str) -> str:
    """Replace each numeric part of a path by ``#``. Paths with the same pattern are folded into one
    row.
    """
    return ".".join("#" if part.isdecimal() else part for part in path.split("."))


def prefixes(path: str) -> list[str]:
    """Return a path's ancestors from the root on, and the path itself."""
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def fold(paths: Iterable[str]) -> str:
    """Fold paths of one pattern: ``layers.0`` to ``layers.31`` become ``"layers.0-31"``."""
    split = [path.split(".") for path in dict.fromkeys(paths)]
    if not split:
        return ""
    columns = zip(*split, strict=True)
    return ".".join(
        (
            column[0]
            if len(set(column)) == 1
            else format_ranks(int(part) for part in column).replace(",", "+")
        )
        for column in columns
    )


def some_of(values: Sequence[str], most: int) -> str:
    """Return the end of a sentence: all of the values with a full stop, or the first ones with an
    ellipsis.
    """
    return f"{', '.join(values)}." if len(values) <= most else f"{', '.join(values[:most])}, ..."
