"""One file from any place: a picklable reference that another process can read."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final, Protocol, TypeVar

from commlens.blackbox.reader import open_regular, reason
from commlens.dumps.sources.compression import amount, decompressor_for, unpacked
from commlens.errors import FormatError

# most bytes that Source.read returns; a ring buffer of 2000 entries takes 0.3 to 1 million
READ_MAX: Final = 1 << 30
# most bytes of one member of a compressed archive, which is held in memory
HELD_MAX: Final = 256 << 20

_Read = TypeVar("_Read")
_FIRST: Final = 4096  # bytes of the first read: enough to detect the kind of most files


class SourcePlace(Protocol):
    """Where a source's bytes are. Places are plain data, so that a source can be pickled."""

    def open(self, name: str, problems: list[str]) -> BinaryIO:
        """Open the stored bytes.

        Raises:
            FormatError: the place cannot be opened, or is not a regular file.
        """
        ...


@dataclass(frozen=True, slots=True)
class FilePart:
    """A local file, or a member of an uncompressed tar file."""

    path: str
    offset: int = 0
    length: int = -1  # to the end

    def open(self, name: str, problems: list[str]) -> BinaryIO:
        """Open the stored bytes."""
        file = os.fdopen(open_regular(Path(self.path), name), "rb", buffering=0)
        if self.length < 0:
            return file
        return _SourcePart(file, self.offset, self.length, name, problems)  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes held by the source itself: a member of a compressed archive, or a file that only this
    process can reach.
    """

    content: bytes = field(repr=False)

    def open(self, name: str, problems: list[str]) -> BinaryIO:
        """Open the bytes."""
        return io.BytesIO(self.content)


@dataclass(slots=True)
class Source:
    """A reference to one file that may be a rank's dump. It can be pickled, and holds the file's
    bytes only if it must.

    Reading raises FormatError if the file cannot be opened or read, and MissingDependency if it
    needs a package that is not installed.
    """

    name: str  # printable path or URL, with ``!member`` in an archive
    place: SourcePlace
    size: int = -1  # stored bytes; -1 if unknown
    modified_ns: int = 0  # Unix ns; 0 if unknown
    # sentences about unreadable parts; filled while reading
    problems: list[str] = field(default_factory=list)
    # of an uncompressed file, cached by peek_stored
    beginning: bytes = field(default=b"", repr=False, compare=False)

    @property
    def path(self) -> Path | None:
        """The path of a whole local file, compressed or not; None for an archive member or a remote
        file.
        """
        return (
            Path(self.place.path)
            if isinstance(self.place, FilePart) and self.place.length < 0
            else None
        )

    @property
    def plain_path(self) -> Path | None:
        """The path of an uncompressed local file, for readers that need a descriptor; else None."""
        path = self.path
        return path if path is not None and decompressor_for(self.peek_stored()) is None else None

    def peek_stored(self) -> bytes:
        """Return the first stored bytes of a local file and cache them if they are not compressed;
        b"" for other places.
        """
        if not isinstance(self.place, FilePart):
            return b""
        with self.place.open(self.name, []) as stream:
            stored = self._tried(lambda: stream.read(_FIRST))
        if decompressor_for(stored) is None:
            self.beginning = stored
        return stored

    def open(self) -> io.BufferedReader:
        """Open the decompressed content as a stream.

        The stream ends early, with a sentence in ``problems``, at truncation or damage, or if it
        looks like a decompression bomb.
        """
        return self._tried(
            lambda: unpacked(self.place.open(self.name, self.problems), self.name, self.problems)
        )

    def read(self, limit: int = READ_MAX) -> bytes:
        """Return the decompressed content; beyond ``limit`` bytes it is cut, and ``problems`` says
        so.
        """
        content = self._content(limit + 1)
        if len(content) > limit:
            self.problems.append(
                f"{self.name} is too large: only its first {amount(limit)} were read."
            )
        return content[:limit]

    def head(self, length: int = 4096) -> bytes:
        """Return the beginning of the decompressed content, adding no problems."""
        if len(self.beginning) >= min(length, self.size) > 0:
            return self.beginning[:length]
        before = len(self.problems)
        try:
            return self._content(length)
        finally:
            del self.problems[before:]

    def _content(self, length: int) -> bytes:
        # without the buffers that unpacking needs, most of the cost of classifying files
        if isinstance(self.place, FilePart):
            problems: list[str] = []
            with self.place.open(self.name, problems) as raw:
                first = self._tried(lambda: raw.read(min(length, _FIRST)))
                if decompressor_for(first) is None:
                    more = (
                        self._tried(lambda: read_up_to(raw, length - len(first)))
                        if len(first) == _FIRST
                        else b""
                    )
                    self.problems += problems
                    return first + more if more else first
        with self.open() as stream:
            return self._tried(lambda: read_up_to(stream, length))

    def _tried(self, read: Callable[[], _Read]) -> _Read:
        try:
            return read()
        except OSError as error:
            raise FormatError(f"{self.name} could not be read: {reason(error)}.") from error


def read_up_to(stream: BinaryIO, limit: int) -> bytes:
    """Return the same as ``stream.read(limit)`` without allocating ``limit`` bytes up front."""
    pieces: list[bytes] = []
    while limit > 0 and (piece := stream.read(min(limit, 4 << 20))):
        pieces.append(piece)
        limit -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class _SourcePart(io.RawIOBase):
    def __init__(
        self, file: io.FileIO, offset: int, length: int, name: str, problems: list[str]
    ) -> None:
        self._file = file
        self._length = self._left = length
        self._name = name
        self._problems = problems
        file.seek(offset)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        piece = self._file.read(min(len(buffer), self._left))
        buffer[: len(piece)] = piece
        self._left -= len(piece)
        if not piece and self._left and len(buffer):
            self._problems.append(
                f"{self._name} is cut off: {self._length - self._left} of {self._length} bytes are"
                " left."
            )
            self._left = 0
        return len(piece)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
