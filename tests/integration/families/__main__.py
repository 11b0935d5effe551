"""Runs families, traced and not, and writes what came of it: ``python -m families OUT fake:8
fake:1024 gloo:2:tp_mlp,moe ...``.

With this folder's parent and the package on PYTHONPATH.

One process imports torch; each job ("gloo:2") is forked from it, a process for each rank, one job
after another. Within a job the families run one after another, each under a fresh process group.
OUT receives one JSON line for each family and rank.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import json
import os
import random
import signal
import sys
import time
import traceback
import weakref
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from oracle import truth
from torch.testing._internal.distributed.fake_pg import FakeStore

import commlens
import families
from families.inspection import Traces, differences, digest, left_behind, state_of

GROUP_TIMEOUT = timedelta(seconds=20)
JOB_TIMEOUT_S = 300
DEEP = (("fake", 8), ("gloo", 2))
"""Where tensor ops are traced, too."""


@contextlib.contextmanager
def process_group(world: families.World, store: Any, name: str) -> Any:
    if world.backend == families.FAKE:
        dist.init_process_group("fake", store=FakeStore(), rank=world.rank, world_size=world.size)
    else:
        prefixed = dist.PrefixStore(name, store)
        dist.init_process_group(
            "gloo", store=prefixed, rank=world.rank, world_size=world.size, timeout=GROUP_TIMEOUT
        )
    try:
        yield
    finally:
        if torch.__version__.startswith("2.6."):
            # Its gloo waits for its threads with the GIL held, which one of them may need to drop a
            # tensor's last reference.
            time.sleep(0.05)
        dist.destroy_process_group()


def built(family: families.Family, world: families.World) -> families.Program:
    torch.manual_seed(7)
    random.seed(7)
    return family.build(world)


def untraced(
    family: families.Family, world: families.World, store: Any
) -> tuple[Counter[str], list[Any], list[Any]]:
    """What the family computes and issues when nobody but the oracle looks."""
    with process_group(world, store, f"{family.name}/plain"):
        program = built(family, world)
        with truth() as counts:
            outputs = family.step(program)
        return counts, digest(program, outputs), state_of(program)


def traced(
    family: families.Family,
    world: families.World,
    store: Any,
    depth: str,
    plain: tuple[Any, Any, Any],
) -> dict[str, Any]:
    """The same under a trace, and what is not as it was."""
    plain_truth, plain_digest, plain_state = plain
    with process_group(world, store, f"{family.name}/{depth}"):
        before = left_behind()
        program = built(family, world)
        traces = Traces(depth)
        # Below a dispatch mode an op is dispatched twice, and the oracle counts dispatches: there
        # the untraced run is the truth.
        with (
            (
                truth() if depth == "collectives" else contextlib.nullcontext(plain_truth)
            ) as traced_truth,
            traces.record(),
        ):
            outputs = family.step(program)
        result: dict[str, Any] = {
            "truth": plain_truth,
            "truth_while_traced": traced_truth,
            **traces.counts(),
            "differs": (
                differences(plain_digest, digest(program, outputs))
                + differences(plain_state, state_of(program))
            ),
            "left": sorted(left_behind() - before),
        }
        alive = [
            (name, weakref.ref(module))
            for model in program.models
            for name, module in model.named_modules()
        ]
        alive += [
            (name, weakref.ref(parameter))
            for model in program.models
            for name, parameter in model.named_parameters()
        ]
        del program, outputs
        torch._dynamo.reset()  # its caches hold what was compiled
    gc.collect()
    # The trace itself is still there.
    result["alive"] = [name for name, ref in alive if ref() is not None]
    result["tensors"] = living_tensors()
    del traces
    return result


def living_tensors() -> int:
    """How many tensors there are when they get no fewer: some take more than one collection to go,
    and some a turn of torch's threads.
    """
    counts: list[int] = []
    while len(counts) < 2 or counts[-1] < counts[-2]:
        time.sleep(0.01)
        gc.collect()
        counts.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
    return counts[-1]


def judged(family: families.Family, world: families.World, store: Any) -> dict[str, Any]:
    """Run a family without a trace and with one of each depth: what came of it, by depth."""
    began = time.perf_counter()
    at_first = living_tensors()
    plain = untraced(family, world, store)
    torch._dynamo.reset()
    tensors = living_tensors()
    depths = ("collectives", "ops") if (world.backend, world.size) in DEEP else ("collectives",)
    results = {depth: traced(family, world, store, depth, plain) for depth in depths}
    # by one run: caches, and collectives that nobody waited for
    kept_by_torch = max(0, tensors - at_first)
    for number, result in enumerate(results.values(), start=1):
        result["tensors"] -= tensors + number * kept_by_torch
    return {"depths": results, "seconds": time.perf_counter() - began}


def run_rank(world: families.World, store: Any, only: list[str], out: Path) -> None:
    if world.backend == families.FAKE:
        # What a fake collective "receives" is whatever memory held: fill it, so that two runs can
        # be compared.
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = True
    for family in families.traced_cases(world.backend, world.size):
        if only and family.name not in only:
            continue
        record = {
            "family": family.name,
            "backend": world.backend,
            "world_size": world.size,
            "rank": world.rank,
        }
        try:
            record |= judged(family, world, store)
        except Exception:
            record["error"] = traceback.format_exc()
        with out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        if "error" in record and world.backend == families.GLOO:
            sys.exit(
                f"{family.name} failed on rank {world.rank} of {world.size}: the families after it"
                " did not run"
            )


def in_child(work: Any) -> int:
    """Fork a process that does ``work`` and ends without the interpreter's long goodbye."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        faulthandler.enable()
        faulthandler.dump_traceback_later(JOB_TIMEOUT_S - 2, exit=True)
        work()
        code = 0
    except SystemExit as error:
        print(error, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve_store(pipe: int) -> None:
    """The job's store, in a process of its own: ranks come and go."""
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=GROUP_TIMEOUT
    )
    os.write(pipe, f"{store.port}\n".encode())
    signal.pause()


def run_job(backend: str, size: int, only: list[str], out: Path) -> list[int]:
    """Run one job; the exit statuses of its ranks."""
    if backend == families.FAKE:
        pids, server = (
            [in_child(lambda: run_rank(families.World(backend, 1, size), None, only, out))],
            None,
        )
    else:
        read, write = os.pipe()
        server = in_child(lambda: serve_store(write))
        os.close(write)
        with os.fdopen(read) as pipe:
            port = int(pipe.readline())

        def rank_of_job(rank: int) -> None:
            store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=GROUP_TIMEOUT)
            run_rank(families.World(backend, rank, size), store, only, out)

        pids = [in_child(lambda rank=rank: rank_of_job(rank)) for rank in range(size)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if server is not None:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
    return codes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("jobs", nargs="+", help="BACKEND:WORLD_SIZE[:FAMILY,FAMILY...]")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    families.load()
    commlens.trace  # noqa: B018  # imported once, before the forks
    gc.collect()
    gc.freeze()
    failed = False
    for job in arguments.jobs:
        backend, size, *names = job.split(":")
        only = names[0].split(",") if names else []
        codes = run_job(backend, int(size), only, arguments.out)
        if any(codes):
            failed = True
            print(f"{job}: the ranks ended with {codes}", file=sys.stderr)
    sys.exit(failed)


if __name__ == "__main__":
    main()
