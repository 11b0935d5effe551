"""Measure recording on one rank of NCCL on one GPU, and check that CUDA graphs and torch's own recorder work with it.

    python benchmarks/gpu_check.py [--quick] [--json FILE]

Without a GPU, it reports that and measures nothing.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _report import Goal, Report, arguments, command, finish, us

SIZES = {"4 B": 1, "1 MB": 262_144, "64 MB": 16_777_216}


def cuda() -> str:
    """Return why nothing can be measured; empty if it can."""
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        return "this torch sees no GPU"
    return "" if dist.is_nccl_available() else "this torch has no NCCL"


def rank(way: str, folder: str, rounds: int, ops: int) -> dict[str, Any]:
    """Run the process that uses the GPU, bare or recorded by an engine."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    os.environ.update(TORCH_NCCL_TRACE_BUFFER_SIZE="2000", TORCH_FR_BUFFER_SIZE="2000")
    import torch
    import torch.distributed as dist

    session = None
    if way != "bare":
        import _modes

        from commlens import config
        from commlens.capture import session
        from commlens.launch import recording

        recording.start(config.Settings(box_dir=folder, dump_dir=folder, job="gpu", **_modes.recorded(way)))
        session = session.session()
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.FileStore(f"{folder}/store-{way}", 1), rank=0, world_size=1)
    result: dict[str, Any] = {"issue_us": {}, "done_us": {}}
    for name, numel in SIZES.items():
        tensor = torch.ones(numel, device="cuda")
        for _ in range(20):
            dist.all_reduce(tensor)
        torch.cuda.synchronize()
        issued, done = [], []
        for _ in range(rounds):
            began = time.perf_counter_ns()
            for _ in range(ops):
                dist.all_reduce(tensor)
            issued.append((time.perf_counter_ns() - began) / ops / 1000)
            torch.cuda.synchronize()
            done.append((time.perf_counter_ns() - began) / ops / 1000)
        result["issue_us"][name], result["done_us"][name] = statistics.median(issued), statistics.median(done)
    result["graph"] = captured_and_replayed()
    dist.barrier()
    torch.cuda.synchronize()
    if session is not None:
        result["recorded"] = session.recorder.writer.last_index
        result["lost"] = session.recorder.lost
    dump = Path(folder) / f"native-{way}"
    dump.mkdir()
    (dump / "nccl_trace_rank_0").write_bytes(torch._C._distributed_c10d._dump_nccl_trace())
    result["dump"] = str(dump)
    dist.destroy_process_group()
    return result


def captured_and_replayed() -> str:
    """Capture three all_reduces in a CUDA graph, in the mode in which any query of an event fails the capture, and replay it."""
    import torch
    import torch.distributed as dist

    tensor, stream = torch.ones(1024, device="cuda"), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            dist.all_reduce(tensor)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="global"):
            tensor.mul_(2)
            for _ in range(3):
                dist.all_reduce(tensor)
            time.sleep(1.0)  # whoever looks at works from another thread would do so now, and end the capture
        tensor.fill_(1)
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "" if tensor[0].item() == 32.0 else f"the result is {tensor[0].item()}, not 32"


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--rank", nargs=2, metavar=("WAY", "FOLDER"), help="(internal: runs one rank)")
    given = parser.parse_args()
    rounds, ops = (5, 50) if given.quick else (30, 200)
    if given.rank:
        print(json.dumps(rank(*given.rank, rounds, ops)))
        return
    report = Report("On a GPU", "", command())
    why = cuda()
    if why:
        report.left_out.append(f"Nothing was measured on a GPU: {why}.")
        finish(report, given)
        return
    import torch

    report.about = (
        f"One rank of NCCL on {torch.cuda.get_device_name(0)}, one process per configuration, one after the other: microseconds for one "
        f"all_reduce until the call returns, and until the device is done; medians of {rounds} blocks of {ops}."
    )
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="commlens-gpu-") as folder:
        for way in ("bare", "python", "native", "bare again"):
            here = Path(folder) / way.replace(" ", "-")
            here.mkdir()
            quick = ["--quick"] if given.quick else []
            ended = subprocess.run(
                [sys.executable, "-W", "ignore", __file__, *quick, "--rank", way.split()[0], str(here)],
                stdout=subprocess.PIPE, text=True, timeout=300, check=False,
            )  # fmt: skip
            if ended.returncode:
                report.left_out.append(f"{way} ended with status {ended.returncode}.")
                continue
            found[way] = json.loads(ended.stdout.strip().splitlines()[-1])
            report.rows.append({"way": way, **found[way]})
        rows = [
            [way, *(f"{us(one['issue_us'][size])} / {us(one['done_us'][size])}" for size in SIZES), one["graph"] or "captured and replayed",
             str(one.get("recorded", ""))]
            for way, one in found.items()
        ]  # fmt: skip
        report.table("", ["", *(f"{size}: returned / done" for size in SIZES), "CUDA graph", "records"], rows)
        for way, one in found.items():
            if way in ("python", "native"):
                report.goals.append(
                    Goal(f"CUDA graphs are captured and replayed with the {way} engine on, and no event is queried meanwhile",
                         one["graph"] or "yes", not one["graph"])
                )  # fmt: skip
        if "python" in found:
            read = subprocess.run([sys.executable, "-m", "commlens", "diagnose", found["python"]["dump"], "--json"],
                                  capture_output=True, text=True, timeout=120, check=False)  # fmt: skip
            kind = json.loads(read.stdout).get("kind", "") if read.stdout.lstrip().startswith("{") else read.stderr.strip()[-300:]
            report.goals.append(Goal("commlens diagnose reads the dump of NCCL's own recorder", str(kind), kind == "healthy"))
    finish(report, given)


if __name__ == "__main__":
    main()
