"""Detect what a file is from its beginning. Names are not used: people rename, collect and mix
files.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from commlens.blackbox.layout import MAGIC
from commlens.blackbox.packed import is_packed

if TYPE_CHECKING:
    from commlens.dumps.sources import Source
    from commlens.formats.columns import RankColumns

DUMP_SCHEMA: Final = "commlens.dump/1"
OBSERVED_SCHEMA: Final = "commlens.observed/1"

OBSERVED_MAX: Final = 32 << 20
"""Largest observed-*.json that is read, in bytes; a node's ranks with all their stacks take less
than 2 MB.
"""

MARKER: Final = "commlens-dump.json"
"""Name of the file that marks a job folder as made by commlens, so that commlens may delete it."""

BOX_NAME: Final = re.compile(r"rank-?\d+\.\d+\.(newest\.)?(box|new)")
"""Names of black boxes, finished or under construction, and of copies with only the newest records.
"""

REPORT_NAME: Final = re.compile(r"(index|verdict)(-[A-Za-z0-9._-]+)?\.(html|json)")
"""Names of the reports that are saved beside a dump."""

# bytes of a file's beginning that detect_kind needs, or the whole file if it is shorter
HEAD_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of file, and its reader.

    ``read`` returns the columns of each rank in the file, opening nothing but the source; None for
    commlens's own files, which :mod:`commlens.dumps.read` joins.
    """

    name: str  # "black box", "Flight Recorder pickle"
    read: Callable[[Source], list[RankColumns]] | None = None


def _read_pickle(source: Source) -> list[RankColumns]:
    from commlens.formats.flight_recorder.reader import read_flight_recorder_pickle

    return [read_flight_recorder_pickle(source.read(), source.name)]


def _read_json(source: Source) -> list[RankColumns]:
    from commlens.formats.flight_recorder.reader import read_flight_recorder_json

    return [read_flight_recorder_json(source.read(), source.name)]


def _read_text(source: Source) -> list[RankColumns]:
    from commlens.formats.torch_log import read_torch_log

    with source.open() as stream:
        return read_torch_log(stream, source.name)


BLACK_BOX: Final = Kind("black box")
OBSERVED: Final = Kind("observations of a job's processes")
DUMP_MARKER: Final = Kind("marker of a dump folder")
REPORT: Final = Kind("verdict beside a dump")
CORE: Final = Kind("core file")
FLIGHT_RECORDER_PICKLE: Final = Kind("Flight Recorder pickle", _read_pickle)
FLIGHT_RECORDER_JSON: Final = Kind("Flight Recorder JSON", _read_json)
TEXT: Final = Kind("text log", _read_text)

_KINDS_BY_SCHEMA: Final = (
    (b'"commlens.observed/', OBSERVED),
    (b'"commlens.dump/', DUMP_MARKER),
    (b'"commlens.verdict/', REPORT),
)
_CORE: Final = re.compile(rb"\x7fELF.{12}\x04\0", re.DOTALL)
# also of protocols 0 and 1, which the reader refuses with a sentence
_PICKLE: Final = re.compile(rb"\x80[\x02-\x05]|\}q\x00\(|\(dp0\n")
_FLIGHT_RECORDER_KEYS: Final = re.compile(
    rb'"(pg_config|pg_status|comm_lib_version|nccl_version|collective_seq_id|nccl_comm_state)"\s*:'
)
_FLIGHT_RECORDER_ENTRIES: Final = re.compile(rb'"entries"\s*:\s*\[')
_TEXT_BYTES: Final = bytes(range(32, 256)) + b"\t\n\r\f\b\x1b"


def is_trace(head: bytes) -> bool:
    """Return whether a file that begins so is a trace, of commlens or torch.profiler, which
    ``commlens view`` shows.
    """
    return head.lstrip().startswith(b"{") and (
        b'"commlens.trace/' in head[:200] or b'"traceEvents"' in head
    )


def detect_kind(head: bytes) -> Kind | None:
    """Return the kind of a file from its first :data:`HEAD_BYTES` decompressed bytes; None if it
    holds nothing of a job.
    """
    if head.startswith(MAGIC) or is_packed(head):
        return BLACK_BOX
    if _CORE.match(head):
        return CORE
    if _PICKLE.match(head):
        return FLIGHT_RECORDER_PICKLE
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(b"{"):
        for schema, kind in _KINDS_BY_SCHEMA:
            if schema in head:
                return kind
        if b'"commlens.' in head[:200]:
            return None  # a trace or another report
        if _FLIGHT_RECORDER_KEYS.search(head) or _FLIGHT_RECORDER_ENTRIES.search(head):
            return FLIGHT_RECORDER_JSON
    if text.startswith(b"<!"):
        return REPORT if b'name="generator" content="commlens' in head else None
    if not text or text.translate(None, _TEXT_BYTES):
        return None
    return TEXT
