"""Looks at the ranks of a job from outside: stacks by py-spy at three moments within a window, and
the state of their processes in between. The result is one :class:`RankSample` of each rank: where
it stands, in which call it waits, and whether it has moved.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec

from commlens.errors import EvidenceError, MissingDependency
from commlens.model.collective import Frame
from commlens.model.frames import FrameKind, frame_kind
from commlens.model.ranklog import End, Observation, RankLog
from commlens.outside.calls import (
    counters,
    find_call,
    fingerprint,
    meeting_place,
)
from commlens.outside.find_ranks import FoundWorld
from commlens.outside.sample import Call, HostSamples, RankSample
from commlens.outside.torch_dumps import error_lines, take_dumps
from commlens.processes import process, pyspy
from commlens.processes.connections import links_between
from commlens.processes.observer import Observer, Pulse
from commlens.processes.ranks import RankProcess
from commlens.processes.store_address import look_at_store

WINDOW_S: Final = 2.5
_LOOKS: Final = 3
_STATE_EVERY_S: Final = 0.1
_PY_SPY_AT_ONCE: Final = 4
_PY_SPY_TIMEOUT_S: Final = 8.0
_SHUTDOWN: Final = frozenset({"_shutdown", "_run_exitfuncs", "_exit_function"})


def look_at(
    worlds: Sequence[FoundWorld], *, window_s: float = WINDOW_S, native: bool = False
) -> list[HostSamples]:
    """Look at all ranks of a job on this machine, several times within a window.

    Args:
        worlds: the ranks of each of its worlds.
        window_s: seconds between the first and the last look.
        native: also read C++ frames, once; py-spy then pauses each process for some milliseconds.

    Raises:
        MissingDependency: py-spy is not installed.
        EvidenceError: no process may be read.
    """
    if pyspy.find() is None:
        raise MissingDependency(
            "commlens attach reads stacks with py-spy, which is not installed: pip install py-spy"
        )
    observer = Observer(window_s + 5.0, use_py_spy=False)
    ranks = [one for world in worlds for one in world.ranks]
    for one in ranks:
        observer.add(one.pid, one.start_ticks)
    began = time.monotonic()
    looks = _look_repeatedly(ranks, observer, window_s, native=native)
    spent = time.monotonic() - began
    samples = {
        one.pid: _sample(one, of_rank, observer, native=native)
        for one, of_rank in zip(ranks, zip(*looks, strict=True), strict=True)
    }
    _require_stacks(ranks, [sample.log.observation for sample in samples.values()])
    for link, free in links_between(samples if len(worlds) > 1 else ()).items():
        for pid, other in (link, link[::-1]) if free else ():
            samples[pid].linked.append(other)
    found = [_of_world(world, [samples[one.pid] for one in world.ranks], spent) for world in worlds]
    if len(worlds) == 1:
        dumps = take_dumps(ranks)
        found[0].notes, found[0].dumps = dumps.notes, dumps.files
    return found


def _require_stacks(ranks: Sequence[RankProcess], seen: Sequence[Observation]) -> None:
    """Raise an EvidenceError if no stack could be read."""
    notes = sorted({each.stacks_note or "" for each in seen} - {""})
    if notes and not any(each.stacks for each in seen):
        raise EvidenceError(
            f"The stacks of {process.script_of(ranks[0].command)} cannot be read: {notes[0]}."
        )


def _of_world(world: FoundWorld, samples: list[RankSample], spent_s: float) -> HostSamples:
    size = max((one.world_size for one in world.ranks), default=0)
    samples = _complete(samples, world.ranks, size)
    by_pid = {one.pid: one for one in world.ranks}
    for sample in samples:
        sample.log.world = world.name
        sample.log_lines = error_lines(by_pid[sample.log.pid])
    return HostSamples(
        os.uname().nodename,
        samples,
        size or max(len(samples), *(sample.log.rank + 1 for sample in samples)),
        world.expected,
        window_s=spent_s,
        world=world.key,
    )


def _look_repeatedly(
    ranks: Sequence[RankProcess], observer: Observer, window_s: float, *, native: bool
) -> list[list[pyspy.Stacks]]:
    """Return each look at all ranks, and observe their processes in between."""
    looks: list[list[pyspy.Stacks]] = []
    began = time.monotonic()
    with ThreadPoolExecutor(_PY_SPY_AT_ONCE) as pool:
        for number in range(_LOOKS):
            # Local variables show the group, the peer and whether a loop moves.
            looks.append(list(pool.map(lambda one: look(one.pid, values=True), ranks)))
            if number + 1 < _LOOKS:
                _observe(ranks, observer, began + window_s * (number + 1) / (_LOOKS - 1))
        if native:
            looks[-1] = list(pool.map(lambda one: look(one.pid, native=True), ranks))
    return looks


def _observe(ranks: Sequence[RankProcess], observer: Observer, until: float) -> None:
    while True:
        for one in ranks:
            observer.sample(one.pid, Pulse(closed=True))
        left = until - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(_STATE_EVERY_S, left))


def look(pid: int, *, native: bool = False, values: bool = False) -> pyspy.Stacks:
    """Read the threads of a process once.

    Args:
        pid: the process.
        native: also C++ frames. This pauses the process; without it, it is not paused.
        values: also local variables.
    """
    options = ["--native" if native else "--nonblocking", *(["--locals"] if values else [])]
    return pyspy.take(pid, classifier(pid), *options, timeout_s=_PY_SPY_TIMEOUT_S)


def classifier(pid: int) -> Callable[[str], FrameKind]:
    """Return a function that classifies a file of a process by its path."""

    def classify(file: str) -> FrameKind:
        if "/commlens/" in file:  # commlens may be installed in place
            if "/commlens/scenarios/" in file and not file.endswith("/scenarios/__main__.py"):
                return FrameKind.USER
            return FrameKind.COMMLENS
        if not file.endswith(".py") and not file.startswith("<"):
            return FrameKind.NATIVE
        return frame_kind(file, [])

    return classify


def _sample(
    one: RankProcess, looks: Sequence[pyspy.Stacks], observer: Observer, *, native: bool
) -> RankSample:
    """Combine the looks at one rank."""
    good = [look for look in looks if look.threads]
    seen = observer.observe(one.pid)
    if process.read_stat(one.pid) is None:
        seen = Observation(end=End.GONE, window_s=seen.window_s)
    log = RankLog(
        rank=one.rank,
        world_size=one.world_size,
        host=os.uname().nodename,
        pid=one.pid,
        local_rank=one.local_rank,
        restart=one.restart,
        captured_ns=time.time_ns(),
        script=process.script_of(one.command),
        source=f"pid {one.pid}",
        initialised=True,
        observation=seen,
    )
    sample = RankSample(log)
    if not good:
        seen.stacks_note = looks[-1].note
        return sample
    seen.stacks = [thread.stack for thread in good[-1].threads]
    compared = good[:-1] if native else good  # the look with C++ frames has no local variables
    threads = (compared or good)[-1].threads
    if one.rank < 0:
        log.rank = _rank_in(threads[0].seen)
    # of another thread, if the main one waits for that
    standing = log.main_stack or threads[0].stack
    for look in good:
        look.threads.sort(key=lambda each: each.stack.thread != standing.thread)
    if len(compared) > 1:
        # A loop around a sleep changes its variables: that moves a rank, but it is no work.
        sample.moved = len({fingerprint(look.threads[0].seen) for look in compared}) > 1
        seen.stack_moved = len({look.threads[0].stack.frames for look in compared}) > 1
    sample.call = _call(threads, one.pid)
    main = threads[0]
    place = meeting_place(main.seen)
    seen.store = look_at_store(one.pid, *place) if place is not None else None
    sample.counters = counters(main.seen)
    seen.holds_gil = _holds_gil(good, seen)
    log.left = _is_at_exit(main.stack.frames)
    return sample


def _is_at_exit(frames: Sequence[Frame]) -> bool:
    """Return whether the interpreter shuts down, with no user code left to run."""
    is_shutdown = any(frame.function in _SHUTDOWN for frame in frames[:4])
    return is_shutdown and not any(frame.kind is FrameKind.USER for frame in frames)


def _call(threads: Sequence[pyspy.SeenThread], pid: int) -> Call | None:
    """Return the call that a rank waits in. In backward, autograd's own threads run Python hooks
    that may issue collectives.
    """
    call = find_call(threads[0].seen, pid)
    if call is not None and call.kind == "backward":
        for thread in threads[1:]:
            inner = find_call(thread.seen, pid)
            if inner is not None and inner.kind in ("collective", "message"):
                return msgspec.structs.replace(inner, line=call.line)
    return call


def _holds_gil(looks: Sequence[pyspy.Stacks], seen: Observation) -> bool:
    """Return whether the main thread held the GIL in all looks and used no CPU: it waits in C code
    that does not release the GIL.
    """
    idle = seen.cpu_s is not None and seen.window_s > 0 and seen.cpu_s / seen.window_s < 0.02
    return (
        len(looks) > 1
        and idle
        and not seen.is_stopped
        and all(look.threads[0].owns_gil for look in looks)
    )


def _rank_in(frames: Sequence[pyspy.SeenFrame]) -> int:
    """Return the rank of a process that torch.multiprocessing or the program itself numbered; -1:
    unknown.
    """
    for seen in reversed(frames):
        # the program that spawned the ranks is in this file, too, in another function
        frame = seen.frame
        if (
            frame.file.endswith("torch/multiprocessing/spawn.py")
            and frame.function == "_wrap"
            and seen.values.get("i", "").isdecimal()
        ):
            return int(seen.values["i"])
    for seen in reversed(frames):
        for name in ("rank", "global_rank", "local_rank", "world_rank"):
            if seen.values.get(name, "").isdecimal():
                return int(seen.values[name])
    return -1


def _complete(
    samples: list[RankSample], processes: Sequence[RankProcess], world_size: int
) -> list[RankSample]:
    """Return the samples of ranks alone, with the rank and the world size where they lack it.

    Ranks that ``torch.multiprocessing`` spawned have no rank in their environment: their stacks may
    show it. Where no stack does, ranks are numbered by pid.
    """
    if any(one.rank < 0 for one in processes) and any(each.log.rank >= 0 for each in samples):
        # those without a rank are the program that spawned the ranks, and helpers
        samples = [sample for sample in samples if sample.log.rank >= 0]
    ranks = [sample.log.rank for sample in samples]
    if -1 in ranks or len(set(ranks)) < len(ranks):
        for number, sample in enumerate(sorted(samples, key=lambda one: one.log.pid)):
            sample.log.rank = number
            sample.log.problems.append(
                "its rank is not known: the ranks are numbered in the order of their pids"
            )
        samples.sort(key=lambda one: one.log.rank)
    for sample in samples:
        sample.log.world_size = sample.log.world_size or world_size
        if note := sample.log.observation.stacks_note:
            sample.log.problems.append(f"its stacks could not be read: {note}")
    return samples
