"""Measure the watcher's CPU time per minute, with and without one part of its work: deferred
verification, or looking for slow ranks, on the host or on devices that tell durations.

The ranks are small processes without torch that write black boxes at a given rate, so that only the
watcher is measured. Runs with and without alternate.

    python benchmarks/watch_cost.py [--ranks 8] [--rate 1000] [--seconds 20] [--rounds 2]
        [--part verification | slow | slow-devices]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import statistics
import tempfile
import threading
import time
from collections import deque
from pathlib import Path

OPS = [
    ("all_reduce", 4_194_304),
    ("all_reduce", 1_048_576),
    ("all_gather", 65_536),
    ("reduce_scatter", 65_536),
    ("all_reduce", 1),
]

READ_EVERY_S = 20.0  # as ranks read the durations of 2,000 entries

PARTS = {
    "verification": "deferred verification",
    "slow": "looking for slow ranks",
    "slow-devices": "looking for slow ranks on devices",
}


def rank_process(
    folder: Path, rank: int, ranks: int, rate: int, seconds: float, barrier: object, part: str
) -> None:
    """Announce ``rate`` collectives a second, in batches of ten, with a watchdog's heartbeat and
    reduce ops that are recorded later.
    """
    from commlens.blackbox import job_dirs
    from commlens.blackbox import layout as L
    from commlens.blackbox.writer import BoxWriter

    about = {
        "job": folder.name,
        "host": os.uname().nodename,
        "pid_namespace": str(Path("/proc/self/ns/pid").readlink()),
        "prefixes": {},
    }
    box = BoxWriter(
        folder / job_dirs.box_name(rank, os.getpid()),
        capacity=2000,
        rank=rank,
        world_size=ranks,
        local_rank=rank,
        start_ticks=job_dirs.start_ticks(os.getpid()),
        about=about,
    )
    box.word(L.PHASE, 1)
    name = f"0-{ranks - 1}"
    group = box.add_blob(
        {
            "k": "group",
            "name": "0",
            "desc": "default_pg",
            "ranks": name,
            "backend": "gloo",
            "device": "cuda" if part == "slow-devices" else "cpu",
            "ahead": part == "slow-devices",
            "inc": 0,
        }
    )
    asked = [
        box.add_blob(
            {
                "k": "asked",
                "op": op,
                "dop": op,
                "in": [[[size], "float32", "cpu", "strided", None]],
                "out": [],
                "rop": None,
            }
        )
        for op, size in OPS
    ]
    stacks = [
        box.add_blob({"k": "stack", "f": [["/home/me/train.py", 80 + i, "step"]]})
        for i in range(len(OPS))
    ]
    barrier.wait()  # type: ignore[attr-defined]
    began, beat, pending, number = time.monotonic(), 0.0, [], 0
    untimed: deque[tuple[int, int]] = deque(maxlen=2000)
    timed = 0.0
    while (now := time.monotonic()) - began < seconds:
        while number < (now - began) * rate:
            number += 1
            kind = number % len(OPS)
            index = box.next_index()
            at = time.monotonic_ns()
            record = L.Record(
                index,
                at,
                group,
                asked[kind],
                stacks[kind],
                sequence_number=number,
                step=number // 100,
                thread=os.getpid(),
                flags=L.FLAG_ENTERED,
            )
            offset = box.announce(record)
            if part == "slow":
                box.wait_began(offset, index, at, os.getpid(), True)
                box.wait_completed(offset, index, at + 100_000 + rank, os.getpid())
            else:
                box.mark_outcome(offset, index, L.OUTCOME_COMPLETED, L.HOW_WAIT)
            untimed.append((offset, index))
            if number % 100 == 0:
                box.word(L.STEPS, number // 100)
            pending.append((offset, index))
        if part == "slow-devices" and time.monotonic() // READ_EVERY_S != timed:
            timed = time.monotonic() // READ_EVERY_S
            for offset, index in untimed:
                box.mark_value(offset, L.DURATION, index, (100_000 + rank) // L.TICK_NS)
            untimed.clear()
            box.word(L.TIMED, time.monotonic_ns())
        if now - beat > 0.25:
            beat = now
            box.heartbeat()
            for offset, index in pending[-500:]:
                box.mark_value(offset, L.REDUCE_OP, index, 1)
            pending.clear()
        time.sleep(10 / rate if rate > 100 else 0.1)
    box.word(L.PHASE, L.PHASE_CLOSED)


def watch(folder: Path, seconds: float, compares: bool, pipe: object, part: str) -> None:
    """Run the watcher in a process of its own, and send its CPU seconds per minute, without its
    start and the job's end.
    """
    from commlens.config import Settings
    from commlens.watch import slowness
    from commlens.watch.mismatches.deferred_verification import DeferredVerification
    from commlens.watch.watcher import Watcher

    made: list[DeferredVerification] = []
    poll = DeferredVerification.poll

    def counted(self: DeferredVerification, now: float) -> None:
        if self not in made:
            made.append(self)
        if compares or part != "verification":
            poll(self, now)

    if part != "verification" and not compares:
        slowness.Slowness.poll = lambda *_: []  # type: ignore[method-assign]
    DeferredVerification.poll = counted  # type: ignore[method-assign]
    watcher = Watcher([folder], Settings(dump_dir=str(folder.parent / "dumps")))
    watcher.reporter.preload()
    looks: list[tuple[float, float]] = []

    def use() -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        looks.append((used.ru_utime + used.ru_stime, time.monotonic()))

    for at in (2.0, seconds - 1.0):
        timer = threading.Timer(at, use)
        timer.daemon = True
        timer.start()
    watcher.run()
    if len(looks) < 2:  # a machine so busy that the job was over first
        use()
    cpu = (looks[1][0] - looks[0][0]) / (looks[1][1] - looks[0][1]) * 60
    compared = made[0] if made else None
    pipe.send(
        (
            cpu,
            compared.records if compared else 0,
            compared.missed if compared else 0,
            watcher.reporter.verdict is not None,
        )
    )  # type: ignore[attr-defined]


def measure(
    ranks: int, rate: int, seconds: float, compares: bool, part: str
) -> tuple[float, int, int, bool]:
    """Return a watcher's CPU seconds per minute, the records compared and missed, and whether it
    printed a verdict.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="commlens-watch-cost-", dir="/dev/shm") as root:
        folder = Path(root) / "job"
        folder.mkdir()
        barrier = context.Barrier(ranks + 1)
        processes = [
            context.Process(
                target=rank_process,
                args=(folder, rank, ranks, rate, seconds, barrier, part),
                daemon=True,
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        barrier.wait()
        ours, theirs = context.Pipe()
        watcher = context.Process(
            target=watch, args=(folder, seconds, compares, theirs, part), daemon=True
        )
        watcher.start()
        theirs.close()
        result = ours.recv()
        for process in [*processes, watcher]:
            process.join(20)
            process.kill()
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description="Measure the watcher's CPU time, with and without one part of its work."
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rate", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--part", choices=list(PARTS), default="verification")
    arguments = parser.parse_args()
    figures: dict[bool, list[float]] = {False: [], True: []}
    records = missed = 0
    for _ in range(arguments.rounds):
        for compares in (False, True):
            cpu, read, lost, spoke = measure(
                arguments.ranks, arguments.rate, arguments.seconds, compares, arguments.part
            )
            figures[compares].append(cpu)
            records, missed = records + read, missed + lost
            assert not spoke, "the watcher printed a verdict on a healthy job"
    without, with_it = statistics.median(figures[False]), statistics.median(figures[True])
    print(
        f"{arguments.ranks} ranks at {arguments.rate}/s: the watcher uses {without:.2f} s of CPU a"
        f" minute without {PARTS[arguments.part]}, {with_it:.2f} s with it"
        f" ({(with_it - without) / 60:.2%} of a core); {records} records compared, {missed} not"
    )


if __name__ == "__main__":
    main()
