"""Read black boxes, live ones and copies in dumps, as docs/protocol.md describes.

The writer takes no lock and may be killed between any two instructions, and the file may come from
anywhere. So the reader checks everything before use, and damage costs only bounded time and memory.

Boxes are read with ``pread``, not mapped: truncating a mapped file kills its reader with SIGBUS,
and a checked copy cannot change between check and use. A poll copies 4 KiB, a whole box of 2000
records 2.2 MB.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

from commlens.blackbox import layout as L
from commlens.blackbox.copy import Parts, read_parts
from commlens.blackbox.header import SIZE_MAX, BoxStatus, Identity, read_identity, read_live
from commlens.blackbox.nccl_events import read_beside
from commlens.blackbox.packed import is_packed, pack, unpack
from commlens.blackbox.rank_log import BoxReader
from commlens.errors import FormatError
from commlens.model.collective import FrameKind, Stack
from commlens.model.frames import frame_kind, kind_prefixes
from commlens.model.nccl import NcclRecord
from commlens.model.ranklog import RankLog

__all__ = [
    "SIZE_MAX",
    "BoxStatus",
    "OpenBox",
    "open_regular",
    "read_box",
    "read_copy",
    "read_status",
    "reason",
]


def read_status(
    buffer: bytes | bytearray | memoryview, *, name: str = "the black box"
) -> BoxStatus:
    """Read the identity and live words in a box's header, its first 4096 bytes.

    Raises:
        FormatError: the file is not a black box of this version, or its header is damaged.
    """
    header = bytes(buffer[: L.HEADER_SIZE])
    return read_live(header, read_identity(header, name))


def read_box(
    source: Path | bytes, *, name: str | None = None, captured_ns: int | None = None
) -> RankLog:
    """Read a whole black box, live or copied, from its file or its content.

    A live box is read as it is now. A copy may be packed. Damaged and overwritten records are
    skipped and reported in ``RankLog.problems``.

    Raises:
        FormatError: the file cannot be opened, is not a black box of this version, or its header is
            damaged.
    """
    if isinstance(source, Path):
        with OpenBox(source, name=name) as box:
            if not is_packed(box.read(0, L.HEADER_SIZE)):
                return box.log(captured_ns=captured_ns)
            source, name = box.read(0, SIZE_MAX), box.name
    return read_copy(source, name=name or "the black box", captured_ns=captured_ns)[1]


def read_copy(
    content: bytes, *, name: str, captured_ns: int | None = None
) -> tuple[BoxStatus, RankLog]:
    """Read the content of a copied black box, packed or not.

    Raises:
        FormatError: it is not a black box of this version, or its header is damaged.
    """
    newest: int | None = None
    problems: list[str] = []
    nccl: NcclRecord | None = None
    if is_packed(content):
        parts, newest, problems, nccl = unpack(content, name)
    else:
        parts = read_parts(
            lambda offset, length: content[offset : offset + length], len(content), name, live=False
        )
    reader = BoxReader(parts, name, captured_ns)
    log = reader.log(newest)
    log.problems, log.nccl = [*problems, *log.problems], nccl
    return reader.status, log


class OpenBox:
    """A black box kept open for polling.

    The descriptor keeps a deleted or replaced box readable. A truncated box gives a
    :class:`FormatError` or a partial log. Only regular files are opened, so that a named pipe
    cannot block the reader.

    Raises:
        FormatError: the file cannot be opened.
    """

    def __init__(self, path: Path, *, name: str | None = None) -> None:
        self.path = path
        self.name = name or str(path)
        self._identity: Identity | None = None
        self._first_header = b""
        self._descriptor = -1
        self._descriptor = open_regular(path, self.name)

    def status(self) -> BoxStatus:
        """Read the identity and the live words: 4 KiB."""
        identity = self.identity
        return read_live(self._read_with_first_header(0, L.HEADER_SIZE), identity)

    @property
    def identity(self) -> Identity:
        """The checked static part of the header."""
        if self._identity is None:
            header = self.read(0, L.HEADER_SIZE)
            self._identity, self._first_header = read_identity(header, self.name), header
        return self._identity

    def _read_with_first_header(self, offset: int, length: int) -> bytes:
        """Read bytes. Take the constant fields of the header from the first time it was read, since
        they may have been damaged later.
        """
        found, first = self.read(offset, length), self._first_header
        if offset or not first or len(found) < L.HEADER_SIZE:
            return found
        return (
            first[: L.HEARTBEAT_MONO]
            + found[L.HEARTBEAT_MONO : L.ABOUT_AT]
            + first[L.ABOUT_AT :]
            + found[L.HEADER_SIZE :]
        )

    def log(
        self,
        *,
        captured_ns: int | None = None,
        newest: int | None = None,
        with_nccl: bool | None = None,
    ) -> RankLog:
        """Read the whole box, or only its ``newest`` records, which is much cheaper. NCCL's
        events are in a file of their own, which is read with all records, or if asked for.
        """
        reader = BoxReader(self._parts(newest), self.name, captured_ns)
        log = reader.log(newest)
        if not (newest is None if with_nccl is None else with_nccl):
            return log
        try:
            log.nccl = self._nccl(reader)
        except FormatError as error:
            log.problems = [*log.problems, str(error).removesuffix(".")]
        return log

    def stacks(self, positions: Iterable[int]) -> dict[int, Stack | None]:
        """Return the stacks at these positions of the side table; None for those overwritten."""
        reader = BoxReader(self._parts(1), self.name, None)
        return {position: reader.stacks[position] for position in positions}

    def packed(self, *, newest: int | None = None) -> bytes:
        """Return a packed copy for a dump, of the whole box or only its ``newest`` records. Torn
        records are read again.
        """
        parts = self._parts(newest)
        with contextlib.suppress(FormatError):
            return pack(parts, newest, self._nccl(BoxReader(parts, self.name, None)))
        return pack(parts, newest)

    def _nccl(self, reader: BoxReader) -> NcclRecord | None:
        """Return NCCL's events so far, if its plugin is on."""
        identity = self.identity
        return read_beside(self.path, identity.pid, identity.start_ticks, reader.unix_offset)

    def classifier(self) -> Callable[[str], FrameKind]:
        """Return a function from a source file to the owner of its code, by the process's folders.
        It is for stacks that are taken from outside the process.
        """
        prefixes = kind_prefixes(self.identity.about)
        return lambda file: frame_kind(file, prefixes)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> OpenBox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _parts(self, newest: int | None = None) -> Parts:
        try:
            size = os.fstat(self._descriptor).st_size
        except OSError as error:
            raise FormatError(f"{self.name} could not be read: {reason(error)}.") from error
        return read_parts(self._read_with_first_header, size, self.name, live=True, newest=newest)

    def read(self, offset: int, length: int) -> bytes:
        """Read bytes from the file, fewer at its end."""
        pieces: list[bytes] = []
        try:
            while length > 0:
                piece = os.pread(self._descriptor, length, offset)
                if not piece:
                    break
                pieces.append(piece)
                offset += len(piece)
                length -= len(piece)
        except OSError as error:
            raise FormatError(f"{self.name} could not be read: {reason(error)}.") from error
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def open_regular(path: Path, name: str) -> int:
    """Open a regular file for reading and return its descriptor.

    Raises:
        FormatError: the file does not exist, is not readable, or is not a regular file (and then is
            not opened).
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise FormatError(f"{name} is not a regular file.")
        # The file may be replaced by a named pipe between the two calls: O_NONBLOCK keeps the open
        # from blocking.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise FormatError(f"{name} could not be opened: {reason(error)}.") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FormatError(f"{name} is not a regular file.")
    return descriptor


def reason(error: BaseException) -> str:
    """Return an error's text as the end of a sentence: ``"permission denied"``."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text[:1].lower() + text[1:] if text else type(error).__name__
