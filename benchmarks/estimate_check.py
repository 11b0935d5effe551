"""Compare the time that a preview estimates for collectives with the time measured on gloo, on one
machine.

python benchmarks/estimate_check.py [--quick] [--json FILE]
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _report import Report, arguments, command, finish

PROGRAMS = ("DDP", "FSDP2", "TP")
STEPS = 8
NETWORK_BYTES = 8_000_000


def program(name: str) -> None:
    """Run a program as a rank: a model of step_time.py, or ``network`` for the two figures of the
    network.
    """
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if name == "network":
        large, small = torch.ones(NETWORK_BYTES // 4), torch.ones(1)
        for _ in range(12):
            dist.all_reduce(large)
            dist.all_reduce(small)
    else:
        import step_time

        step = {"DDP": step_time.ddp, "FSDP2": step_time.fsdp2, "TP": step_time.tp}[name](
            rank, world_size
        )
        for _ in range(STEPS):
            step()
    dist.destroy_process_group()


def run(*words: object) -> None:
    """Run commlens on this file; raise if it fails."""
    environ = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-m", "commlens", *map(str, words)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))}: {done.stderr[-2000:]}")


def measured(name: str, ranks: int, folder: Path) -> list[tuple[Any, float]]:
    """Run a program under gloo. Return its events, and the seconds that each took on the rank that
    arrived last.
    """
    from commlens import Trace
    from commlens.traces.times import time_of

    traces = folder / f"{name}-{ranks}"
    run(
        "launch",
        "--trace",
        "--trace-dir",
        traces,
        "--nproc-per-node",
        ranks,
        __file__,
        "--program",
        name,
    )
    data = [Trace.load(traces / f"trace-rank{rank}.json").data for rank in range(ranks)]
    # All ranks of these programs issue the same collectives. The one that arrives last waits for
    # nobody.
    found = []
    for events in zip(*(each.events for each in data), strict=True):
        times = [time_of(each, event) for each, event in zip(data, events, strict=True)]
        if all(time is not None for time in times):
            found.append((events[0], min(time.total for time in times if time is not None) / 1e9))
    return found


def network_of(ranks: int, folder: Path) -> Any:
    """Return the network whose two figures are those of an all_reduce of 8 MB and of one of 4 B
    here.
    """
    from commlens.model.network import Network

    found = measured("network", ranks, folder)
    large = statistics.median(
        seconds for event, seconds in found if event.input_bytes == NETWORK_BYTES
    )
    small = statistics.median(seconds for event, seconds in found if event.input_bytes == 4)
    hops = 2 * (ranks - 1).bit_length()
    wire = next(event.wire_bytes for event, _ in found if event.input_bytes == NETWORK_BYTES)
    bandwidth = wire / max(1e-9, large - small)
    return Network(
        name="this machine",
        intra_bandwidth=bandwidth,
        inter_bandwidth=bandwidth,
        intra_latency=small / hops,
        ranks_per_node=ranks,
    )


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--program", help="run as a rank of this program")
    given = parser.parse_args()
    if given.program:
        program(given.program)
        return
    from commlens import Trace
    from commlens.traces.network import collective_seconds

    report = Report(
        "A preview's estimate against measured time",
        "Programs on gloo, on one machine. The network's bandwidth and latency are those of"
        " all_reduces of 8 MB and of 4 B, measured just before. Measured is the time of a"
        " collective on the rank that arrives last, which waits for no other; figures are sums over"
        " the collectives of a step, medians of the steps. Estimated is the preview's, for the same"
        " collectives.",
        command(),
    )
    rows = []
    with tempfile.TemporaryDirectory(prefix="commlens-estimate-") as scratch:
        folder = Path(scratch)
        for ranks in (2,) if given.quick else (2, 4):
            network = network_of(ranks, folder)
            for name in PROGRAMS:
                found = measured(name, ranks, folder)
                run(
                    "preview",
                    "--world-size",
                    ranks,
                    "--output",
                    folder / f"{name}-{ranks}-preview.json",
                    "--force",
                    __file__,
                    "--program",
                    name,
                )
                preview = Trace.load(folder / f"{name}-{ranks}-preview.json").data
                same = {(event.sequence, event.op, event.wire_bytes) for event in preview.events}
                for op in [*sorted({event.op for event, _ in found if 0 < event.step < STEPS}), ""]:
                    steps: dict[int, list[float]] = {}
                    estimates: dict[int, float] = {}
                    calls = 0
                    for event, seconds in found:
                        if not 0 < event.step < STEPS or op not in ("", event.op):
                            continue
                        calls += 1
                        steps.setdefault(event.step, []).append(seconds)
                        group = tuple(range(ranks))
                        estimates[event.step] = estimates.get(event.step, 0.0) + collective_seconds(
                            event.op, group, event.wire_bytes, network
                        )
                    real = statistics.median(sum(step) for step in steps.values())
                    estimate = statistics.median(estimates.values())
                    agree = sum(
                        (event.sequence, event.op, event.wire_bytes) in same for event, _ in found
                    )
                    report.rows.append(
                        {
                            "program": name,
                            "ranks": ranks,
                            "op": op,
                            "measured_s": real,
                            "estimated_s": estimate,
                            "same": agree,
                            "of": len(found),
                        }
                    )
                    rows.append(
                        [
                            name,
                            str(ranks),
                            op or "all",
                            f"{calls / len(steps):.0f}",
                            f"{real * 1e3:.2f} ms",
                            f"{estimate * 1e3:.2f} ms",
                            f"{estimate / real:.2f}",
                            f"{agree} of {len(found)}",
                        ]
                    )
            bandwidth, latency = network.intra_bandwidth / 1e9, network.intra_latency * 1e6
            report.about += (
                f" With {ranks} ranks: {bandwidth:.2f} GB/s and {latency:.0f} us per hop."
            )
    report.table(
        "",
        [
            "program",
            "ranks",
            "op",
            "calls a step",
            "measured",
            "estimated",
            "estimated / measured",
            "same collectives",
        ],
        rows,
    )
    finish(report, given)


if __name__ == "__main__":
    main()
