"""A progress bar for what takes long: on a terminal, after two seconds, and gone when it is done."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Final

_QUIET_S: Final = 2.0
_EVERY_S: Final = 0.2


class ProgressBar:
    """Call it with how many are done and how many there are.

    It draws when it is called and has no thread: a process with one may not be forked safely.

    Args:
        what: "reading dumps".
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._drawn = time.monotonic() + _QUIET_S - _EVERY_S
        self._terminal = sys.stderr is not None and sys.stderr.isatty()
        self._bar: Any = None
        self._task: Any = None

    def __call__(self, done: int, total: int) -> None:
        """Show it, unless it was shown just now."""
        now = time.monotonic()
        if not self._terminal or now - self._drawn < _EVERY_S:
            return
        self._drawn = now
        if self._bar is None:
            self._bar, self._task = _bar(self._what, total)
        self._bar.update(self._task, completed=done, total=total)
        self._bar.refresh()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar(what: str, total: int) -> tuple[Any, Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True)
    bar.start()
    return bar, bar.add_task(what, total=total)
