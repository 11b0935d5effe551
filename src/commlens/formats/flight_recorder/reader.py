"""Read one rank's Flight Recorder dump into columns."""

from __future__ import annotations

from commlens.errors import FormatError
from commlens.formats.columns import RankColumns
from commlens.formats.flight_recorder.entries import build_table
from commlens.formats.flight_recorder.json_data import read_json
from commlens.formats.flight_recorder.native_entries import read_table
from commlens.formats.flight_recorder.pickle_data import read_pickle
from commlens.formats.flight_recorder.table import EntryColumns
from commlens.formats.flight_recorder.to_columns import columns_from_table


def read_flight_recorder_pickle(data: bytes, source: str) -> RankColumns:
    """Read a dump as torch wrote it or as Python pickled it again. ``source`` is the file's name.

    Raises:
        FormatError: the dump cannot be read; the message names the file.
    """
    try:
        return columns_from_table(_read_pickled_table(data), source)
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


def _read_pickled_table(data: bytes) -> EntryColumns:
    table = read_table(data)
    if table is not None:
        return table
    pickled = read_pickle(data)
    return build_table(pickled.value, truncated=pickled.truncated)
