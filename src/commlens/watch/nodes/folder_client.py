"""A shared folder in which nodes meet that have no store in common. Each key is one small file,
which appears whole or not at all.

The calls are those of :class:`~commlens.watch.nodes.store_client.StoreClient`.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import time
from collections.abc import Sequence
from pathlib import Path

from commlens.watch.nodes.beat import QUESTION
from commlens.watch.nodes.store_client import VALUE_MAX

_NAME = re.compile(r"commlens-\d+[a-z0-9.-]*(\.\d+\.tmp)?")
_COUNT_MAX = 100_000
_POLL_S = 1.0  # between two checks whether a key is set


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
        """Add to a counter, which starts at 0, and return the sum. The counter is as many files,
        and another one with the number of questions of commands.

        Args:
            key: of the counter.
            amount: 0, 1, or a question.
        """
        asked = f"{key}.asked"
        questions = int(self.get([asked])[0]) if self.existing_keys([asked]) else 0
        if amount >= QUESTION:
            questions, amount = questions + 1, 0  # two that come at once count as one
            self.set(asked, b"%d" % questions)
        count = next(
            number for number in range(_COUNT_MAX) if not self._path(f"{key}.{number}").exists()
        )
        while amount:
            path = self._path(f"{key}.{count}")
            count += 1
            with contextlib.suppress(FileExistsError):  # else another node has made it meanwhile
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
                break
        return count + QUESTION * questions

    def existing_keys(self, keys: Sequence[str]) -> list[str]:
        """Return those of these keys that exist, with counters that are not 0."""
        names = {key: (key, f"{key}.0") for key in keys}
        return [key for key in keys if any(self._path(name).exists() for name in names[key])]

    def get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys that exist."""
        values: list[bytes] = []
        for key in keys:
            descriptor = os.open(self._path(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:  # noqa: PTH123 - of the descriptor
                values.append(file.read(VALUE_MAX))
        return values

    def wait_for(self, key: str, timeout_s: float, wake_fd: int) -> bool:
        """Wait until a key is set, and delete it: see
        :meth:`~commlens.watch.nodes.store_client.StoreClient.wait_for`.
        """
        end = time.monotonic() + timeout_s
        wake = select.poll()
        wake.register(wake_fd, select.POLLIN)
        while not self._path(key).exists():
            left = end - time.monotonic()
            if left <= 0 or wake.poll(1000 * min(left, _POLL_S)):
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
