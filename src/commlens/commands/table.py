"""Prints tables: as wide as the terminal, or as wide as their content where the output is no
terminal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_NO_TERMINAL_WIDTH: Final = 100_000


def print_table(
    rows: Sequence[Sequence[str]], *, headings: Sequence[str] = (), indent: int = 0
) -> None:
    """Print rows of cells, with two spaces between the columns."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _NO_TERMINAL_WIDTH
    table = Table(box=None, show_header=bool(headings), pad_edge=False, header_style="bold")
    for column in range(len(headings or (rows[0] if rows else ()))):
        table.add_column(
            headings[column] if headings else "", overflow="fold", no_wrap=not console.is_terminal
        )
    for row in rows:
        table.add_row(*row)
    with console.capture() as captured:
        console.print(Padding(table, (0, 0, 0, indent), expand=False))
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
