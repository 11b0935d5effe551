"""Compressed files as streams that never grow beyond bounds and give what there is before a cut.

The format is found out from the first bytes, whatever the file is called.
"""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Callable
from typing import BinaryIO, Final, Protocol

from commlens.errors import MissingDependency

MAGIC_BYTES: Final = 264
"""How much of a file's beginning tells whether it is compressed or an archive."""
UNSUSPICIOUS: Final = 256 << 20
"""A content of up to so many bytes may be packed as tightly as it likes."""
RATIO_MAX: Final = 500
"""Beyond that, bytes of content for each stored byte. Text logs reach 30, repetitive dumps 150, gzip's most is 1032."""
_DEEPEST: Final = 3  # compressed within compressed
_PIECE: Final = 64 << 10
_MOST: Final = 1 << 20  # bytes of content before the bound is looked at
_LEAST: Final = 1024  # bytes of content in one read, so that a peek shows enough


class _Decompressor(Protocol):
    """What bz2's, lzma's and the two below have in common: one frame."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    @property
    def needs_input(self) -> bool: ...
    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...


class _Gzip:
    """zlib's decompressor in bz2's manner."""

    def __init__(self) -> None:
        self._one = zlib.decompressobj(wbits=31)

    @property
    def eof(self) -> bool:
        return self._one.eof

    @property
    def unused_data(self) -> bytes:
        return self._one.unused_data

    @property
    def needs_input(self) -> bool:
        return not self._one.unconsumed_tail

    def decompress(self, data: bytes, max_length: int = -1) -> bytes:
        return self._one.decompress(self._one.unconsumed_tail + data, max_length)


class _Zstandard:
    """zstandard's. It knows no limit for its output: a block of 4 bytes gives at most 128 KiB, so it is fed in small bites."""

    BITE: Final = 512

    def __init__(self) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise MissingDependency(
                f"Reading a file compressed with Zstandard needs the package zstandard ({error}): pip install 'commlens[zstd]'"
            ) from None
        self._one = zstandard.ZstdDecompressor().decompressobj()
        self._left = b""

    @property
    def eof(self) -> bool:
        return self._one.eof

    @property
    def unused_data(self) -> bytes:
        return self._one.unused_data + self._left

    @property
    def needs_input(self) -> bool:
        return not self._left

    def decompress(self, data: bytes, max_length: int = -1) -> bytes:
        """A bite's worth."""
        data = self._left + data
        self._left = data[self.BITE :]
        return self._one.decompress(data[: self.BITE])


_KINDS: Final[dict[bytes, Callable[[], _Decompressor]]] = {
    b"\x1f\x8b\x08": _Gzip,
    b"\x28\xb5\x2f\xfd": _Zstandard,
    b"BZh": bz2.BZ2Decompressor,
    b"\xfd7zXZ\x00": lambda: lzma.LZMADecompressor(memlimit=256 << 20),
}


def is_packed(head: bytes) -> bool:
    """Whether a file that begins like this is compressed."""
    return decompressor_for(head) is not None


def is_bomb(content: int, stored: int) -> bool:
    """Whether so many bytes of content from so many stored ones are no honest dump."""
    return content > UNSUSPICIOUS and content > RATIO_MAX * stored


def decompressor_for(head: bytes) -> Callable[[], _Decompressor] | None:
    """What reads a file that begins like this; None when it is not compressed."""
    return next((make for magic, make in _KINDS.items() if head.startswith(magic)), None)


class _Content(io.RawIOBase):
    """The content of a compressed file. Errors end it; what went wrong becomes a sentence."""

    def __init__(self, packed: BinaryIO, make: Callable[[], _Decompressor], name: str, problems: list[str]) -> None:
        self._packed = packed
        self._make = make
        self._frame: _Decompressor | None = make()  # None: at the end
        self._name = name
        self._problems = problems
        self._waiting = b""  # content that was asked for in smaller pieces
        self._taken = 0  # bytes of the packed file
        self._given = 0  # bytes of content

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        while len(self._waiting) < min(len(buffer), _LEAST) and self._frame is not None:
            self._waiting += self._more(self._frame, len(buffer))
        count = min(len(buffer), len(self._waiting))
        buffer[:count] = self._waiting[:count]
        self._waiting = self._waiting[count:]
        return count

    def close(self) -> None:
        if not self.closed:
            self._packed.close()
        super().close()

    def _more(self, frame: _Decompressor, wanted: int) -> bytes:
        try:
            fresh = b""
            if frame.eof:
                fresh = self._next_frame(frame)
                if self._frame is None or not fresh:
                    return b""
                frame = self._frame
            elif frame.needs_input:
                fresh = self._packed.read(_PIECE)
                self._taken += len(fresh)
                if not fresh:
                    return self._end(f"{self._name} is cut off: {_amount(self._given)} of its content could be read.")
            content = frame.decompress(fresh, min(max(wanted, 1), _MOST))
        except MissingDependency:
            raise
        except Exception as error:  # zlib.error, LZMAError, ZstdError, OSError, EOFError, ValueError: each library has its own
            return self._end(f"{self._name} is damaged ({_reason(error)}): {_amount(self._given)} of its content could be read.")
        self._given += len(content)
        if is_bomb(self._given, self._taken):
            self._problems.append(
                f"{self._name} unpacks to far more than a dump holds: only the first {_amount(self._given)} of its content were read."
            )
            self._frame = None
        return content

    def _next_frame(self, frame: _Decompressor) -> bytes:
        """The first bytes of what follows a frame: another one, or nothing (padding and rubbish are passed over, as gzip does)."""
        rest = frame.unused_data
        if len(rest) < 6:
            more = self._packed.read(_PIECE)
            self._taken += len(more)
            rest += more
        if decompressor_for(rest) is None:
            self._frame = None
            return b""
        self._frame = self._make()
        return rest

    def _end(self, problem: str) -> bytes:
        self._problems.append(problem)
        self._frame = None
        return b""


def unpacked(stream: BinaryIO, name: str, problems: list[str]) -> io.BufferedReader:
    """The stream itself, or the content of what it compresses.

    Args:
        stream: at its beginning. It is closed with the result.
        name: for the sentences.
        problems: takes a sentence when the content is cut off, damaged or too large; known once it has been read.

    Raises:
        MissingDependency: it is compressed with Zstandard, and the package is not installed.
    """
    reader = buffered(stream)
    for _ in range(_DEEPEST):
        make = decompressor_for(reader.peek(MAGIC_BYTES))
        if make is None:
            break
        reader = io.BufferedReader(_Content(reader, make, name, problems), 256 << 10)
    return reader


def buffered(stream: BinaryIO) -> io.BufferedReader:
    """With ``peek``."""
    return stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(stream, 256 << 10)  # type: ignore[arg-type]


def _amount(count: int) -> str:
    if count >= 1 << 20:
        return f"{count / (1 << 20):.0f} MiB"
    return "nothing" if not count else f"{count} bytes"


def _reason(error: Exception) -> str:
    text = str(error).strip().rstrip(".")
    return text[:120] if text else type(error).__name__
