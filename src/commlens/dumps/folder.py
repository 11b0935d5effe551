"""A dump's folder: its files are written whole or not at all, links are never followed, and only
files made by commlens are deleted.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from commlens.blackbox import job_dirs, nccl_events, rank_claims
from commlens.blackbox.reader import reason
from commlens.boards import board, refusal_log
from commlens.dumps.detect import (
    BLACK_BOX,
    BOX_NAME,
    DUMP_MARKER,
    DUMP_SCHEMA,
    HEAD_BYTES,
    MARKER,
    OBSERVED,
    REPORT,
    REPORT_NAME,
    detect_kind,
)
from commlens.errors import DumpError

OBSERVED_NAME: Final = re.compile(r"observed-[A-Za-z0-9._-]+\.json")
_WHATEVER_IT_HOLDS: Final = re.compile(
    re.escape(refusal_log.NAME) + r"|\.nccl\.\d+\.new|\.(rank-?\d+\.\d+\.(newest\.)?box"
    r"|observed-[A-Za-z0-9._-]+\.json|commlens-dump\.json"
    r"|(index|verdict)[A-Za-z0-9._-]*\.(html|json))\.\d+\.tmp"
)
_KIND_BY_NAME: Final = (
    (BOX_NAME, BLACK_BOX),
    (OBSERVED_NAME, OBSERVED),
    (re.compile(re.escape(MARKER)), DUMP_MARKER),
    (REPORT_NAME, REPORT),
)
_BOARD_NAME: Final = re.compile(r"rank\d+\.\d+\.(board|making)")
_BEGINNINGS: Final = (
    (_BOARD_NAME, board.MAGIC.to_bytes(8, "little")),
    (rank_claims.NAME, b""),
    (re.compile(r"nccl\.\d+"), nccl_events.MAGIC),
    (re.compile(r"hazard\.[0-9a-f]{8}|\.lock|\.watcher(-2)?"), b""),
    (re.compile(re.escape(job_dirs.TOLD) + ".*"), b"rank "),
    (re.compile(re.escape(job_dirs.NUMBERS) + ".*"), job_dirs.NUMBERS_HEAD),
)
"""Names of files beside the boxes of a live job, and how these begin; empty: they hold nothing."""


@contextlib.contextmanager
def folder_to_fill(target: Path, mode: int) -> Iterator[tuple[int, bool, bool]]:
    """Yield the folder's descriptor, whether it was just created, and whether commlens may mark it.

    A folder that exists keeps its mode.

    A folder with other programs' files takes the dump but is never marked, so it is never pruned.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            target.mkdir(0o700)
            created = True
        except FileExistsError:
            created = False
        folder = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        if created:
            os.fchmod(folder, mode | (mode & 0o444) >> 2)
    except (OSError, ValueError) as error:
        raise DumpError(
            f"No dump could be written to {target}: {reason(error)}. Choose another folder with the"
            " setting dump_dir."
        ) from error
    try:
        yield folder, created, created or not names_in(folder) or read_marker(folder) is not None
    finally:
        os.close(folder)


def write(folder: int, name: str, content: bytes, mode: int) -> None:
    """Write a file whole or not at all."""
    # another node may write the file, with the same pid
    temporary = f".{name}.{int.from_bytes(os.urandom(6), 'little')}.tmp"
    descriptor = os.open(
        temporary,
        os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
        0o600,
        dir_fd=folder,
    )
    try:
        try:
            os.fchmod(descriptor, mode)  # not narrowed by the umask
            view = memoryview(content)
            while view:
                view = view[os.write(descriptor, view) :]
        finally:
            os.close(descriptor)  # some file systems report a full disk only here
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


@contextlib.contextmanager
def opened_folder(path: Path) -> Iterator[int]:
    """Yield the descriptor of a folder that exists. Raises OSError, also if it is a link."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield folder
    finally:
        os.close(folder)


def names_in(folder: int) -> list[str]:
    """Return the names of all files in a folder."""
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def exists(folder: int, name: str) -> bool:
    """Return whether a folder has a file with this name."""
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return False
    return True


def remove(folder: int, name: str) -> None:
    """Delete a file, if it exists and can be deleted."""
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder)


def peek(folder: int, name: str, length: int) -> bytes | None:
    """Return the beginning of a regular file in a folder; None for anything else."""
    try:
        if not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            return None
        descriptor = os.open(
            name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder
        )
    except OSError:
        return None
    try:
        return os.pread(descriptor, length, 0)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def read_marker(folder: int) -> dict[str, Any] | None:
    """Return the content of the marker in a folder; None if commlens has not made the folder."""
    try:
        marker = msgspec.json.decode(peek(folder, MARKER, 4096) or b"")
    except (ValueError, RecursionError):
        return None
    return marker if isinstance(marker, dict) and marker.get("schema") == DUMP_SCHEMA else None


def discard(path: Path) -> None:
    """Delete commlens's files in a folder, the marker last, and the folder if it is then empty."""
    with contextlib.suppress(OSError), opened_folder(path) as folder:
        for name in sorted(names_in(folder), key=lambda name: name == MARKER):
            if _is_own(folder, name):
                remove(folder, name)
    with contextlib.suppress(OSError):
        if not path.is_symlink():
            path.rmdir()


def _is_own(folder: int, name: str) -> bool:
    """Return whether commlens has made a file, by its name and its beginning."""
    head = peek(folder, name, HEAD_BYTES)
    if head is None:
        return False
    kind = next((kind for pattern, kind in _KIND_BY_NAME if pattern.fullmatch(name)), None)
    # all zero: its process died creating it
    is_unfinished = not any(head) and (kind is BLACK_BOX or bool(_BOARD_NAME.fullmatch(name)))
    if kind is not None or is_unfinished:
        return is_unfinished or detect_kind(head) is kind
    return any(
        pattern.fullmatch(name) and (head.startswith(begin) if begin else not head)
        for pattern, begin in _BEGINNINGS
    ) or bool(_WHATEVER_IT_HOLDS.fullmatch(name))
