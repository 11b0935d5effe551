"""Finds out what a file is by looking at its beginning. Names say nothing: people rename, gather and mix files."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from commlens.blackbox.layout import MAGIC
from commlens.dumps.read import OBSERVED_SCHEMA

if TYPE_CHECKING:
    from commlens.dumps.sources import Source
    from commlens.formats.columns import RankColumns

__all__ = [
    "BLACK_BOX",
    "DUMP_MARKER",
    "FLIGHT_RECORDER_JSON",
    "FLIGHT_RECORDER_PICKLE",
    "HEAD_BYTES",
    "OBSERVED",
    "TEXT",
    "Kind",
    "reader_for",
]

HEAD_BYTES: Final = 4096
"""How much of a file's beginning :func:`reader_for` wants to see; less where there is less."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of file, and how to read it.

    Attributes:
        name: "black box", "Flight Recorder pickle".
        read: gives what the file says of each rank that it speaks of, without opening anything but the source; None for what
            commlens itself leaves, which :func:`commlens.dumps.read.read_evidence` reads together.
    """

    name: str
    read: Callable[[Source], list[RankColumns]] | None = None


def _read_pickle(source: Source) -> list[RankColumns]:
    from commlens.formats.flight_recorder import read_flight_recorder_pickle

    return [read_flight_recorder_pickle(source.read(), source.name)]


def _read_json(source: Source) -> list[RankColumns]:
    from commlens.formats.flight_recorder import read_flight_recorder_json

    return [read_flight_recorder_json(source.read(), source.name)]


def _read_text(source: Source) -> list[RankColumns]:
    from commlens.formats.torch_log import read_torch_log

    with source.open() as stream:
        return read_torch_log(stream, source.name)


BLACK_BOX: Final = Kind("black box")
OBSERVED: Final = Kind("what was observed of a job's processes")
DUMP_MARKER: Final = Kind("mark of a dump's folder")
FLIGHT_RECORDER_PICKLE: Final = Kind("Flight Recorder pickle", _read_pickle)
FLIGHT_RECORDER_JSON: Final = Kind("Flight Recorder JSON", _read_json)
TEXT: Final = Kind("text log", _read_text)

_PICKLE: Final = re.compile(rb"\x80[\x02-\x05]|\}q\x00\(|\(dp0\n")
_FLIGHT_RECORDER_KEYS: Final = re.compile(rb'"(pg_config|pg_status|comm_lib_version|nccl_version|collective_seq_id|nccl_comm_state)"\s*:')
_FLIGHT_RECORDER_ENTRIES: Final = re.compile(rb'"entries"\s*:\s*\[')
_TEXT_BYTES: Final = bytes(range(32, 256)) + b"\t\n\r\f\b\x1b"


def reader_for(head: bytes, name: str = "") -> Kind | None:
    """What a file is; None for what holds nothing of a job's communication, as far as its beginning tells.

    Args:
        head: its first :data:`HEAD_BYTES` bytes, decompressed.
        name: only for what cannot be told otherwise; nothing at present.
    """
    if head.startswith(MAGIC):
        return BLACK_BOX
    if _PICKLE.match(head):
        return FLIGHT_RECORDER_PICKLE
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(b"{"):
        if OBSERVED_SCHEMA.encode() in head:
            return OBSERVED
        if b'"commlens.dump/' in head:
            return DUMP_MARKER
        if b'"commlens.' in head[:200]:
            return None  # a trace, a verdict or another report
        if _FLIGHT_RECORDER_KEYS.search(head) or _FLIGHT_RECORDER_ENTRIES.search(head):
            return FLIGHT_RECORDER_JSON
    if text.startswith(b"<!") or not text or text.translate(None, _TEXT_BYTES):
        return None
    return TEXT
