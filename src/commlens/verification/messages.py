"""The words of a refused operation: one wording per kind, the same text on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from commlens.matching import Disagree
from commlens.model.collective import CollectiveArgs
from commlens.model.ops import POINT_TO_POINT
from commlens.text import format_ranks
from commlens.verification.arguments import LeafDisagreement

_PLURAL = {
    "shape": ("shape", "shapes"),
    "dtype": ("dtype", "dtypes"),
    "reduce-op": ("reduce op", "reduce ops"),
    "root": ("root", "roots"),
    "device": ("device", "devices"),
    "layout": ("memory layout", "memory layouts"),
    "splits": ("split", "splits"),
    "op": ("operation", "operations"),
    "p2p": ("point-to-point", "messages"),
}
_HEADINGS = {"shape": "Input shapes", "dtype": "Input dtypes", "reduce-op": "Reduce ops", "root": "Roots", "device": "Devices",
             "layout": "Input layouts", "splits": "Splits", "op": "Operations", "p2p": "Messages"}  # fmt: skip


_LEAF_WORDS = {
    "structure": ("containers across devices must have the same elements", "Structure"),
    "shape": ("shapes across devices must be valid", "Input shapes"),
    "dtype": ("dtypes across devices must be valid", "Input dtypes"),
    "device": ("processes must use the same kind of device", "Devices"),
    "layout": ("memory layouts across devices must be valid", "Input layouts"),
    "value": ("values across devices must be equal", "Values"),
    "argument": ("arguments across devices must be valid", "Arguments"),
}
_LEAVES_SHOWN = 8


class Row(msgspec.Struct, frozen=True):
    """What one rank asked for, or where it is instead."""

    rank: int
    asked: CollectiveArgs | None  # None: it has not arrived
    where: str  # "train.py:21 in main"
    name: str = ""  # "accelerate.utils.operations.broadcast", "torch.distributed.broadcast"
    peer: int | None = None
    tag: int = 0


class Subject(msgspec.Struct, frozen=True):
    """The collective that it is about."""

    group: str  # "default_pg"
    ranks: Sequence[int]  # global
    number: int


def mismatch_text(answer: Disagree, subject: Subject, rows: Sequence[Row]) -> str:
    """What is raised when ranks disagree.

    Args:
        answer: in what.
        subject: about which collective.
        rows: all ranks of which something is known, in order of rank.
    """
    one, many = _PLURAL[answer.aspect]
    if answer.aspect == "op":
        first = "Cannot apply desired operation: processes issued different operations as one and the same collective of their group."
    else:
        all_of_them = "processes must use the same kind of device" if answer.aspect == "device" else f"{many} across devices must be valid"
        first = f"Cannot apply desired operation due to {one} mismatches. All {all_of_them}."
    lines = [first, "", _operation(subject, rows, answer.aspect), f"{_HEADINGS[answer.aspect]}:"]
    return "\n".join([*lines, *_table(answer.aspect, rows)])


def absence_text(kind: str, subject: Subject, rows: Sequence[Row], absent: Mapping[int, str], waited_s: float) -> str:
    """What is raised when a rank does not come.

    Args:
        kind: "missing" or "dead".
        subject: for which collective the others wait.
        rows: those that have arrived.
        absent: where the others are, by rank: "has ended", "is in train.py:30 load_batch".
        waited_s: for how long.
    """
    who = _processes(list(absent))
    if kind == "dead":
        first = f"Cannot apply desired operation: {who} {_has(absent)} ended, and will never take part."
    else:
        first = f"Cannot apply desired operation: {who} did not take part within {waited_s:.0f} s."
    lines = [first, "", _operation(subject, rows, "missing"), "Processes:"]
    return "\n".join([*lines, *_table("missing", [*rows, *(Row(rank, None, where) for rank, where in absent.items())])])


def tag_text(subject: Subject, rows: Sequence[Row], other: int, tags: tuple[int, int], waited_s: float, where: str) -> str:
    """What is raised when a message is waited for under one tag, and one under another tag waits in its place.

    Args:
        subject: of which message.
        rows: what both asked for.
        other: the rank that is waited for.
        tags: of the message that is waited for, and of the one that nobody takes.
        waited_s: for how long.
        where: what the other rank does now, in words, if that is known.
    """
    waiting = next(row for row in rows if row.rank != other)
    asked = waiting.asked.op if waiting.asked is not None else ""
    did, takes = ("sent", "receives") if asked == "recv" else ("received", "sends")
    first = (
        f"Cannot apply desired operation due to tag mismatches. Process {other} {did} nothing under tag {tags[0]} within {waited_s:.1f} s, "
        f"and nobody {takes} what it {did} under tag {tags[1]}."
    )
    lines = [first, "", _operation(subject, rows, "p2p"), "Messages:", *_table("p2p", rows)]
    return "\n".join([*lines, *([f"Process {other} {where}."] if where else [])])


def cycle_text(edges: Sequence[tuple[int, str, str, Sequence[int]]]) -> str:
    """What is raised when ranks wait for each other in a ring.

    Args:
        edges: rank, what it waits in (words), its line, the ranks that it waits for.
    """
    lines = ["Cannot apply desired operation: processes wait for each other, and none of them can go on.", "", "Cycle:"]
    for rank, what, where, absent in edges:
        lines.append(f"  - Process {rank}: waits in {what} for {_processes(list(absent)).lower()}{f'   {where}' if where else ''}")
    lines.append("")
    if all(what.startswith("recv") for _, what, _, _ in edges):
        lines.append("Each receives before it sends: let one of them send first.")
    else:
        lines.append("They issue the same collectives in another order: let all of them use the same one.")
    return "\n".join(lines)


def leaves_text(answer: LeafDisagreement, subject: Subject, rows: Sequence[Row]) -> str:
    """What is raised when ranks call a function of the user's with arguments that do not fit.

    Args:
        answer: where in the arguments, and in what.
        subject: which call, of which group.
        rows: all ranks of which something is known, in order of rank.
    """
    many, heading = _LEAF_WORDS[answer.aspect]
    first = f"Cannot apply desired operation due to {answer.aspect} mismatches. All {many}."
    lines = [first, "", _operation(subject, rows, answer.aspect)]
    if not answer.at:
        return "\n".join([*lines, "The arguments differ. They have too many elements to say in which."])
    places = {row.rank: row.where for row in rows}
    for path, words in answer.at[:_LEAVES_SHOWN]:
        lines += [
            f"{heading} of {path}:" if path else f"{heading}:",
            *_lined([(rank, cells, places.get(rank, "")) for rank, cells in words.items()]),
        ]
    more = len(answer.at) - _LEAVES_SHOWN
    return "\n".join([*lines, *([f"and so in {more} more"] if more > 0 else [])])


def _operation(subject: Subject, rows: Sequence[Row], aspect: str) -> str:
    """The line that names the operation: the library's name first, where one issued it."""
    names = {row.name for row in rows if row.asked is not None and row.name}
    known = [row for row in rows if row.asked is not None]
    ops = {row.asked.op for row in known if row.asked is not None}
    plain = f"torch.distributed.{next(iter(ops))}" if len(ops) == 1 and not any("." in op for op in ops) else ""
    where = f"group {subject.group}, ranks {format_ranks(subject.ranks)}, #{subject.number}"
    roots = {row.asked.root for row in known if row.asked is not None}
    if len(roots) == 1 and (root := next(iter(roots))) is not None:
        where += f", src {root}" if ops & {"broadcast", "scatter"} else f", dst {root}"
    if aspect == "op" or not names:
        return f"Operation: {f'`{plain}`  ' if plain else ''}({where})"
    if len(names) == 1:
        name = next(iter(names))
        detail = f"{plain}, {where}" if plain and not name.startswith("torch.distributed.") else where
        return f"Operation: `{name}`  ({detail})"
    return f"Operation: {', '.join(f'`{name}`' for name in sorted(names))}  ({where})"


def _table(aspect: str, rows: Sequence[Row]) -> list[str]:
    return _lined([(row.rank, _cells(aspect, row), row.where) for row in rows])


def _lined(rows: Sequence[tuple[int, tuple[str, str], str]]) -> list[str]:
    """One line for all processes that say the same, in order of their first rank. A row is a rank, two cells, and its line."""
    grouped: dict[tuple[str, ...], list[int]] = {}
    for rank, two, where in sorted(rows, key=lambda row: row[0]):
        grouped.setdefault((*two, where), []).append(rank)
    heads = [f"{_processes(ranks)}:" for ranks in grouped.values()]
    width = max((len(head) for head in heads), default=0)
    widths = [max(len(cells[i]) for cells in grouped) for i in range(2)]
    lines = []
    for head, cells in zip(heads, grouped, strict=True):
        shown = "  ".join(cell.ljust(widths[i]) for i, cell in enumerate(cells[:2]) if widths[i])
        lines.append(f"  - {head.ljust(width)} {shown}   {cells[2]}".rstrip())
    return lines


def _cells(aspect: str, row: Row) -> tuple[str, str]:
    asked = row.asked
    if asked is None:
        return "has not arrived", ""
    specs = asked.payload
    shapes = ", ".join(str(list(spec.shape)) for spec in specs[:4]) + (f", ... ({len(specs)} tensors)" if len(specs) > 4 else "")
    dtypes = ", ".join(sorted({spec.dtype for spec in specs}))
    if asked.op in POINT_TO_POINT:
        direction = "to" if asked.op == "send" else "from"
        peer = f"process {row.peer}" if row.peer is not None else "any process"
        return f"{asked.op} {direction} {peer}, tag {row.tag}", f"{shapes} {dtypes}".strip()
    if aspect in ("op", "missing"):
        through = f" of {row.name}" if row.name not in ("", asked.op) and not row.name.startswith("torch.distributed.") else ""
        return _op_words(asked) + through, f"{shapes} {dtypes}".strip()
    if aspect == "dtype":
        return dtypes, shapes
    if aspect == "reduce-op":
        return asked.reduce_op or "unknown", f"{shapes} {dtypes}"
    if aspect == "root":
        return f"root {asked.root}", f"{shapes} {dtypes}"
    if aspect == "device":
        return ", ".join(sorted({spec.device for spec in specs})), f"{shapes} {dtypes}"
    if aspect == "layout":
        orders = {spec.layout if spec.layout != "strided" else _order(spec.memory_order) for spec in specs}
        return ", ".join(sorted(orders)), f"{shapes} {dtypes}"
    if aspect == "splits":
        return f"sends {list(asked.input_splits) or 'even'}, receives {list(asked.output_splits) or 'even'}", f"{shapes} {dtypes}"
    return shapes or "no tensor", dtypes


def _op_words(asked: CollectiveArgs) -> str:
    words = f"`{asked.op}`"
    if asked.root is not None:
        words += f" with root {asked.root}"
    if asked.reduce_op is not None:
        words += f" {asked.reduce_op}"
    return words


def _order(order: tuple[int, ...] | None) -> str:
    return "row-major" if order is None else f"dimensions in order {list(order)}"


def _processes(ranks: Sequence[int]) -> str:
    return f"Process {ranks[0]}" if len(ranks) == 1 else f"Processes {format_ranks(ranks)}"


def _has(ranks: Mapping[int, str]) -> str:
    return "has" if len(ranks) == 1 else "have"
