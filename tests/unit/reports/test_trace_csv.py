"""Rows as CSV."""

from __future__ import annotations

import csv
import io

from commlens.reports.trace_csv import to_csv

ROWS = [
    {"op": "all_reduce", "bytes": 4, "site": None},
    {"op": "=HYPERLINK(1)", "bytes": 0, "site": 'a "quoted", name'},
]


def test_csv_reads_back_and_no_cell_is_a_formula() -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(ROWS, ["op", "bytes", "site"]))))
    assert rows[0] == {"op": "all_reduce", "bytes": "4", "site": ""}
    assert rows[1] == {"op": "'=HYPERLINK(1)", "bytes": "0", "site": 'a "quoted", name'}
