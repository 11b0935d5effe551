"""Decompress files as streams: bounded in memory, safe against bombs, and readable up to a
truncation.

The format is detected from the first bytes, never from the name.
"""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Callable
from typing import BinaryIO, Final, Protocol

from commlens.errors import MissingDependency
from commlens.text import printable

# bytes of a file's beginning that reveal whether it is compressed or an archive
MAGIC_BYTES: Final = 264
UNSUSPICIOUS_BYTES: Final = 256 << 20  # content of up to this size may have any compression ratio
RATIO_MAX: Final = 500
"""Highest ratio of larger content. Text logs reach 30, repetitive dumps 150; gzip's maximum is
1032.
"""
UNPACKED_MAX: Final = 16 << 30
"""Most bytes that one file is unpacked to; an archive's members are counted together."""
USUAL_RATIO: Final = 200
"""Content beyond this ratio counts as excess, which all files together may have :data:`EXCESS_MAX`
bytes of.
"""
# bounds the time for many small bombs: a gigabyte takes up to 10 s to unpack and parse
EXCESS_MAX: Final = 1 << 30
_PIECE: Final = 64 << 10
_CONTENT_MAX: Final = 1 << 20  # bytes of content between two checks of the ratio
_CONTENT_MIN: Final = 1024  # bytes of content per read, so that a peek shows enough


class _Decompressor(Protocol):
    """The interface shared by bz2's, lzma's and the two decompressors below: one frame."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    @property
    def needs_input(self) -> bool: ...
    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...


class _Gzip:
    """zlib's decompressor with bz2's interface."""

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
    """zstandard's decompressor. It cannot limit its output, and 4 bytes yield up to 128 KiB, so it
    is fed small pieces.
    """

    PIECE: Final = 512

    def __init__(self) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise MissingDependency(
                f"Reading a file compressed with Zstandard needs the package zstandard ({error}):"
                " pip install zstandard"
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
        data = self._left + data
        self._left = data[self.PIECE :]
        return self._one.decompress(data[: self.PIECE])


_KINDS: Final[dict[bytes, Callable[[], _Decompressor]]] = {
    b"\x1f\x8b\x08": _Gzip,
    b"\x28\xb5\x2f\xfd": _Zstandard,
    b"BZh": bz2.BZ2Decompressor,
    b"\xfd7zXZ\x00": lambda: lzma.LZMADecompressor(memlimit=256 << 20),
}


class Excess:
    """How many bytes beyond the usual ratio this process has unpacked since its last walk over
    files began.
    """

    count = 0


def unpacking_limit(stored: int) -> int:
    """Return how many bytes so many stored bytes may unpack to; more must be a decompression
    bomb.
    """
    return min(UNPACKED_MAX, max(UNSUSPICIOUS_BYTES, RATIO_MAX * stored))


def amount(count: int) -> str:
    """``"nothing"``, ``"512 bytes"``, ``"256 MiB"``."""
    if count >= 1 << 20:
        return f"{count / (1 << 20):.0f} MiB"
    return "nothing" if not count else f"{count} bytes"


def decompressor_for(head: bytes) -> Callable[[], _Decompressor] | None:
    """Return the decompressor for a file with this beginning; None if the file is not
    compressed.
    """
    return next((make for magic, make in _KINDS.items() if head.startswith(magic)), None)


class _Content(io.RawIOBase):
    """The content of a compressed file as a stream. An error ends the stream and is added to
    ``problems``.
    """

    def __init__(
        self, packed: BinaryIO, make: Callable[[], _Decompressor], name: str, problems: list[str]
    ) -> None:
        self._packed = packed
        self._make = make
        self._frame: _Decompressor | None = make()  # None at the end of the stream
        self._name = name
        self._problems = problems
        self._waiting = b""  # decompressed, not yet returned
        self._stored = 0  # compressed bytes read
        self._given = 0  # bytes of content

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        while len(self._waiting) < min(len(buffer), _CONTENT_MIN) and self._frame is not None:
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
                self._stored += len(fresh)
                if not fresh:
                    return self._end(
                        f"{self._name} is cut off: {amount(self._given)} of its content could be"
                        " read."
                    )
            content = frame.decompress(fresh, min(max(wanted, 1), _CONTENT_MAX))
        except MissingDependency:
            raise
        except Exception as error:
            # zlib.error, LZMAError, ZstdError, OSError, EOFError, ValueError: one per library
            return self._end(
                f"{self._name} is damaged ({error_text(error)}): {amount(self._given)} of its"
                " content could be read."
            )
        before = self._excess()
        self._given += len(content)
        grown = self._excess() - before
        Excess.count += grown
        if self._given > unpacking_limit(self._stored) or (grown and Excess.count > EXCESS_MAX):
            self._problems.append(
                f"{self._name} unpacks to far more than a dump holds: only the first"
                f" {amount(self._given)} of its content were read (limit: {RATIO_MAX} times the"
                f" file's size, {amount(UNPACKED_MAX)}, and for all files together"
                f" {amount(EXCESS_MAX)} beyond {USUAL_RATIO} times their size). To read all of it,"
                " unpack it first."
            )
            self._frame = None
        return content

    def _excess(self) -> int:
        return max(0, self._given - USUAL_RATIO * self._stored)

    def _next_frame(self, frame: _Decompressor) -> bytes:
        """Return the first bytes of the next frame; b"" before padding or garbage."""
        rest = frame.unused_data
        if len(rest) < 6:
            more = self._packed.read(_PIECE)
            self._stored += len(more)
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
    """Return a stream of the decompressed content; the stream itself if it is not compressed.
    Closing the result closes it.

    ``problems`` is extended while reading, if the content is cut off, damaged or too large.

    Raises:
        MissingDependency: the stream is compressed with Zstandard and the package is not installed.
    """
    reader = buffered(stream)
    make = decompressor_for(reader.peek(MAGIC_BYTES))
    if make is None:
        return reader
    return io.BufferedReader(_Content(reader, make, name, problems), 256 << 10)


def buffered(stream: BinaryIO) -> io.BufferedReader:
    """Return the stream with a ``peek`` method."""
    return stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(stream, 256 << 10)  # type: ignore[arg-type]


def error_text(error: BaseException) -> str:
    """Return the text of a library's error, for the end of a sentence in brackets."""
    if isinstance(error, MemoryError):
        return "it claims more memory than there is"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    text = printable(" ".join(str(error).split())).rstrip(".")
    return text[:200] if text else type(error).__name__
