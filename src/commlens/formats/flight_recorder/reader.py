"""Read one rank's Flight Recorder dump into columns: a pickle with the reader in C, if it was
built, else with that in Python; or JSON.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import Any, Final

import msgspec

from commlens.errors import FormatError
from commlens.formats.columns import RankColumns
from commlens.formats.flight_recorder.entries import build_table
from commlens.formats.flight_recorder.pickle_data import read_pickle
from commlens.formats.flight_recorder.table import COLUMNS, EntryColumns
from commlens.formats.flight_recorder.to_columns import columns_from_table

_SPACE: Final = re.compile(r"[ \t\r\n]*")
_ENTRIES_MAX: Final = 1_000_000
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
    return EntryColumns(
        about, groups, names, signatures, frames, stacks, dict(zip(COLUMNS, columns, strict=True))
    )


def read_json(data: bytes) -> tuple[Any, bool]:
    """Return the data and whether it is truncated.

    Raises:
        FormatError: the data is not JSON. The message is a sentence about "It".
    """
    data = data[3:] if data[:3] == codecs.BOM_UTF8 else data  # as editors on Windows add it
    try:
        return msgspec.json.decode(data), False
    except (ValueError, RecursionError) as error:
        found = _salvage(data)
        if found:
            return found, True
        raise FormatError(f"It is not JSON: {str(error).rstrip('.')}.") from None


def _salvage(data: bytes) -> dict[str, Any]:
    """Return the complete members of an object, and the complete items of its "entries"."""
    text = data.decode("utf-8", "replace").rstrip("\ufffd")
    decode = json.JSONDecoder().raw_decode
    found: dict[str, Any] = {}
    try:
        at = _skip_sign(text, 0, "{")
        while True:
            key, at = decode(text, _skip_space(text, at))
            at = _skip_sign(text, at, ":")
            if key == "entries" and text[at : at + 1] == "[":
                items: list[Any] = []
                found[key] = items
                at = _skip_space(text, at + 1)
                while text[at] != "]" and len(items) < _ENTRIES_MAX:
                    item, at = decode(text, at)
                    items.append(item)
                    at = _skip_space(text, at)
                    at = _skip_sign(text, at, ",") if text[at] != "]" else at
                at += 1
            else:
                found[key], at = decode(text, at)
            at = _skip_sign(text, at, ",")
    except (ValueError, IndexError, TypeError, RecursionError):
        return found


def _skip_space(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()  # type: ignore[union-attr] # it matches nothing, too


def _skip_sign(text: str, at: int, sign: str) -> int:
    """Return the position after a sign and the spaces around it."""
    at = _skip_space(text, at)
    if text[at] != sign:
        raise ValueError
    return _skip_space(text, at + 1)


def read_flight_recorder_pickle(data: bytes, source: str) -> RankColumns:
    """Read a dump as torch wrote it or as Python pickled it again. ``source`` is the file's name.

    Raises:
        FormatError: the dump cannot be read; the message names the file.
    """
    try:
        table = read_table(data)
        if table is None:
            value, truncated = read_pickle(data)
            table = build_table(value, truncated=truncated)
        return columns_from_table(table, source)
    except FormatError as error:
        raise FormatError(f"{source} cannot be read as a Flight Recorder dump. {error}") from None


def read_flight_recorder_json(data: bytes, source: str) -> RankColumns:
    """Read a dump as JSON, the result of ``_dump_fr_trace_json``; it has no stacks. Like
    :func:`read_flight_recorder_pickle`.
    """
    try:
        value, truncated = read_json(data)
        return columns_from_table(build_table(value, truncated=truncated), source)
    except FormatError as error:
        raise FormatError(f"{source} cannot be read as Flight Recorder JSON. {error}") from None
