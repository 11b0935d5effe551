"""Deferred verification: compares the collectives of this node's ranks while the job runs, within
a CPU budget, so that the ranks pay nothing for it.

The way of a record: :mod:`~commlens.watch.mismatches.record_reader` reads it from its rank's black
box, :mod:`~commlens.watch.mismatches.comparison` compares it with that of the first rank that
reached its sequence number, and :mod:`~commlens.watch.mismatches.report` reports each disagreement
once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from commlens.blackbox.tail import BoxTail
from commlens.errors import FormatError
from commlens.text import ranks_phrase
from commlens.watch.mismatches.channel_progress import MAX_PENDING, Discrepancy
from commlens.watch.mismatches.comparison import SignatureComparison
from commlens.watch.mismatches.record_reader import RecordReader
from commlens.watch.roster import Member, Roster

INTERVAL_S: Final = 0.05
INTERVAL_MAX_S: Final = 0.5
CPU_SHARE: Final = 0.03  # of one core
RECORDS_MAX: Final = 1 << 16  # per rank and poll
RECORDS_MIN: Final = 64


@dataclass
class CpuBudget:
    """Keeps deferred verification within its share of one core: poll less often, then read fewer
    records.
    """

    interval_s: float = INTERVAL_S  # between polls
    records_per_rank: int = RECORDS_MAX  # per poll; if a rank has more, only the newest are read

    def charge(self, spent_s: float, records_per_rank: float) -> None:
        """Adapt to the CPU time that a poll took and the average number of records that it read per
        rank.
        """
        needed_s = spent_s / CPU_SHARE
        self.interval_s = min(INTERVAL_MAX_S, max(INTERVAL_S, needed_s))
        if needed_s > INTERVAL_MAX_S and records_per_rank:
            self.records_per_rank = max(
                RECORDS_MIN, int(records_per_rank * INTERVAL_MAX_S / needed_s)
            )
        else:
            self.records_per_rank = min(RECORDS_MAX, self.records_per_rank * 2)


class DeferredVerification:
    """Compares the collectives of this node's ranks while they run.

    Args:
        roster: lists the ranks and their black boxes.
        clock: returns the CPU seconds that the calling thread has used.
    """

    def __init__(self, roster: Roster, *, clock: Callable[[], float] = time.thread_time) -> None:
        self.budget = CpuBudget()
        self.discrepancies: list[Discrepancy] = []  # not reported yet
        self.records = 0  # read so far
        self._roster = roster
        self._clock = clock
        # the ranks that are compared: (pid, rank, whether it has a box)
        self._members: tuple[tuple[int, int, bool], ...] = ()
        self._readers: list[RecordReader] = []
        self._is_alone = True  # the world has one rank, which has nothing to disagree with
        self.comparison = SignatureComparison(())
        self._missed_before = 0  # by readers of former ranks

    def poll(self, now: float) -> None:
        """Read the new records and compare them. ``now`` is CLOCK_MONOTONIC, seconds."""
        members = self._roster.current()
        self._follow(members)
        if not self._readers or self._is_alone:
            return
        began = self._clock()
        read = 0
        ended = {member.rank for member in members if not member.alive}
        for reader in self._readers:
            with contextlib.suppress(FormatError):  # the roster reports it
                read += reader.poll(self.budget.records_per_rank, ended=reader.rank in ended)
        self.records += read
        for discrepancy in self.comparison.discrepancies:
            discrepancy.seen_at = now
        self.discrepancies += self.comparison.discrepancies
        self.comparison.discrepancies = []
        self.budget.charge(self._clock() - began, read / len(self._readers))

    def _follow(self, members: list[Member]) -> None:
        """Restart the comparison when the ranks change. Their earlier records are still in the
        boxes and are read again.
        """
        now = tuple(
            (member.pid, member.rank, member.box is not None)
            for member in members
            if member.rank >= 0
        )
        if now == self._members:
            return
        self._members = now
        self._is_alone = max((member.world_size for member in members), default=0) < 2
        self._missed_before = self.missed
        self.comparison = SignatureComparison(rank for _, rank, _ in now)
        self._readers = []
        for member in members:
            if member.box is not None and member.rank >= 0:
                with contextlib.suppress(FormatError):
                    if member.box.identity.about.get("joined"):
                        continue  # its numbers are the backend's, which may differ between ranks
                    self._readers.append(
                        RecordReader(self.comparison, member.rank, BoxTail(member.box))
                    )

    @property
    def missed(self) -> int:
        """The number of records that were not compared: overwritten before they were read, or
        skipped to stay within the CPU budget.
        """
        return self._missed_before + sum(reader.tail.missed for reader in self._readers)

    def times(self, discrepancy: Discrepancy) -> int:
        """Return how often the channel's ranks have disagreed on this aspect so far."""
        return self.comparison.disagreement_counts[(discrepancy.channel.key, discrepancy.aspect)]

    @property
    def gaps(self) -> str:
        """Description of the records that were not compared; empty if all were."""
        missed, given_up = self.missed, self.comparison.given_up
        parts = []
        if missed:
            ranks = [reader.rank for reader in self._readers if reader.tail.missed]
            source = f"of {ranks_phrase(ranks)}" if ranks else "from before a restart"
            parts.append(f"{missed} records {source} came too fast to be compared")
        if given_up:
            parts.append(
                f"{given_up} collectives were not compared with a rank that was more than"
                f" {MAX_PENDING} behind"
            )
        return "; ".join(parts)
