"""The checks of gpu_check.py of what commlens reads on a machine with a GPU: the hardware, and the
numbers in its memory.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from typing import Any

from _gpu_checks import ALONE, HERE, Bench, Check, Finds, Judged, NoResultError, SkippedError

MAX_POWER_W = 2000
FAULT_STEP, DRAW_STEP, TENSOR = 4, 6, "1.linear1.weight"
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


# --- the numbers in a device's memory


def judge_digests(finds: Finds) -> Judged:
    """Return whether equal bytes have equal hashes on the device and on the CPU."""
    wrong, lone = finds["wrong"], finds["lone"]
    is_right = lone.get("position") == 654_321 and lone.get("bit") == 20
    speeds = "; ".join(
        f"{name}: {one['all_ms']:.1f} ms ({one['gb_per_s']:.0f} GB/s), call {one['call_ms']:.1f} ms,"
        f" peak {one['peak_mb']:.0f} MB, left {one['left_mb']:.1f} MB"
        for name, one in finds["speed"].items()
    )
    return not wrong and is_right, (
        f"{len(finds['compared'])} tensors, wrong: {'; '.join(wrong)[:300] or 'none'}; errors"
        f" {finds['errors'] or 'none'}; one bit changed: {lone}; {speeds}"
    )


def judge_waits(finds: Finds) -> Judged:
    """Return whether a check begins, and a step goes on, while the device is busy. The first check
    may wait: it loads kernels, and makes room in the host's memory.
    """
    limit = finds["kernel_s"] / 3
    words = "; ".join(
        f"{size}, {name}: {one['tensors']} tensors begun in {one['call_s'] * 1000:.1f} ms, the next"
        f" step launched after {one['step_called_s'] * 1000:.1f} ms, the device done after"
        f" {one['done_s']:.2f} s, read with {one['read_cpu_s']:.2f} s of CPU time, torch warned"
        f" {len(one['warnings'])} times"
        for size in ("small", "large")
        for name, one in ((each, finds[size][each]) for each in ("first", "third"))
    )
    alone = finds["alone"]
    small = finds["small"]
    # where the step itself waits, only the call is ours
    measure = "step_called_s" if small["bare"]["step_called_s"] < limit else "call_s"
    right = all(
        small[name][measure] < limit and not small[name]["warnings"] for name in ("second", "third")
    )
    right = right and alone["all_s"] < limit and not alone["warnings"]
    return right, (
        f"the hook of a step without a check {alone['hook_us']:.1f} us; {words}; calls of CUDA"
        f" {finds['small']['launches']}, large {finds['large']['launches']}"
    )


def check_cost(bench: Bench) -> Finds:
    """Let two ranks take turns in training, with and without checks."""
    rounds = 3 if bench.quick or bench.is_dry else 20
    program = [str(HERE / "_gpu_numbers.py"), "cost", bench.device, str(rounds)]
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run"]
    ended = bench.processes.run(
        [*torchrun, "--standalone", "--nproc-per-node", "2", *program],
        bench.limit_s,
        OMP_NUM_THREADS="1",
    )
    if ended.result is None or ended.status != 0:
        raise NoResultError(ended.reason, hung=ended.status is None)
    return ended.result


def judge_cost(finds: Finds) -> Judged:
    """Return what a check adds to a step."""
    if finds["is_off"]:
        return False, "the checks have ended by themselves"
    bare, added = finds["medians"]["bare"]["all_ms"], finds["added_ms"]
    words = ", ".join(
        f"{name} {one['all_ms']:.2f} ms (launched in {one['called_ms']:.2f} ms, {added[name]:+.2f}"
        f" ms in pairs, peak {finds['peak_mb'][name]:.0f} MB)"
        for name, one in finds["medians"].items()
    )
    share = (added["check"] + 99 * added["not due"]) / 100 / bare
    return None, (
        f"{finds['parameters'] / 1e6:.0f} million parameters, {finds['rounds']} rounds: {words}; at"
        f" every 100th step {share:+.2%}"
    )


def check_job(case: str, how: str, backend: str = "") -> Callable[[Bench], Finds]:
    """Return the check of a job of two ranks whose numbers are compared.

    Args:
        case: ``healthy`` or ``fault``.
        how: the setting ``check_numbers``.
        backend: other than the one that is checked.
    """

    def measure(bench: Bench) -> Finds:
        if not backend and bench.pair:
            raise SkippedError(f"two ranks do not share this GPU: {bench.pair}")
        folder = bench.folder()
        log, topology = folder / "verdicts.jsonl", folder / "topology.xml"
        ended = bench.commlens(
            "launch",
            "--standalone",
            "--nproc-per-node",
            "2",
            f"--check-numbers={how}",
            "--on-verdict",
            f"cat >> {shlex.quote(str(log))}",
            "--dump-dir",
            str(folder / "dumps"),
            str(HERE / "_gpu_numbers.py"),
            "train",
            case,
            bench.device,
            backend or bench.backend,
            COMMLENS_BOX_DIR=str(folder / "boxes"),
            NCCL_TOPO_DUMP_FILE=str(topology),
            OMP_NUM_THREADS="1",
        )
        text = log.read_text(encoding="utf-8") if log.exists() else ""
        if ended.status != 0 and not text:
            raise NoResultError(ended.reason, hung=ended.status is None)
        return {
            "status": ended.status,
            "seconds": ended.seconds,
            "ended_well": ended.out.count("ended well"),
            "verdicts": [slim(json.loads(line)["verdict"]) for line in text.splitlines()][:3],
            "topology": topology.read_text()[:6000] if topology.exists() else "",
            "out": ended.out[-1500:],
            "err": ended.err[-4000:],
        }

    return measure


def slim(verdict: Finds) -> Finds:
    """Return a verdict without the findings, which say the same once more."""
    return {name: value for name, value in verdict.items() if name != "findings"}


def judge_quiet(finds: Finds) -> Judged:
    """Return whether a healthy job ended well, and nothing was said."""
    quiet = not finds["verdicts"] and "commlens stops" not in finds["err"]
    return quiet and finds["ended_well"] == 2, (
        f"{finds['ended_well']} ranks ended well in {finds['seconds']:.0f} s,"
        f" {len(finds['verdicts'])} verdicts; {finds['err'][-200:] if not quiet else ''}"
    )


def judge_parted(step: int, tensor: str) -> Callable[[Finds], Judged]:
    """Return the judge of a verdict on one element that became another in a step."""

    def judge(finds: Finds) -> Judged:
        if not finds["verdicts"]:
            return False, f"no verdict in {finds['seconds']:.0f} s, status {finds['status']}"
        first = finds["verdicts"][0]
        words = f"{first.get('kind')}, culprits {first.get('culprits')}: {first.get('summary')}"
        names_it = tensor in words and f"step {step}" in words
        return first.get("kind") == "diverged" and names_it, words

    return judge


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
    Check(
        "numbers, digests",
        "The same bytes have the same hash on the device and on the CPU",
        60,
        lambda bench: inside(bench, "_gpu_numbers.py", "digests"),
        judge_digests,
        lane="numbers",
    ),
    Check(
        "numbers, waits",
        "A check of the numbers waits for no kernel",
        45,
        lambda bench: {**inside(bench, "_gpu_numbers.py", "waits"), "kernel_s": 1.5},
        judge_waits,
        lane="numbers",
    ),
    Check(
        "numbers, fault",
        "One wrong element of a DDP parameter is found, with its step",
        60,
        check_job("fault", "every 1 steps"),
        judge_parted(FAULT_STEP, TENSOR),
        lane="numbers",
    ),
    Check(
        "numbers, healthy",
        "Of a healthy DDP job whose numbers are compared, nothing is said",
        60,
        check_job("healthy", "every 1 steps,nan"),
        judge_quiet,
        lane="numbers",
    ),
    Check(
        "numbers, fault, gloo",
        "The same with gloo and tensors on the device",
        60,
        check_job("fault", "every 1 steps", "gloo"),
        judge_parted(FAULT_STEP, TENSOR),
        lane="numbers",
    ),
    Check(
        "numbers, every op",
        "Of a healthy job whose ops are compared, nothing is said",
        60,
        check_job("healthy", "every-op", "gloo"),
        judge_quiet,
        lane="numbers",
    ),
    Check(
        "numbers, every op, fault",
        "The op before which an element became another is named",
        60,
        check_job("fault", "every-op", "gloo"),
        judge_parted(FAULT_STEP, TENSOR),
        lane="numbers",
    ),
    Check(
        "numbers, generator",
        "A tensor parallel rank that draws random numbers besides is found",
        60,
        check_job("generator", "every 1 steps", "gloo"),
        judge_parted(DRAW_STEP, "generator"),
        lane="numbers",
    ),
    Check(
        "numbers, cost",
        "What comparing numbers adds to a step",
        60,
        check_cost,
        judge_cost,
        lane=ALONE,
    ),
]
