"""What it costs that worlds on several nodes meet, in a healthy job: ``python
benchmarks/worlds_cost.py --pairs 8 --write``.

Two trainers and two rollout workers, on two emulated nodes, train and share a group made by hand.
Every pair of runs differs in ``COMMLENS_MEET`` alone: ``off`` and ``auto``, in alternating order.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

from _gpu_jobs import free_port
from _report import write_section

DOCUMENT = Path(__file__).parents[1] / "docs" / "nodes.md"
ROLES = ("trainer", "rollout")
SETTLE_S, MEASURED_S = 6.0, 15.0
REST_S = 0.02
"""In each step: a rank computes elsewhere."""
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
Figures = dict[str, float]


def rank(role: str) -> None:
    """Run one rank, and print its CPU time and the length of a step as JSON."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    number, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    member = 0 if role == ROLES[0] else 1 + number
    shared = None
    if role == ROLES[1] or number == 0:
        port = int(os.environ["GROUP_PORT"])
        store = dist.TCPStore("127.0.0.1", port, 1 + size, member == 0, wait_for_workers=False)
        place = (1 + size, member, [], c10d.Backend("gloo"), dist.PrefixStore("weights", store))
        wait = datetime.timedelta(seconds=60)
        shared, _ = c10d._new_process_group_helper(*place, group_name="weights", timeout=wait)
    values, lengths = torch.ones(1024), []
    began, cpu_s, watched_s, goes_on = time.monotonic(), 0.0, 0.0, torch.ones(1)
    boxes = Path(os.environ["COMMLENS_BOX_DIR"]).parent
    while goes_on:
        step_began = time.monotonic()
        if role == ROLES[0] and number == 0 and step_began - began > SETTLE_S + MEASURED_S:
            goes_on.zero_()  # the last step
        dist.all_reduce(values)
        values.fill_(1.0)
        if shared is not None:
            shared.broadcast(values, 0).wait()
            shared.broadcast(goes_on, 0).wait()
        dist.broadcast(goes_on, 0)
        time.sleep(REST_S)
        now = time.monotonic()
        if now - began < SETTLE_S:
            continue
        if not lengths:
            cpu_s, watched_s = time.process_time(), watchers_cpu_s(boxes)
        lengths.append(now - step_began)
    cpu_s = time.process_time() - cpu_s
    watched_s = (watchers_cpu_s(boxes) - watched_s) / len(ROLES) / sum(lengths)
    length = statistics.median(lengths)
    told = {"step": length, "cpu": cpu_s / len(lengths), "watcher": watched_s}
    print(json.dumps(told), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def run(meet: str) -> Figures:
    """Run the job once. Returns the medians over its ranks and the watchers' CPU time a second."""
    boxes = Path("/dev/shm") / f"commlens-worlds-cost-{os.getpid()}"
    group, *ports = [str(free_port()) for _ in range(3)]
    started: list[subprocess.Popen[str]] = []
    common = {k: v for k, v in os.environ.items() if not k.startswith("COMMLENS_MEET")} | {
        "MASTER_ADDR": "127.0.0.1",
        "GROUP_PORT": group,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "COMMLENS_MEET": meet,
        "COMMLENS_DUMP_DIR": str(boxes / "dumps"),
    }
    try:
        for role, port in zip(ROLES, ports, strict=True):
            for number in range(2):
                own = {
                    "RANK": str(number),
                    "WORLD_SIZE": "2",
                    "MASTER_PORT": port,
                    "COMMLENS_BOX_DIR": str(boxes / role),
                }
                command = [sys.executable, "-m", "commlens", "run", __file__, "--role", role]
                started.append(
                    subprocess.Popen(command, env=common | own, stdout=subprocess.PIPE, text=True)
                )
        told = [json.loads(each.communicate(timeout=120)[0].splitlines()[-1]) for each in started]
    finally:
        for each in started:
            with contextlib.suppress(OSError):
                each.send_signal(signal.SIGKILL)
        time.sleep(1.5)
        shutil.rmtree(boxes, ignore_errors=True)
    return {name: statistics.median(each[name] for each in told) for name in told[0]}


def watchers_cpu_s(boxes: Path) -> float:
    """Return the CPU time so far of the watchers of these black boxes."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_bytes()
            if b"commlens.watch" in command and str(boxes).encode() in command:
                fields = (path.parent / "stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS_A_SECOND


def words(pairs: list[tuple[Figures, Figures]]) -> str:
    """Return the figures as Markdown."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for off, on in pairs:
        for name, value in off.items():
            by_name[name].append(on[name] - value)
    rows = []
    for name, what, factor, unit in (
        ("watcher", "CPU time of a watcher", 1e3, "ms a second"),
        ("cpu", "CPU time of a rank", 1e6, "µs a step"),
        ("step", "length of a step", 1e6, "µs"),
    ):
        off = statistics.median(pair[0][name] for pair in pairs) * factor
        more = sorted(value * factor for value in by_name[name])
        rows.append(
            f"| {what} | {off:.1f} {unit} | {statistics.median(more):+.1f} |"
            f" {more[0]:+.1f} to {more[-1]:+.1f} |"
        )
    when = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return "\n".join(
        [
            f"{len(pairs)} pairs of runs of {MEASURED_S:.0f} s on {when}, Python"
            f" {platform.python_version()}, {os.cpu_count()} cores, load"
            f" {os.getloadavg()[1]:.1f}:",
            "",
            "| | `COMMLENS_MEET=off` | more with `auto` (median) | of all pairs |",
            "|---|---:|---:|---:|",
            *rows,
        ]
    )


def main() -> None:
    """Run the pairs and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--role", choices=ROLES, help="be a rank")
    parser.add_argument("--write", action="store_true", help=f"write into {DOCUMENT.name}")
    arguments = parser.parse_args()
    if arguments.role:
        rank(arguments.role)
        return
    pairs = []
    for number in range(arguments.pairs):
        found = {meet: run(meet) for meet in (("off", "auto") if number % 2 else ("auto", "off"))}
        pairs.append((found["off"], found["auto"]))
        print(pairs[-1], flush=True)
    print(words(pairs))
    if arguments.write:
        write_section(DOCUMENT, "cost of meeting", words(pairs))


if __name__ == "__main__":
    main()
