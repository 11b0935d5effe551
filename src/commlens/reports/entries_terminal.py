"""Entries side by side on a terminal: what most ranks issued under each number, and how it ended on
each rank.

Ranks that did the same share a column.
"""

from __future__ import annotations

import shutil
from collections import Counter
from typing import IO

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from commlens.model.collective import Stack
from commlens.model.entries import Column, EntryCell, EntryTable
from commlens.reports.console import print_parts
from commlens.text import count, ranks_phrase

_NARROWEST, _WIDEST = 12, 40  # characters per column of ranks
_GAP = 2  # characters between columns
_OTHER_LINES = 10  # lines beside the rows of the table
_STACK_FRAMES = 12
_MAX_ELSEWHERE = 2


def room(width: int | None = None, height: int | None = None) -> tuple[int, int, int]:
    """Return how many rows and columns fit on one screen, and its width; 100 characters without a
    terminal.
    """
    size = shutil.get_terminal_size((100, 24))
    width = min(width or size.columns, 200)
    return (
        max(4, (height or size.lines) - _OTHER_LINES),
        max(1, (width - 46) // (_NARROWEST + _GAP)),
        width,
    )


def print_entries(
    table: EntryTable,
    *,
    stacks: bool = False,
    width: int | None = None,
    file: IO[str] | None = None,
) -> None:
    """Print the table and, with ``stacks``, each stack once."""
    wide = room(width)[2]
    print_parts(_parts(table, wide, stacks), file, wide)


def _parts(table: EntryTable, width: int, stacks: bool) -> list[RenderableType]:
    if not table.numbers:
        return [Text(f"There are no entries to show{' of ' + table.group if table.group else ''}.")]
    names: dict[Stack, str] = {}
    parts: list[RenderableType] = [
        _line(_title(table)),
        "",
        _grid(table, width, names if stacks else None),
    ]
    if table.elsewhere:
        parts += ["", *map(_line, _lines_on_other_ranks(table))]
    if table.left_out:
        be = "is" if table.kinds_left_out == 1 else "are"
        more = (
            f"{count(table.kinds_left_out, 'more column')} {be} not shown:"
            f" {ranks_phrase(table.left_out)}"
        )
        parts += ["", Text(f"{more}. --ranks selects others.")]
    for stack, name in names.items():
        frames = [
            f"    {frame.file}:{frame.line} {frame.function}" for frame in stack[:_STACK_FRAMES]
        ]
        if len(stack) > _STACK_FRAMES:
            frames.append(f"    and {count(len(stack) - _STACK_FRAMES, 'more frame')}")
        parts += ["", name, *map(Text, frames)]
    return parts


def _line(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")


def _title(table: EntryTable) -> str:
    ranks = sum(len(column.ranks) for column in table.columns) + len(table.left_out)
    kinds = len(table.columns) + table.kinds_left_out
    alike = f" in {kinds} columns" if kinds > 1 else ", which all did the same" if ranks > 1 else ""
    what, order = (
        ("Messages on", "as each rank issued them, newest last")
        if table.messages
        else ("Entries of", "by number")
    )
    return f"{what} {table.group or 'the job'}, {order}: {count(ranks, 'rank')}{alike}"


def _grid(table: EntryTable, width: int, names: dict[Stack, str] | None) -> Table:
    """Return one row for each number, and the source lines below the fault. ``names`` is filled
    with the stacks' names; None shows none.
    """
    usual = [_usual(table, row) for row in range(len(table.numbers))]
    marks = [_mark(table, number) for number in table.numbers]
    what_width = max([max(len(cell.what), len(cell.line) + 2) for cell in usual if cell], default=0)
    grid = _empty_grid(width, max(map(len, marks)), what_width, len(table.columns))

    def add(mark: str, what: str, cells: list[str]) -> None:
        grid.add_row(*map(Text, (mark, what, *cells)))

    add("", "", [ranks_phrase(column.ranks) for column in table.columns])
    if any(column.role for column in table.columns):
        add("", "", [column.role for column in table.columns])
    for row, (number, most) in enumerate(zip(table.numbers, usual, strict=True)):
        add(
            marks[row],
            most.what if most else "",
            [_cell_text(column, row, most, names) for column in table.columns],
        )
        if _is_fault(table, number) and most and most.line:
            add("", f"  {most.line}", _other_lines(table.columns, row, most.line))
    return grid


def _empty_grid(width: int, mark_width: int, what_width: int, kinds: int) -> Table:
    """Return a grid with columns for the mark, for what most ranks did, and for each kind."""
    left = width - mark_width - _GAP
    what_width = min(what_width, max(12, left - kinds * (_NARROWEST + _GAP)))
    grid = Table.grid(padding=(0, _GAP))
    grid.add_column(justify="right", width=mark_width)
    grid.add_column(no_wrap=True, overflow="ellipsis", width=what_width)
    for _ in range(kinds):
        each = max(_NARROWEST, min(_WIDEST, (left - what_width) // kinds - _GAP))
        grid.add_column(no_wrap=True, overflow="ellipsis", width=each)
    return grid


def _other_lines(columns: list[Column], row: int, usual: str) -> list[str]:
    """Return each column's source line in a row, empty where it is the usual one."""
    cells = [column.cells[row] for column in columns]
    return [cell.line if cell and cell.line != usual else "" for cell in cells]


def _is_fault(table: EntryTable, number: int) -> bool:
    return number != 0 and number == table.fault  # 0: there is none


def _mark(table: EntryTable, number: int) -> str:
    if _is_fault(table, number):
        return f"> {number}"
    return "newest" if table.messages and number == 0 else str(number)


def _usual(table: EntryTable, row: int) -> EntryCell | None:
    """Return the entry that most ranks have in a row; None for messages."""
    if table.messages:
        return None
    ranks: Counter[str] = Counter()
    first: dict[str, EntryCell] = {}
    for column in table.columns:
        cell = column.cells[row]
        if cell is not None:
            ranks[cell.what] += len(column.ranks)
            first.setdefault(cell.what, cell)
    return first[ranks.most_common(1)[0][0]] if ranks else None


def _cell_text(
    column: Column, row: int, usual: EntryCell | None, names: dict[Stack, str] | None
) -> str:
    """Return how the entry ended, with its arguments where they differ from the usual ones."""
    cell = column.cells[row]
    if cell is None and usual is None:
        return ""
    if cell is None:
        return "not kept" if column.forgotten[row] else "not issued"
    name = (
        f" {names.setdefault(cell.stack, f'[{len(names) + 1}]')}"
        if names is not None and cell.stack
        else ""
    )
    if usual is None:
        return f"{cell.op} {cell.end}{name} {cell.tensors}"
    if cell.what == usual.what:
        return cell.end + name
    return (
        f"{(cell.tensors if cell.op == usual.op else cell.what) or 'no tensors'}, {cell.end}{name}"
    )


def _lines_on_other_ranks(table: EntryTable) -> list[str]:
    lines = [
        f"Elsewhere, {ranks_phrase(ranks)}: {text}, in flight"
        for ranks, text in table.elsewhere[:_MAX_ELSEWHERE]
    ]
    others = {rank for ranks, _ in table.elsewhere[_MAX_ELSEWHERE:] for rank in ranks}
    if others:
        lines[-1] += f"; {count(len(others), 'more rank')} in others"
    return lines
