"""Members of tar and zip files as sources. Nothing is written to disk."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Iterator
from datetime import datetime
from typing import Any, BinaryIO, Final

from commlens.dumps.sources.compression import MAGIC_BYTES, RATIO_MAX, UNSUSPICIOUS_BYTES
from commlens.dumps.sources.source import READ_MAX, FilePart, Held, Source, printable, read_up_to

MEMBERS_MAX: Final = 1_000_000
_NAMED_MAX: Final = 10
_ENDINGS: Final = (".tar", ".tgz", ".tar.gz", ".tar.zst", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tzst", ".zip")
_TAR_ERRORS: Final = (tarfile.TarError, OSError, ValueError, EOFError, OverflowError)
_ZIP_ERRORS: Final = (zipfile.BadZipFile, OSError, ValueError, EOFError, RuntimeError, NotImplementedError, zipfile.zlib.error)  # type: ignore[attr-defined]


def named_like_archive(name: str) -> bool:
    """Return whether the file name is an archive's: for object stores, where opening each file costs a request."""
    return name.lower().endswith(_ENDINGS)


def archive_kind(head: bytes) -> str | None:
    """Return ``"tar"`` or ``"zip"`` from the first 264 bytes of the decompressed content, else None."""
    if head[257:262] == b"ustar":
        return "tar"
    return "zip" if head.startswith((b"PK\x03\x04", b"PK\x05\x06")) else None


def members(source: Source, problems: list[str]) -> Iterator[Source] | None:
    """Return the members of an archive, or None if the source is not one.

    A member of an uncompressed tar file is a reference; any other member holds its bytes, so release each before the next.

    Raises:
        FormatError: the file cannot be opened.
        MissingDependency: the file needs a package that is not installed.
    """
    if source.peek_stored() and source.beginning and archive_kind(source.beginning) is None:
        return None  # an uncompressed file, like most: not opened again
    stream = source.open()
    try:
        head = stream.peek(MAGIC_BYTES)
        kind = archive_kind(head)
    except OSError:
        kind = None
    if kind is None:
        stream.close()
        source.problems.clear()  # reading the source reports them again
        return None
    return _tar(source, stream, problems) if kind == "tar" else _zip(source, stream, problems)


def _tar(source: Source, stream: BinaryIO, problems: list[str]) -> Iterator[Source]:
    path = source.path
    with stream:
        plain = path is not None and isinstance(getattr(stream, "raw", None), io.FileIO)
        skipped: list[str] = []
        count = 0
        try:
            with tarfile.open(fileobj=stream, mode="r:" if plain else "r|") as archive:
                for member in archive:
                    archive.members = []  # type: ignore[attr-defined] # tarfile would keep them all
                    count += 1
                    if count > MEMBERS_MAX:
                        problems.append(f"{source.name} has more than {MEMBERS_MAX} members: the others were left out.")
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
                        yield Source(name, FilePart(str(path), member.offset_data, member.size), member.size, modified_ns)
                        continue
                    content = _content(archive.extractfile(member), member.size, name, problems)
                    if content:
                        yield Source(name, Held(content), len(content), modified_ns)
        except _TAR_ERRORS as error:
            if not source.problems:
                problems.append(f"{source.name} is cut off or damaged: its first {count} members could be read ({error}).")
        problems += [*source.problems, *_first_few(skipped, source.name)]


def _zip(source: Source, stream: BinaryIO, problems: list[str]) -> Iterator[Source]:
    with stream:
        plain = source.path is not None and isinstance(getattr(stream, "raw", None), io.FileIO)
        try:
            # A zip file's list of members is at its end.
            file = stream if plain else io.BytesIO(read_up_to(stream, READ_MAX))
            archive = zipfile.ZipFile(file)
            listed = archive.infolist()
        except _ZIP_ERRORS as error:
            problems.append(f"{source.name} is a truncated or damaged zip file ({error}) and is left out.")
            return
        with archive:
            if any(info.filename.endswith("/data.pkl") for info in listed):
                problems.append(f"{source.name} was written by torch.save, is not a dump, and is left out.")
                return
            if len(listed) > MEMBERS_MAX:
                problems.append(f"{source.name} has more than {MEMBERS_MAX} members: the others were left out.")
            allowed = max(UNSUSPICIOUS_BYTES, RATIO_MAX * source.size)  # in a zip bomb, many members share their bytes
            for info in listed[:MEMBERS_MAX]:
                if info.is_dir() or not info.file_size:
                    continue
                name = f"{source.name}!{printable(info.filename)}"
                if allowed <= 0:
                    problems.append(f"{source.name} unpacks to far more than dumps hold: {name} and all members after it were left out.")
                    break
                try:
                    content = _content(archive.open(info), info.file_size, name, problems, allowed)
                except _ZIP_ERRORS as error:
                    problems.append(f"{name} could not be read ({error}).")
                    continue
                allowed -= len(content)
                if content:
                    yield Source(name, Held(content), info.compress_size, _zip_time(info))
        problems += source.problems


def _content(stream: Any, size: int, name: str, problems: list[str], limit: int = READ_MAX) -> bytes:
    """Return the bytes of a member, as many as can be read."""
    limit = min(limit, READ_MAX)
    pieces: list[bytes] = []
    count = 0
    with stream:
        try:
            while count <= limit and (piece := stream.read1(16 << 10)):  # an error loses the piece it is in
                pieces.append(piece)
                count += len(piece)
        except _TAR_ERRORS + _ZIP_ERRORS:
            pass  # reported below: the member is too short
    if count > limit:
        problems.append(f"{name} is too large: only its first {limit >> 20} MiB were read.")
    elif count < size:
        problems.append(f"{name} is cut off or damaged: {count} of {size} bytes could be read.")
    return b"".join(pieces)[:limit]


def _first_few(sentences: list[str], name: str) -> list[str]:
    more = len(sentences) - _NAMED_MAX
    return sentences[:_NAMED_MAX] + ([f"{more} more members of {name} are not regular files."] if more > 0 else [])


def _zip_time(info: zipfile.ZipInfo) -> int:
    try:
        return int(datetime(*info.date_time).timestamp() * 1e9)
    except (ValueError, OverflowError, OSError):
        return 0
