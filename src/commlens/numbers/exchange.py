"""Sends this rank's measures to the lowest of the ranks that take part, which compares the measures
of all: in a thread of its own, so that no rank waits for another one. Nothing here is sent through
a process group.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import multiprocessing.util
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from commlens.diagnosis.words.diverged import (
    no_difference,
    other_ops,
    steps_compared,
    verdict_of,
)
from commlens.model.numbers import CheckId, NumbersReport, StepsCompared, TableRef, TensorTable
from commlens.model.verdict import Verdict
from commlens.numbers.comparison import OPTIMIZER, TensorComparison
from commlens.numbers.differences import count_tensors, parts_of
from commlens.numbers.inspection import Inspection
from commlens.numbers.meeting import Meeting
from commlens.text import ranks_phrase

log = logging.getLogger("commlens")

_POLL_S: Final = 0.25
_NAP_S: Final = 0.01  # while ranks wait for an answer
_AT_END_S: Final = 3.0  # for the last checks to be compared
_WAITING_MAX: Final = 256  # checks that ranks have not reported yet
# after the first report, a check for which no rank waits is compared without the other ranks: they
# may have finished before
_LATE_S: Final = 60.0

_LEAVES: Final = CheckId("leaves", 0)
"""The last report of a rank."""

_encode = msgspec.msgpack.encode


class Exchange:
    """A thread that sends the reports of this rank. On the lowest rank, it also compares them.

    Args:
        meeting: where the ranks' reports meet.
        rank: of this process.
        ranks: that report a check which names no ranks; the lowest one compares.
        on_diverged: is called on the lowest rank, once with each verdict.
        world: the default group, with which the exchange ends.
    """

    def __init__(
        self,
        meeting: Meeting,
        rank: int,
        ranks: Sequence[int],
        on_diverged: Callable[[Verdict], None],
        world: object,
    ) -> None:
        self._meeting = meeting
        self._rank = rank
        self._pid = os.getpid()
        self._world = weakref.ref(world)
        self._queue: queue.SimpleQueue[tuple[CheckId, Inspection] | None] = queue.SimpleQueue()
        self._collector = Collector(meeting, ranks, on_diverged) if rank == min(ranks) else None
        self._off = False
        self.is_ending = False
        """The other ranks may be gone: what cannot be sent is not reported."""
        self._thread = threading.Thread(target=self._run, name="commlens-numbers", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        # A child of multiprocessing leaves by os._exit, without atexit handlers.
        self._at_exit = multiprocessing.util.Finalize(None, self.close, exitpriority=-900)

    @property
    def is_running(self) -> bool:
        """Whether the thread runs, in this very process."""
        return not self._off and self._thread.is_alive() and self._pid == os.getpid()

    def is_for(self, world: object) -> bool:
        """Return whether the exchange was made for this default group, in this very process."""
        return self._world() is world and self._pid == os.getpid()

    def send(self, check: CheckId, inspection: Inspection) -> None:
        """Send what was measured. Returns at once."""
        if self.is_running:
            self._queue.put((check, inspection))

    def verdict_on(self, check: CheckId) -> Verdict:
        """Wait for the verdict on a check."""
        until = time.monotonic() + check.wait_s + _AT_END_S
        while self.is_running and time.monotonic() < until:
            if (content := self._meeting.value(answer_name(check))) is not None:
                return msgspec.msgpack.decode(content, type=Verdict)
            time.sleep(_NAP_S)
        summary = (
            f"rank {check.ranks[0]} has not answered {check.source} within {check.wait_s:g} s"
            if self.is_running
            else "commlens has stopped comparing numbers; the log says why"
        )
        return Verdict(kind="undetermined", summary=summary)

    def close(self) -> None:
        """Send what is left, compare it if this rank does so, and end the thread."""
        if self.is_running:
            self.is_ending = True
            self._queue.put(None)
            self._thread.join(_AT_END_S + 1.0)
        self._off = True
        atexit.unregister(self.close)
        self._at_exit.cancel()

    def _run(self) -> None:
        try:
            while True:
                timeout = None if self._collector is None else self._collector.pause_s
                try:
                    item = self._queue.get(timeout=timeout)
                except queue.Empty:
                    pass
                else:
                    if item is None:
                        break
                    self._send(*item)
                if self._collector is not None:
                    self._collector.poll(time.monotonic())
            self._meeting.post(_encode(NumbersReport(self._rank, _LEAVES, ())))
            if self._collector is not None:
                self._collector.finish()
        except Exception as error:
            self._off = True
            if not self.is_ending or self._collector is not None:
                log_stop(error)

    def _send(self, check: CheckId, inspection: Inspection) -> None:
        tables, nans = inspection.read()
        refs = []
        for table in tables:
            content = _encode(table)
            digest = hashlib.blake2b(content, digest_size=16).hexdigest()
            self._meeting.keep(table_name(check, digest), content)
            refs.append(TableRef(table.ranks, table.relation, digest))
        report = NumbersReport(
            self._rank,
            check,
            tuple(refs),
            tuple(nans),
            inspection.first_nan,
            inspection.ops,
        )
        self._meeting.post(_encode(report))


def log_stop(error: Exception) -> None:
    """Log the error that ends all checks of this process."""
    log.warning(
        "commlens stops comparing numbers; the job goes on: %s: %s", type(error).__name__, error
    )
    log.debug("the error that ends the checks", exc_info=error)


@dataclass
class _Reports:
    """The reports on one check, until all of its ranks have reported."""

    since: float  # when the first one was taken, by time.monotonic()
    by_rank: dict[int, NumbersReport] = field(default_factory=dict)


class Collector:
    """Collects the reports of all ranks, and compares those of a check once all are there."""

    def __init__(
        self, meeting: Meeting, ranks: Sequence[int], on_diverged: Callable[[Verdict], None]
    ) -> None:
        self._meeting = meeting
        self._ranks = set(ranks)
        self._on_diverged = on_diverged
        self._comparison = TensorComparison()
        self._waiting: dict[CheckId, _Reports] = {}
        self._answered: list[str] = []  # names of the newest answers, which ranks may still read
        self._warned_of_other_ops = False
        self._leaving: set[int] = set()  # ranks whose last report came with the newest reports
        self._left: set[int] = set()  # ranks all of whose reports have been taken
        self._steps = StepsCompared()

    @property
    def pause_s(self) -> float:
        """How long until the next poll."""
        return _NAP_S if any(check.wait_s for check in self._waiting) else _POLL_S

    def poll(self, now: float) -> None:
        """Take new reports, and compare the checks whose reports are all there or that are due.

        A take may return a rank's last report and miss an earlier one, if both are posted
        meanwhile; the next take returns that one. So a rank has left only one poll after its last
        report.
        """
        self._left |= self._leaving
        self._leaving = set()
        for content in self._meeting.take():
            report = msgspec.msgpack.decode(content, type=NumbersReport)
            if report.check == _LEAVES:
                self._leaving.add(report.rank)
                continue
            if answer_name(report.check) in self._answered:
                continue  # it comes too late
            self._waiting.setdefault(report.check, _Reports(now)).by_rank[report.rank] = report
        for check, reports in list(self._waiting.items()):
            absent = self._absent(check)
            if not absent or (self._left.issuperset(absent) and not check.wait_s):
                self._compare(check, [])
            elif now - reports.since > (check.wait_s or _LATE_S):
                self._compare(check, absent, f"within {check.wait_s:g} s")
            elif len(self._waiting) > _WAITING_MAX:
                self._forget(check)

    def finish(self) -> None:
        """Compare the checks that all ranks have reported by the end of the job, for a short
        while.
        """
        until = time.monotonic() + _AT_END_S
        while True:
            self.poll(time.monotonic())
            if not self._waiting or time.monotonic() > until:
                break
            time.sleep(_NAP_S)
        for check in list(self._waiting):
            end = f"before rank {check.ranks[0]} ended" if check.ranks else ""
            self._compare(check, self._absent(check), end)
        self._meeting.discard(self._answered)
        if self._steps.checks:
            log.warning("commlens: %s", steps_compared(self._steps))

    def _absent(self, check: CheckId) -> list[int]:
        """Return the ranks that have not reported a check. If the check names no ranks, they are
        those of its tables: of tensors that are declared replicas, else of those that may be.
        """
        reports = self._waiting[check].by_rank
        declared: set[int] = set()
        presumed: set[int] = set()
        for report in reports.values():
            for table in report.tables:
                if table.relation != "output":
                    is_presumed = table.relation in ("presumed", "learned")
                    (presumed if is_presumed else declared).update(table.ranks)
        expected = set(check.ranks) or declared or presumed or self._ranks
        return sorted(expected - reports.keys())

    def _compare(self, check: CheckId, absent: Sequence[int], waited: str = "") -> None:
        """Compare the reports of a check, report what differs, and forget the check.

        Args:
            check: of which reports have come.
            absent: ranks that have not reported it.
            waited: how long the check has waited for them, in words: "within 30 s"; empty for a
                check that does not wait.
        """
        reports = self._waiting[check].by_rank
        parts = parts_of(reports, lambda digest: self._table(check, digest))
        causes = self._comparison.compare(check, reports, parts)
        verdicts = [verdict_of(cause) for cause in causes]
        tensors = count_tensors(parts)
        if check.source == f"{OPTIMIZER} 1" and len(reports) > 1:
            self._steps.add(check.number, len(reports), tensors, bool(causes))
        if check.wait_s:
            answer = _joined(verdicts) or no_difference(len(reports), tensors)
            self._answer(check, answer, absent, waited)
        self._forget(check)
        if (other := self._comparison.other_ops) is not None and not self._warned_of_other_ops:
            self._warned_of_other_ops = True
            log.warning("commlens: %s", other_ops(*other))
        for verdict in verdicts:
            self._on_diverged(verdict)

    def _table(self, check: CheckId, digest: str) -> TensorTable | None:
        """Return a table that a rank has kept; None if it is gone."""
        content = self._meeting.value(table_name(check, digest))
        return msgspec.msgpack.decode(content, type=TensorTable) if content is not None else None

    def _answer(self, check: CheckId, verdict: Verdict, absent: Sequence[int], waited: str) -> None:
        """Give the ranks that wait for a check its verdict, and say which ranks did not come."""
        if absent:
            verdict.missing_evidence.append(
                f"Not compared: {ranks_phrase(absent)} did not call {check.source} {waited}."
            )
            log.warning(
                "commlens: %s did not reach %s %s: not compared.",
                ranks_phrase(absent),
                check.source,
                waited,
            )
        self._meeting.keep(answer_name(check), _encode(verdict))
        self._answered.append(answer_name(check))
        self._meeting.discard(self._answered[:-8])
        self._answered = self._answered[-8:]

    def _forget(self, check: CheckId) -> None:
        reports = self._waiting.pop(check).by_rank
        digests = {table.digest for report in reports.values() for table in report.tables}
        with contextlib.suppress(OSError, RuntimeError):
            self._meeting.discard([table_name(check, digest) for digest in digests])


def _joined(verdicts: Sequence[Verdict]) -> Verdict | None:
    """Return one verdict with the findings of all; None if there are none."""
    findings = [finding for verdict in verdicts for finding in verdict.findings]
    return Verdict.from_findings(findings, looked_at=verdicts[0].looked_at) if verdicts else None


def table_name(check: CheckId, digest: str) -> str:
    """Return the name under which a table of a check is kept."""
    return f"table.{_short(check)}.{digest}"


def answer_name(check: CheckId) -> str:
    """Return the name under which the answer to a check is kept."""
    return f"answer.{_short(check)}"


def _short(check: CheckId) -> str:
    about = f"{check.source} {check.ranks}".encode()
    return f"{hashlib.blake2b(about, digest_size=4).hexdigest()}.{check.number}"
