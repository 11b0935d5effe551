"""Reads one rank's new records for the comparison."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from commlens.blackbox import layout as L
from commlens.blackbox.blobs import GroupJson, decode_channel
from commlens.blackbox.tail import BoxTail, Raw, reduce_code
from commlens.model.collective import Channel
from commlens.model.ops import POINT_TO_POINT
from commlens.watch.mismatches.channel_progress import ChannelProgress, SequenceNumber
from commlens.watch.mismatches.comparison import ChannelKey, SignatureComparison
from commlens.watch.mismatches.message_stream import StreamEnd
from commlens.watch.mismatches.signatures import BoundedCache, SignatureId

_RANKS_MAX: Final = 1 << 20
_OPEN_GROUPS_MAX: Final = 64  # coalesced groups
# rounds of a rank's watchdog thread after which a reduce op is given up
_REDUCE_OP_ROUNDS: Final = 3


@dataclass(slots=True)
class _RankChannel:
    """A channel as one rank uses it."""

    progress: ChannelProgress
    channel: Channel
    era: int = 0  # how often the group was destroyed and created again under its former name
    first: int = 0  # index of the record with sequence number 1
    ends: dict[tuple[int, str], StreamEnd] = field(default_factory=dict)  # (peer, op)


_PendingReduceOp = tuple[int, int, ChannelProgress, SequenceNumber, SignatureId, int]
"""A record whose reduce op was not there when it was read: the watchdog thread's heartbeat then,
the record's index, its place and signature, and the watchdog's rounds since. A plain tuple, because
one is made for every all_reduce.
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
            lambda position: comparison.intern_stack(tail.blob(position))
        )
        self._by_key: dict[ChannelKey, _RankChannel] = {}
        self._coalesced: dict[int, list[SignatureId]] = {}  # by coalescing id
        self._pending: deque[_PendingReduceOp] = deque()
        self._heartbeat = 0
        self._eras: Counter[tuple[ChannelKey, int, str]] = Counter()

    def poll(self, at_most: int) -> int:
        """Read and compare the new records, or only the newest ``at_most`` of them. Returns how
        many were read.

        Raises:
            FormatError: the box cannot be read.
        """
        records = self.tail.poll(at_most)
        if records:
            self._compare(records)
        if self._pending and self.tail.heartbeat != self._heartbeat:
            self._read_reduce_ops()
        return len(records)

    def _compare(self, records: Sequence[Raw]) -> None:
        # The loop runs once per record of every rank: local names, and one look-up per blob.
        comparison, rank, heartbeat, pending = (
            self._comparison,
            self.rank,
            self.tail.heartbeat,
            self._pending,
        )
        channels, signatures, stacks = self._channels, self._signatures, self._stacks
        needs_more, needs_all_ranks = (
            comparison.signatures.needs_more,
            comparison.signatures.needs_all_ranks,
        )
        touched: dict[int, ChannelProgress] = {}
        digest = comparison.signatures.digest
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
                self._add_message(channel, signature, number, tag, peer)
                continue
            if coalescing:
                if not flags & L.FLAG_COALESCED_END:
                    place = (number, self._add_member(coalescing, signature))
                    if signature in needs_more and signature not in needs_all_ranks:
                        pending.append((heartbeat, index, channel.progress, place, signature, 0))
                    continue
                signature = self._close(coalescing, members)
            if not number:
                continue
            if number == 1:
                if channel.first and not self.tail.was_never_issued(channel.first):
                    self._begin_era(channel)
                channel.first = index
            progress = channel.progress
            touched[id(progress)] = progress
            if flags & L.FLAG_CONCURRENT:
                progress.is_concurrent = True
            issue = (signature, stacks[stack], step)
            first = progress.first_issue.get(number)
            if first is None:
                if number >= progress.floor:
                    progress.first_issue[number] = (issue, rank)
                    progress.begin = progress.begin or number
                    if progress.digest is not None:
                        progress.digest.add(number, digest(signature))
            elif first[1] == rank:  # refused before it was issued, so that its number is used again
                progress.first_issue[number] = (issue, rank)
            elif first[0] != issue:
                comparison.compare_with_first(progress, number, rank, issue)
            if signature in needs_more:
                if signature in needs_all_ranks:
                    comparison.compare_all_ranks(progress, number, rank, signature)
                else:
                    pending.append((heartbeat, index, progress, (number, 0), signature, 0))
            if number > progress.newest.get(rank, 0):
                progress.newest[rank] = number
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

    def _begin_era(self, channel: _RankChannel) -> None:
        """Start anew: the group was destroyed and created again under its former name, so its
        sequence numbers begin at 1.
        """
        channel.era += 1
        channel.progress = self._comparison.channel(channel.channel, channel.era)
        channel.ends.clear()

    # --- coalesced groups and messages

    def _add_member(self, coalescing: int, signature: SignatureId) -> int:
        """Add a member to an open coalesced group. Returns its position, from 1."""
        if coalescing not in self._coalesced and len(self._coalesced) > _OPEN_GROUPS_MAX:
            del self._coalesced[next(iter(self._coalesced))]  # never closed: its caller raised
        members = self._coalesced.setdefault(coalescing, [])
        members.append(signature)
        return len(members)

    def _close(self, coalescing: int, count: int) -> SignatureId:
        """Return the signature of a complete coalesced group; 0 if a member was not read."""
        members = self._coalesced.pop(coalescing, [])
        return (
            self._comparison.signatures.intern_group(tuple(members))
            if members and len(members) == count
            else 0
        )

    def _add_message(
        self, channel: _RankChannel, signature: SignatureId, number: int, tag: int, peer: int
    ) -> None:
        comparison = self._comparison
        op = comparison.signatures.op(signature)
        if peer < 0:
            comparison.receive_from_any_source(channel.channel, self.rank)
            return
        if op not in POINT_TO_POINT or peer not in comparison.local_ranks or not number:
            return
        end = channel.ends.get((peer, op))
        if end is None or (number == 1 and end.newest):
            key = (channel.channel.key, peer, op)
            self._eras[key] += end is not None  # the group was created again
            sender, receiver = (self.rank, peer) if op == "send" else (peer, self.rank)
            stream = comparison.stream(channel.channel, self._eras[key], sender, receiver)
            end = channel.ends[(peer, op)] = StreamEnd(stream, is_sender=op == "send")
        comparison.add_message(end, signature, number, tag)

    # --- reduce ops

    def _read_reduce_ops(self) -> None:
        """Read the reduce ops of earlier records: the rank's watchdog thread, which records them,
        has completed a round since.
        """
        self._heartbeat = self.tail.heartbeat
        floor = self.tail.issued - self.tail.capacity
        ready = []
        while self._pending and self._pending[0][0] != self._heartbeat:
            record = self._pending.popleft()
            if record[1] > floor:
                ready.append(record)
        if not ready:
            return
        indices = [record[1] for record in ready]
        first = min(indices)
        words = self.tail.reduce_words(first, max(indices))
        compare_reduce_op, rank = self._comparison.compare_reduce_op, self.rank
        for _, index, progress, place, signature, rounds in ready:
            reduce_op = (
                reduce_code(words[index - first], index) if index - first < len(words) else 0
            )
            if reduce_op:
                if place[0] > progress.newest_reduce_op.get(rank, 0):
                    progress.newest_reduce_op[rank] = place[0]
                known = progress.reduce_ops.get(place)
                if known is None or known[0] != reduce_op:
                    compare_reduce_op(progress, place, rank, signature, reduce_op)
            elif rounds + 1 < _REDUCE_OP_ROUNDS:
                self._pending.append(
                    (self._heartbeat, index, progress, place, signature, rounds + 1)
                )
