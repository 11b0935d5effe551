"""Object stores and all other URLs, read through fsspec and its extras (``s3fs``, ``gcsfs``,
...).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, BinaryIO, Final

from commlens.dumps.sources.source import READ_MAX, Held, Source, read_up_to
from commlens.errors import CommandError, FormatError, MissingDependency
from commlens.text import printable

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
        raise CommandError(f"{printable(url)} cannot be read ({_reason(error)}).") from error
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
            raise FormatError(f"{name} could not be opened: {_reason(error)}.") from error
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
        raise MissingDependency(f"{printable(url)} cannot be read: {_reason(error)}.") from None
    except Exception as error:  # each store's client raises its own
        raise CommandError(f"{printable(url)} cannot be read ({_reason(error)}).") from error
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


def _reason(error: Exception) -> str:
    text = printable(" ".join(str(error).split())).rstrip(".")
    return text[:200] if text else type(error).__name__
