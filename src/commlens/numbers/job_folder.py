"""The folder of the job's black boxes, which ``launch`` sets. Standard library only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

_find: Callable[[], Path | None] | None = None


def set_finder(find: Callable[[], Path | None]) -> None:
    """Tell how to find the folder."""
    global _find
    _find = find


def job_folder() -> Path | None:
    """Return the job's folder of black boxes; None if this process is not recorded."""
    return _find() if _find is not None else None
