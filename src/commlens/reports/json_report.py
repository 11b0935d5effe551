"""Print results as JSON, following the published ``schemas/``."""

from __future__ import annotations

from typing import IO, Any


def print_json(result: Any, file: IO[str] | None = None) -> None:
    """Print a verdict, a summary or a comparison as indented JSON."""
    import msgspec  # here, as a command's help does not need it

    print(msgspec.json.format(msgspec.json.encode(result), indent=2).decode(), file=file)
