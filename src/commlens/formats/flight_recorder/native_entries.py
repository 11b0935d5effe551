"""The C reader of entries, if it was built. It returns the same table as the Python reader, or
None.
"""

from __future__ import annotations

from typing import Any, Final

from commlens.formats.flight_recorder.table import COLUMNS, EntryColumns

_VERSION: Final = 1  # of _entries.c: an older or newer build is ignored

_native: Any = None
try:
    from commlens.formats.flight_recorder import _entries  # type: ignore[attr-defined,unused-ignore]
except ImportError:
    pass
else:
    if getattr(_entries, "VERSION", None) == _VERSION:
        _native = _entries

AVAILABLE: Final[bool] = _native is not None
"""Whether the C reader was built."""


def read_table(data: bytes) -> EntryColumns | None:
    """Return the table of a pickled dump; None if the Python reader must read it."""
    found = _native.read(data) if _native is not None else None
    if found is None:
        return None
    about, columns, groups, names, signatures, frames, stacks = found
    by_name = dict(zip(COLUMNS, columns, strict=True))
    return EntryColumns(about, groups, names, signatures, frames, stacks, by_name)
