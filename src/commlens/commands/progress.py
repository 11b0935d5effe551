"""Progress of long operations: shown on a terminal after two seconds, removed at the end; nothing
in a pipe or a file.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

_QUIET_S: Final = 2.0
_EVERY_S: Final = 0.2


class ProgressBar:
    """A progress bar that is drawn when it is called: a thread would make it unsafe to fork the
    process.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._drawn = time.monotonic() + _QUIET_S - _EVERY_S
        self._terminal = sys.stderr is not None and sys.stderr.isatty()
        self._bar: Any = None
        self._task: Any = None

    def __call__(self, done: int, total: int) -> None:
        """Draw how many are done, unless it was drawn just now."""
        now = time.monotonic()
        if not self._terminal or now - self._drawn < _EVERY_S:
            return
        self._drawn = now
        if self._bar is None:
            self._bar, self._task = _bar(self._label, total)
        self._bar.update(self._task, completed=done, total=total)
        self._bar.refresh()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


@contextlib.contextmanager
def working(label: str) -> Iterator[Callable[[str], None]]:
    """Show that a block still works, if it is not known how much there is to do. It uses a thread:
    not where a process is forked.

    Yields:
        A function that adds a few words to the label, such as what has been done so far.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda words: None
        return
    shown: list[Any] = []
    latest = [label]

    def show() -> None:
        from rich.console import Console

        status = Console(stderr=True).status(latest[0])
        status.start()
        shown.append(status)

    def add(words: str) -> None:
        latest[0] = f"{label}: {words}"
        for status in shown:
            status.update(latest[0])

    timer = threading.Timer(_QUIET_S, show)
    timer.daemon = True
    timer.start()
    try:
        yield add
    finally:
        timer.cancel()
        timer.join()
        for status in shown:
            status.stop()


def _bar(label: str, total: int) -> tuple[Any, Any]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True)
    bar.start()
    return bar, bar.add_task(label, total=total)
