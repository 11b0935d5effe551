"""The limits of a process's control group, v1 or v2. Nothing here raises: a counter that cannot be
read is None.
"""

from __future__ import annotations

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
            parts = line.split(":", 2)
            if len(parts) != 3:
                continue
            _, controllers, inside = parts
            names = controllers.split(",")
            if not controllers:
                bases = [root, root / "unified"]
            elif "cpu" in names or "memory" in names:
                bases = [root / controllers, *(root / name for name in names)]
            else:
                continue
            candidates = (folder for base in bases for folder in (base / inside.lstrip("/"), base))
            folder = next((each for each in candidates if (each / "cgroup.procs").exists()), None)
            if folder is None:
                continue
            # v1 first: where both are mounted, the controllers are v1's, and v2's files lack their
            # counters.
            if "cpu" in names:
                found.cpu.insert(0, folder)
            if "memory" in names:
                found.memory.insert(0, folder)
            if not controllers:
                found.cpu.append(folder)
                found.memory.append(folder)
        return found

    def read(self) -> Counters:
        """Read the counters."""
        throttled_s: float | None = None
        for folder in self.cpu:
            stat = _counters(folder / "cpu.stat")
            if "throttled_usec" in stat:
                throttled_s = stat["throttled_usec"] / 1e6
            elif "throttled_time" in stat:
                throttled_s = stat["throttled_time"] / 1e9
            if throttled_s is not None:
                break
        kills: int | None = None
        pressure: float | None = None
        for folder in self.memory:
            for name in ("memory.events", "memory.oom_control"):
                if kills is None:
                    kills = _counters(folder / name).get("oom_kill")
            if pressure is None:
                pressure = _full_avg10(folder / "memory.pressure")
        if pressure is None:
            pressure = _full_avg10(Path("/proc/pressure/memory"))
        return Counters(throttled_s, kills, pressure)


def _counters(path: Path) -> dict[str, int]:
    return {
        key: int(value)
        for key, value in re.findall(r"^(\S+) (-?\d+)\s*$", read_text(path) or "", re.MULTILINE)
    }


def _full_avg10(path: Path) -> float | None:
    found = re.search(r"^full .*?avg10=(\d+(?:\.\d+)?)", read_text(path) or "", re.MULTILINE)
    return float(found[1]) if found else None
