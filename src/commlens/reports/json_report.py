"""Print a verdict as JSON, following the published schema ``schemas/verdict-1.schema.json``."""

from __future__ import annotations

import sys
from importlib import resources
from typing import IO, Any

import msgspec

from commlens.model.verdict import Verdict

SCHEMA_FILE = "verdict-1.schema.json"


def print_json(verdict: Verdict, file: IO[str] | None = None) -> None:
    """Print a verdict as indented JSON."""
    print(verdict.to_json().decode(), file=file if file is not None else sys.stdout)


def schema() -> dict[str, Any]:
    """Return the published schema as data."""
    text = resources.files("commlens.reports").joinpath("schemas", SCHEMA_FILE).read_bytes()
    return msgspec.json.decode(text, type=dict[str, Any])
