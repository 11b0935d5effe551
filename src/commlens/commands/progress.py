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
            from rich import progress
            from rich.console import Console

            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TimeRemainingColumn(),
                console=Console(stderr=True),
                auto_refresh=False,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(self._label, total=total)
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
    from rich.console import Console

    status = Console(stderr=True).status(label)
    timer = threading.Timer(_QUIET_S, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda words: status.update(f"{label}: {words}")
    finally:
        timer.cancel()
        timer.join()
        status.stop()
