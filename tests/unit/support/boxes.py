"""Builds valid black boxes byte by byte from docs/protocol.md, independently of the writer in the
package.

Every number here is typed from that page, on purpose: a mistake in ``layout.py`` must not cancel
itself out in the tests.
"""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

HEADER = 4096
RECORD = 192
MONO = 1_000_000_000_000  # CLOCK_MONOTONIC at creation
UNIX = 1_700_000_000_000_000_000  # Unix ns at creation
ENTERED, RETURNED, WAIT_BEGAN, WAIT_ENDED, DONE, OUTCOME, FAILURE, REDUCE_OP, DURATION = range(
    120, 192, 8
)
COMPLETED, FAILED, UNKNOWN = 1, 2, 3
BY_RETURN, BY_WAIT, BY_POLL, BY_NATIVE, BY_UNKNOWN = 1, 2, 3, 4, 5
TORCH = "/env/lib/python3.11/site-packages/torch"
COMMLENS = "/env/lib/python3.11/site-packages/commlens"
STDLIB = "/env/lib/python3.11"


def page(size: int) -> int:
    return (size + 4095) // 4096 * 4096


class Box:
    """A black box in the making. Positions of blobs and indices of records are returned as they are
    written.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 4,
        *,
        capacity: int = 16,
        pid: int = 4121,
        job: str = "job-1",
        host: str = "n03",
        local_rank: int = -1,
        start_ticks: int = 777,
        about: dict[str, Any] | None = None,
    ) -> None:
        self.rank, self.pid, self.capacity = rank, pid, capacity
        self.side_at = HEADER + page(capacity * RECORD)
        self.side_size = page(512 * 1024 + capacity * 512)
        self.evidence_at = self.side_at + self.side_size
        self.total = self.evidence_at + 2 * 128 * 1024
        self.data = bytearray(self.total)
        self.static = {
            "magic": b"COMMLENS",
            "version": 1,
            "header": HEADER,
            "record": RECORD,
            "capacity": capacity,
            "side_at": self.side_at,
            "side_size": self.side_size,
            "evidence_at": self.evidence_at,
            "evidence_slot": 128 * 1024,
            "total": self.total,
            "pid": pid,
            "rank": rank,
            "world_size": world_size,
            "local_rank": local_rank,
            "start_ticks": start_ticks,
            "mono": MONO,
            "unix": UNIX,
        }
        self.about = {
            "job": job,
            "host": host,
            "boot_id": "b007",
            "pid_namespace": "4026531836",
            "restart": 0,
            "script": "train.py",
            "torch": "2.13.0",
            "python": "3.11.9",
            "commlens": "0.1.0",
            "prefixes": {"torch": TORCH, "commlens": COMMLENS, "python": [STDLIB, "<frozen"]},
        } | (about or {})
        self.head = 0
        self.index = 0
        self.evidence_count = 0
        self.write_header()
        self.heartbeat(MONO)
        self.word(288, 1)
        self.word(368, 1_800_000)

    def write_header(self, text: bytes | None = None, **changed: Any) -> None:
        """Write the static part again, with some of its fields changed and a right checksum."""
        text = json.dumps(self.about).encode() if text is None else text
        assert len(text) <= 2048
        self.static |= changed
        static = struct.pack(
            "<8sIIIIQQQQQIiIiQQQII", *self.static.values(), len(text), zlib.crc32(text)
        )
        self.data[: len(static)] = static
        self.data[len(static) : len(static) + 4] = struct.pack("<I", zlib.crc32(static))
        self.data[2048 : 2048 + len(text)] = text

    def word(self, offset: int, value: int) -> None:
        struct.pack_into("<Q", self.data, offset, value)

    def heartbeat(self, mono: int, unix: int | None = None) -> None:
        self.word(256, mono)
        self.word(264, mono - MONO + UNIX if unix is None else unix)

    # --- blobs

    def blob(self, content: Any, *, raw: bytes | None = None) -> int:
        payload = json.dumps(content).encode() if raw is None else raw
        need = (16 + len(payload) + 7) // 8 * 8
        room = self.side_size - self.head % self.side_size
        if room < need:
            self.head += room
        position = self.head + 1
        at = self.side_at + self.head % self.side_size
        self.data[at : at + 16] = struct.pack(
            "<IIQ", len(payload), zlib.crc32(payload, position & 0xFFFFFFFF), position
        )
        self.data[at + 16 : at + 16 + len(payload)] = payload
        self.head += need
        self.word(280, self.head)
        return position

    def group(
        self,
        name: str = "0",
        ranks: str = "0-3",
        *,
        desc: str = "default_pg",
        device: str = "cpu",
        inc: int = 0,
        **more: Any,
    ) -> int:
        return self.blob(
            {
                "k": "group",
                "name": name,
                "desc": desc,
                "ranks": ranks,
                "backend": "gloo",
                "device": device,
                "mesh_dim": None,
                "inc": inc,
            }
            | more
        )

    def asked(
        self,
        op: str = "all_reduce",
        dop: str = "allreduce_",
        shape: tuple[int, ...] = (5, 5),
        **more: Any,
    ) -> int:
        content = {
            "k": "asked",
            "op": op,
            "dop": dop,
            "in": [[list(shape), "float32", "cpu", "strided", None]],
            "out": [],
            "rop": None,
            "root": None,
            "is": [],
            "os": [],
            "async": False,
        }
        return self.blob(content | more)

    def stack(self, *frames: tuple[Any, ...]) -> int:
        return self.blob({"k": "stack", "f": [list(frame) for frame in frames]})

    def text(self, text: str) -> int:
        return self.blob({"k": "text", "text": text})

    # --- records

    def record(
        self,
        *,
        group: int,
        asked: int,
        stack: int = 0,
        module: int = 0,
        seq: int = 1,
        step: int = 0,
        coalescing_id: int = 0,
        tag: int = 0,
        thread: int = 4121,
        flags: int = 8,
        peer: int = -1,
        members: int = 0,
        at: int | None = None,
        index: int | None = None,
    ) -> int:
        """Announce. ``at`` is CLOCK_MONOTONIC ns, by default one millisecond after the former
        record.
        """
        self.index = self.index + 1 if index is None else index
        at = MONO + self.index * 1_000_000 if at is None else at
        record = struct.pack(
            "<QQQQQQQQQqIIiI",
            self.index,
            at,
            group,
            asked,
            stack,
            module,
            seq,
            step,
            coalescing_id,
            tag,
            thread,
            flags,
            peer,
            members,
        )
        where = self.slot(self.index)
        self.data[where : where + 100] = record + struct.pack("<I", zlib.crc32(record))
        self.word(272, self.index)
        return self.index

    def slot(self, index: int) -> int:
        return HEADER + (index - 1) % self.capacity * RECORD

    def mark(self, index: int, word: int, mono: int) -> None:
        self.value(index, word, (mono - MONO) // 100)

    def value(self, index: int, word: int, value: int) -> None:
        self.word(self.slot(index) + word, (value << 16 | (index & 0xFFFF)) & 0xFFFF_FFFF_FFFF_FFFF)

    def outcome(self, index: int, outcome: int, how: int = 0, waiter: int = 0) -> None:
        self.value(index, OUTCOME, waiter << 16 | outcome << 8 | how)

    def complete(
        self, index: int, *, after: int = 500_000, how: int = BY_WAIT, waiter: int = 4121
    ) -> None:
        """The usual life: issued, waited for, done."""
        (announced,) = struct.unpack_from("<Q", self.data, self.slot(index) + 8)
        for word, share in ((RETURNED, 4), (WAIT_BEGAN, 3)):
            self.mark(index, word, announced + after // share)
        self.mark(index, WAIT_ENDED, announced + after)
        self.mark(index, DONE, announced + after)
        self.outcome(index, COMPLETED, how, waiter)

    # --- evidence

    def evidence(
        self, threads: list[dict[str, Any]], at: int = MONO, *, raw: bytes | None = None
    ) -> None:
        payload = json.dumps({"threads": threads}).encode() if raw is None else raw
        self.evidence_count += 1
        where = self.evidence_at + self.evidence_count % 2 * 128 * 1024
        self.data[where : where + 24] = struct.pack(
            "<IIQQ", len(payload), zlib.crc32(payload), self.evidence_count, at
        )
        self.data[where + 24 : where + 24 + len(payload)] = payload
        self.word(328, self.evidence_count)

    # --- out

    @property
    def name(self) -> str:
        return f"rank{self.rank}.{self.pid}.box"

    def bytes(self) -> bytes:
        return bytes(self.data)

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / self.name
        path.write_bytes(self.data)
        return path


def busy_box(rank: int = 0, world_size: int = 4, *, records: int = 10, **options: Any) -> Box:
    """A box with a bit of everything: collectives that completed, and a last one that a thread
    waits for.
    """
    box = Box(rank, world_size, **options)
    group = box.group(ranks=f"0-{world_size - 1}" if world_size > 1 else "0")
    stack = box.stack(
        (f"{TORCH}/distributed/distributed_c10d.py", 2806, "all_reduce"),
        ("/home/me/train.py", 81, "step"),
        ("/home/me/train.py", 120, "<module>"),
    )
    asked = box.asked()
    index = 0
    for number in range(1, records + 1):
        index = box.record(group=group, asked=asked, stack=stack, seq=number, step=number // 2)
        if number < records:
            box.complete(index)
    if index:
        box.mark(index, WAIT_BEGAN, MONO + index * 1_000_000 + 400_000)
        box.outcome(index, 0, 0, 4121)
    box.evidence(
        [
            {
                "tid": 4121,
                "name": "MainThread",
                "main": True,
                "f": [["/home/me/train.py", 57, "load_batch"]],
            }
        ],
        MONO + 30_000_000,
    )
    box.word(296, records // 2)
    return box
