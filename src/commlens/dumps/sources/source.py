"""One file, wherever it lies: something that can be sent to another process and read there."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from commlens.blackbox.reader import open_regular, reason
from commlens.dumps.sources.compression import decompressor_for, unpacked
from commlens.errors import FormatError

LOOK_BYTES: Final = 4096
READ_MAX: Final = 1 << 30
"""The most bytes of content that :meth:`Source.read` gives; of a ring of 2000 entries there are 0.3 to 1 million."""


_FIRST: Final = 4096


@dataclass(frozen=True, slots=True)
class FilePart:
    """A local file, or a member of a tar file that is not compressed."""

    path: str
    offset: int = 0
    length: int = -1  # to the end

    def open(self, name: str, problems: list[str]) -> BinaryIO:
        """The bytes as they are stored.

        Raises:
            FormatError: it cannot be opened, or is no regular file.
        """
        file = os.fdopen(open_regular(Path(self.path), name), "rb", buffering=0)
        if self.length < 0:
            return file
        return _Part(file, self.offset, self.length, name, problems)  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes that travel with the source: a member of a compressed archive, or a file that only this process can reach."""

    content: bytes = field(repr=False)

    def open(self, name: str, problems: list[str]) -> BinaryIO:
        """The bytes."""
        return io.BytesIO(self.content)


@dataclass(frozen=True, slots=True)
class Remote:
    """A file of an object store, opened by fsspec wherever it is read."""

    url: str

    def open(self, name: str, problems: list[str]) -> BinaryIO:
        """The bytes as they are stored.

        Raises:
            FormatError: the store refused.
        """
        from commlens.dumps.sources.remote import open_remote

        return open_remote(self.url, name)


@dataclass(slots=True)
class Source:
    """One file that may hold what a rank left. It can be pickled: it says where the bytes are, and holds them only if it must.

    Attributes:
        name: what to call it: its path or URL, with ``!member`` in an archive. Printable.
        place: where the bytes are.
        size: as stored, in bytes; -1 when not known.
        modified_ns: Unix ns, 0 when not known.
        problems: sentences about what could not be read of it. Filled while it is read, so look at it afterwards.
    """

    name: str
    place: FilePart | Held | Remote
    size: int = -1
    modified_ns: int = 0
    problems: list[str] = field(default_factory=list)
    beginning: bytes = field(default=b"", repr=False, compare=False)  # the first bytes of a file that is not compressed, while at hand

    @property
    def path(self) -> Path | None:
        """The local file, where it is one of its own (compressed or not): for readers that want a descriptor."""
        return Path(self.place.path) if isinstance(self.place, FilePart) and self.place.length < 0 else None

    def look(self) -> bytes:
        """The first bytes as they are stored, kept in ``beginning`` where they are the content's. Only of local files.

        Raises:
            FormatError: it cannot be opened.
        """
        if not isinstance(self.place, FilePart):
            return b""
        with self.place.open(self.name, []) as stream:
            try:
                stored = stream.read(LOOK_BYTES)
            except OSError as error:
                raise FormatError(f"{self.name} could not be read: {reason(error)}.") from error
        if decompressor_for(stored) is None:
            self.beginning = stored
        return stored

    def open(self) -> io.BufferedReader:
        """The content, decompressed, as a stream from its beginning. It ends early, with a sentence in ``problems``, where it is
        cut off, damaged or larger than is sane.

        Raises:
            FormatError: it cannot be opened.
            MissingDependency: a package is not installed.
        """
        try:
            return unpacked(self.place.open(self.name, self.problems), self.name, self.problems)
        except OSError as error:
            raise FormatError(f"{self.name} could not be read: {reason(error)}.") from error

    def read(self, limit: int = READ_MAX) -> bytes:
        """The whole content, at most ``limit`` bytes of it; then ``problems`` says so.

        Raises:
            FormatError: it cannot be opened or read.
            MissingDependency: a package is not installed.
        """
        content = self._plain(limit + 1)
        if content is None:
            with self.open() as stream:
                try:
                    content = read_up_to(stream, limit + 1)
                except OSError as error:
                    raise FormatError(f"{self.name} could not be read: {reason(error)}.") from error
        if len(content) > limit:
            self.problems.append(f"{self.name} is too large: only its first {limit >> 20} MiB were read.")
            return content[:limit]
        return content

    def _plain(self, length: int) -> bytes | None:
        """The beginning of a local file that is not compressed, without the buffers that unpacking takes; else None.

        Of thousands of files this is most of what looking at them costs.
        """
        if not isinstance(self.place, FilePart):
            return None
        problems: list[str] = []
        with self.place.open(self.name, problems) as raw:
            try:
                first = raw.read(min(length, _FIRST))
                if decompressor_for(first) is not None:
                    return None
                content = first + read_up_to(raw, length - len(first)) if len(first) == _FIRST else first
            except OSError as error:
                raise FormatError(f"{self.name} could not be read: {reason(error)}.") from error
        self.problems += problems
        return content

    def head(self, length: int = 4096) -> bytes:
        """The beginning of the content, without complaint about the rest.

        Raises:
            FormatError: it cannot be opened.
            MissingDependency: a package is not installed.
        """
        if len(self.beginning) >= min(length, self.size) > 0:
            return self.beginning[:length]
        said = len(self.problems)
        content = self._plain(length)
        if content is not None:
            del self.problems[said:]
            return content
        with self.open() as stream:
            try:
                return stream.read(length)
            except OSError as error:
                raise FormatError(f"{self.name} could not be read: {reason(error)}.") from error
            finally:
                del self.problems[said:]


def read_up_to(stream: BinaryIO, limit: int) -> bytes:
    """What ``stream.read(limit)`` gives, without setting so much memory aside."""
    pieces: list[bytes] = []
    while limit > 0 and (piece := stream.read(min(limit, 4 << 20))):
        pieces.append(piece)
        limit -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class _Part(io.RawIOBase):
    """A range of a file."""

    def __init__(self, file: io.FileIO, offset: int, length: int, name: str, problems: list[str]) -> None:
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
            self._problems.append(f"{self._name} is cut off: {self._length - self._left} of {self._length} bytes are there.")
            self._left = 0
        return len(piece)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def printable(name: str) -> str:
    """A name that every terminal and every encoding can print: others' files may be called anything."""
    text = name.encode("utf-8", "backslashreplace").decode("utf-8")
    return text if text.isprintable() else "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
