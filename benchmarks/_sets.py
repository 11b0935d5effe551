"""Sets of real processes that take turns, one set per mode: the basis of the paired benchmarks.

All sets run the same program. A round runs each set once, in a different order each time, so that a
slow phase of the machine slows all of them. Figures are medians, over the rounds, of the difference
within a round.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic, perf_counter_ns, process_time_ns
from typing import Any

import _modes
from _modes import Mode

Prepare = Callable[[int, int, Mode], dict[str, Callable[[], object]]]
"""Called in a process with its rank, the world size and the mode once the process group exists;
returns a function to run for each name.
"""

PATIENCE_S = 120.0
"""How long a block may take before the benchmark fails."""
LEAST_ROUNDS = 3
FEW_ROUNDS = 15
"""Blocks are short enough to allow this many rounds."""


class Ended(Exception):
    """A rank of a set ended with an exception, which the message names."""


def _why(error: BaseException) -> str:
    """Return the original exception, and where it was raised."""
    while error.__cause__ is not None:
        error = error.__cause__
    where = traceback.extract_tb(error.__traceback__)[-1]
    said = str(error).strip().splitlines()
    return (
        f"{type(error).__name__}{f': {said[0]}' if said else ''}"
        f" ({Path(where.filename).name}:{where.lineno})"
    )


def _rank(
    mode: Mode,
    rank: int,
    world_size: int,
    backend: str,
    folder: str,
    per_step: bool,
    prepare: Prepare,
    pipe: Connection,
) -> None:
    """Run one process, and send the reason if it ends early."""
    try:
        _member(mode, rank, world_size, backend, folder, per_step, prepare, pipe)
    except Exception as error:
        with suppress(OSError):
            pipe.send(Ended(_why(error)))
        os._exit(1)


def _member(
    mode: Mode,
    rank: int,
    world_size: int,
    backend: str,
    folder: str,
    per_step: bool,
    prepare: Prepare,
    pipe: Connection,
) -> None:
    """Run one process: receive (case, number of runs), run them, send (wall, CPU) ns per run."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    faulthandler.register(signal.SIGUSR1)
    warnings.simplefilter("ignore")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    job = Path(folder).name
    _modes.set_up(mode, folder, job)
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    else:
        store = dist.FileStore(f"{folder}/store", world_size)
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=PATIENCE_S),
        )
    cases = prepare(rank, world_size, mode)
    _modes.confirm(mode, backend)
    around = _modes.around(mode)
    outer, inner = (
        (contextlib.nullcontext, around) if per_step else (around, contextlib.nullcontext)
    )
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        case, count = order
        run = cases[case]
        with outer():
            cpu, wall = process_time_ns(), perf_counter_ns()
            if inner is contextlib.nullcontext:
                for _ in range(count):
                    run()
            else:
                for _ in range(count):
                    with inner():
                        run()
            wall, cpu = perf_counter_ns() - wall, process_time_ns() - cpu
        pipe.send((wall / count, cpu / count))
    sys.stdout.flush()
    os._exit(0)  # every rank at once: what is measured is over


@dataclass
class Measured:
    """One case in one mode: microseconds of the slowest rank, compared with the first mode in the
    same round.
    """

    case: str
    mode: str
    us: float
    added_us: float
    added_us_quartiles: tuple[float, float]
    ratio: float
    ratio_quartiles: tuple[float, float]
    ratio_interval: tuple[float, float]
    """The median's 95% confidence interval, assuming that rounds are alike."""
    cpu_us: float
    added_cpu_us: float
    added_cpu_us_quartiles: tuple[float, float]
    added_cpu_us_interval: tuple[float, float]
    added_least_us: float
    """The shortest block minus the first mode's shortest: what is added without disturbances."""
    rounds: int
    runs: int

    def takes_at_most(self, limit: float) -> bool | None:
        """Return whether its ratio is at most ``limit``; None if that is not certain with 95%
        confidence.
        """
        return is_at_most(self.ratio_interval, limit)

    def adds_at_most(self, least: float, most: float | None = None) -> bool | None:
        """Return whether it adds at most this much CPU time, in us (a limit from ``least`` to
        ``most``); None if that is uncertain.
        """
        return is_at_most(self.added_cpu_us_interval, least, most)


def is_at_most(
    interval: tuple[float, float], least: float, most: float | None = None
) -> bool | None:
    """Return whether a value in ``interval`` is at most a limit between ``least`` and ``most``;
    None if that is uncertain.
    """
    return (
        True
        if interval[1] <= least
        else False
        if interval[0] > (least if most is None else most)
        else None
    )


class Sets:
    """One set of processes per mode; the others are compared with the first."""

    def __init__(
        self,
        modes: Sequence[Mode],
        pipes: list[list[Connection]],
        watchers: dict[str, int],
        failed: dict[str, str],
    ) -> None:
        self._modes = modes
        self._pipes = pipes
        self._watchers = watchers
        self.failed = failed  # modes whose ranks ended, with why: the case does not run in them

    def compare(
        self, case: str, *, rounds: int, runs: int, seconds: float, only: Sequence[Mode] = ()
    ) -> list[Measured]:
        """Run a case on all sets in turns: at most ``rounds`` blocks of at most ``runs`` runs each,
        as time allows.

        Args:
            case: its name.
            rounds: at most; fewer once ``seconds`` are over, but never fewer than
                :data:`LEAST_ROUNDS`.
            runs: in a block; fewer if such blocks leave time for too few rounds.
            seconds: in all. A slow machine runs fewer rounds, not for longer.
            only: run only these modes, for more rounds of each.
        """
        turns = [number for number, mode in enumerate(self._modes) if mode in (only or self._modes)]
        blocks: list[list[tuple[float, float]]] = [[] for _ in self._modes]
        # what is set up once
        self._round(0, turns, case, max(3, runs // 20), [[] for _ in self._modes])
        tried: list[list[tuple[float, float]]] = [[] for _ in self._modes]
        self._round(0, turns, case, max(3, runs // 20), tried)
        a_round_ns = sum(block[0] for found in tried for block in found) * runs
        share = min(1.0, seconds * 1e9 / (FEW_ROUNDS * a_round_ns))
        runs = max(3, int(runs * share))
        began, done = monotonic(), 0
        while done < rounds and (done < LEAST_ROUNDS or monotonic() - began < seconds):
            self._round(done, turns, case, runs, blocks)
            done += 1
        return [
            self._measured(case, mode.name, found, blocks[0], runs)
            for mode, found in zip(self._modes, blocks, strict=True)
            if found and mode.name not in self.failed
        ]

    def _round(
        self,
        number: int,
        turns: list[int],
        case: str,
        runs: int,
        blocks: list[list[tuple[float, float]]],
    ) -> None:
        """Run a block in each mode, starting with a different mode each time."""
        shift = number % len(turns)
        for which in turns[shift:] + turns[:shift]:
            if self._modes[which].name in self.failed:
                continue
            try:
                blocks[which].append(self._block(which, case, runs))
            except (EOFError, OSError, Ended) as error:
                if not which:
                    raise
                self.failed[self._modes[which].name] = _how_it_ended(error)

    @staticmethod
    def _measured(
        case: str,
        mode: str,
        found: list[tuple[float, float]],
        base: list[tuple[float, float]],
        runs: int,
    ) -> Measured:
        added = sorted((one[0] - other[0]) / 1000 for one, other in zip(found, base, strict=True))
        ratios = sorted(one[0] / other[0] for one, other in zip(found, base, strict=True))
        cpu = sorted((one[1] - other[1]) / 1000 for one, other in zip(found, base, strict=True))
        return Measured(
            case,
            mode,
            statistics.median(one[0] for one in found) / 1000,
            statistics.median(added),
            quartiles(added),
            statistics.median(ratios),
            quartiles(ratios),
            interval(ratios),
            statistics.median(one[1] for one in found) / 1000,
            statistics.median(cpu),
            quartiles(cpu),
            interval(cpu),
            (min(found)[0] - min(base)[0]) / 1000,
            len(found),
            runs,
        )

    def _block(self, which: int, case: str, runs: int) -> tuple[float, float]:
        watcher = self._watchers.get(self._modes[which].name)
        if watcher is not None:
            os.kill(watcher, signal.SIGCONT)
            self._run(which, case, runs)  # not counted: a watcher that has slept looks around first
        answers = self._run(which, case, runs)
        if watcher is not None:
            os.kill(watcher, signal.SIGSTOP)  # nobody watches while others are measured
        return max(wall for wall, _ in answers), max(cpu for _, cpu in answers)

    def _run(self, which: int, case: str, runs: int) -> list[tuple[float, float]]:
        for pipe in self._pipes[which]:
            pipe.send((case, runs))
        return [self._answer(pipe, which, case) for pipe in self._pipes[which]]

    def _answer(self, pipe: Connection, which: int, case: str) -> tuple[float, float]:
        if not pipe.poll(PATIENCE_S):
            raise RuntimeError(
                f"{case}, {self._modes[which].name}: no answer within {PATIENCE_S:.0f} s"
            )
        wall, cpu = _received(pipe)
        return wall, cpu


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the first and the third quartile of sorted values."""
    return values[len(values) // 4], values[-1 - len(values) // 4]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the median's 95% confidence interval from sorted values (order statistics; the
    extremes of few values).
    """
    at = max(0, math.floor((len(values) - 1.96 * math.sqrt(len(values))) / 2))
    return values[at], values[-1 - at]


@contextmanager
def running(
    modes: Sequence[Mode],
    backend: str,
    world_size: int,
    prepare: Prepare,
    *,
    per_step: bool = False,
) -> Iterator[Sets]:
    """Start all sets, and end them afterwards. The fake backend has one real process for any world
    size.

    Args:
        modes: the bare one first.
        backend: "gloo" or "fake".
        world_size: ranks of each set.
        prepare: makes the cases.
        per_step: whether a mode's context is entered for each run instead of for each block.
    """
    import torch

    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")  # torch is imported once
    processes: list[Any] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="commlens-bench-") as folder:
        pipes: list[list[Connection]] = []
        failed: dict[str, str] = {}
        try:
            for number, mode in enumerate(modes):
                own = Path(folder) / f"set{number}-{os.getpid()}"
                own.mkdir()
                pipes.append([])
                for rank in range(1 if backend == "fake" else world_size):
                    ours, theirs = context.Pipe()
                    arguments = (
                        mode,
                        rank,
                        world_size,
                        backend,
                        str(own),
                        per_step,
                        prepare,
                        theirs,
                    )
                    process = context.Process(target=_rank, args=arguments, daemon=True)
                    process.start()
                    theirs.close()
                    processes.append(process)
                    pipes[-1].append(ours)
                try:
                    for pipe in pipes[-1]:
                        _wait_until_ready(pipe)
                except (EOFError, OSError, Ended) as error:
                    if not number:
                        raise RuntimeError(
                            f"{mode.name}: its ranks did not start: {_how_it_ended(error)}"
                        ) from None
                    failed[mode.name] = _how_it_ended(error)
            watched = [
                (number, mode.name)
                for number, mode in enumerate(modes)
                if mode.watched and mode.name not in failed
            ]
            watchers = {name: _watcher(f"set{number}-{os.getpid()}") for number, name in watched}
            for watcher in watchers.values():
                os.kill(watcher, signal.SIGSTOP)
            try:
                yield Sets(modes, pipes, watchers, failed)
            finally:
                for watcher in watchers.values():
                    with suppress(OSError):
                        os.kill(watcher, signal.SIGKILL)
        finally:
            for pipe in (pipe for each in pipes for pipe in each):
                with suppress(OSError):
                    pipe.send(None)
            for process in processes:
                process.join(5)
                process.kill()
                process.join()


def _wait_until_ready(pipe: Connection) -> None:
    if not pipe.poll(PATIENCE_S):
        raise Ended(f"it sent nothing for {PATIENCE_S:.0f} s")
    _received(pipe)


def _received(pipe: Connection) -> Any:
    """Return what a rank sent; raise if it ended instead."""
    if isinstance(found := pipe.recv(), Ended):
        raise found
    return found


def _how_it_ended(error: Exception) -> str:
    return str(error) if isinstance(error, Ended) else "its ranks end"


def _watcher(job: str) -> int:
    """Return the pid of a job's watcher."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            line = (process / "cmdline").read_bytes()
            if b"commlens.watch" in line and job.encode() in line:
                return int(process.name)
    raise RuntimeError(f"{job} has no watcher")
