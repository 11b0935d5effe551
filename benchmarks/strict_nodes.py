"""What strict verification costs with several nodes. They are emulated: each has a folder of black
boxes, and a relay on the loopback.

One set of ranks for each number of nodes; in turns, all of them run blocks of an all_reduce of 4
bytes that is only recorded, verified, and verified in samples. The ratios are of blocks of the same
round.

    python benchmarks/strict_nodes.py [--nodes 1 2 4 8] [--ranks 2] [--rounds 15] [--engine native]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

BLOCK = 64
MODES = ("recorded", "strict", "sample")
TICKS = os.sysconf("SC_CLK_TCK")


def relay_cpu_s(folder: Path) -> float:
    """Return the CPU seconds that the relay of a node has used."""
    from commlens.blackbox import job_dirs
    from commlens.boards.board import PeerBoard

    for path in folder.glob("commlens-*/job/rank*.board"):
        board = PeerBoard(path)
        if board.is_remote:
            fields = job_dirs.stat_fields(board.pid)
            return (int(fields[11]) + int(fields[12])) / TICKS
    return 0.0


def run_rank(folder: Path, nodes: int, per_node: int, rank: int, given: argparse.Namespace) -> None:
    """Run one rank and write its figures."""
    import commlens
    from commlens.capture import session
    from commlens.verification.sampling import CallSampler

    size, node = nodes * per_node, rank // per_node
    box_dir = folder / f"node{node}"
    places = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": rank % per_node,
        "LOCAL_WORLD_SIZE": per_node,
    }
    os.environ.update({name: str(value) for name, value in places.items()})
    commlens.enable(debug=True, watched=True, box_dir=str(box_dir), job="job", engine=given.engine)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )
    inside = [
        dist.new_group(list(range(first, first + per_node))) for first in range(0, size, per_node)
    ][node]
    verifier: Any = session.recording().recorder.verifier
    groups = {"all ranks": None, "within the node": inside} if nodes > 1 else {"all ranks": None}
    tensor = torch.ones(1)
    took: dict[str, list[float]] = {f"{where}, {mode}": [] for where in groups for mode in MODES}
    relays: dict[str, list[float]] = {name: [] for name in took}
    verifier.leave()
    for _ in range(given.rounds + 2):  # the first ones make plans
        for where, group in groups.items():
            for mode in MODES:
                if mode != "recorded":
                    verifier._sampler = CallSampler() if mode == "sample" else None
                    verifier.enter()
                dist.barrier()
                cpu = relay_cpu_s(box_dir)
                began = time.perf_counter()
                for _ in range(BLOCK):
                    dist.all_reduce(tensor, group=group)
                took[f"{where}, {mode}"].append((time.perf_counter() - began) / BLOCK)
                relays[f"{where}, {mode}"].append((relay_cpu_s(box_dir) - cpu) / BLOCK)
                dist.barrier()
                if mode != "recorded":
                    verifier.leave()
    (folder / f"{rank}.json").write_text(json.dumps({"took": took, "relays": relays}))
    dist.destroy_process_group()


def measure(nodes: int, given: argparse.Namespace) -> None:
    """Run the ranks of some nodes, and print their figures."""
    with tempfile.TemporaryDirectory() as made:
        folder, pids = Path(made), []
        for rank in range(nodes * given.ranks):
            pid = os.fork()
            if not pid:
                code = 1
                try:
                    run_rank(folder, nodes, given.ranks, rank, given)
                    code = 0
                finally:
                    from commlens.capture import session

                    session.recording().at_exit()
                    os._exit(code)
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        if any(codes):
            print(f"{nodes} nodes: the ranks ended with {codes}")
            return
        found = [
            json.loads((folder / f"{rank}.json").read_text()) for rank in range(nodes * given.ranks)
        ]
    for where in ("all ranks", "within the node"):
        if f"{where}, strict" not in found[0]["took"]:
            continue
        # A collective ends on all ranks at about the same time: the slowest rank of each block says
        # how long the block took.
        blocks = {
            mode: [
                max(times)
                for times in zip(*(one["took"][f"{where}, {mode}"] for one in found), strict=True)
            ][2:]
            for mode in MODES
        }
        cells = [f"{statistics.median(blocks['recorded']) * 1e6:.0f} us"]
        for mode in MODES[1:]:
            ratios = sorted(
                one / bare for one, bare in zip(blocks[mode], blocks["recorded"], strict=True)
            )
            quarter, three = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
            added = (
                statistics.median(
                    one - bare for one, bare in zip(blocks[mode], blocks["recorded"], strict=True)
                )
                * 1e6
            )
            cpu = (
                statistics.mean(
                    one["relays"][f"{where}, {mode}"][2:][i]
                    for one in found
                    for i in range(given.rounds)
                )
                * 1e6
            )
            cells.append(
                f"{statistics.median(ratios):.2f} ({quarter:.2f}-{three:.2f}), +{added:.0f} us,"
                f" relay {cpu:.0f} us"
            )
        print(f"| {nodes} x {given.ranks} | {where} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--engine", default="native")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    import commlens.capture.watchdog
    import commlens.verification.verifier  # noqa: F401

    print(
        f"torch {torch.__version__}, {os.cpu_count()} cores, {given.engine} engine, load"
        f" {os.getloadavg()[0]:.1f}"
    )
    print(
        "| nodes x ranks | group | recorded | strict | sample |\n|---|---|---|---|---|", flush=True
    )
    for nodes in given.nodes:
        measure(nodes, given)


if __name__ == "__main__":
    sys.exit(main())
