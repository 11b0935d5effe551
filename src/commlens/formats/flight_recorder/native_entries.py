"""The reader of entries in C, where it could be built. It gives the same tables as the one in Python, or none at all."""

from __future__ import annotations

from typing import Any, Final

from commlens.formats.flight_recorder.table import Table

__all__ = ["AVAILABLE", "read_table"]

_VERSION: Final = 1  # of _entries.c: a build of another time is left alone

_native: Any = None
try:
    from commlens.formats.flight_recorder import _entries  # type: ignore[attr-defined,unused-ignore]
except ImportError:
    pass
else:
    if getattr(_entries, "VERSION", None) == _VERSION:
        _native = _entries

AVAILABLE: Final[bool] = _native is not None
"""Whether it was built."""


def read_table(data: bytes) -> Table | None:
    """The table of a pickled dump; None where it has to be read in Python: always, where there was no compiler."""
    found = _native.read(data) if _native is not None else None
    if found is None:
        return None
    about, columns, groups, names, signatures, frames, stacks = found
    return Table(about, groups, names, signatures, frames, stacks, *columns)
