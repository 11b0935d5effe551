"""The checks of gpu_check.py of what commlens reads on a machine with a GPU: the hardware, and the
numbers in its memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from _gpu_checks import HERE, Bench, Check, Finds, Judged, NoResultError

MAX_POWER_W = 2000
SAME = (
    "index",
    "name",
    "ecc_uncorrected",
    "ecc_corrected",
    "rows_remapped",
    "remap_failed",
    "pcie_generation_max",
    "pcie_width",
    "pcie_width_max",
)
"""Values of a GPU that do not change between two readings."""


def inside(bench: Bench, program: str, what: str, **environ: str) -> Finds:
    """Run one of the programs of this folder, and return what it saw."""
    given = {
        "device": bench.device,
        "backend": bench.backend,
        "folder": str(bench.folder()),
        "quick": bench.quick,
    }
    command = [sys.executable, "-W", "ignore", str(HERE / program), what, json.dumps(given)]
    ended = bench.processes.run(command, bench.limit_s, **environ)
    if ended.result is None or ended.status != 0:
        raise NoResultError(ended.reason, hung=ended.status is None)
    return {**ended.result, "err": ended.err[-1500:]}


# --- the hardware


def judge_health(finds: Finds) -> Judged:
    """Return whether one GPU with plausible values was read in both ways, and alike."""
    wrong = [f"{name}: {error}" for name, error in finds["errors"].items()]
    wrong += [f"{way}: {problem}" for way, problem in finds["problems"].items()]
    for when in ("idle", "load"):
        for way in ("nvml", "smi"):
            wrong += implausible(f"{way}, {when}", finds.get(when, {}).get(way, {}))
    wrong += differences(finds.get("idle", {}))
    idle, busy = (first_gpu(finds.get(when, {}).get("nvml", {})) for when in ("idle", "load"))
    if busy.get("used_percent", 0) < 50 or busy.get("power_w", 0) < idle.get("power_w", 0):
        wrong.append(f"the load is not seen: {busy.get('used_percent')} % used")
    if is_a_user(finds):
        wrong.append("nvidia-smi lists the reader as a process that computes")
    changes = ", ".join(
        f"{name} {idle.get(name)} -> {busy.get(name)}"
        for name in ("used_percent", "power_w", "clock_mhz", "temperature_c", "throttle_reasons")
    )
    return not wrong, f"{'; '.join(wrong) or 'alike and plausible'}; idle -> load: {changes}"


def is_a_user(finds: Finds) -> bool:
    """Return whether nvidia-smi lists the reader among the processes that compute."""
    lines = finds.get("apps", "").splitlines()
    return str(finds["pid"]) in [line.split(",")[0].strip() for line in lines]


def first_gpu(values: Finds) -> Finds:
    """Return the values of the first GPU."""
    return next(iter(values.values()), {})


def implausible(name: str, values: Finds) -> list[str]:
    """Return what is wrong with the values of one reading."""
    if len(values) != 1:
        return [f"{name}: {len(values)} GPUs"]
    gpu = first_gpu(values)
    right: dict[str, Callable[[Any], bool]] = {
        "name": lambda text: bool(text),
        "temperature_c": lambda value: 10 <= value <= 100,
        "power_w": lambda value: 0 < value < MAX_POWER_W,
        "used_percent": lambda value: 0 <= value <= 100,
        "clock_mhz": lambda value: 0 < value < 5000,
        "throttle_reasons": lambda value: value >= 0,
        "ecc_uncorrected": lambda value: value == 0,
        "ecc_corrected": lambda value: value >= 0,
        "pcie_width": lambda value: value in (1, 2, 4, 8, 16, 32),
        "pcie_generation": lambda value: 1 <= value <= 7,
    }
    return [
        f"{name}: {field} is {gpu.get(field)}"
        for field, is_right in right.items()
        if field not in gpu or not is_right(gpu[field])
    ]


def differences(both: Finds) -> list[str]:
    """Return which values NVML and nvidia-smi tell differently."""
    nvml, smi = first_gpu(both.get("nvml", {})), first_gpu(both.get("smi", {}))
    wrong = [
        f"{field}: {nvml.get(field)} by NVML, {smi.get(field)} by nvidia-smi"
        for field in SAME
        if nvml.get(field) != smi.get(field)
    ]
    if list(both.get("nvml", {})) != list(both.get("smi", {})):
        wrong.append(f"addresses {list(both.get('nvml', {}))} and {list(both.get('smi', {}))}")
    return wrong


def judge_release(finds: Finds) -> Judged:
    """Return whether the devices are let go after the readings, and no context was made."""
    left = [*finds["closed"], *finds["monitor_closed"]]
    is_listed = is_a_user(finds)
    words = (
        f"open while read: {finds['reading'] or 'nothing'}; after close(): {left or 'nothing'};"
        f" after nvmlShutdown(): {finds['shut_down'] or 'nothing'}; loaded {finds['libraries']}"
    )
    return not left and not is_listed, words


def check_doctor(bench: Bench) -> Finds:
    """Run the command that looks at the machine, and keep its output."""
    ended = bench.commlens("doctor", limit_s=bench.limit_s)
    if ended.status is None:
        raise NoResultError(ended.reason, hung=True)
    return {"status": ended.status, "out": ended.out[:12000], "err": ended.err[-2000:]}


def judge_doctor(finds: Finds) -> Judged:
    """Return how it ended."""
    lines = finds["out"].strip().splitlines()
    return None, f"status {finds['status']}, {len(lines)} lines; the last: {lines[-1:]}"


CHECKS: list[Check] = [
    Check(
        "health",
        "NVML and nvidia-smi tell the same plausible values, idle and under load",
        60,
        lambda bench: inside(bench, "_gpu_health.py", "read"),
        judge_health,
        lane="health",
    ),
    Check(
        "health, release",
        "After the hardware was read, no device of a GPU stays open",
        40,
        lambda bench: inside(bench, "_gpu_health.py", "release"),
        judge_release,
        lane="health",
    ),
    Check(
        "doctor",
        "commlens doctor looks at the machine",
        40,
        check_doctor,
        judge_doctor,
        lane="health",
    ),
]
