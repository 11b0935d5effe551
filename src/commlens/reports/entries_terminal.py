"""Entries side by side on a terminal: the number, what most ranks did under it, and for each kind of ranks how that ended."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from typing import IO

from commlens.model.collective import Stack
from commlens.model.entries import Cell, Column, EntryTable
from commlens.text import format_ranks, ranks_phrase

_NARROWEST = 12  # columns of a terminal that one kind of ranks takes at least
_ROOM = 10  # lines beside the rows of the table
_STACK_FRAMES = 12
_ELSEWHERE = 2  # lines of what ranks do on other groups


def room(width: int | None = None, height: int | None = None) -> tuple[int, int, int]:
    """How many rows and columns fit on one screen, and how wide it is."""
    size = shutil.get_terminal_size((100, 24))
    width = min(width or size.columns, 200)
    return max(4, (height or size.lines) - _ROOM), max(1, (width - 46) // (_NARROWEST + 2)), width


def print_entries(table: EntryTable, *, stacks: bool = False, width: int | None = None, file: IO[str] | None = None) -> None:
    """Print the table. Of a file that is no terminal, the width is 100 columns."""
    out = file if file is not None else sys.stdout
    wide = room(width)[2]
    print("\n".join(text.rstrip() for text in _lines(table, wide, stacks)), file=out)


def _lines(table: EntryTable, width: int, stacks: bool) -> list[str]:
    if not table.numbers:
        return [f"There are no entries to show{' of ' + table.group if table.group else ''}."]
    named: dict[Stack, str] = {}
    usual = [_usual(table.columns, row) for row in range(len(table.numbers))]
    marks = len(str(max(map(abs, table.numbers)))) + 2
    many = len(table.columns)
    first = max([max(len(cell.what), len(cell.line) + 2) for cell in usual if cell], default=0) if not table.messages else 0
    first = min(first, max(12, width - marks - 2 - many * (_NARROWEST + 2)))
    each = max(_NARROWEST, min(40, (width - marks - 2 - first) // many - 2))

    def line(mark: str, what: str, cells: Sequence[str]) -> str:
        return f"{mark:>{marks}}  {_cut(what, first):<{first}}" + "".join(f"  {_cut(cell, each):<{each}}" for cell in cells)

    count = sum(len(column.ranks) for column in table.columns) + len(table.left_out)
    many_kinds = many + table.kinds_left_out
    kinds = f"{count} ranks" + (f", of {many_kinds} kinds" if many_kinds > 1 else ", which all did the same" if count > 1 else "").replace(
        "1 ranks", "1 rank"
    )
    what = "Messages on" if table.messages else "Entries of"
    order = "as each rank issued them, newest last" if table.messages else "by number"
    lines = [_cut(f"{what} {table.group or 'the job'}, {order}: {kinds}", width), ""]
    lines.append(line("", "", [ranks_phrase(column.ranks) for column in table.columns]))
    if any(column.role for column in table.columns):
        lines.append(line("", "", [column.role for column in table.columns]))
    for row, number in enumerate(table.numbers):
        cells = [column.cells[row] for column in table.columns]
        most = usual[row]
        label = "" if table.messages or most is None else most.what
        shown = [
            _shown(cell, None if table.messages else most, column.forgotten[row], named if stacks else None)
            for cell, column in zip(cells, table.columns, strict=True)
        ]
        mark = f"> {number}" if number == table.fault and table.fault else "newest" if table.messages and number == 0 else str(number)
        lines.append(line(mark if len(mark) <= marks else str(number), label, shown))
        here = most.line if most and not table.messages else ""
        if number == table.fault and table.fault and here:
            lines.append(line("", f"  {here}", [cell.line if cell and cell.line != here else "" for cell in cells]))
    if table.elsewhere:
        lines.append("")
        for ranks, text in table.elsewhere[:_ELSEWHERE]:
            lines.append(_cut(f"Elsewhere, {ranks_phrase(ranks)[:40]}: {text}, in flight", width))
        if len(table.elsewhere) > _ELSEWHERE:
            others = {rank for ranks, _ in table.elsewhere[_ELSEWHERE:] for rank in ranks}
            lines[-1] = _cut(f"{lines[-1]}; {len(others)} ranks in others", width)
    if table.left_out:
        kinds = "1 more kind" if table.kinds_left_out == 1 else f"{table.kinds_left_out} more kinds"
        more = f"{kinds} of ranks {'is' if table.kinds_left_out == 1 else 'are'} not shown: {format_ranks(table.left_out)}"
        lines += ["", _cut(more, width - 26) + ". --ranks chooses others."]
    for stack, name in named.items():
        lines += ["", f"{name}"]
        lines += [f"    {frame.file}:{frame.line} {frame.function}" for frame in stack[:_STACK_FRAMES]]
        if len(stack) > _STACK_FRAMES:
            lines.append(f"    and {len(stack) - _STACK_FRAMES} more frames")
    return lines


def _usual(columns: Sequence[Column], row: int) -> Cell | None:
    """What most ranks did under a number."""
    count: Counter[str] = Counter()
    first: dict[str, Cell] = {}
    for column in columns:
        cell = column.cells[row]
        if cell is not None:
            count[cell.what] += len(column.ranks)
            first.setdefault(cell.what, cell)
    return first[count.most_common(1)[0][0]] if count else None


def _shown(cell: Cell | None, usual: Cell | None, forgotten: bool, named: dict[Stack, str] | None) -> str:
    if cell is None:
        return "" if usual is None else "not kept" if forgotten else "not issued"
    name = ""
    if named is not None and cell.stack:
        name = " " + named.setdefault(cell.stack, f"[{len(named) + 1}]")
    if usual is None:
        return f"{cell.op} {cell.end}{name} {cell.tensors}"
    same = cell.tensors if cell.op == usual.op else cell.what
    return (cell.end if cell.what == usual.what else f"{same or 'no tensors'}, {cell.end}") + name


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 3)] + "..."
