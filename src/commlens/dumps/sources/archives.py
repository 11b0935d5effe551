"""tar and zip files: their members as sources. Nothing is ever written to disk."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Iterator
from datetime import datetime
from typing import Any, BinaryIO, Final

from commlens.dumps.sources.compression import MAGIC_BYTES, RATIO_MAX, UNSUSPICIOUS
from commlens.dumps.sources.source import READ_MAX, FilePart, Held, Source, printable, read_up_to

MEMBERS_MAX: Final = 1_000_000
_NAMED_MAX: Final = 10
_ENDINGS: Final = (".tar", ".tgz", ".tar.gz", ".tar.zst", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tzst", ".zip")
_TAR_ERRORS: Final = (tarfile.TarError, OSError, ValueError, EOFError, OverflowError)
_ZIP_ERRORS: Final = (zipfile.BadZipFile, OSError, ValueError, EOFError, RuntimeError, NotImplementedError, zipfile.zlib.error)  # type: ignore[attr-defined]


def named_like_archive(name: str) -> bool:
    """Whether the name alone says so: for stores where looking into every file would cost a request."""
    return name.lower().endswith(_ENDINGS)


def kind_of(head: bytes) -> str | None:
    """``"tar"`` or ``"zip"``, from the first 264 bytes of the (decompressed) content."""
    if head[257:262] == b"ustar":
        return "tar"
    return "zip" if head.startswith((b"PK\x03\x04", b"PK\x05\x06")) else None


def members(source: Source, problems: list[str]) -> Iterator[Source] | None:
    """The members of an archive, or None when the source is none.

    Members of a tar file that is not compressed say where they lie; others hold their bytes, so take one after the other.

    Raises:
        FormatError: the file cannot be opened.
        MissingDependency: a package is not installed.
    """
    if source.look() and source.beginning and kind_of(source.beginning) is None:
        return None  # neither compressed nor an archive, as most files are: not opened again
    stream = source.open()
    try:
        head = stream.peek(MAGIC_BYTES)
        kind = kind_of(head)
    except OSError:
        kind = None
    if kind is None:
        stream.close()
        source.problems.clear()  # they come again when it is read
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
                    archive.members = []  # type: ignore[attr-defined] # it would keep them all
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
        problems += [*source.problems, *_few(skipped, source.name)]


def _zip(source: Source, stream: BinaryIO, problems: list[str]) -> Iterator[Source]:
    with stream:
        plain = source.path is not None and isinstance(getattr(stream, "raw", None), io.FileIO)
        try:
            # A zip file's list of members is at its end.
            file = stream if plain else io.BytesIO(read_up_to(stream, READ_MAX))
            archive = zipfile.ZipFile(file)
            listed = archive.infolist()
        except _ZIP_ERRORS as error:
            problems.append(f"{source.name} is a zip file that is cut off or damaged ({error}), and is left out.")
            return
        with archive:
            if any(info.filename.endswith("/data.pkl") for info in listed):
                problems.append(f"{source.name} is a file of torch.save and no dump, and is left out.")
                return
            if len(listed) > MEMBERS_MAX:
                problems.append(f"{source.name} has more than {MEMBERS_MAX} members: the others were left out.")
            allowed = max(UNSUSPICIOUS, RATIO_MAX * source.size)  # zip bombs let many members share their bytes
            for info in listed[:MEMBERS_MAX]:
                if info.is_dir() or not info.file_size:
                    continue
                name = f"{source.name}!{printable(info.filename)}"
                if allowed <= 0:
                    problems.append(f"{source.name} unpacks to far more than dumps hold: {name} and what follows it were left out.")
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
    """As much of a member as there is, as it is stored there."""
    limit = min(limit, READ_MAX)
    pieces: list[bytes] = []
    count = 0
    with stream:
        try:
            while count <= limit and (piece := stream.read1(16 << 10)):  # what lies before an error is lost with its piece
                pieces.append(piece)
                count += len(piece)
        except _TAR_ERRORS + _ZIP_ERRORS:
            pass  # it is shorter than it should be, then
    if count > limit:
        problems.append(f"{name} is too large: only its first {limit >> 20} MiB were read.")
    elif count < size:
        problems.append(f"{name} is cut off or damaged: {count} of {size} bytes could be read.")
    return b"".join(pieces)[:limit]


def _few(sentences: list[str], name: str) -> list[str]:
    more = len(sentences) - _NAMED_MAX
    return sentences[:_NAMED_MAX] + ([f"{more} more members of {name} are not regular files."] if more > 0 else [])


def _zip_time(info: zipfile.ZipInfo) -> int:
    try:
        return int(datetime(*info.date_time).timestamp() * 1e9)
    except (ValueError, OverflowError, OSError):
        return 0
