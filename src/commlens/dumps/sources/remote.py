"""Object stores and everything else that has a URL, through fsspec and its own extras (``s3fs``, ``gcsfs``, ...)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any, BinaryIO, Final

from commlens.dumps.sources.source import READ_MAX, Held, Remote, Source, printable, read_up_to
from commlens.errors import CommandError, FormatError, MissingDependency

_URL: Final = re.compile(r"[a-z][a-z0-9+.-]*(::|://)", re.IGNORECASE)
_IN_PROCESS: Final = ("memory",)  # stores that another process cannot reach


def is_url(text: str) -> bool:
    """Whether it is for fsspec: ``s3://...``, ``memory://...``, ``simplecache::s3://...``. A file of that name comes first."""
    return bool(_URL.match(text)) and not os.path.lexists(text)


def remote_sources(url: str, problems: list[str], prefix: str, files_max: int) -> Iterator[Source]:
    """The file that a URL names, or all files under it.

    Raises:
        CommandError: there is nothing of that name, or the store refuses.
        MissingDependency: fsspec, or what it needs for this protocol, is not installed.
    """
    system, path = _filesystem(url)
    try:
        if system.isfile(path):
            found = {path: system.info(path)}
        else:
            found = {name: about for name, about in system.find(path, detail=True).items() if name.rsplit("/", 1)[-1].startswith(prefix)}
    except Exception as error:  # whatever the store's own client raises
        raise CommandError(f"{printable(url)} cannot be read ({_said(error)}).") from error
    if not found:
        raise CommandError(f"There is no file at {printable(url)}" + (f" whose name begins with {prefix!r}." if prefix else "."))
    if len(found) > files_max:
        problems.append(f"{printable(url)} holds more than {files_max} files: the others were left out.")
    for name, about in sorted(found.items())[:files_max]:
        if name.rsplit("/", 1)[-1].startswith("."):
            continue
        full = system.unstrip_protocol(name)
        source = Source(printable(full), Remote(full), int(about.get("size") or -1), _moment(about))
        if url.startswith(_IN_PROCESS):
            source.place = Held(_content(source, problems))
        if source.size != 0:
            yield source


def open_remote(url: str, name: str) -> BinaryIO:
    """A stream of the file's bytes as they are stored.

    Raises:
        FormatError: the store refuses.
        MissingDependency: fsspec, or what it needs for this protocol, is not installed.
    """
    system, path = _filesystem(url)
    try:
        stream: BinaryIO = system.open(path, "rb")
    except Exception as error:  # whatever the store's own client raises
        raise FormatError(f"{name} could not be opened: {_said(error)}.") from error
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
        raise MissingDependency(f"Reading {printable(url)} needs the package fsspec ({error}): pip install 'commlens[fsspec]'") from None
    try:
        system, path = url_to_fs(url)
    except ImportError as error:
        raise MissingDependency(f"{printable(url)} cannot be read: {_said(error)}.") from None
    except Exception as error:  # whatever the store's own client raises
        raise CommandError(f"{printable(url)} cannot be read ({_said(error)}).") from error
    return system, path


def _moment(about: dict[str, Any]) -> int:
    """The file's date: each store has its own name for it."""
    for key in ("mtime", "LastModified", "last_modified", "updated", "created"):
        value = about.get(key)
        if isinstance(value, (int, float)):
            return int(value * 1e9)
        if isinstance(value, datetime):
            return int(value.timestamp() * 1e9)
    return 0


def _said(error: Exception) -> str:
    text = printable(" ".join(str(error).split())).rstrip(".")
    return text[:200] if text else type(error).__name__
