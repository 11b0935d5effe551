"""The screen of ``commlens top``: the verdict, the ranks as far as they fit, the chosen ranks'
stack, and the keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from commlens.diagnosis.views.status import JobStatus, Order, StatusRow
from commlens.text import sentence, used_columns

_ORDERS: Final[tuple[Order, ...]] = ("rank", "for", "state")
_ANSWER_LINES: Final = 3
_NODES_MAX: Final = 3  # nodes that did not answer
_STACK_SHARE: Final = 0.5  # of the screen
_STYLES: Final = {"healthy": "green", "waiting": "yellow", "undetermined": "yellow"}
KEYS: Final = "up/down  enter stack  f fold  s sort  n job  q quit"
NARROW: Final = 110
"""Columns below which rows are shortened."""


@dataclass
class View:
    """The view that the user chose."""

    order: Order = "rank"
    folded: bool = True
    chosen: int = 0  # position among the rows
    stack: bool = False  # whether the stack of the chosen row is shown
    job: int = 0  # position among the jobs
    first: int = 0  # position of the first row on the screen
    quit: bool = False
    jobs: int = field(default=1, repr=False)

    def press(self, key: str, rows: int) -> None:
        """Change the view by a key.

        Args:
            key: a character, or "up", "down", "pageup", "pagedown", "home", "end", "enter",
                "escape".
            rows: the number of rows now.
        """
        moves = {
            "up": -1,
            "k": -1,
            "down": 1,
            "j": 1,
            "pageup": -10,
            "pagedown": 10,
            "home": -rows,
            "end": rows,
        }
        if key in moves:
            self.chosen += moves[key]
        elif key == "enter":
            self.stack = not self.stack
        elif key == "escape":
            self.stack = False
        elif key == "f":
            self.folded, self.chosen = not self.folded, 0
        elif key == "s":
            self.order = _ORDERS[(_ORDERS.index(self.order) + 1) % len(_ORDERS)]
        elif key in ("n", "\t"):
            self.job, self.chosen = (self.job + 1) % max(1, self.jobs), 0
        elif key in ("q", "\x03"):
            self.quit = True
        self.chosen = max(0, min(self.chosen, rows - 1))


@dataclass
class Screen:
    """One frame: the job and its rows, already folded and sorted."""

    job: JobStatus
    rows: list[StatusRow]
    cells: Sequence[Sequence[str]]  # of the rows
    headings: tuple[str, ...]
    stack: list[str]  # lines of the chosen row's stack


def draw(screen: Screen, view: View, width: int, height: int) -> RenderableType:
    """Return one frame of exactly the terminal's size or less.

    Args:
        screen: what to show.
        view: what the user chose; its first row moves so that the chosen one is visible.
        width: columns.
        height: lines.
    """
    job = screen.job
    style = _STYLES.get(job.verdict.kind, "red") if job.needs_attention else "green"
    lines: list[RenderableType] = [
        _cut(job.heading, "bold"),
        *_wrapped(Text(sentence(job.answer), style=style), width, _ANSWER_LINES),
    ]
    if job.steps and job.needs_attention:
        lines.append(_cut(job.steps, "dim"))
    lines += [_cut(line, "dim") for line in job.other_nodes[:_NODES_MAX]]
    left = height - len(lines) - 2  # the table's heading and the keys
    stack = screen.stack if view.stack else []
    for_stack = min(len(stack) + 1, int(left * _STACK_SHARE)) if stack else 0
    room = max(1, left - for_stack)
    view.first = max(0, min(view.first, view.chosen, len(screen.rows) - room))
    view.first = max(view.first, view.chosen - room + 1)
    lines.append(_table(screen, view, room, width))
    if for_stack:
        lines.append(Text("-" * min(width, 40), style="dim"))
        lines += [_cut(line) for line in stack[: for_stack - 1]]
    # of the parts, the table has more than one line: its heading, which is counted, and the rows
    used_lines = len(lines) + min(room, len(screen.rows))
    lines += [Text("")] * max(0, height - used_lines - 1)
    last = min(len(screen.rows), view.first + room)
    foot = f"{KEYS} | {view.first + 1}-{last} of {len(screen.rows)} by {view.order}"
    lines.append(
        Text(
            foot[: width - 1].ljust(width - 1),
            style="reverse",
            no_wrap=True,
            overflow="crop",
            end="",
        )
    )
    return Group(*lines)


def _cut(line: str, style: str = "") -> Text:
    return Text(line, style=style, no_wrap=True, overflow="ellipsis")


def _wrapped(text: Text, width: int, most: int) -> list[Text]:
    from rich.console import Console

    lines = list(text.wrap(Console(width=width), width))
    if len(lines) > most:
        lines[most - 1].truncate(width - 1, overflow="ellipsis")
        lines[most - 1].append("…")
    return [Text(line.plain.rstrip(), style=text.style, no_wrap=True) for line in lines[:most]]


def _table(screen: Screen, view: View, room: int, width: int) -> RenderableType:
    """Draw only the rows that fit: a job may have thousands."""
    headings, rows = used_columns(screen.headings, screen.cells[view.first : view.first + room])
    widths = [
        max(len(heading), *(len(row[column]) for row in rows))
        for column, heading in enumerate(headings)
    ]
    while (over := sum(widths) + len(widths) - width) > 0:
        # Ranks and times stay whole; the widest of the other columns is cut.
        widest = max(
            (column for column, heading in enumerate(headings) if heading in _CUT),
            key=widths.__getitem__,
            default=None,
        )
        if widest is None or widths[widest] <= _NARROWEST:
            break
        widths[widest] = max(_NARROWEST, widths[widest] - min(over, max(1, widths[widest] // 8)))
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold", expand=False)
    for heading, wide in zip(headings, widths, strict=True):
        table.add_column(heading, no_wrap=True, overflow="ellipsis", width=wide)
    for position, row in enumerate(rows, view.first):
        table.add_row(*row, style="reverse" if position == view.chosen else "")
    return table


_CUT: Final = ("process", "collective", "at")
_NARROWEST: Final = 8
