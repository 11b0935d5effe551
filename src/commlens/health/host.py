"""The memory, the storage and the processors of a node: pressure, OOM kills, heat."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from commlens.health.sources import number, word
from commlens.model.health import Value, Values
from commlens.processes.cgroup import Cgroup

_CPUS_MAX: Final = 256  # whose counters are read: two small files each
_NO_LIMIT: Final = 1 << 60  # cgroup v1 writes a limit like that where there is none
_OPERATION: Final = re.compile(r"\s+[A-Z_]+: (\d+) (\d+) (\d+) ")
_VMSTAT: Final = {"oom_kill": "oom_kills", "pswpin": "pages_in", "pswpout": "pages_out"}


def read_host(root: Path) -> Values:
    """Return the counters of memory, storage and processors that the node has."""
    found = {
        "memory": _memory(root),
        "disk": _stalls(root, "io"),
        "cpu": _heat(root),
        "container": _limits(root),
    }
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


def read_nfs(root: Path) -> Values:
    """Return how often each NFS server did not answer in time: the requests that were sent again,
    and those that timed out. Reading this waits for no server.
    """
    values: Values = {}
    part = ""
    for line in word(root / "proc/self/mountstats").splitlines():
        if line.startswith("device "):
            fields = line.split()
            is_nfs = len(fields) > 7 and fields[6:7] == ["fstype"] and fields[7].startswith("nfs")
            part = fields[1].rpartition(":/")[0] if is_nfs else ""
        elif part and (found := _OPERATION.match(line)):
            operations, sent, timeouts = (int(number) for number in found.groups())
            known = values.setdefault(part, {"timeouts": 0.0, "sent_again": 0.0})
            known["timeouts"] = float(known["timeouts"]) + timeouts
            known["sent_again"] = float(known["sent_again"]) + max(0, sent - operations)
    return values


def has_pressure(root: Path) -> bool:
    """Return whether the kernel measures how long tasks wait for memory and storage."""
    return bool(word(root / "proc/pressure/memory"))


def _limits(root: Path) -> dict[str, Value]:
    """Return the limits of this process's control group, and how much of each is used."""
    group = Cgroup.of(os.getpid(), root / "sys/fs/cgroup")
    values: dict[str, Value] = {}
    for folder in group.memory[:1]:
        limit = number(folder / "memory.max") or number(folder / "memory.limit_in_bytes")
        used = number(folder / "memory.current") or number(folder / "memory.usage_in_bytes")
        if limit and used and limit < _NO_LIMIT:
            values |= {"memory_used": used, "memory_limit": limit}
    counters = group.read()
    if counters.oom_kills is not None and values:
        values["oom_kills"] = float(counters.oom_kills)
    for folder in group.cpu[:1]:
        quota = word(folder / "cpu.max").split()
        if len(quota) == 2 and all(part.isdecimal() for part in quota):
            values["cpu_limit"] = int(quota[0]) / int(quota[1])
            if counters.throttled_s is not None:
                values["cpu_throttled_s"] = counters.throttled_s
    return values


def _heat(root: Path) -> dict[str, Value]:
    """Return how often the processors lowered their clock because of heat, all together."""
    # a processor that is off has no count
    counts = (root / "sys/devices/system/cpu").glob(
        "cpu[0-9]*/thermal_throttle/core_throttle_count"
    )
    times = [times for path in sorted(counts)[:_CPUS_MAX] if (times := number(path)) is not None]
    return {"throttled_times": sum(times)} if times else {}
