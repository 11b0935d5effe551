"""Tables that the verbs print."""

from __future__ import annotations

import pytest

from commlens.commands.table import print_table


def test_columns_are_aligned_and_nothing_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    wide = "x" * 300
    print_table([("rank 0", wide), ("ranks 1-3", "y")], headings=("", "in collectives"), indent=2)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [
        ["in", "collectives"],
        ["rank", "0", wide],
        ["ranks", "1-3", "y"],
    ]
    assert lines[1].index("x") == lines[2].index("y")
    assert all(line == line.rstrip() and line.startswith("  ") for line in lines)


def test_brackets_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([("[red]dp[/red] [0-3]", ":smile:")])
    assert capsys.readouterr().out == "[red]dp[/red] [0-3]  :smile:\n"
