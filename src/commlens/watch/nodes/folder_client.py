"""A shared folder as the meeting place of nodes that have no store in common: one small file for
each key.

It offers the calls of :class:`~commlens.watch.nodes.store_client.StoreClient`. A file appears whole
or not at all.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import time
from collections.abc import Sequence
from pathlib import Path

from commlens.watch.nodes.store_client import VALUE_MAX

_NAME = re.compile(r"commlens-\d+[a-z0-9.-]*(\.\d+\.tmp)?")
_COUNT_MAX = 100_000
_PAUSE_S = 1.0  # between two looks for a key


class FolderClient:
    """Values in a folder.

    All methods raise OSError if the folder cannot be used.

    Args:
        folder: created if it does not exist, for this user only.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)

    def set(self, key: str, value: bytes) -> None:
        """Store a value."""
        path = self._path(key)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        descriptor = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        with open(descriptor, "wb") as file:  # noqa: PTH123 - of the descriptor
            file.write(value)
        temporary.replace(path)

    def add(self, key: str, amount: int) -> int:
        """Add 0 or 1 to a counter, which starts at 0. Returns the sum. Looks are not counted: see
        :mod:`commlens.watch.nodes.status_answers`.
        """
        count = next(
            number for number in range(_COUNT_MAX) if not self._path(f"{key}.{number}").exists()
        )
        while amount:
            try:
                os.close(
                    os.open(
                        self._path(f"{key}.{count}"),
                        os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC,
                        0o600,
                    )
                )
            except FileExistsError:
                count += 1
                continue
            return count + 1
        return count

    def existing(self, keys: Sequence[str]) -> list[str]:
        """Return those of these keys that exist."""
        return [key for key in keys if self._path(key).exists()]

    def get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys that exist."""
        values: list[bytes] = []
        for key in keys:
            descriptor = os.open(self._path(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:  # noqa: PTH123 - of the descriptor
                values.append(file.read(VALUE_MAX))
        return values

    def pause(self, key: str, timeout_s: float, wakes: int) -> bool:
        """Wait until a key is set, and delete it: see
        :meth:`~commlens.watch.nodes.store_client.StoreClient.pause`.
        """
        end = time.monotonic() + timeout_s
        waiting = select.poll()
        waiting.register(wakes, select.POLLIN)
        while not self._path(key).exists():
            left = end - time.monotonic()
            if left <= 0 or waiting.poll(1000 * min(left, _PAUSE_S)):
                return False
        self._path(key).unlink(missing_ok=True)
        return True

    def remove(self) -> None:
        """Delete all values, and the folder if it is then empty."""
        for path in self._folder.iterdir():
            if _NAME.fullmatch(path.name):
                path.unlink(missing_ok=True)
        self._folder.rmdir()

    def close(self) -> None:
        """Do nothing: no file is open between calls."""

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "-")
