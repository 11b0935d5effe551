"""The memory, the storage and the processors of a node: pressure, OOM kills, heat."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from commlens.health.sources import number, word
from commlens.model.health import Value, Values

_CPUS_MAX: Final = 256  # whose counters are read: two small files each
_VMSTAT: Final = {"oom_kill": "oom_kills", "pswpin": "pages_in", "pswpout": "pages_out"}


def read_host(root: Path) -> Values:
    """Return the counters of memory, storage and processors that the node has."""
    found = {"memory": _memory(root), "disk": _stalls(root, "io"), "cpu": _heat(root)}
    return {part: values for part, values in found.items() if values}


def _memory(root: Path) -> dict[str, Value]:
    values: dict[str, Value] = _stalls(root, "memory")
    for name, kilobytes in re.findall(
        r"^(MemAvailable|MemTotal|SwapFree|SwapTotal):\s+(\d+) kB",
        word(root / "proc/meminfo"),
        re.MULTILINE,
    ):
        values[name] = float(kilobytes) * 1024
    for name, count in re.findall(
        r"^(oom_kill|pswpin|pswpout) (\d+)$", word(root / "proc/vmstat"), re.MULTILINE
    ):
        values[_VMSTAT[name]] = float(count)
    return values


def _stalls(root: Path, what: str) -> dict[str, Value]:
    """Return for how long all tasks have waited for memory or storage (PSI), in seconds."""
    text = word(root / "proc/pressure" / what)
    found = re.search(r"^full .*total=(\d+)", text, re.MULTILINE)
    return {"stalled_s": int(found[1]) / 1e6} if found else {}


def _heat(root: Path) -> dict[str, Value]:
    """Return how often the processors lowered their clock because of heat, all together."""
    folder = root / "sys/devices/system/cpu"
    cpus = 0
    times: list[float] = []
    while cpus < _CPUS_MAX:
        throttled = number(folder / f"cpu{cpus}/thermal_throttle/core_throttle_count")
        if throttled is None:
            break
        times.append(throttled)
        cpus += 1
    return {"throttled_times": sum(times)} if times else {}
