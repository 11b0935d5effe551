"""Warnings about settings, each printed by one process of a job: its ranks are started by one
launcher, with one environment.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable

from commlens import launchers
from commlens.config import WARNED_VARIABLE


def new_warnings(warnings: Iterable[str]) -> list[str]:
    """Return the warnings that this process is to print, and note them in its environment for the
    processes that it starts.

    A process that started this one may have printed them. If not, rank 0 prints them, or a process
    that is no rank.
    """
    printed = os.environ.get(WARNED_VARIABLE, "").split()
    by_mark = {f"{zlib.crc32(text.encode()):x}": text for text in warnings}
    new = {mark: text for mark, text in by_mark.items() if mark not in printed}
    if new:
        os.environ[WARNED_VARIABLE] = " ".join([*printed, *new])
    return list(new.values()) if launchers.number(os.environ, launchers.RANK) <= 0 else []
