"""Deferred verification: reads the ranks' new records while the job runs and compares them, within
a CPU budget.

:mod:`commlens.watch.mismatches.deferred_verification` reads the records,
:mod:`commlens.watch.mismatches.comparison` compares them, and
:mod:`commlens.watch.mismatches.report` reports each disagreement once.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from commlens.blackbox import layout as L
from commlens.blackbox.blobs import GroupJson, decode_channel
from commlens.blackbox.tail import BoxTail, Raw, reduce_code
from commlens.errors import FormatError
from commlens.model.collective import Channel
from commlens.model.ops import POINT_TO_POINT, matches_by_tag
from commlens.text import ranks_phrase
from commlens.watch.mismatches.channel_progress import (
    MAX_PENDING,
    Blocks,
    ChannelProgress,
    Discrepancy,
)
from commlens.watch.mismatches.comparison import ChannelKey, Messages, SignatureComparison
from commlens.watch.mismatches.signatures import BoundedCache, SignatureId
from commlens.watch.roster import Member, Roster

# --- one rank's new records

_RANKS_MAX: Final = 1 << 20
_OPEN_GROUPS_MAX: Final = 64  # coalesced groups
# rounds of a rank's watchdog thread after which a reduce op is given up
_REDUCE_OP_ROUNDS: Final = 3


@dataclass(slots=True)
class MessageEnd:
    """The sender's or the receiver's side of messages."""

    messages: Messages
    newest: int = 0  # sequence number
    counts: dict[int, int] = field(default_factory=dict)  # tag: messages so far
    has_gap: bool = False

    def place(self, number: int, tag: int) -> tuple[ChannelProgress, int] | None:
        """Add a message. Return its place among those of its tag, in their order of issue; None if
        sends can no longer be assigned to receives.
        """
        messages = self.messages
        if messages.pairing_lost:
            return None
        if not matches_by_tag(messages.channel.group.backend):
            tag = 0
        count = self.counts.get(tag, 0) + 1
        if number > self.newest + 1:
            # records were overwritten before they were read; with a single tag, the sequence number
            # still is the count
            self.has_gap, count = True, number
        is_of_threads = number <= self.newest  # issued by several threads at once
        self.newest, self.counts[tag] = number, count
        if is_of_threads or (self.has_gap and len(self.counts) > 1):
            messages.pairing_lost = True
            messages.by_tag.clear()
            return None
        return messages.of_tag(tag), count


@dataclass(slots=True)
class _RankChannel:
    """A channel as one rank uses it."""

    progress: ChannelProgress
    channel: Channel
    era: int = 0  # how often the group was destroyed and created again under its former name
    first: int = 0  # index of the record with sequence number 1
    ends: dict[tuple[int, str], MessageEnd] = field(default_factory=dict)  # (peer, op)


_PendingReduceOp = tuple[int, int, ChannelProgress, int, SignatureId, int]
"""A record whose reduce op was not there when it was read: the watchdog thread's heartbeat then,
the record's index, the progress of the reduce ops with its sequence number and signature, and the
watchdog's rounds since. A plain tuple, because one is made for every all_reduce.
"""


class RecordReader:
    """Reads one rank's records and hands them to the comparison.

    Args:
        comparison: of all ranks.
        rank: global.
        tail: of the rank's black box.
    """

    def __init__(self, comparison: SignatureComparison, rank: int, tail: BoxTail) -> None:
        self.rank = rank
        self.tail = tail
        self._comparison = comparison
        self._channels = BoundedCache(self._load_channel)  # these three by their blobs' positions
        self._signatures: BoundedCache[int, SignatureId] = BoundedCache(
            lambda position: comparison.signatures.intern(tail.blob(position))
        )
        self._stacks: BoundedCache[int, int] = BoundedCache(
            lambda position: (
                comparison.stacks[blob] if (blob := tail.blob(position)) is not None else 0
            )
        )
        self._by_key: dict[ChannelKey, _RankChannel] = {}
        self._coalesced: dict[int, list[SignatureId]] = {}  # by coalescing id
        self._pending: deque[_PendingReduceOp] = deque()
        self._heartbeat = 0
        self._eras: Counter[tuple[ChannelKey, int, str]] = Counter()

    def poll(self, at_most: int, *, ended: bool = False) -> int:
        """Read and compare the new records, or only the newest ``at_most`` of them.

        Args:
            at_most: how many records to read.
            ended: whether the rank has ended, so that no other heartbeat comes.

        Returns:
            How many records were read.

        Raises:
            FormatError: the box cannot be read.
        """
        records = self.tail.poll(at_most)
        if records:
            self._compare(records)
        ended = ended or self.tail.is_closed
        if self._pending and (ended or self.tail.heartbeat != self._heartbeat):
            self._read_reduce_ops(ended=ended)
        return len(records)

    def _compare(self, records: Sequence[Raw]) -> None:
        # The loop runs once per record of every rank: local names, and one look-up per blob.
        comparison, rank, heartbeat = self._comparison, self.rank, self.tail.heartbeat
        channels, signatures, stacks = self._channels, self._signatures, self._stacks
        needs_more, needs_all_ranks = (
            comparison.signatures.needs_more,
            comparison.signatures.needs_all_ranks,
        )
        add, pending = comparison.add, self._pending
        touched: dict[int, ChannelProgress] = {}
        for (
            index,
            group,
            args,
            stack,
            number,
            step,
            coalescing,
            tag,
            flags,
            peer,
            members,
            _,
            _,
        ) in records:
            channel = channels[group]
            if channel is None:
                continue
            signature = signatures[args]
            if peer >= 0 or flags & L.FLAG_ANY_SOURCE:
                self._add_message(channel, signature, number, tag, peer, touched)
                continue
            if coalescing:
                if not flags & L.FLAG_COALESCED_END:
                    self._add_member(channel, coalescing, signature, number, index)
                    continue
                group_members = self._coalesced.pop(coalescing, [])
                is_whole = members > 0 and len(group_members) == members
                signature = (
                    comparison.signatures.intern_group(tuple(group_members)) if is_whole else 0
                )
            if not number:
                continue
            if number == 1:
                self._begin_era(channel, index)
            progress = channel.progress
            touched[id(progress)] = progress
            if flags & L.FLAG_CONCURRENT:
                progress.is_concurrent = True
            add(progress, number, rank, (signature, stacks[stack], step))
            if signature in needs_more:
                if signature in needs_all_ranks:
                    comparison.add_to_all(progress, number, rank, signature)
                else:
                    reduce_ops = progress.reduce_ops.get(0) or comparison.reduce_ops(progress, 0)
                    pending.append((heartbeat, index, reduce_ops, number, signature, 0))
        comparison.trim(touched.values())

    def _load_channel(self, group: int) -> _RankChannel | None:
        """Return the channel of a group blob; None if it is unreadable, or a group of one rank."""
        blob = self.tail.decoded(group)
        found: _RankChannel | None = None
        if isinstance(blob, GroupJson):
            try:
                channel = decode_channel(blob, limit=_RANKS_MAX)
            except ValueError:
                channel = None
            if channel is not None:
                found = self._by_key.get(channel.key)
                if found is None and len(channel.group.ranks) > 1:
                    found = self._by_key[channel.key] = _RankChannel(
                        self._comparison.channel(channel, 0), channel
                    )
        return found

    def _begin_era(self, channel: _RankChannel, index: int) -> None:
        """Note the record with sequence number 1. A second one starts anew: the group was destroyed
        and created again under its former name.
        """
        if channel.first and not self.tail.was_never_issued(channel.first):
            channel.era += 1
            channel.progress = self._comparison.channel(channel.channel, channel.era)
            channel.ends.clear()
        channel.first = index

    # --- coalesced groups and messages

    def _add_member(
        self,
        channel: _RankChannel,
        coalescing: int,
        signature: SignatureId,
        number: int,
        index: int,
    ) -> None:
        """Add a member to an open coalesced group."""
        if coalescing not in self._coalesced and len(self._coalesced) > _OPEN_GROUPS_MAX:
            del self._coalesced[next(iter(self._coalesced))]  # never closed: its caller raised
        members = self._coalesced.setdefault(coalescing, [])
        members.append(signature)
        table = self._comparison.signatures
        if signature in table.needs_more and signature not in table.needs_all_ranks:
            of_member = self._comparison.reduce_ops(channel.progress, len(members))
            self._pending.append((self.tail.heartbeat, index, of_member, number, signature, 0))

    def _add_message(
        self,
        channel: _RankChannel,
        signature: SignatureId,
        number: int,
        tag: int,
        peer: int,
        touched: dict[int, ChannelProgress],
    ) -> None:
        comparison = self._comparison
        if peer < 0:
            comparison.any_source.add((channel.channel.key, self.rank))
            return
        parts = comparison.signatures.parts(signature)
        op = parts[0].op if parts else ""
        if op not in POINT_TO_POINT or peer not in comparison.local_ranks or not number:
            return
        sender, receiver = (self.rank, peer) if op == "send" else (peer, self.rank)
        end = channel.ends.get((peer, op))
        if end is None or (number == 1 and end.newest):
            key = (channel.channel.key, peer, op)
            self._eras[key] += end is not None  # the group was created again
            end = channel.ends[(peer, op)] = MessageEnd(
                comparison.messages(channel.channel, self._eras[key], sender, receiver)
            )
        place = end.place(number, tag)
        if place is not None and (channel.channel.key, receiver) not in comparison.any_source:
            progress, count = place
            progress.last_message = number
            comparison.add(progress, count, self.rank, (signature, 0, 0))
            touched[id(progress)] = progress

    # --- reduce ops

    def _read_reduce_ops(self, *, ended: bool) -> None:
        """Read the reduce ops of earlier records, and with ``ended`` those of all records: the
        rank's watchdog thread, which records them, has completed a round since, or its last one.
        """
        comparison = self._comparison
        self._heartbeat = self.tail.heartbeat
        floor = self.tail.issued - self.tail.capacity
        ready = []
        while self._pending and (ended or self._pending[0][0] != self._heartbeat):
            record = self._pending.popleft()
            if record[1] > floor:
                ready.append(record)
        if not ready:
            return
        indices = [record[1] for record in ready]
        first = min(indices)
        words = self.tail.reduce_words(first, max(indices))
        for _, index, progress, number, signature, rounds in ready:
            code = reduce_code(words[index - first], index) if index - first < len(words) else 0
            if code:
                with_op = comparison.signatures.with_reduce_op(signature, code)
                comparison.add(progress, number, self.rank, (with_op, 0, 0))
            elif rounds + 1 < _REDUCE_OP_ROUNDS and not ended:
                self._pending.append(
                    (self._heartbeat, index, progress, number, signature, rounds + 1)
                )
        comparison.trim({id(record[2]): record[2] for record in ready}.values())


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
        self.records = 0
        self._roster = roster
        self._clock = clock
        self._members: tuple[tuple[int, int, bool], ...] = ()
        self._readers: list[RecordReader] = []
        self._is_alone = True
        self._comparison = SignatureComparison(())
        self._missed_before = 0

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
        for discrepancy in self._comparison.discrepancies:
            discrepancy.seen_at = now
        self.discrepancies += self._comparison.discrepancies
        self._comparison.discrepancies = []
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
        self._comparison = SignatureComparison(rank for _, rank, _ in now)
        self._readers = []
        for member in members:
            if member.box is not None and member.rank >= 0:
                with contextlib.suppress(FormatError):
                    if member.box.identity.about.get("joined"):
                        continue  # its numbers are the backend's, which may differ between ranks
                    self._readers.append(
                        RecordReader(self._comparison, member.rank, BoxTail(member.box))
                    )

    @property
    def missed(self) -> int:
        """The number of records that were not compared: overwritten before they were read, or
        skipped to stay within the CPU budget.
        """
        return self._missed_before + sum(reader.tail.missed for reader in self._readers)

    def digests(self) -> dict[str, list[Blocks]]:
        """Return what was issued on the channels that reach other nodes, in a form that nodes can
        compare.
        """
        return self._comparison.digests()

    def times(self, discrepancy: Discrepancy) -> int:
        """Return how often the channel's ranks have disagreed on this aspect so far."""
        return self._comparison.disagreement_counts[(discrepancy.channel.key, discrepancy.aspect)]

    @property
    def gaps(self) -> str:
        """Description of the records that were not compared; empty if all were."""
        missed, given_up = self.missed, self._comparison.given_up
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
