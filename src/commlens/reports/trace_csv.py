"""A trace's rows as CSV and as JSON lines."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec


def to_csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Comma-separated, with a header; None is an empty cell."""
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def to_json_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """One JSON object a line."""
    return "".join(msgspec.json.encode(dict(row)).decode() + "\n" for row in rows)
