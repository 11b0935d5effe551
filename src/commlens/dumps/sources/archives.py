"""Members of tar and zip files as sources. Nothing is written to disk."""

from __future__ import annotations

import io
import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from datetime import datetime
from typing import Any, BinaryIO, Final

from commlens.dumps.sources.compression import (
    MAGIC_BYTES,
    UNPACKED_MAX,
    amount,
    error_text,
    unpacking_limit,
)
from commlens.dumps.sources.source import HELD_MAX, READ_MAX, FilePart, Held, Source, read_up_to
from commlens.text import printable

MEMBERS_MAX: Final = 1_000_000
_NAMED_MAX: Final = 10
_ENDINGS: Final = (
    ".tar",
    ".tgz",
    ".tar.gz",
    ".tar.zst",
    ".tar.bz2",
    ".tbz2",
    ".tar.xz",
    ".txz",
    ".tzst",
    ".zip",
)
_EXTENSION_MAX: Final = 1 << 20
"""Largest extension header of a tar file, in bytes. It holds names and times, and tarfile reads it
in one piece.
"""
_EXTENSIONS_MAX: Final = 100
"""Most extension headers of one member. tarfile reads each by a call within the call for the one
before.
"""
_EXTENSIONS: Final = (
    *tarfile.GNU_TYPES[:2],
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)
_ERRORS: Final = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    OSError,
    ValueError,
    EOFError,
    OverflowError,
    MemoryError,
    RuntimeError,
    struct.error,
    LookupError,
)
"""What damaged archives raise in Python's readers; RuntimeError includes RecursionError and
NotImplementedError.
"""


class Allowance:
    """The number of bytes that an archive's members may still unpack to, by its size; -1 if that is
    unknown.
    """

    def __init__(self, stored: int) -> None:
        self.limit = self.left = unpacking_limit(stored) if stored >= 0 else UNPACKED_MAX


def named_like_archive(name: str) -> bool:
    """Return whether the file name is an archive's: for object stores, where opening each file
    costs a request.
    """
    return name.lower().endswith(_ENDINGS)


def archive_kind(head: bytes) -> str | None:
    """Return ``"tar"`` or ``"zip"`` from the first 264 bytes of the decompressed content, else
    None.
    """
    if head[257:262] == b"ustar":
        return "tar"
    return "zip" if head.startswith((b"PK\x03\x04", b"PK\x05\x06")) else None


def members(source: Source, problems: list[str]) -> Iterator[Source] | None:
    """Return the members of an archive, or None if the source is not one.

    A member of an uncompressed tar file is a reference; any other member holds its bytes, so
    release each before the next.

    Raises:
        FormatError: the file cannot be opened.
        MissingDependency: the file needs a package that is not installed.
    """
    if source.peek_stored() and source.beginning and archive_kind(source.beginning) is None:
        return None  # an uncompressed file, like most: not opened again
    stream = source.open()
    try:
        kind = archive_kind(stream.peek(MAGIC_BYTES))
    except OSError:
        kind = None
    if kind is None:
        stream.close()
        source.problems.clear()  # reading the source reports them again
        return None
    return (_tar if kind == "tar" else _zip)(source, stream, problems, Allowance(source.size))


def _tar(
    source: Source, stream: BinaryIO, problems: list[str], allowance: Allowance
) -> Iterator[Source]:
    path = source.path
    with stream:
        plain = path is not None and isinstance(getattr(stream, "raw", None), io.FileIO)
        skipped: list[str] = []
        count = 0
        try:
            with tarfile.open(
                fileobj=stream, mode="r:" if plain else "r|", tarinfo=_TarInfo
            ) as archive:
                for member in archive:
                    archive.members = []  # type: ignore[attr-defined] # tarfile would keep them all
                    count += 1
                    if count > MEMBERS_MAX:
                        problems.append(
                            f"{source.name} has more than {MEMBERS_MAX} members: the others were"
                            " left out."
                        )
                        break
                    name = f"{source.name}!{printable(member.name)}"
                    if not member.isfile():
                        if not member.isdir():
                            skipped.append(f"{name} is not a regular file and is left out.")
                        continue
                    if not member.size:
                        continue
                    modified_ns = max(0, int(member.mtime * 1e9))
                    if plain and not member.issparse():
                        yield Source(
                            name,
                            FilePart(str(path), member.offset_data, member.size),
                            member.size,
                            modified_ns,
                        )
                        continue
                    if allowance.left <= 0:
                        problems.append(_over_limit_note(source, name, allowance))
                        break
                    content = _content(
                        archive.extractfile(member), member.size, name, problems, allowance
                    )
                    if content:
                        yield Source(name, Held(content), len(content), modified_ns)
                        del content
        except _ERRORS as error:
            if not source.problems:
                problems.append(
                    f"{source.name} is cut off or damaged: its first {count} members could be read"
                    f" ({error_text(error)})."
                )
        problems += [*source.problems, *skipped[:_NAMED_MAX]]
        if (more := len(skipped) - _NAMED_MAX) > 0:
            problems.append(f"{more} more members of {source.name} are not regular files.")


def _zip(
    source: Source, stream: BinaryIO, problems: list[str], allowance: Allowance
) -> Iterator[Source]:
    with stream:
        plain = source.path is not None and isinstance(getattr(stream, "raw", None), io.FileIO)
        try:
            # A zip file's list of members is at its end.
            file = (
                stream
                if plain
                else io.BytesIO(read_up_to(stream, min(READ_MAX, max(allowance.left, 1))))
            )
            archive = zipfile.ZipFile(file)
            listed = archive.infolist()
        except _ERRORS as error:
            problems.append(
                f"{source.name} is a truncated or damaged zip file ({error_text(error)}) and is"
                " left out."
            )
            return
        with archive:
            if any(info.filename.endswith("/data.pkl") for info in listed):
                problems.append(
                    f"{source.name} was written by torch.save, is not a dump, and is left out."
                )
                return
            if len(listed) > MEMBERS_MAX:
                problems.append(
                    f"{source.name} has more than {MEMBERS_MAX} members: the others were left out."
                )
            for info in listed[:MEMBERS_MAX]:
                if info.is_dir() or not info.file_size:
                    continue
                name = f"{source.name}!{printable(info.filename)}"
                if allowance.left <= 0:  # in a zip bomb, many members share their bytes
                    problems.append(_over_limit_note(source, name, allowance))
                    break
                try:
                    content = _content(
                        archive.open(info), info.file_size, name, problems, allowance
                    )
                except _ERRORS as error:
                    problems.append(f"{name} could not be read ({error_text(error)}).")
                    continue
                if content:
                    yield Source(name, Held(content), info.compress_size, _zip_time(info))
                    del content
        problems += source.problems


class _TarInfo(tarfile.TarInfo):
    """A member whose extension headers are bounded: tarfile reads each at once, whatever size it
    claims, and recurses for the next.
    """

    def _proc_member(self, archive: tarfile.TarFile) -> Any:
        if self.size < 0:
            raise tarfile.ReadError(f"a header claims {self.size} bytes")
        if self.type not in _EXTENSIONS:
            archive.commlens_extensions = 0  # type: ignore[attr-defined]
            return super()._proc_member(archive)  # type: ignore[misc]
        before = getattr(archive, "commlens_extensions", 0)
        archive.commlens_extensions = before + 1  # type: ignore[attr-defined]
        if self.size > _EXTENSION_MAX:
            raise tarfile.ReadError(
                f"an extension header claims {self.size} bytes; at most {_EXTENSION_MAX} are read"
            )
        if before >= _EXTENSIONS_MAX:
            raise tarfile.ReadError(f"a member has more than {_EXTENSIONS_MAX} extension headers")
        return super()._proc_member(archive)  # type: ignore[misc]


def _content(stream: Any, size: int, name: str, problems: list[str], allowance: Allowance) -> bytes:
    """Return the bytes of a member, as many as can be read, and take them from the allowance."""
    limit = min(allowance.left, HELD_MAX)
    held = io.BytesIO()
    with stream:
        try:
            # an error loses the piece it is in
            while held.tell() <= limit and (piece := stream.read1(16 << 10)):
                held.write(piece)
        except _ERRORS:
            pass  # reported below: the member is too short
    count = held.tell()
    allowance.left -= count
    if count > limit:
        problems.append(
            f"{name} is too large: only its first {amount(limit)} were read. To read all of it,"
            " unpack the archive first."
        )
    elif count < size:
        problems.append(f"{name} is cut off or damaged: {count} of {size} bytes could be read.")
    held.truncate(limit)
    return held.getvalue()


def _over_limit_note(source: Source, name: str, allowance: Allowance) -> str:
    return (
        f"{source.name} unpacks to far more than dumps hold: {name} and all members after it were"
        f" left out (limit: {amount(allowance.limit)}, from the file's size). To read all of them,"
        " unpack the archive first."
    )


def _zip_time(info: zipfile.ZipInfo) -> int:
    try:
        return int(datetime(*info.date_time).timestamp() * 1e9)
    except (ValueError, OverflowError, OSError):
        return 0
