"""Copies of boards on other nodes. Standard library only.

The relay of a node reads its ranks' boards (:class:`Feed`) and sends the bytes that changed; the
other nodes' relays write them at the same offsets of a file of the same layout (:class:`Mirror`),
which their ranks read like any board. Times are sent as ages.

A feed reads in the order in which a copy must be written: a word that says how far to read follows
the bytes that it covers, and a rank's wait follows its announcements. So a copy may be old, but is
never ahead of itself.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from commlens.blackbox import job_dirs
from commlens.boards import board as B
from commlens.boards.board import PeerBoard

Write = tuple[int, bytes]
"""Offset in the board, and the bytes there."""

_U64: Final = struct.Struct("<Q")
_URGENT: Final = (B.ACTIVE, B.PRESENT, B.ALONE, B.ASKS, B.CLOSED)
_ALL_WORDS: Final = (B.STEADY, B.COUNTS_FROM, B.THREADS, B.ANY_SOURCE, *_URGENT)
_WAIT_WORDS: Final = (B.WAITING_SINCE, B.WAITING_NUMBER, B.WAITING)


class Feed:
    """The changes of a board since they were last read."""

    def __init__(self, board: PeerBoard, reaches_out: Callable[[Any], bool]) -> None:
        """Read a board.

        Args:
            board: of a rank on this node, or a copy.
            reaches_out: returns whether a channel with these ranks has members on other nodes.
        """
        self.board = board
        self._reaches_out = reaches_out
        self._words: dict[int, int] = {}  # by offset, as last read
        self._head = 0  # bytes of blobs read
        self._used = 0
        self._inside: dict[int, bytes] = {}  # slots of channels within this node
        self._outside: dict[int, bytes] = {}  # slots of channels that reach other nodes
        self._last: dict[int, int] = {}  # by slot: the newest number

    def news(self) -> list[Write]:
        """Return new announcements on channels that reach other nodes, and changes of the words
        that others wait for.
        """
        writes = list(self._new_slots())
        for slot, known in self._last.items():
            last = self.board.last_number(slot)
            if last != known:
                writes += self._announcements(slot, known, last)
        writes += self._changed(_URGENT)
        return writes

    def rest(self, *, waits: bool) -> list[Write]:
        """Return all other changes; with ``waits``, also how long the rank has waited and the
        channels within its node.
        """
        wait = {offset: self.board.word(offset) for offset in _WAIT_WORDS}
        writes = list(self._new_slots())
        for slots in (self._outside, self._inside) if waits else (self._outside,):
            for slot, known in slots.items():
                content = self.board.map[slot : slot + B.SLOT_SIZE]
                if content != known:
                    slots[slot] = content
                    writes.append((slot, content))
        writes += self._changed(_ALL_WORDS)
        if not waits:
            wait = dict.fromkeys(wait, 0)
        if any(self._words.get(offset, 0) != value for offset, value in wait.items()):
            self._words.update(wait)
            since = wait[B.WAITING_SINCE]
            age = max(time.monotonic_ns() - since, 1) if since else 0
            writes += [(B.WAITING, _U64.pack(0)), (B.WAITING_SINCE, _U64.pack(age))]
            writes += [
                (offset, _U64.pack(wait[offset])) for offset in (B.WAITING_NUMBER, B.WAITING)
            ]
        return writes

    @property
    def waited_ns(self) -> int:
        """How long the rank has waited for others; 0 if it does not wait."""
        since = self.board.word(B.WAITING_SINCE) if self.board.word(B.WAITING) else 0
        return time.monotonic_ns() - since if since else 0

    def _new_slots(self) -> Iterator[Write]:
        """Yield new blobs and new channels."""
        used = min(self.board.word(B.USED), B.CHANNELS)
        head = self.board.word(B.HEAD)
        if head != self._head:
            begin = max(self._head, head - B.BLOBS_SIZE)
            while begin < head:  # in two pieces around the end of the ring
                at = begin % B.BLOBS_SIZE
                size = min(head - begin, B.BLOBS_SIZE - at)
                yield B.BLOBS_AT + at, self.board.map[B.BLOBS_AT + at : B.BLOBS_AT + at + size]
                begin += size
            yield B.HEAD, _U64.pack(head)
            self._head = head
        if used == self._used:
            return
        for index in range(self._used, used):
            slot = B.HEADER_SIZE + index * B.SLOT_SIZE
            description = self.board.blob(B.SLOT_HEAD.unpack_from(self.board.map, slot)[1]) or {}
            yield slot, self.board.map[slot : slot + B.SLOT_HEAD.size]
            if self._reaches_out(description.get("ranks", ())):
                self._outside[slot] = b""
                self._last[slot] = 0
            else:
                self._inside[slot] = b""
        self._used = used
        yield B.USED, _U64.pack(used)

    def _announcements(self, slot: int, known: int, last: int) -> list[Write]:
        self._last[slot] = last
        entries = slot + B.SLOT_HEAD.size
        if known < last <= known + B.ENTRIES:
            ats = [
                entries + number % B.ENTRIES * B.ENTRY.size for number in range(known + 1, last + 1)
            ]
            writes = [(at, self.board.map[at : at + B.ENTRY.size]) for at in ats]
        else:  # another round, a withdrawal, or more than the ring holds
            writes = [(entries, self.board.map[entries : slot + B.LAST_AT])]
        return [*writes, (slot + B.LAST_AT, _U64.pack(last))]

    def _changed(self, offsets: tuple[int, ...]) -> list[Write]:
        words, board, writes = self._words, self.board, []
        for offset in offsets:
            value = board.word(offset)
            if value != words.get(offset, 0):
                words[offset] = value
                writes.append((offset, _U64.pack(value)))
        return writes


class Mirror:
    """A copy of the board of a rank on another node. Ranks find it once it is published."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Create the file.

        Raises:
            OSError: there is no space, or no permission.
        """
        self.rank = rank
        self.path = folder / f"rank{rank}.{os.getpid()}{B.SUFFIX}"
        self._building = self.path.with_suffix(".making")
        self.map = B.allocate(self._building, rank, job_dirs.start_ticks(os.getpid()))
        self._words = memoryview(self.map).cast("Q")
        self._set(B.REMOTE, B.LINKED)
        self.heard(time.monotonic())
        self.is_published = False

    def apply(self, offset: int, content: bytes) -> None:
        """Write what the other node's relay has read.

        Raises:
            ValueError: it does not belong there.
        """
        if not B.USED <= offset <= B.SIZE - len(content) or (
            offset < B.HEADER_SIZE and offset + len(content) > B.HEADER_SIZE
        ):
            raise ValueError(f"a write of {len(content)} bytes at {offset}")
        if len(content) == B.WORD_SIZE and offset % B.WORD_SIZE == 0:
            (value,) = _U64.unpack(content)
            if offset == B.WAITING_SINCE and value:
                value = max(time.monotonic_ns() - value, 1)
            if offset not in (B.REMOTE, B.HEARD):
                self._set(offset, value)
        else:
            self.map[offset : offset + len(content)] = content

    def publish(self) -> None:
        """Show it to the ranks of this node."""
        self._building.rename(self.path)
        self.is_published = True

    def heard(self, at_s: float) -> None:
        """Note when the other node gave its last sign of life, by ``time.monotonic()``."""
        self._set(B.HEARD, int(at_s * 1e9))

    def word(self, offset: int) -> int:
        """Read a word."""
        return self._words[offset // B.WORD_SIZE]

    @property
    def is_lost(self) -> bool:
        """Whether the other node is no longer heard of."""
        return self.word(B.REMOTE) == B.LOST

    def lose(self) -> None:
        """Mark the other node as lost: its rank is not waited for."""
        self._set(B.REMOTE, B.LOST)
        self._set(B.ACTIVE, 0)

    def remove(self) -> None:
        """Remove the file. Ranks that have it mapped still read it."""
        for path in (self.path, self._building):
            with contextlib.suppress(OSError):
                path.unlink()

    def _set(self, offset: int, value: int) -> None:
        self._words[offset // B.WORD_SIZE] = value
