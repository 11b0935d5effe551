"""What strict verification adds to a synchronous collective on gloo, against the bare op and the recorded one.

Paired and interleaved: the ranks of one job switch together between bare, recorded and verified blocks of the same op.
Usage: python benchmarks/verify_cost.py [--ranks 2 4] [--rounds 40]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path

SIZES = {"4 B": 1, "64 KB": 16_384, "1 MB": 262_144, "16 MB": 4_194_304}
MODES = ("bare", "recorded", "verified")


def worker(rank: int, ranks: int, folder: str, rounds: int) -> None:
    """One rank: prints its medians when it is rank 0."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks), OMP_NUM_THREADS="1")
    import torch
    import torch.distributed as dist

    import commlens
    from commlens.capture import bootstrap, hooks, tap

    commlens.enable(debug=True, watched=True, job=Path(folder).name)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    session = bootstrap.session()
    assert session is not None and session.recorder.verifier is not None
    recorder, verifier = session.recorder, session.recorder.verifier

    def switch(mode: str) -> None:
        if mode == "bare":
            tap.detach(recorder)
            hooks.set_recorder(None)
        else:
            recorder.verifier = verifier if mode == "verified" else None
            hooks.set_recorder(recorder)
            tap.attach(recorder)

    for name, numel in SIZES.items():
        tensor = torch.ones(numel)
        repeats = max(4, min(150, 3_000_000 // numel))
        times: dict[str, list[float]] = {mode: [] for mode in MODES}
        for turn in range(rounds + 2):
            for mode in MODES[turn % 3 :] + MODES[: turn % 3]:
                switch(mode)
                for _ in range(2):
                    dist.all_reduce(tensor)
                began = time.perf_counter()
                for _ in range(repeats):
                    dist.all_reduce(tensor)
                if turn >= 2:
                    times[mode].append((time.perf_counter() - began) / repeats * 1e6)
        if rank == 0:
            median = {mode: statistics.median(values) for mode, values in times.items()}
            ratio = {mode: statistics.median(v / b for v, b in zip(times[mode], times["bare"], strict=True)) for mode in MODES[1:]}
            print(
                f"{ranks} ranks  all_reduce {name:>5}   bare {median['bare']:8.0f} us   recorded x{ratio['recorded']:.2f}   "
                f"verified x{ratio['verified']:.2f}   (+{median['verified'] - median['bare']:.0f} us)",
                flush=True,
            )
    switch("recorded")
    dist.destroy_process_group()
    bootstrap.stop()


def main() -> None:
    """Run it for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    import torch.multiprocessing as mp

    for ranks in arguments.ranks:
        with tempfile.TemporaryDirectory(prefix="verify-cost-") as folder:
            mp.spawn(worker, (ranks, folder, arguments.rounds), ranks)


if __name__ == "__main__":
    main()
