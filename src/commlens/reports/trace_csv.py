"""The rows of a trace as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from commlens.text import csv_cell


def to_csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Render rows as CSV with a header; None becomes an empty cell. Texts that begin like a formula
    get an apostrophe.
    """
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {name: csv_cell(value) if isinstance(value, str) else value for name, value in row.items()}
        for row in rows
    )
    return out.getvalue()
