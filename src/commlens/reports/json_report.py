"""Print results as JSON, following the published ``schemas/``."""

from __future__ import annotations

from importlib import resources
from typing import IO, Any

import msgspec

SCHEMA_FILE = "verdict-2.schema.json"


def print_json(result: Any, file: IO[str] | None = None) -> None:
    """Print a verdict, a summary or a comparison as indented JSON."""
    print(msgspec.json.format(msgspec.json.encode(result), indent=2).decode(), file=file)


def schema() -> dict[str, Any]:
    """Return the published schema of verdicts as data."""
    text = (
        resources.files("commlens.reports").joinpath("schemas").joinpath(SCHEMA_FILE).read_bytes()
    )
    return msgspec.json.decode(text, type=dict[str, Any])
