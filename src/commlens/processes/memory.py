"""How much memory this process and its children may still take: of the machine, and of the control
groups that limit them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from commlens.processes.cgroup import Cgroup
from commlens.processes.process import read_text


def free(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes that are free, page cache included; None if neither the machine nor a
    control group tells.
    """
    found = re.search(r"^MemAvailable:\s+(\d+) kB", read_text("/proc/meminfo") or "", re.MULTILINE)
    known = [int(found[1]) * 1024] if found else []
    known += [left for folder in _limiting(root) if (left := _left(folder)) is not None]
    return min(known, default=None)


def _limiting(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups, and those that contain them: each may
    have a limit.
    """
    for folder in Cgroup.of(os.getpid(), root).memory:
        while folder != root and root in folder.parents:
            yield folder
            folder = folder.parent
        yield root


def _left(folder: Path) -> int | None:
    """Return what a control group (v2, else v1) may still take. Its page cache that is not in use
    counts as free.
    """
    for limit_name, used_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        if limit is not None and used is not None:
            reclaimable = re.search(
                rf"^{cache_name} (\d+)", read_text(folder / "memory.stat") or "", re.MULTILINE
            )
            return max(0, limit - used + (int(reclaimable[1]) if reclaimable else 0))
    return None


def _number(path: Path) -> int | None:
    text = (read_text(path) or "").strip()
    return int(text) if text.isdigit() else None  # "max": no limit
