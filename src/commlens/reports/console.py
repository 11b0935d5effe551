"""Printing with rich: at most 120 columns by default, and plain text where the file is not a
terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import IO

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from commlens.model.wrapping import rejoined, unbroken

_WIDEST = 120  # longer lines are hard to read


def console(
    file: IO[str] | None = None, width: int | None = None, colour: bool | None = None
) -> Console:
    """Return a console on a file.

    Args:
        file: standard output by default.
        width: columns; those of the terminal by default, 80 without one, at most 120.
        colour: by default, colour is used on a terminal that supports it.
    """
    out = file if file is not None else sys.stdout
    made = Console(
        file=out,
        width=width,
        force_terminal=colour,
        no_color=colour is False,
        highlight=False,
        emoji=False,
        markup=False,
    )
    if width is None:
        made.width = min(made.width, _WIDEST)
    return made


def print_parts(
    parts: Iterable[RenderableType],
    file: IO[str] | None = None,
    width: int | None = None,
    colour: bool | None = None,
) -> None:
    """Print parts one below the other. The arguments are those of :func:`console`."""
    out = console(file, width, colour)
    with out.capture() as captured:
        for part in parts:
            out.print(part)
    text = rejoined(captured.get())
    # Tables pad their columns with blanks, which only a terminal hides.
    out.file.write(
        text if out.is_terminal else "".join(f"{line.rstrip()}\n" for line in text.splitlines())
    )


def bullet(text: str) -> RenderableType:
    """Return a list item; its further lines are indented."""
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("-", Text(unbroken(text)))
    return Padding(table, (0, 0, 0, 2))
