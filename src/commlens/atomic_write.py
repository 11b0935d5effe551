"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from commlens.errors import OutputError


def write_whole(path: Path, content: bytes, *, overwrite: bool = True, hint: str = "without --force") -> None:
    """Write a file beside its place and move it there.

    Args:
        path: the file. Its folder is made when missing.
        content: what it shall hold.
        overwrite: whether a file that is there may be replaced.
        hint: how to say so, for the error: "will not overwrite <hint>".

    Raises:
        OutputError: it could not be written.
    """
    if path.is_dir():
        raise OutputError(f"{path} is a folder, and a file was to be written there. Name a file in it.")
    if not overwrite and (path.exists() or path.is_symlink()):
        raise OutputError(f"File already exists, will not overwrite {hint}: {path}")
    with replacing(path) as temporary:
        temporary.write_bytes(content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write piece by piece: it takes the place of ``path`` when all went well, and is deleted otherwise.

    What is no regular file (``/dev/stdout``, a pipe) is written itself.

    Raises:
        OutputError: it could not be written.
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
        raise OutputError(f"{path} could not be written: {getattr(error, 'strerror', None) or error}.") from error
