"""The limits of a process's control group, v1 or v2. Nothing here raises: a counter that cannot be
read is None.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from commlens.processes.process import read_text


@dataclass(frozen=True)
class Counters:
    """The counters of a control group."""

    # time for which its CPU quota kept it from running, since it was created
    throttled_s: float | None = None
    oom_kills: int | None = None
    # PSI "full avg10": percent of the last 10 s in which all of it waited for memory
    memory_pressure: float | None = None


@dataclass
class Cgroup:
    """The folders of a process's control group, found once and read many times."""

    cpu: list[Path] = field(default_factory=list)
    memory: list[Path] = field(default_factory=list)

    @classmethod
    def of(cls, pid: int, root: Path = Path("/sys/fs/cgroup")) -> Cgroup:
        """Find them. In a container, ``/proc/PID/cgroup`` often holds the host's path; then the
        mount's own root is used.
        """
        found = cls()
        for line in (read_text(f"/proc/{pid}/cgroup") or "").splitlines():
            _, controllers, inside = [*line.split(":", 2), "", ""][:3]  # the last may be cut
            names = controllers.split(",")
            if controllers and not {"cpu", "memory"}.intersection(names):
                continue
            bases = (
                [root / controllers, *(root / name for name in names)]
                if controllers
                else [root, root / "unified"]
            )
            candidates = (folder for base in bases for folder in (base / inside.lstrip("/"), base))
            here = [each for each in candidates if (each / "cgroup.procs").exists()][:1]
            # v1 first: where both are mounted, the controllers are v1's, and v2's files lack their
            # counters.
            if not controllers:
                found.cpu += here
                found.memory += here
            if "cpu" in names:
                found.cpu[:0] = here
            if "memory" in names:
                found.memory[:0] = here
        return found

    def read(self) -> Counters:
        """Read the counters, each from the first file that has it."""
        stats = map(_counters, (folder / "cpu.stat" for folder in self.cpu))
        throttled_s = (
            stat[name] / per_s
            for stat in stats
            for name, per_s in (("throttled_usec", 1e6), ("throttled_time", 1e9))
            if name in stat
        )
        events = (
            _counters(folder / name)
            for folder in self.memory
            for name in ("memory.events", "memory.oom_control")
        )
        kills = (each["oom_kill"] for each in events if "oom_kill" in each)
        files = [folder / "memory.pressure" for folder in self.memory]
        pressures = map(_full_avg10, [*files, Path("/proc/pressure/memory")])
        pressure = next((each for each in pressures if each is not None), None)
        return Counters(next(throttled_s, None), next(kills, None), pressure)


def _counters(path: Path) -> dict[str, int]:
    return {
        key: int(value)
        for key, value in re.findall(r"^(\S+) (-?\d+)\s*$", read_text(path) or "", re.MULTILINE)
    }


def _full_avg10(path: Path) -> float | None:
    found = re.search(r"^full .*?avg10=(\d+(?:\.\d+)?)", read_text(path) or "", re.MULTILINE)
    return float(found[1]) if found else None


def free_memory(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes that are free, page cache included; None if neither the machine nor a
    control group shows it.
    """
    found = re.search(r"^MemAvailable:\s+(\d+) kB", read_text("/proc/meminfo") or "", re.MULTILINE)
    known = [int(found[1]) * 1024] if found else []
    # this process's control groups, and those that contain them: each may have a limit
    limiting = {
        each
        for folder in Cgroup.of(os.getpid(), root).memory
        for each in (folder, *folder.parents, root)
        if each == root or root in each.parents
    }
    known += [left for left in map(_bytes_left, limiting) if left is not None]
    return min(known, default=None)


def _bytes_left(folder: Path) -> int | None:
    """Return the bytes that a control group (v2, else v1) may still use. Its page cache that is not
    in use counts as free.
    """
    for limit_name, used_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        if limit is not None and used is not None:
            reclaimable = _counters(folder / "memory.stat").get(cache_name, 0)
            return max(0, limit - used + reclaimable)
    return None


def _number(path: Path) -> int | None:
    text = (read_text(path) or "").strip()
    return int(text) if text.isdigit() else None  # "max": no limit
