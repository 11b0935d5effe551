"""Observes the ranks' processes from outside, over a sliding window of 10 s: whether a process
works, sleeps, is stopped, gets no core, holds the GIL, or how it ended.

:meth:`Observer.sample` is called ten times a second while something is wrong, and reads a process's
state and counters; :meth:`Observer.observe` sums the window's samples up to one
:class:`~commlens.model.ranklog.Observation`. For example, of a rank that computes in a C extension
without releasing the GIL: ``window_s=10, proc_state="R", running_fraction=1, cpu_s=9.9,
holds_gil=True``, and the stack that py-spy read. Stacks are read by py-spy only where the rank's
own watchdog thread cannot record them.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from commlens.model.frames import frame_kind
from commlens.model.ranklog import End, Observation
from commlens.processes import blocked, process, pyspy
from commlens.processes.cgroup import Cgroup

WINDOW_S: Final = 10.0
SILENT_S: Final = 1.5
"""The watchdog thread beats four times a second: after six missed beats, it cannot run."""
STACK_INTERVAL_S: Final = 1.0
"""How often the watchdog thread records the stacks."""
_STACKS_FRESH_S: Final = 5.0
_CGROUP_EVERY_S: Final = 1.0
_COUNTS_EVERY_S: Final = 0.4
# bytes per second of a connection that carries no work, such as to a store that is asked again and
# again whether a key is there
_CHATTER: Final = 1024
_LIBRARIES_EVERY_S: Final = 5.0
_SWAPS: Final = 10.0  # memory pressure, percent
_STARVED: Final = 0.6  # of the time, without a core

_Counted = TypeVar("_Counted", bound="tuple[Any, ...]")  # CLOCK_MONOTONIC ns, and counters so far


@dataclass(frozen=True)
class Pulse:
    """The signs of life in a rank's box at one moment; times are CLOCK_MONOTONIC ns."""

    heartbeat_ns: int = 0
    main_stack_since_ns: int = 0  # 0: unknown
    records: int = 0
    closed: bool = False


class _Sample(NamedTuple):
    """A process at one moment."""

    at_ns: int  # CLOCK_MONOTONIC
    state: str
    cpu_s: float
    pulse: Pulse


class _Counts(NamedTuple):
    """Counters of a process so far."""

    at_ns: int  # CLOCK_MONOTONIC
    # of the process and its children, as process.io_bytes returns them
    io_bytes: tuple[int, int] | None
    children_cpu_s: float  # of its child processes and theirs
    children_run: bool  # one of them runs, or would if it got a core
    net_bytes: int


@dataclass
class _Subject:
    """A process that is observed."""

    pid: int
    start_ticks: int
    classify: pyspy.Classify
    cgroup: Cgroup
    oom_kills_before: int | None  # None: the counter cannot be read
    # --- of the window
    samples: deque[_Sample] = field(default_factory=deque)
    counts: deque[_Counts] = field(default_factory=deque)
    # while the watchdog thread is silent: CLOCK_MONOTONIC ns, and each thread's times
    core_waits: deque[tuple[int, dict[int, process.CoreTimes]]] = field(default_factory=deque)
    # CLOCK_MONOTONIC ns, and the seconds so far for which the CPU quota stopped it (-1: unknown)
    throttled: deque[tuple[int, float]] = field(default_factory=deque)
    # --- as of the last reading
    sockets: dict[int, int] = field(default_factory=dict)  # bytes moved so far, by inode
    served: int = 0  # bytes that a store in which watchers meet has moved so far
    unsent: int = 0  # bytes that its connections' other sides have not acknowledged
    pressure: float | None = None  # of memory, percent
    # when the sleep of its main thread ends, and when that sleep was first seen; CLOCK_MONOTONIC
    wakes_ns: int = 0
    asleep_ns: int = 0
    libraries: list[str] = field(default_factory=list)  # that communicate past torch
    libraries_at: float = -_LIBRARIES_EVERY_S  # time.monotonic()
    pending: pyspy.InBackground[pyspy.Stacks] | None = None  # a py-spy that runs
    stacks: pyspy.Stacks | None = None  # its last answer
    stacks_at: float = 0.0  # time.monotonic()
    end: Observation | None = None  # once it has ended


class Observer:
    """Samples the processes of the ranks on this node. While nothing is wrong, no samples are
    needed.

    A sample reads ``/proc/PID/stat``; io and cgroup files are read less often.

    Args:
        window_s: seconds that an Observation covers.
        use_py_spy: whether py-spy may read the stacks of ranks whose watchdog thread cannot run.
    """

    def __init__(self, window_s: float = WINDOW_S, *, use_py_spy: bool = True) -> None:
        self._window_ns = int(window_s * 1e9)
        self._use_py_spy = use_py_spy
        self._subjects: dict[int, _Subject] = {}  # by pid
        self._tcp: dict[int, process.TcpSocket] = {}  # by inode
        self._tcp_at = 0  # CLOCK_MONOTONIC ns
        self.store_ports: frozenset[int] = frozenset()
        """Ports of stores in which watchers meet: to serve these is no work of the process's own.
        """

    def add(
        self,
        pid: int,
        start_ticks: int,
        classify: pyspy.Classify = lambda file: frame_kind(file, []),
    ) -> None:
        """Observe a process. ``classify`` returns the kind of code in a file, for stacks that
        py-spy reads.
        """
        cgroup = Cgroup.of(pid)
        self._subjects[pid] = _Subject(pid, start_ticks, classify, cgroup, cgroup.read().oom_kills)

    def sample(self, pid: int, pulse: Pulse) -> None:
        """Sample a process now. State changes between two samples are not seen."""
        subject = self._subjects[pid]
        if subject.end is not None:
            return
        now = time.monotonic_ns()
        seen = process.read_stat(subject.pid)
        if seen is None or (subject.start_ticks and seen.start_ticks != subject.start_ticks):
            return
        kept_ns = now - self._window_ns
        subject.samples.append(_Sample(now, seen.state, seen.cpu_s, pulse))
        _forget(subject.samples, kept_ns)
        if _is_due(subject.counts, now, _COUNTS_EVERY_S):
            subject.counts.append(self._count(subject, seen.reaped_cpu_s, now))
            _forget(subject.counts, kept_ns)
        if _is_due(subject.throttled, now, _CGROUP_EVERY_S):
            self._read_cgroup(subject, now)
            _forget(subject.throttled, kept_ns)
        if self._watchdog_is_silent(subject) and _is_due(subject.core_waits, now, _COUNTS_EVERY_S):
            subject.core_waits.append((now, process.core_times(subject.pid)))
            _forget(subject.core_waits, kept_ns)
        if self._box_lacks_stacks(subject):
            self._start_py_spy(subject)

    @staticmethod
    def _read_cgroup(subject: _Subject, now: int) -> None:
        """Read the counters of a process's cgroup. It may move to another one; the counters of two
        cgroups cannot be compared.
        """
        cgroup = Cgroup.of(subject.pid)
        if cgroup.cpu != subject.cgroup.cpu:
            subject.throttled.clear()
        subject.cgroup = cgroup
        counters = cgroup.read()
        subject.pressure = counters.memory_pressure
        throttled_s = counters.throttled_s if counters.throttled_s is not None else -1.0
        subject.throttled.append((now, throttled_s))

    def _count(self, subject: _Subject, reaped_cpu_s: float, now: int) -> _Counts:
        """Read the counters of a process, its children and their connections."""
        children = process.descendants(subject.pid, {os.getpid(), *self._subjects})
        stats = [stat for child in children if (stat := process.read_stat(child)) is not None]
        cpu_s = reaped_cpu_s + sum(stat.cpu_s + stat.reaped_cpu_s for stat in stats)
        counted = [process.io_bytes(each) for each in (subject.pid, *children)]
        # Of a process that serves a store, what it has served is subtracted from these counts: its
        # connections must be read after them.
        is_old = now - self._tcp_at > _COUNTS_EVERY_S * 5e8
        seen = (self._tcp[inode] for inode in subject.sockets if inode in self._tcp)
        if is_old or (self.store_ports and any(one.port in self.store_ports for one in seen)):
            self._tcp, self._tcp_at = process.tcp_sockets(), now
        net_bytes = self._count_traffic(subject, children, now)
        io_bytes = None
        if counted[0] is not None:
            calls, disks = zip(*filter(None, counted), strict=True)
            io_bytes = sum(calls) - subject.served, sum(disks)
        runs = any(stat.state == "R" for stat in stats)
        return _Counts(now, io_bytes, cpu_s, runs, net_bytes)

    def _count_traffic(self, subject: _Subject, children: Sequence[int], now: int) -> int:
        """Return the bytes that the connections of a process and its children have moved so far,
        without those of an idle conversation, and of a store in which watchers meet.
        """
        inodes = {inode for pid in (subject.pid, *children) for inode in process.socket_inodes(pid)}
        tcp = {inode: self._tcp[inode] for inode in inodes if inode in self._tcp}
        moved = 0
        if subject.counts:
            before = subject.counts[-1]
            least = _CHATTER * (now - before.at_ns) / 1e9
            steps = [
                (one.moved - subject.sockets.get(inode, 0), one.port in self.store_ports)
                for inode, one in tcp.items()
            ]
            moved = before.net_bytes + sum(
                step for step, is_served in steps if step >= least and not is_served
            )
            subject.served += sum(step for step, is_served in steps if is_served)
        subject.sockets = {inode: one.moved for inode, one in tcp.items()}
        subject.unsent = sum(one.unsent for one in tcp.values() if one.port not in self.store_ports)
        return moved

    def is_stopped(self, pid: int) -> bool:
        """Return whether the last sample found a process stopped, by SIGSTOP or a debugger."""
        samples = self._subjects[pid].samples
        return bool(samples) and samples[-1].state in "Tt"

    def forget_samples(self) -> None:
        """Drop all samples: they belong to a stall that is over."""
        for subject in self._subjects.values():
            subject.samples.clear()
            subject.counts.clear()
            subject.core_waits.clear()
            subject.throttled.clear()
            subject.stacks = None
            subject.pending = None

    def ended(
        self, pid: int, ending: process.ProcessEnding, *, clean: bool | None = None, at_ns: int = 0
    ) -> Observation:
        """Note that a process ended.

        Args:
            pid: of the process.
            ending: its exit status, as far as it is known.
            clean: replaces a lost exit status by what the box holds: True after a goodbye, False
                after an uncaught exception.
            at_ns: Unix ns; now by default.
        """
        subject = self._subjects[pid]
        if subject.end is not None:
            return subject.end
        if ending.exit_code is not None:
            clean = ending.exit_code == 0
        last = self._window(subject, time.monotonic_ns())
        if ending.signal is not None:
            last.end = End.KILLED
        elif clean is None:
            last.end = End.GONE
        else:
            last.end = End.CLEAN if clean else End.FAILED
        last.exit_code, last.signal = ending.exit_code, ending.signal
        kills = subject.cgroup.read().oom_kills
        if subject.oom_kills_before is not None and kills is not None:
            last.oom_killed = ending.signal == "SIGKILL" and kills > subject.oom_kills_before
        last.ended_ns = last.seen_ns = at_ns or time.time_ns()
        last.holds_gil, last.libraries = None, subject.libraries
        subject.end = last
        return last

    def observe(self, pid: int, *, wait_s: float = 0.0) -> Observation:
        """Return what was observed of a process. ``wait_s`` is how long to wait for a py-spy that
        is still running.
        """
        subject = self._subjects.get(pid)
        if subject is None:
            return Observation(stacks_note="its process was not watched from here")
        if subject.end is not None:
            return subject.end
        seen = self._window(subject, time.monotonic_ns())
        if time.monotonic() - subject.libraries_at >= _LIBRARIES_EVERY_S:
            subject.libraries_at = time.monotonic()
            subject.libraries = process.bypass_libraries(pid)
        seen.libraries = subject.libraries
        if self._box_lacks_stacks(subject):
            self._start_py_spy(subject)
        self._collect(subject, wait_s)
        if subject.stacks is not None:
            seen.stacks = [thread.stack for thread in subject.stacks.threads]
            seen.stacks_note = subject.stacks.note
        return seen

    def _window(self, subject: _Subject, now: int) -> Observation:
        """Combine the window's samples into one Observation."""
        seen = Observation(end=End.RUNNING, seen_ns=time.time_ns())
        if not subject.samples:
            last = process.read_stat(subject.pid)
            seen.proc_state = last.state if last else None
            return seen
        first, last_sample = subject.samples[0], subject.samples[-1]
        seen.window_s = round((last_sample.at_ns - first.at_ns) / 1e9, 3)
        seen.proc_state = last_sample.state
        if last_sample.at_ns > first.at_ns:
            seen.cpu_s = round(max(0.0, last_sample.cpu_s - first.cpu_s), 3)
        seen.stopped_fraction = _fraction(each.state in "Tt" for each in subject.samples)
        seen.running_fraction = _fraction(each.state == "R" for each in subject.samples)
        if len(subject.counts) > 1:
            self._add_counts(subject, seen)
        throttled = _throttled_fraction(subject)
        # cgroups v1 and v2 add up the times of all CPUs, so the sum can exceed the window.
        seen.throttled_fraction = (
            round(min(1.0, max(0.0, throttled)), 3) if throttled is not None else None
        )
        seen.memory_pressure = subject.pressure
        seen.holds_gil = _holds_gil(subject, now)
        seen.stack_moved = _stack_moved(subject, now)
        if last_sample.state == "S" and not seen.stack_moved:
            seen.waits_for, seen.waits_for_pid, wakes_ns = blocked.waits_for(subject.pid)
            seen.lost_child = blocked.lost_child(subject.pid)
            if wakes_ns != subject.wakes_ns:
                subject.wakes_ns, subject.asleep_ns = wakes_ns, now
            if wakes_ns > now:
                seen.wakes_in_s = round((wakes_ns - now) / 1e9, 3)
                seen.sleeps_s = round((wakes_ns - subject.asleep_ns) / 1e9, 3)
        return seen

    @staticmethod
    def _add_counts(subject: _Subject, seen: Observation) -> None:
        """Add how much the counters of the process and its children rose."""
        before, after = subject.counts[0], subject.counts[-1]
        if before.io_bytes is not None and after.io_bytes is not None:
            # If memory is short, pages are read from disk again and again: that is no work, so only
            # the bytes of the process's own calls count.
            swaps = (subject.pressure or 0.0) >= _SWAPS
            kinds = zip(before.io_bytes, after.io_bytes, strict=True)
            seen.io_bytes = max(
                0, *[later - earlier for earlier, later in kinds][: 1 if swaps else 2]
            )
        seen.children_cpu_s = round(max(0.0, after.children_cpu_s - before.children_cpu_s), 3)
        seen.children_running_fraction = _fraction(one.children_run for one in subject.counts)
        seen.net_bytes, seen.unsent_bytes = after.net_bytes - before.net_bytes, subject.unsent

    def _watchdog_is_silent(self, subject: _Subject) -> bool:
        """Return whether no watchdog thread runs, so that the stacks in the box are old, or there
        is no box.
        """
        pulse = subject.samples[-1].pulse if subject.samples else Pulse(closed=True)
        return not pulse.closed and (
            not pulse.heartbeat_ns or _silent_s(pulse, time.monotonic_ns()) > SILENT_S
        )

    def _box_lacks_stacks(self, subject: _Subject) -> bool:
        """Return whether the watchdog thread cannot record stacks, or beats and has recorded none
        since the last collective, although it had the time: with a hundredth of a core, a thread
        beats and gets to nothing else.
        """
        samples = subject.samples
        had_time = len(samples) > 1 and samples[-1].at_ns - samples[0].at_ns > SILENT_S * 1e9
        lacks_stacks = (
            had_time
            and not samples[-1].pulse.closed
            and samples[0].pulse.records == samples[-1].pulse.records
            and not any(each.pulse.main_stack_since_ns for each in samples)
        )
        return lacks_stacks or self._watchdog_is_silent(subject)

    def _start_py_spy(self, subject: _Subject) -> None:
        """Let py-spy read the stacks in a thread, unless it does so now or did so just before."""
        self._collect(subject, 0.0)
        is_fresh = subject.stacks and time.monotonic() - subject.stacks_at <= _STACKS_FRESH_S
        if self._use_py_spy and subject.pending is None and not is_fresh:
            subject.pending = pyspy.InBackground(
                partial(pyspy.take, subject.pid, subject.classify),
                lambda error: pyspy.Stacks([], f"py-spy failed: {error}"),
            )

    def _collect(self, subject: _Subject, wait_s: float) -> None:
        """Take the answer of a py-spy that runs, once it is there or overdue."""
        if subject.pending is None:
            return
        result = subject.pending.wait(wait_s)
        if result is not None:
            subject.stacks, subject.stacks_at, subject.pending = result, time.monotonic(), None
        elif time.monotonic() - subject.pending.started_at > pyspy.TIMEOUT_S + 1:
            subject.stacks, subject.pending = pyspy.Stacks([], "py-spy did not answer"), None


def _silent_s(pulse: Pulse, now: int) -> float:
    """Return for how long the watchdog thread has not beaten."""
    return (now - pulse.heartbeat_ns) / 1e9


def _throttled_fraction(subject: _Subject) -> float | None:
    """Return for which part of the window the CPU quota stopped a process; None: unknown."""
    if len(subject.throttled) < 2 or subject.throttled[0][1] < 0:
        return None
    (began_ns, before_s), (ended_ns, after_s) = subject.throttled[0], subject.throttled[-1]
    return (after_s - before_s) / ((ended_ns - began_ns) / 1e9)


def _holds_gil(subject: _Subject, now: int) -> bool | None:
    """Return whether the process runs but its watchdog thread cannot, because another thread holds
    the GIL.

    A process that is stopped, in uninterruptible sleep, throttled or without a core misses its
    heartbeats, too: its states since the last heartbeat tell these apart.
    """
    last = subject.samples[-1]
    if not last.pulse.heartbeat_ns or last.pulse.closed:
        return None
    if _silent_s(last.pulse, now) <= SILENT_S:
        return False
    since = [sample for sample in subject.samples if sample.at_ns >= last.pulse.heartbeat_ns]
    is_held_up_otherwise = (
        not since
        or any(sample.state in "TtDZX" for sample in since)
        or _is_starved(since)
        or _a_thread_is_starved(subject, last.pulse.heartbeat_ns)
    )
    return not is_held_up_otherwise and (_throttled_fraction(subject) or 0.0) <= 0.5


def _is_starved(samples: list[_Sample]) -> bool:
    """Return whether the main thread was mostly ready to run but got no core: the machine is busy,
    and the watchdog thread waits, too.
    """
    span_s = (samples[-1].at_ns - samples[0].at_ns) / 1e9
    runnable = sum(sample.state == "R" for sample in samples) / len(samples)
    return (
        span_s >= 0.4
        and runnable >= 0.3
        and samples[-1].cpu_s - samples[0].cpu_s < 0.5 * runnable * span_s
    )


def _a_thread_is_starved(subject: _Subject, since_ns: int) -> bool:
    """Return whether a thread was ready to run for most of the time and got no core: it may be the
    watchdog thread. One that waits for the GIL sleeps.
    """
    waits = [one for one in subject.core_waits if one[0] >= since_ns]
    if len(waits) < 2:
        return False
    (began_ns, before), (ended_ns, after) = waits[0], waits[-1]
    # A wait shows in the counters only once it has ended. So at some moment the thread's waits so
    # far may have ended, and another one begun that lasts until now.
    return _STARVED * (ended_ns - began_ns) < max(
        process.longest_cpu_wait_ns(before, then, at_ns - began_ns)
        + process.longest_cpu_wait_ns(then, after, ended_ns - at_ns)
        for at_ns, then in waits
    )


def _stack_moved(subject: _Subject, now: int) -> bool | None:
    """Return whether the main thread's stack changed, or a collective was issued, within the
    window; None if unknown.

    The box holds since when the stack has been the same, counted from the watchdog's first look
    after the last collective. That first look is not a change, so two different times must have
    been seen.
    """
    last = subject.samples[-1]
    if last.pulse.records != subject.samples[0].pulse.records:
        return True
    since = {sample.pulse.main_stack_since_ns for sample in subject.samples} - {0}
    if len(since) > 1:
        return True
    # Unknown if the watchdog cannot run, or has only just begun to look.
    has_just_begun = not since or last.at_ns - max(since) < STACK_INTERVAL_S * 1e9
    return None if has_just_begun or _silent_s(last.pulse, now) > SILENT_S else False


def _fraction(flags: Iterable[bool]) -> float:
    """Return the part of the flags that are set."""
    known = list(flags)
    return round(sum(known) / len(known), 3)


def _is_due(series: deque[_Counted], now: int, every_s: float) -> bool:
    """Return whether a counter is to be read again."""
    return not series or now - series[-1][0] > every_s * 1e9


def _forget(samples: deque[_Counted], before_ns: int) -> None:
    """Drop samples from before the window, but not the newest of them, so that the window is
    covered whole, and two at least stay.
    """
    while len(samples) > 2 and samples[1][0] < before_ns:
        samples.popleft()
