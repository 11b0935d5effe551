"""Where the reports of ranks meet: in the job's folder in shared memory if all ranks are on this
node, else in the job's own store. No process group is used, and no call waits for another rank.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from commlens.blackbox import job_dirs

_KEY: Final = "commlens/numbers/"


class SharedMemory:
    """One small file for each value, in the job's folder of black boxes.

    Args:
        folder: the job's folder.
        rank: of this process.
        reader: the rank that takes the reports.
    """

    def __init__(self, folder: Path, rank: int, reader: int = 0) -> None:
        self._folder = folder
        self._rank = rank
        self._queue = f"report.{reader}."
        self._posted = 0

    def post(self, report: bytes) -> None:
        """Add a report to the queue."""
        self._posted += 1
        name = f"{self._queue}{self._rank:08}.{os.getpid()}.{self._posted:012}"
        write_file(self._path(name), report)

    def take(self) -> list[bytes]:
        """Return the reports that were added since the last call, of each rank in its order. For
        one rank only.
        """
        prefix = job_dirs.NUMBERS + self._queue
        with os.scandir(self._folder) as entries:
            names = sorted(entry.name for entry in entries if entry.name.startswith(prefix))
        reports = []
        for name in names:
            path = self._folder / name
            if (content := _content(path)) is not None:
                reports.append(content)
            path.unlink(missing_ok=True)
        return reports

    def keep(self, name: str, value: bytes) -> None:
        """Keep a value under a name, unless there is one."""
        path = self._path(name)
        if not path.exists():
            write_file(path, value)

    def value(self, name: str) -> bytes | None:
        """Return the value under a name; None if there is none."""
        return _content(self._path(name))

    def discard(self, names: Sequence[str]) -> None:
        """Remove values. They need not exist."""
        for name in names:
            self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{job_dirs.NUMBERS}{name}"


def write_file(path: Path, value: bytes) -> None:
    """Write a file of a job's folder whole, for its user only."""
    temporary = path.with_name(f"{job_dirs.NUMBERS}draft.{threading.get_native_id()}.{path.name}")
    temporary.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(temporary, flags, 0o600), "wb") as file:  # noqa: PTH123 - of a descriptor
        file.write(job_dirs.NUMBERS_HEAD + value)
    temporary.replace(path)


def _content(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    return content.removeprefix(job_dirs.NUMBERS_HEAD)


class JobStore:
    """The store of torch's default group, through a connection of its own.

    Args:
        store: the store. It is kept, because this process may serve it.
        reader: the rank that takes the reports.
    """

    def __init__(self, store: Any, reader: int = 0) -> None:
        self._served = store
        self._queue = f"report.{reader}/"
        try:  # a client answers one thread at a time
            self._store = store.clone()
        except (AttributeError, RuntimeError, NotImplementedError):
            self._store = store
        self._next = 1
        self._late: list[int] = []  # numbers that were drawn, and whose reports are still under way

    def post(self, report: bytes) -> None:
        """Add a report to the queue."""
        number = self._store.add(f"{_KEY}{self._queue}count", 1)
        self._store.set(f"{_KEY}{self._queue}{number}", report)

    def take(self) -> list[bytes]:
        """Return the reports that were added since the last call. For one rank only."""
        last = self._store.add(f"{_KEY}{self._queue}count", 0)
        numbers = [*self._late, *range(self._next, last + 1)]
        self._next, self._late = last + 1, []
        reports = []
        for number in numbers:
            name = f"{self._queue}{number}"
            if (content := self.value(name)) is None:
                self._late.append(number)
            else:
                reports.append(content)
                self.discard([name])
        return reports

    def keep(self, name: str, value: bytes) -> None:
        """Keep a value under a name, unless there is one."""
        if not self._store.check([_KEY + name]):
            self._store.set(_KEY + name, value)

    def value(self, name: str) -> bytes | None:
        """Return the value under a name; None if there is none."""
        if not self._store.check([_KEY + name]):
            return None
        return bytes(self._store.get(_KEY + name))

    def discard(self, names: Sequence[str]) -> None:
        """Remove values, where the store can."""
        for name in names:
            with contextlib.suppress(RuntimeError):
                self._store.delete_key(_KEY + name)


Meeting = SharedMemory | JobStore
"""Values that all ranks of the job can read, and a queue of reports for one reader. All methods
raise OSError or RuntimeError if the place cannot be reached.
"""
