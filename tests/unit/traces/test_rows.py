"""Events as flat rows."""

from __future__ import annotations

from traces import trace

from commlens.traces.rows import COLUMNS


def test_rows_are_flat_and_alike():
    rows = trace().to_rows()
    assert {tuple(row) for row in rows} == {COLUMNS}
    assert all(
        value is None or isinstance(value, (str, int, bool))
        for row in rows
        for value in row.values()
    )
    assert (
        rows[1]["cause_before"] == "(Partial(sum),)"
        and rows[1]["source"] == "/home/me/train.py:14"
        and rows[1]["group_ranks"] == "0-3"
    )
