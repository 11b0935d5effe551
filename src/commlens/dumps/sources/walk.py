"""Walk the paths that a user gives: files, folders, archives and URLs."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Final

from commlens.blackbox.reader import reason
from commlens.dumps.sources.archives import members, named_like_archive
from commlens.dumps.sources.compression import Excess, error_text
from commlens.dumps.sources.source import READ_MAX, FilePart, Held, Source, read_up_to
from commlens.errors import CommandError, FormatError, MissingDependency
from commlens.text import printable

FILES_MAX: Final = 1_000_000
_DEPTH_MAX: Final = 12  # folders within folders
_NAMED_MAX: Final = 10  # files per folder that are named in a problem; the rest is counted
_NOT_FILES: Final = frozenset({"/proc", "/sys"})  # kernel interfaces, not dumps


Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def name_paths(paths: Paths) -> tuple[str, ...]:
    """Return the paths that a user gave, each once and sorted."""
    several = [paths] if isinstance(paths, (str, os.PathLike)) else paths
    return tuple(sorted({os.fspath(path).removeprefix("file://") for path in several}))


def open_sources(
    paths: Paths,
    problems: list[str],
    *,
    prefix: str = "",
    empty: list[str] | None = None,
) -> Iterator[Source]:
    """Yield each file at the paths once, in an order that does not depend on the order of the
    paths.

    Release each source before taking the next: a member of a compressed archive holds its bytes.
    Empty files and dot files are skipped; ``empty`` is extended by the names of the former. A file
    is opened only to check whether it is an archive.
    """
    Excess.count = 0
    walk = _Walk(problems, prefix, [] if empty is None else empty)
    yield from walk.sources(name_paths(paths))


class _Walk:
    def __init__(self, problems: list[str], prefix: str, empty: list[str]) -> None:
        self.problems = problems
        self.prefix = prefix
        self.empty = empty
        # (device, inode): a file may be given twice, by a link or with its folder
        self.seen: set[tuple[int, int]] = set()
        self.count = 0

    def sources(self, given: tuple[str, ...]) -> Iterator[Source]:
        roots = [(text, _stat(text)) for text in given if not is_url(text)]
        for text, status in roots:
            if status is None:
                self.problems.append(f"{printable(text)} could not be opened: permission denied.")
            elif stat.S_ISDIR(status.st_mode):
                yield from self._folder(text, 0)
            elif stat.S_ISREG(status.st_mode):
                yield from self._file(text, status)
            else:
                self.problems.append(
                    f"{printable(text)} is {_file_type(status.st_mode)} and is left out."
                )
        for text in given:
            if is_url(text):
                for source in remote_sources(text, self.problems, self.prefix, FILES_MAX):
                    may_be_archive = named_like_archive(source.name) or isinstance(
                        source.place, Held
                    )
                    yield from self._unpack(source) if may_be_archive else [source]

    def _folder(self, folder: str, depth: int) -> Iterator[Source]:
        skipped: list[str] = []
        try:
            with os.scandir(folder) as scan:
                entries = sorted(scan, key=lambda entry: entry.name)
        except (OSError, ValueError) as error:
            self.problems.append(f"{printable(folder)} could not be listed: {reason(error)}.")
            return
        for entry in entries:
            if self.count > FILES_MAX:
                break
            try:
                if entry.is_dir(follow_symlinks=False):
                    if depth == _DEPTH_MAX:
                        skipped.append(
                            f"{printable(entry.path)} is {_DEPTH_MAX} folders deep and was not"
                            " searched."
                        )
                    elif os.path.realpath(
                        entry.path
                    ) not in _NOT_FILES and not entry.name.startswith("."):
                        yield from self._folder(entry.path, depth + 1)
                elif entry.name.startswith(".") or not entry.name.startswith(self.prefix):
                    continue
                elif not entry.is_file():
                    skipped.append(
                        f"{printable(entry.path)} is {_entry_type(entry)} and is left out."
                    )
                else:
                    yield from self._file(entry.path, entry.stat())
            except OSError as error:
                skipped.append(f"{printable(entry.path)} could not be opened: {reason(error)}.")
        self.problems += skipped[:_NAMED_MAX]
        if len(skipped) > _NAMED_MAX:
            self.problems.append(
                f"{len(skipped) - _NAMED_MAX} more files in {printable(folder)} could not be read."
            )

    def _file(self, path: str, status: os.stat_result) -> Iterator[Source]:
        identity = (status.st_dev, status.st_ino)
        if identity in self.seen:
            return
        self.seen.add(identity)
        self.count += 1
        if self.count > FILES_MAX:
            if self.count == FILES_MAX + 1:
                self.problems.append(
                    f"There are more than {FILES_MAX} files here: the others were left out."
                )
            return
        if not status.st_size:
            self.problems.append(f"{printable(path)} is empty.")
            self.empty.append(printable(path))
            return
        yield from self._unpack(
            Source(printable(path), FilePart(path), status.st_size, status.st_mtime_ns)
        )

    def _unpack(self, source: Source) -> Iterator[Source]:
        """Yield the source or, for an archive, its members."""
        try:
            inner = members(source, self.problems)
        except (FormatError, MissingDependency) as error:
            self.problems.append(str(error))
            return
        if inner is None:
            yield source
            return
        for member in inner:
            name = member.name.rsplit("!", 1)[-1].rsplit("/", 1)[-1]
            if name.startswith(self.prefix) and not name.startswith("."):
                yield member


def _stat(path: str) -> os.stat_result | None:
    """Return the status of a path; None without permission."""
    try:
        return Path(path).stat()
    except PermissionError:
        return None
    except (OSError, ValueError) as error:
        raise CommandError(
            f"{printable(path)} cannot be read ({reason(error)}). Give dump folders, files,"
            " archives or URLs of them."
        ) from error


def _entry_type(entry: os.DirEntry[str]) -> str:
    if entry.is_dir():
        return "a link to a folder"
    return _file_type(entry.stat().st_mode) if Path(entry.path).exists() else "a link to nothing"


def _file_type(mode: int) -> str:
    types = (
        (stat.S_ISFIFO, "a named pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
    )
    return next((text for test, text in types if test(mode)), "not a regular file")


# --- object stores and all other URLs, read through fsspec and its extras (s3fs, gcsfs, ...)

_URL: Final = re.compile(r"[a-z][a-z0-9+.-]*(::|://)", re.IGNORECASE)
_IN_PROCESS: Final = ("memory",)  # stores that another process cannot reach


def is_url(text: str) -> bool:
    """Return whether fsspec should open ``text`` (``s3://...``, ``simplecache::s3://...``). An
    existing file of that name wins.
    """
    return bool(_URL.match(text)) and not os.path.lexists(text)


def remote_sources(url: str, problems: list[str], prefix: str, files_max: int) -> Iterator[Source]:
    """Yield the file at a URL, or all files below it.

    Raises:
        CommandError: nothing is at the URL, or the store refuses.
        MissingDependency: fsspec or its package for this protocol is not installed.
    """
    system, path = _filesystem(url)
    try:
        if system.isfile(path):
            found = {path: system.info(path)}
        else:
            found = {
                name: about
                for name, about in system.find(path, detail=True).items()
                if name.rsplit("/", 1)[-1].startswith(prefix)
            }
    except Exception as error:  # each store's client raises its own
        raise CommandError(f"{printable(url)} cannot be read ({error_text(error)}).") from error
    if not found:
        raise CommandError(
            f"There is no file at {printable(url)}"
            + (f" whose name begins with {prefix!r}." if prefix else ".")
        )
    if len(found) > files_max:
        problems.append(
            f"{printable(url)} holds more than {files_max} files: the others were left out."
        )
    for name, about in sorted(found.items())[:files_max]:
        if name.rsplit("/", 1)[-1].startswith("."):
            continue
        full = system.unstrip_protocol(name)
        source = Source(
            printable(full), Remote(full), int(about.get("size") or -1), _modified_ns(about)
        )
        if url.startswith(_IN_PROCESS):
            source.place = Held(_content(source, problems))
        if source.size != 0:
            yield source


@dataclass(frozen=True, slots=True)
class Remote:
    """A file of an object store, opened by the process that reads it."""

    url: str

    def open(self, name: str, problems: list[str]) -> BinaryIO:
        """Open the stored bytes."""
        system, path = _filesystem(self.url)
        try:
            stream: BinaryIO = system.open(path, "rb")
        except Exception as error:  # each store's client raises its own
            raise FormatError(f"{name} could not be opened: {error_text(error)}.") from error
        return stream


def _content(source: Source, problems: list[str]) -> bytes:
    try:
        with source.place.open(source.name, []) as stream:
            return read_up_to(stream, READ_MAX)
    except FormatError as error:
        problems.append(str(error))
        return b""


def _filesystem(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise MissingDependency(
            f"Reading {printable(url)} needs the package fsspec ({error}): pip install fsspec"
        ) from None
    try:
        system, path = url_to_fs(url)
    except ImportError as error:
        raise MissingDependency(f"{printable(url)} cannot be read: {error_text(error)}.") from None
    except Exception as error:  # each store's client raises its own
        raise CommandError(f"{printable(url)} cannot be read ({error_text(error)}).") from error
    return system, path


def _modified_ns(about: dict[str, Any]) -> int:
    """Return the modification time from a store's metadata; each store has its own key."""
    for key in ("mtime", "LastModified", "last_modified", "updated", "created"):
        value = about.get(key)
        if isinstance(value, (int, float)):
            return int(value * 1e9)
        if isinstance(value, datetime):
            return int(value.timestamp() * 1e9)
    return 0
