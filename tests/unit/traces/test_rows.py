"""Events as flat rows."""

from __future__ import annotations

import csv
import io

from traces import trace

from commlens.traces.rows import COLUMNS, to_csv


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


def test_csv_reads_back_and_no_cell_is_a_formula():
    rows = [
        {"op": "all_reduce", "wire_bytes": 4, "module": None},
        {"op": "=HYPERLINK(1)", "wire_bytes": 0, "module": 'a "quoted", name'},
    ]
    read = list(csv.DictReader(io.StringIO(to_csv(rows))))
    assert [(row["op"], row["wire_bytes"], row["module"]) for row in read] == [
        ("all_reduce", "4", ""),
        ("'=HYPERLINK(1)", "0", 'a "quoted", name'),
    ]
