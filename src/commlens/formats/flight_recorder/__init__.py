"""PyTorch's Flight Recorder: dumps as pickle or JSON, of NCCL, gloo and other backends, format versions 2.0 to 2.10 and later."""

from __future__ import annotations

from commlens.errors import FormatError
from commlens.formats.columns import RankColumns
from commlens.formats.flight_recorder.entries import table_of
from commlens.formats.flight_recorder.json_data import read_json
from commlens.formats.flight_recorder.native_entries import read_table
from commlens.formats.flight_recorder.pickle_data import read_pickle
from commlens.formats.flight_recorder.table import Table
from commlens.formats.flight_recorder.to_columns import columns_from_table

__all__ = ["read_flight_recorder_json", "read_flight_recorder_pickle"]


def read_flight_recorder_pickle(data: bytes, source: str) -> RankColumns:
    """One rank's dump, as torch wrote it or as Python saved it again.

    Args:
        data: the file's content.
        source: the file's name, for messages and for :attr:`~commlens.formats.columns.RankColumns.source`.

    Raises:
        FormatError: it cannot be read; the message names the file.
    """
    try:
        return columns_from_table(_pickled(data), source)
    except FormatError as error:
        raise FormatError(f"{source} cannot be read as a Flight Recorder dump. {error}") from None


def read_flight_recorder_json(data: bytes, source: str) -> RankColumns:
    """One rank's dump as JSON: what ``_dump_fr_trace_json`` gives. It has no stacks.

    Args:
        data: the file's content.
        source: the file's name, for messages and for :attr:`~commlens.formats.columns.RankColumns.source`.

    Raises:
        FormatError: it cannot be read; the message names the file.
    """
    try:
        value, cut = read_json(data)
        return columns_from_table(table_of(value, cut=cut), source)
    except FormatError as error:
        raise FormatError(f"{source} cannot be read as Flight Recorder JSON. {error}") from None


def _pickled(data: bytes) -> Table:
    table = read_table(data)
    if table is not None:
        return table
    found = read_pickle(data)
    return table_of(found.value, cut=found.cut)
