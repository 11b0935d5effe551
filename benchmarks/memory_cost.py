"""Measure the memory that recording uses: of a process over 10,000 steps, which must not grow, and
of the black box.

python benchmarks/memory_cost.py [--quick] [--steps 10000] [--json FILE]
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import _modes
from _modes import Mode
from _report import Goal, Report, arguments, command, finish

OPS = 10
"""Collectives in a step."""
POINTS = 10
FLAT_KB = 1024
"""How much a process may grow from the middle to the end of its run and still count as flat."""


def resident_kb() -> int:
    """Return the private memory of this process (no files, no shared memory), in KB."""
    fields = dict(
        line.split(":", 1)
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        if ":" in line
    )
    return int(fields["RssAnon"].split()[0])


def member(mode: Mode, steps: int, folder: str, pipe: Connection) -> None:
    """Run one process with 10 collectives a step, from varying lines and with a few shapes; return
    its memory at ten times.
    """
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    os.environ.update(RANK="0", WORLD_SIZE="4", LOCAL_RANK="0")
    _modes.set_up(mode, folder, "memory")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    tensors = [torch.ones(8 * (1 + number)) for number in range(OPS)]
    held = []
    for step in range(steps):
        for number, tensor in enumerate(tensors):
            if number % 2:
                dist.all_reduce(tensor)
            else:
                dist.broadcast(tensor, 0, async_op=True).wait()
        if (step + 1) % (steps // POINTS) == 0:
            held.append(resident_kb())
    boxes = [path.stat().st_size for path in Path(folder).rglob("*.box")]
    pipe.send((held, boxes))
    pipe.recv()
    os._exit(0)


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    given = parser.parse_args()
    steps = 500 if given.quick else given.steps
    modes, left_out = _modes.available([_modes.OFF, _modes.PYTHON, _modes.NATIVE])
    report = Report(
        "Memory of a recorded process",
        f"One process per configuration, {steps:,} steps of {OPS} collectives on the fake backend:"
        " anonymous resident memory, sampled ten times, and the size of the black box, which is in"
        " shared memory and fully allocated at the start.",
        command(),
        left_out=left_out,
    )
    context, rows, grown = multiprocessing.get_context("spawn"), [], {}
    for mode in modes:
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="commlens-bench-") as folder:
            ours, theirs = context.Pipe()
            process = context.Process(
                target=member, args=(mode, steps, folder, theirs), daemon=True
            )
            process.start()
            held, boxes = ours.recv()
            ours.send(None)
            process.join(10)
            process.kill()
        middle, end = statistics.median(held[3:6]), statistics.median(held[-3:])
        grown[mode.name] = end - middle
        report.rows.append({"mode": mode.name, "resident_kb": held, "box_bytes": boxes})
        box = f"{boxes[0] / 1e6:.1f} MB" if boxes else "-"
        rows.append(
            [
                mode.name,
                f"{held[0] / 1024:.1f} MB",
                f"{middle / 1024:.1f} MB",
                f"{held[-1] / 1024:.1f} MB",
                f"{end - middle:+.0f} KB",
                box,
            ]
        )
    report.table(
        "",
        [
            "",
            f"after {steps // POINTS:,} steps",
            "in the middle",
            "at the end",
            "growth since the middle",
            "black box",
        ],
        rows,
    )
    recorded = {name: kb for name, kb in grown.items() if name != "off"}
    report.goals.append(
        Goal(
            f"The memory of a recorded process does not grow (less than {FLAT_KB // 1024} MB over"
            f" the second half of {steps:,} steps)",
            ", ".join(f"{name} {kb:+.0f} KB" for name, kb in recorded.items()),
            all(kb < FLAT_KB for kb in recorded.values()),
        )
    )
    finish(report, given)


if __name__ == "__main__":
    main()
