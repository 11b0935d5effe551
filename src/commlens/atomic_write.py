"""Write files atomically: a reader sees the whole file or none."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from commlens.errors import OutputError


def write_whole(path: Path, content: bytes, *, overwrite: bool = True) -> None:
    """Write a temporary file beside the target and rename it. The target's folder is created if
    missing.

    Raises:
        OutputError: the file could not be written.
    """
    if path.is_dir():
        raise OutputError(f"{path} is a folder. Name a file in it.")
    if not overwrite and (path.exists() or path.is_symlink()):
        raise OutputError(f"File already exists, will not overwrite without --force: {path}")
    with replacing(path) as temporary:
        temporary.write_bytes(content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file that replaces ``path`` on success and is deleted on an error.

    A path that is not a regular file (``/dev/stdout``, a pipe) is yielded itself.
    """
    try:
        if path.exists() and not path.is_file():
            yield path
            return
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            temporary.replace(path.resolve() if path.is_symlink() else path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    except (OSError, ValueError) as error:
        raise OutputError(
            f"{path} could not be written: {getattr(error, 'strerror', None) or error}."
        ) from error
