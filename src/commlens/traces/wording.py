"""How a trace says things: bytes, groups, places, reasons."""

from __future__ import annotations

import re
from collections.abc import Iterable

from commlens.model.collective import Frame, ProcessGroup
from commlens.model.trace import Cause, Phase, TraceEvent
from commlens.text import capital, count, format_ranks, group_label, joined, number, ranks_phrase, size

__all__ = [
    "capital", "cause_words", "count", "fold", "joined", "label", "natural", "number", "on_group", "pattern", "payload", "phase_name",
    "place", "placements", "ranks_phrase", "short_op", "size", "source_words", "within",
]  # fmt: skip

_NUMBER = re.compile(r"\d+")


def label(group: ProcessGroup) -> str:
    """The group's name to show: the mesh dimension, else the description, else torch's name."""
    return group_label(group, "default")


def on_group(group: ProcessGroup) -> str:
    """``"tp [0-3]"``: with its ranks, where they are known."""
    return f"{label(group)} [{format_ranks(group.ranks)}]" if group.ranks else label(group)


def phase_name(phase: Phase | None) -> str:
    """The phase as a word."""
    return "unclassified" if phase is None else phase.value


def place(phase: Phase | None, site: str | None) -> str:
    """``"forward of MLP.net2"``, ``"the optimizer"``, ``"outside of every module"``."""
    if phase is Phase.OUTSIDE:
        return "outside of every module" if site is None else f"outside, in {site}"
    if phase is Phase.OPTIMIZER:
        return "the optimizer's step" if site is None else f"the optimizer's step, in {site}"
    if phase is None:
        return "an unknown phase" if site is None else f"an unknown phase of {site}"
    return f"{phase.value} of {site}" if site is not None else f"{phase.value}, module unknown"


def within(phase: Phase | None, site: str | None) -> str:
    """``"in forward of MLP.net2"``, ``"outside of every module"``: the place after a verb."""
    text = place(phase, site)
    return text if phase is Phase.OUTSIDE else f"in {text}"


def placements(text: str) -> str:
    """``"(Shard(dim=0),)"`` -> ``"Shard(0)"``; several mesh dimensions stay in their brackets."""
    text = text.replace("dim=", "").strip()
    if text.startswith("(") and text.endswith(",)"):
        return text[1:-2]
    return text


def short_op(name: str) -> str:
    """``"aten.addmm.default"`` -> ``"addmm"``: without namespace and overload."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[0] in ("aten", "prims") else name


def cause_words(cause: Cause) -> str:
    """``"DTensor: Partial(sum) -> Replicate(), needed by addmm (implicit)"``."""
    change = f"{placements(cause.before)} -> {placements(cause.after)}"
    needed = f", to run {short_op(cause.op)}" if cause.op else ""
    asked = "implicit" if cause.implicit else "explicit"
    return f"DTensor {change}{needed} ({asked})"


def source_words(frame: Frame | None, through: str | None = None) -> str:
    """``"train.py:57 (clip_grad_norm_)"``; empty where no line is known."""
    if frame is None:
        return through or ""
    return f"{frame.where} ({through})" if through else frame.where


def payload(event: TraceEvent) -> str:
    """``"float32 16.8 kB"``: what the rank puts in, or receives where that is more."""
    most = max(event.input_bytes, event.output_bytes)
    if not event.dtype and not most:
        return ""
    return f"{event.dtype} {size(most)}".strip()


def pattern(path: str) -> str:
    """The path with every number replaced: paths of one pattern are folded into one row."""
    return ".".join("#" if part.isdecimal() else part for part in path.split("."))


def fold(paths: Iterable[str]) -> str:
    """Paths of one pattern as one: ``layers.0`` ... ``layers.31`` -> ``"layers.0-31"``."""
    split = [path.split(".") for path in dict.fromkeys(paths)]
    if not split:
        return ""
    columns = zip(*split, strict=True)
    return ".".join(
        column[0] if len(set(column)) == 1 else format_ranks(int(part) for part in column).replace(",", "+") for column in columns
    )


def natural(text: str) -> tuple[tuple[int, int | str], ...]:
    """A key that sorts ``layers.2`` before ``layers.10``."""
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in _split(text))


def _split(text: str) -> list[str]:
    parts: list[str] = []
    end = 0
    for match in _NUMBER.finditer(text):
        parts += [text[end : match.start()], match.group()]
        end = match.end()
    return [part for part in [*parts, text[end:]] if part]
