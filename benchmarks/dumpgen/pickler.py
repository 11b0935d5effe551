"""Writes dumps opcode by opcode as torch's own pickler does: protocol 2, strings and frames
memoised, nothing but plain data.

A template is a whole file with the places of its times noted, so that thousands of ranks that did
the same differ only by a few copies.
"""

from __future__ import annotations

import struct
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

MARK, LIST, DICT, APPENDS, SETITEMS, NONE, STOP, TUPLE2 = (
    b"(",
    b"]",
    b"}",
    b"e",
    b"u",
    b"N",
    b".",
    b"\x86",
)
TRUE, FALSE = b"\x88", b"\x89"
SOME_TIME = b"\x8a\x08" + bytes(8)

Frame = tuple[str, str, int]


@dataclass
class Stream:
    """Bytes of a pickle, and what has been memoised so far."""

    parts: list[bytes] = field(default_factory=list)
    length: int = 0
    memo: dict[Hashable, bytes] = field(default_factory=dict)
    puts: int = 0

    def write(self, data: bytes) -> None:
        """Append."""
        self.parts.append(data)
        self.length += len(data)

    def put(self, key: Hashable) -> None:
        """Memoise what is on top of the stack."""
        number = self.puts
        self.puts += 1
        self.memo[key] = (
            b"h" + bytes((number,)) if number < 256 else b"j" + struct.pack("<I", number)
        )
        self.write(b"q" + bytes((number,)) if number < 256 else b"r" + struct.pack("<I", number))

    def text(self, value: str) -> None:
        """A string: the second time it is only referred to."""
        known = self.memo.get(value)
        if known is not None:
            self.write(known)
            return
        data = value.encode()
        self.write(b"X" + struct.pack("<I", len(data)) + data)
        self.put(value)

    def number(self, value: int) -> None:
        """An integer."""
        if 0 <= value < 256:
            self.write(b"K" + bytes((value,)))
        elif 0 <= value < 65536:
            self.write(b"M" + struct.pack("<H", value))
        elif -(1 << 31) <= value < 1 << 31:
            self.write(b"J" + struct.pack("<i", value))
        else:
            self.write(b"\x8a\x08" + struct.pack("<q", value))

    def getvalue(self) -> bytes:
        """All of it."""
        data = b"".join(self.parts)
        self.parts = [data]
        return data


@dataclass(frozen=True, eq=False)
class Record:
    """One entry of the ring, but for its numbers and times. Entries that differ only in those share
    it.
    """

    frames: tuple[Frame, ...]
    pg_id: int
    group: tuple[str, str]
    name: str
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    dtype: str
    state: str
    timed_start: bool  # the start was noticed
    timed_end: bool  # the end was
    retired: bool
    is_p2p: bool
    duration_ms: float | None
    thread: int


Numbers = tuple[int, int, int, int]
"""record_id, collective_seq_id, p2p_seq_id, op_id."""


@dataclass
class Template:
    """A file but for its header, and where its times are: (row, offset of 8 bytes) of each kind."""

    data: np.ndarray
    created: tuple[np.ndarray, np.ndarray]
    started: tuple[np.ndarray, np.ndarray]
    completed: tuple[np.ndarray, np.ndarray]

    def fill(self, created: np.ndarray, started: np.ndarray, completed: np.ndarray) -> np.ndarray:
        """The bytes with these times (Unix ns, one of each row)."""
        data = self.data.copy()
        for (rows, offsets), times in (
            (self.created, created),
            (self.started, started),
            (self.completed, completed),
        ):
            if len(rows):
                data[offsets[:, None] + np.arange(8)] = (
                    np.ascontiguousarray(times[rows], dtype="<i8").view(np.uint8).reshape(-1, 8)
                )
        return data


THREADS = (("python3", "139845123456832"), ("pt_autograd_0", "139843987654336"))


def header(
    version: str,
    config: Sequence[tuple[str, str, str]],
    status: Sequence[tuple[str, tuple[int, int, int]]],
) -> Stream:
    """Everything before the entries.

    Args:
        version: of the format.
        config: name, description and ranks of each group.
        status: pg_id, and the last enqueued, started and completed sequence numbers.
    """
    minor = int(version.split(".")[1])
    s = Stream()
    s.write(b"\x80\x02" + DICT + MARK)
    s.text("version")
    s.text(version)
    s.text("pg_config")
    s.write(DICT + MARK)
    for name, description, ranks in config:
        s.text(name)
        s.write(DICT + MARK)
        for key, value in (("name", name), ("desc", description), ("ranks", ranks)):
            s.text(key)
            s.text(value)
        s.write(SETITEMS)
    s.write(SETITEMS)
    if minor >= 6:
        s.text("comm_lib_version" if minor >= 10 else "nccl_version")
        s.text("2.27.3")
    if minor >= 3:
        s.text("pg_status")
        s.write(DICT + MARK)
        for pg_id, values in status:
            s.text(pg_id)
            s.write(DICT + MARK)
            for key, value in zip(
                (
                    "last_enqueued_collective",
                    "last_started_collective",
                    "last_completed_collective",
                ),
                values,
                strict=True,
            ):
                s.text(key)
                s.number(value)
            s.write(SETITEMS)
        s.write(SETITEMS)
    s.text("entries")
    return s


def template(
    version: str,
    s: Stream,
    entries: Sequence[tuple[Record, Numbers]],
    *,
    opens: bool = False,
    closes: bool = False,
) -> Template:
    """Some entries as they come after what ``s`` remembers; ``opens``: they are the first,
    ``closes``: the file's last.
    """
    minor = int(version.split(".")[1])
    times: tuple[list[tuple[int, int]], ...] = ([], [], [])
    known: dict[Record, list[bytes]] = {}
    if opens:
        s.write(LIST + MARK)
    for row, (record, numbers) in enumerate(entries):
        pieces = known.get(record)
        if pieces is None:
            puts = s.puts
            pieces = _pieces(s, record, minor)
            # everything in it is memoised by now: the next one will have the same bytes
            if s.puts == puts:
                known[record] = pieces
        for piece, number in zip(pieces, numbers, strict=False):
            s.write(piece)
            s.number(number)
        for piece, into in zip(pieces[4:], times, strict=False):
            s.write(piece)
            if piece.endswith(SOME_TIME):
                into.append((row, s.length - 8))
        s.write(pieces[7])
    if closes:
        s.write(APPENDS + SETITEMS)
        s.put(0)
        s.write(STOP)
    data = np.frombuffer(s.getvalue(), dtype=np.uint8)
    created, started, completed = (
        (
            np.array([row for row, _ in found], dtype=np.int64),
            np.array([at for _, at in found], dtype=np.int64),
        )
        for found in times
    )
    return Template(data, created, started, completed)


def _pieces(outer: Stream, record: Record, minor: int) -> list[bytes]:
    """The bytes up to each of the four numbers, up to each of the three times (with them), and the
    rest.
    """
    s = Stream(memo=outer.memo, puts=outer.puts)
    pieces: list[bytes] = []

    def cut() -> None:
        pieces.append(s.getvalue())
        s.parts = []

    s.write(DICT + MARK)
    if record.frames:
        s.text("frames")
        s.write(LIST + MARK)
        for frame in record.frames:
            _frame(s, frame)
        s.write(APPENDS)
    s.text("record_id")
    cut()
    s.text("pg_id")
    s.number(record.pg_id)
    s.text("process_group")
    s.text(record.group[0])
    s.text(record.group[1])
    s.write(TUPLE2)
    if minor >= 9:
        for key, text in zip(("thread_name", "thread_id"), THREADS[record.thread], strict=True):
            s.text(key)
            s.text(text)
    s.text("collective_seq_id")
    cut()
    s.text("p2p_seq_id")
    cut()
    s.text("op_id")
    cut()
    s.text("profiling_name")
    s.text(record.name)
    s.text("time_created_ns")
    s.write(SOME_TIME)
    cut()
    if record.duration_ms is not None:
        s.text("duration_ms")
        s.write(b"G" + struct.pack(">d", record.duration_ms))
    for side, sizes in (("input", record.inputs), ("output", record.outputs)):
        s.text(f"{side}_sizes")
        s.write(LIST + MARK)
        for size in sizes:
            s.write(LIST + MARK)
            for extent in size:
                s.number(extent)
            s.write(APPENDS)
        s.write(APPENDS)
        s.text(f"{side}_dtypes")
        s.write(LIST + MARK)
        for _ in sizes:
            s.text(record.dtype)
        s.write(APPENDS)
    s.text("state")
    s.text(record.state)
    for key, noticed in (("started", record.timed_start), ("completed", record.timed_end)):
        s.text(f"time_discovered_{key}_ns")
        s.write(SOME_TIME if noticed else NONE)
        cut()
    s.text("retired")
    s.write(TRUE if record.retired else FALSE)
    s.text("timeout_ms")
    s.number(600000)
    s.text("is_p2p")
    s.write(TRUE if record.is_p2p else FALSE)
    s.write(SETITEMS)
    cut()
    outer.puts = s.puts
    return pieces


def _frame(s: Stream, frame: Frame) -> None:
    known = s.memo.get(frame)
    if known is not None:
        s.write(known)
        return
    name, filename, line = frame
    s.write(DICT + MARK)
    for key, text in (("name", name), ("filename", filename)):
        s.text(key)
        s.text(text)
    s.text("line")
    s.number(line)
    s.write(SETITEMS)
    s.put(frame)
