"""How the verdict says things: collectives, tensors, lines of code, lengths of time."""

from __future__ import annotations

from collections.abc import Iterable

from commlens.matching.tensors import payload, show_tensors
from commlens.model.collective import Collective, Frame, ProcessGroup
from commlens.model.ranks import format_ranks, ranks_phrase

__all__ = ["capital", "count", "duration", "group_phrase", "instance", "place", "ranks_phrase", "tensors", "verb"]


def duration(ns: int) -> str:
    """``"0.8 s"``, ``"31 s"``, ``"5 min 10 s"``, ``"2 h 5 min"``."""
    seconds = max(0.0, ns / 1e9)
    if seconds < 0.95:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        minutes, rest = divmod(whole, 60)
        return f"{minutes} min {rest} s" if rest and minutes < 10 else f"{minutes} min"
    hours, rest = divmod(round(whole / 60), 60)
    return f"{hours} h {rest} min" if rest else f"{hours} h"


def group_phrase(group: ProcessGroup) -> str:
    """``"group dp [0-3]"``, ``"the default group [0-3]"``."""
    ranks = format_ranks(group.ranks)
    if group.label in ("default_pg", "0", ""):
        return f"the default group [{ranks}]"
    return f"group {group.label} [{ranks}]"


def instance(op: Collective, *, group: bool = True) -> str:
    """``"all_reduce #41 of group dp [0-3]"``, ``"recv #3 from rank 1"``."""
    if op.is_point_to_point:
        towards = "to" if op.op == "send" else "from"
        who = f"rank {op.peer}" if op.peer is not None else "any rank"
        return f"{op.op} #{op.sequence_number} {towards} {who}"
    name = f"{op.op} #{op.sequence_number}"
    return f"{name} of {group_phrase(op.channel.group)}" if group else name


def tensors(op: Collective) -> str:
    """``"float32[1048576] SUM"``; empty where there is nothing to say."""
    asked = op.args
    specs = payload(asked)
    if not specs or op.op in ("barrier", "monitored_barrier"):
        return ""
    text = show_tensors(specs)
    if asked.reduce_op:
        text += f" {asked.reduce_op}"
    if asked.root is not None:
        text += f", root {asked.root}"
    return text


def place(frame: Frame | None) -> str:
    """``"train.py:57 load_batch"``."""
    return f"{frame.where} {frame.function}".rstrip() if frame is not None else ""


def capital(text: str) -> str:
    """With its first letter large, as at the start of a sentence."""
    return text[:1].upper() + text[1:]


def verb(ranks: Iterable[int], singular: str, plural: str) -> str:
    """The verb's form for one rank, or for several."""
    return singular if len(set(ranks)) == 1 else plural


def count(number: int, singular: str, plural: str | None = None) -> str:
    """``"1 rank"``, ``"3 ranks"``."""
    return f"{number} {singular if number == 1 else plural or singular + 's'}"
