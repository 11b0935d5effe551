"""Watches a node's hardware for the watcher: looks at the start, once a minute, and at once when a
stall is suspected.

A *look* reads the present values of all sources (:class:`NodeSampler`): links, GPUs, counters of
errors, the kernel's log. What changed between two looks is an event (:class:`NodeRecord`), such as
``link-down`` of mlx5_0. :class:`Monitor` does all reading in one thread of its own, because a file
of a broken device may block for ever; no caller waits for it without a limit. A source that takes
more than its share of CPU time is read less often, so that all together take 50 ms a minute or
less.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

import msgspec

from commlens.errors import CommandError
from commlens.health import places, ras
from commlens.health.changes import Look, changes, clock_step, is_down, shifted
from commlens.health.gpus import Gpus
from commlens.health.host import has_pressure, read_host, read_nfs
from commlens.health.kernel_log import KernelLog
from commlens.health.network import read_infiniband, read_interfaces, read_tcp
from commlens.health.sources import ROOT, UnreadableError
from commlens.health.topology import NodeLayout, find_layout, read_inventory
from commlens.model.grouping import grouped
from commlens.model.health import HealthEvent, NodeHealth, NotRead, RasReport, Values
from commlens.model.topology import Inventory

log = logging.getLogger("commlens")

EVERY_S: Final = 60.0
CPU_S: Final = 0.05  # that all sources together may take in that time
_SOURCES: Final = 6  # of NodeSampler: each may take an equal share of that
LOOK_WAIT_S: Final = 1.0
FRESH_S: Final = 5.0  # a look that is younger shows the present
EVENTS_MAX: Final = 500  # the newest are kept
_Request = Literal["look", "layout", "ras"]


@dataclass
class _Source:
    """A source of values, and when it is read next."""

    name: str
    read: Callable[[], Values]
    due: float = 0.0  # time.monotonic()
    cost_s: float = 0.0  # CPU time of the last reading


class NodeRecord:
    """The looks at a node, and the events found so far.

    Args:
        host: the node's name.
        past: the events may be older than the first look.
    """

    def __init__(self, host: str, *, past: bool = False) -> None:
        self._host = host
        self._past = past
        self._first = Look(0, {})
        self.last = Look(0, {})  # not taken yet
        self._events: deque[HealthEvent] = deque(maxlen=EVENTS_MAX)
        self.faults: Counter[str] = Counter()  # how many changes of each fault there were

    def add(self, look: Look, logged: Sequence[HealthEvent]) -> None:
        """Add a look, and the events that the kernel has logged since the look before.

        A source that was not read has not changed, as far as is known.
        """
        if not self.last.taken_ns:
            self._first = self.last = look
        step_ns = clock_step(self.last, look)
        self._follow_clock(step_ns)
        last = self.last
        found = changes(self._first, last, look)
        if step_ns:
            found.append(
                HealthEvent(
                    what="clock-step",
                    fault="clock",
                    part="clock",
                    at_ns=look.taken_ns,
                    since_ns=last.taken_ns,
                    after=step_ns / 1e9,
                )
            )
        found += [_placed(event, step_ns, last.taken_ns, look.taken_ns) for event in logged]
        clock_ns = look.clock_ns or last.clock_ns
        self.last = Look(look.taken_ns, {**last.values, **look.values}, clock_ns)
        # replaced, not changed: the watcher's thread may be reading the old ones
        self._events = deque([*self._events, *found], maxlen=EVENTS_MAX)
        self.faults = self.faults + Counter(
            event.fault for event in found if event.what not in _ENDS.values()
        )

    def _follow_clock(self, step_ns: int) -> None:
        """Set all earlier times to the present clock, as those of the ranks' records are."""
        if step_ns:
            self._first = self._first._replace(taken_ns=self._first.taken_ns + step_ns)
            self.last = self.last._replace(taken_ns=self.last.taken_ns + step_ns)
            self._events = deque(
                (shifted(event, step_ns) for event in self._events), maxlen=EVENTS_MAX
            )

    def health(
        self,
        ranks: Sequence[places.RankOfNode] = (),
        gpu_of_pid: Mapping[int, str] = MappingProxyType({}),
        not_read: Sequence[NotRead] = (),
        ras_report: RasReport | None = None,
    ) -> NodeHealth:
        """Return all of it, with the places of the ranks."""
        first, last = self._first, self.last
        if not last.taken_ns:
            return NodeHealth(self._host, not_read=list(not_read), ras=ras_report)
        environment = next((rank.environment for rank in ranks if rank.environment), {})
        events = tidy(list(self._events), first, last)
        # An interface that is down now was in use if it went down. Only where the log of before the
        # first look is read: else the first look has seen it up, as in use.
        went_down = {event.part for event in events if event.what == "link-down" and self._past}
        return NodeHealth(
            self._host,
            began_ns=first.taken_ns,
            taken_ns=last.taken_ns,
            ranks=places.place_ranks(ranks, first.values, gpu_of_pid),
            networks=places.networks(environment, first.values, went_down),
            events=events,
            values=dict(last.values),
            not_read=list(not_read),
            ras=ras_report,
        )


class NodeSampler:
    """Reads all sources of a node that can be read.

    Args:
        root: the folder below which the node's files are.
        past: also read what the kernel logged before.
    """

    def __init__(self, root: Path = ROOT, *, past: bool = False) -> None:
        self._problems: dict[str, str] = {}  # by source
        self._kernel_log: KernelLog | None = None
        self.gpus: Gpus | None = None
        self._sources = [
            _Source("infiniband", lambda: read_infiniband(root)),
            _Source("network", lambda: read_interfaces(root)),
            _Source("tcp", lambda: read_tcp(root)),
            _Source("host", lambda: read_host(root)),
            _Source("nfs", lambda: read_nfs(root)),
        ]
        if (root / "proc").is_dir() and not has_pressure(root):
            self._problems["pressure of memory and storage"] = (
                "there is no /proc/pressure: the kernel needs CONFIG_PSI, and perhaps psi=1 at its"
                " start"
            )
        try:
            self._kernel_log = KernelLog(root, past=past)
        except UnreadableError as error:
            self._problems["kernel log"] = str(error)
        try:
            self.gpus = Gpus(root)
            self._sources.append(_Source("gpu", self.gpus.read))
        except UnreadableError as error:
            self._problems["GPUs"] = str(error)

    @property
    def not_read(self) -> list[NotRead]:
        """The sources that could not be read, for any thread. One that failed once stays among
        them, as its values have a gap.
        """
        return [NotRead(source, reason) for source, reason in list(self._problems.items())]

    def look(self, *, thorough: bool) -> tuple[dict[str, Values], list[HealthEvent]]:
        """Read the sources that are due, and the kernel's log.

        Args:
            thorough: read all sources, whatever they cost.
        """
        values: dict[str, Values] = {}
        for source in list(self._sources):
            if thorough or time.monotonic() >= source.due:
                self._read(source, values)
        events = self._kernel_log.read_new(thorough=thorough) if self._kernel_log else []
        return values, events

    def _read(self, source: _Source, values: dict[str, Values]) -> None:
        began, began_s = time.thread_time(), time.monotonic()
        try:
            found = source.read()
        except Exception as error:  # a driver's library, or a file of a form not known here
            found = {}
            self._problems[source.name] = f"{type(error).__name__}: {error}"
        if not found:
            if not source.due:  # there is no such hardware
                self._sources.remove(source)
            return
        source.cost_s = time.thread_time() - began
        if source.name == "gpu":  # nvidia-smi is a process of its own
            source.cost_s = max(source.cost_s, time.monotonic() - began_s)
        if source.name == "infiniband" and not all(
            "link_downed" in each for each in found.values()
        ):
            self._problems["InfiniBand's counters"] = (
                "the adapter hides some from this machine or container: they are on the host"
            )
        share = CPU_S / _SOURCES
        # a second early, else the look in a minute's time could just miss it
        source.due = time.monotonic() + EVERY_S * max(1.0, source.cost_s / share) - 1.0
        values[source.name] = found

    def close(self) -> None:
        """Close what is open."""
        if self._kernel_log is not None:
            self._kernel_log.close()
        if self.gpus is not None:
            self.gpus.close()


class Monitor:
    """Looks at a node from a thread of its own.

    Args:
        root: the folder below which the node's files are.
        host: the node's name.
        past: also read what the kernel logged before.
        topology: the user's inventory of hosts.
    """

    def __init__(
        self,
        root: Path = ROOT,
        host: str = "",
        *,
        past: bool = False,
        topology: Path | None = None,
    ) -> None:
        self._root = root
        self._past = past
        self._host = host or os.uname().nodename
        self._topology = topology
        self._layout = NodeLayout()
        # what the thread is asked for, and what of that it does now; with the environment of a rank
        self._asked: dict[_Request, Mapping[str, str]] = {}
        self._doing: dict[_Request, Mapping[str, str]] = {}
        self._closed = False
        self._changed = threading.Condition()  # one of these three has changed
        self._record = NodeRecord(self._host, past=past)
        self._sampler: NodeSampler | None = None
        self._gpu_of_pid: Mapping[int, str] = {}
        self._ras: RasReport | None = None
        self._thread = threading.Thread(target=self._run, name="commlens-health", daemon=True)
        self._thread.start()

    # --- from the watcher

    def look_now(self, environment: Mapping[str, str] | None = None) -> None:
        """Ask for a look at all sources, and return at once.

        Args:
            environment: of one of the ranks, to ask NCCL's RAS service, too; None: do not.
        """
        self._ask("look", {})
        if environment is not None:
            self._ask("ras", environment)

    def learn_places(self, environment: Mapping[str, str]) -> None:
        """Find out where the node is and which adapters its GPUs are near to, in the thread.

        Args:
            environment: of a rank.
        """
        self._ask("layout", environment)

    def _ask(self, request: _Request, environment: Mapping[str, str]) -> None:
        with self._changed:
            self._asked[request] = environment
            self._changed.notify_all()

    def _is_open(self, request: _Request) -> bool:
        """Return whether the thread still runs, and has not finished what was asked for."""
        return not self._closed and (request in self._asked or request in self._doing)

    @property
    def faults(self) -> Mapping[str, int]:
        """How many changes of each fault were seen so far."""
        return self._record.faults

    @property
    def values(self) -> Mapping[str, Values]:
        """The values of the last look, by source."""
        return self._record.last.values

    def report(
        self, ranks: Sequence[places.RankOfNode], *, wait_s: float = LOOK_WAIT_S
    ) -> NodeHealth:
        """Return the state of the node, with a fresh look and RAS's answer if they come in time.

        Args:
            ranks: of this node.
            wait_s: how long to wait for both.
        """
        if abs(time.time_ns() - self._record.last.taken_ns) > FRESH_S * 1e9:
            self.look_now()
        with self._changed:
            self._changed.wait_for(
                lambda: not self._is_open("look") and not self._is_open("ras"), wait_s
            )
            is_complete = not self._is_open("look")
        sampler = self._sampler
        not_read = sampler.not_read if sampler is not None else []
        if not is_complete:
            not_read.append(NotRead("this node", "a source did not answer in time"))
        health = self._record.health(ranks, self._gpu_of_pid, not_read, self._ras)
        return self._layout.add_to(health)

    def close(self) -> None:
        """End the thread. One that is blocked ends with the process."""
        self._end()
        self._thread.join(1.0)

    def _end(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # --- the thread

    def _run(self) -> None:
        try:
            self._sampler = NodeSampler(self._root, past=self._past)
            due = time.monotonic()
            while not self._closed:
                with self._changed:
                    self._doing, self._asked = self._asked, {}
                if "look" in self._doing or time.monotonic() >= due:
                    is_first = not self._record.last.taken_ns
                    self._look(thorough="look" in self._doing or is_first)
                    due = time.monotonic() + EVERY_S
                if "layout" in self._doing:
                    self._find_layout(self._doing["layout"])
                with self._changed:
                    self._doing.pop("look", None)
                if "ras" in self._doing:
                    self._ras = ras.ask(self._doing["ras"])
                with self._changed:
                    self._doing = {}
                    self._changed.notify_all()
                    wait_s = max(0.0, due - time.monotonic())
                    self._changed.wait_for(lambda: self._asked or self._closed, wait_s)
        except Exception as error:
            log.warning(
                "commlens: the node's hardware is not watched any more: %s: %s",
                type(error).__name__,
                error,
            )
            log.debug("the error of watching the hardware", exc_info=True)
        finally:
            self._end()
            if self._sampler is not None:
                self._sampler.close()

    def _look(self, *, thorough: bool) -> None:
        assert self._sampler is not None
        taken_ns = time.time_ns()
        clock_ns = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        values, logged = self._sampler.look(thorough=thorough)
        self._record.add(Look(taken_ns, values, clock_ns), logged)
        if thorough and self._sampler.gpus is not None:
            self._gpu_of_pid = self._sampler.gpus.processes()

    def _find_layout(self, environment: Mapping[str, str]) -> None:
        inventory = None
        if self._topology is not None:
            try:
                inventory = read_inventory(self._topology)
            except CommandError as error:
                log.warning("commlens: %s", error)
        self._layout = find_layout(
            self._root, self._host, environment, self._record.last.values, inventory
        )


def _placed(event: HealthEvent, step_ns: int, since_ns: int, until_ns: int) -> HealthEvent:
    """Return an event of the kernel's log with its time on the present clock.

    A file of the log says 12:00:01, and then the clock was set one hour forward: on the present
    clock, the looks before and after are at 13:00:00 and 13:01:00. The line is of a moment between
    them, so of 13:00:01. One that was written after the clock was set, at 13:00:30, is between them
    as it stands.

    Args:
        event: of the lines since the last look.
        step_ns: by how much the clock was set forward.
        since_ns: the last look, on the present clock.
        until_ns: this look.
    """
    fits_as_written = since_ns <= event.at_ns <= until_ns
    fits_shifted = since_ns <= event.at_ns + step_ns <= until_ns
    return shifted(event, step_ns) if step_ns and fits_shifted and not fits_as_written else event


def tidy(events: list[HealthEvent], first: Look, last: Look) -> list[HealthEvent]:
    """Return events in the order of their times: each failure once, its interface by name, and
    whether it is over.

    The kernel's log dates an event to the microsecond, where a counter shows only that it was
    between two looks: then the log's event is kept.
    """
    names = places.part_names(first.values)
    other_names = places.aliases(first.values)
    named = []
    for event in events:
        part = names.get(event.part, event.part)
        named.append(msgspec.structs.replace(event, part=other_names.get(part, part)))
    named.sort(key=lambda event: (event.at_ns, event.what, event.part))
    logged = grouped(
        ((event.what, event.part), event.at_ns) for event in named if not event.since_ns
    )
    kept: dict[tuple[str, str, int, int], HealthEvent] = {}
    for event in named:
        exact = logged.get((event.what, event.part), ())
        if event.since_ns and any(event.since_ns <= at_ns <= event.at_ns for at_ns in exact):
            continue  # the kernel's log has the same event
        second = event.at_ns // 1_000_000_000
        key = (event.what, event.part, event.number, second)
        over = _is_over(event, named, last)
        kept.setdefault(key, msgspec.structs.replace(event, over=over) if over else event)
    return list(kept.values())


_ENDS: Final = {"link-down": "link-up", "nfs-silent": "nfs-back"}


def _is_over(event: HealthEvent, events: list[HealthEvent], last: Look) -> bool:
    """Return whether what broke was well again at the last look."""
    end = _ENDS.get(event.what)
    if end is None:
        return event.over
    ended = any(
        other.what == end and other.part == event.part and other.at_ns >= event.at_ns
        for other in events
    )
    return ended or (end == "link-up" and is_down(last.values, event.part) is False)


def look_once(root: Path = ROOT, host: str = "", inventory: Inventory | None = None) -> NodeHealth:
    """Look at a node once, and return the present values of its sources and what the kernel has
    logged. There is no earlier look to compare with, so counters show no change.

    Args:
        root: the folder below which the node's files are.
        host: the node's name.
        inventory: where hosts are.
    """
    host = host or os.uname().nodename
    sampler = NodeSampler(root, past=True)
    try:
        taken_ns = time.time_ns()
        values, events = sampler.look(thorough=True)
    finally:
        sampler.close()
    record = NodeRecord(host, past=True)
    record.add(Look(taken_ns, values), events)
    environment = os.environ if root == ROOT else {}  # of another node, it says nothing
    layout = find_layout(root, host, environment, values, inventory)
    return layout.add_to(record.health(not_read=sampler.not_read))
