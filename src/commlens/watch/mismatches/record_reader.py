"""Read one rank's new records for deferred verification.

Each record becomes a call of ``SignatureComparison.add``, with what all ranks must have alike. For
example, of rank 0::

    record 41: all_reduce #57 of "dp"        add(<progress of "dp">, 57, rank 0, (3, 9, 12)):
                                             signature 3, stack 9, step 12
    record 42: send #6 to rank 1, tag 7      add(<progress of messages from 0 to 1 with tag 7>, 2,
                                             rank 0, (5, 0, 0)): the second one with this tag
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from commlens.blackbox import layout as L
from commlens.blackbox.blobs import GroupJson, decode_channel
from commlens.blackbox.tail import BoxTail, Raw, reduce_code
from commlens.model.collective import Channel
from commlens.model.ops import POINT_TO_POINT, matches_by_tag
from commlens.watch.mismatches.channel_progress import ChannelProgress
from commlens.watch.mismatches.comparison import ChannelKey, Messages, SignatureComparison
from commlens.watch.mismatches.signatures import BoundedCache, SignatureId

_RANKS_MAX: Final = 1 << 20
_OPEN_GROUPS_MAX: Final = 64  # coalesced groups that have begun and not ended
# rounds of a rank's watchdog thread after which a reduce op is given up
_REDUCE_OP_ROUNDS: Final = 3


@dataclass(slots=True)
class MessageEnd:
    """The sends of one rank to another, or the receives of that one, as they are read: which send
    belongs to which receive follows from their order.
    """

    messages: Messages
    newest: int = 0  # sequence number, which counts the messages of all tags
    counts: dict[int, int] = field(default_factory=dict)  # messages so far, by tag
    has_gap: bool = False  # records were overwritten before they were read

    def add(self, number: int, tag: int) -> tuple[ChannelProgress, int] | None:
        """Add a message. Return the progress of the messages with its tag, and its number among
        these; None if sends can no longer be assigned to receives.

        Args:
            number: its sequence number.
            tag: backends that match messages by their order alone ignore it.
        """
        messages = self.messages
        if messages.pairing_lost:
            return None
        if not matches_by_tag(messages.channel.group.backend):
            tag = 0
        count = self.counts.get(tag, 0) + 1
        if number > self.newest + 1:  # with a single tag, the sequence number still is the count
            self.has_gap, count = True, number
        from_several_threads = number <= self.newest  # so the order of issue is unknown
        self.newest, self.counts[tag] = number, count
        if from_several_threads or (self.has_gap and len(self.counts) > 1):
            messages.pairing_lost = True
            messages.by_tag.clear()
            return None
        return messages.of_tag(tag), count


@dataclass(slots=True)
class _RankChannel:
    """A channel as one rank uses it."""

    channel: Channel
    progress: ChannelProgress  # of all ranks on the channel, in its present era
    era: int = 0  # how often the group was destroyed and created again under its former name
    first_index: int = 0  # of the record with sequence number 1 in this era
    ends: dict[tuple[int, str], MessageEnd] = field(default_factory=dict)  # by peer and op


_PendingReduceOp = tuple[int, int, ChannelProgress, int, SignatureId, int]
"""A record whose reduce op was not there when it was read: the watchdog thread's heartbeat then,
the record's index, the progress of the reduce ops with its sequence number and signature, and the
watchdog's rounds since. A plain tuple, because one is made for every all_reduce.
"""


class RecordReader:
    """Reads one rank's new records and hands each call to the comparison with all ranks: its
    channel, sequence number and signature.

    Three kinds of records need more than that. A member of a coalesced group has no sequence number
    of its own: the members are collected until the record that ends the group. A message is
    counted over its tag. A reduce op that torch hides is recorded by the rank's watchdog thread, up
    to a second later: such a call is compared again once that is there.

    Args:
        comparison: of all ranks.
        rank: global.
        tail: of the rank's black box.
    """

    def __init__(self, comparison: SignatureComparison, rank: int, tail: BoxTail) -> None:
        self.rank = rank
        self.tail = tail
        self._comparison = comparison
        # these three by the positions of the records' blobs
        self._channels = BoundedCache(self._load_channel)
        self._signatures: BoundedCache[int, SignatureId] = BoundedCache(
            lambda position: comparison.signatures.intern(tail.blob(position))
        )
        self._stacks: BoundedCache[int, int] = BoundedCache(
            lambda position: (
                comparison.stacks[blob] if (blob := tail.blob(position)) is not None else 0
            )
        )
        self._by_key: dict[ChannelKey, _RankChannel] = {}
        # members so far of the coalesced groups that have not ended, by coalescing id
        self._coalesced: dict[int, list[SignatureId]] = {}
        self._pending: deque[_PendingReduceOp] = deque()
        self._heartbeat = 0  # of the watchdog thread when reduce ops were read last
        # how often a channel's messages have begun anew, by channel, peer and op
        self._message_eras: Counter[tuple[ChannelKey, int, str]] = Counter()

    def poll(self, at_most: int, *, ended: bool = False) -> int:
        """Read and compare the new records, or only the newest ``at_most`` of them.

        Args:
            at_most: how many records to read.
            ended: whether the rank has ended, so that its watchdog thread records nothing more.

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
        """Hand each record to the comparison."""
        # The loop runs once per record of every rank: local names, and one look-up per blob.
        comparison, rank, heartbeat = self._comparison, self.rank, self.tail.heartbeat
        channels, signatures, stacks = self._channels, self._signatures, self._stacks
        table, add, pending = comparison.signatures, comparison.add, self._pending
        needs_more, needs_all_ranks = table.needs_more, table.needs_all_ranks
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
            if coalescing:  # only the record that ends the group is a call of all ranks
                if not flags & L.FLAG_COALESCED_END:
                    self._add_member(channel, coalescing, signature, number, index)
                    continue
                group_members = self._coalesced.pop(coalescing, [])
                is_whole = members > 0 and len(group_members) == members
                signature = table.intern_group(tuple(group_members)) if is_whole else 0
            if not number:
                continue
            if number == 1:
                self._note_first(channel, index)
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
        channel: Channel | None = None
        if isinstance(blob, GroupJson):
            with contextlib.suppress(ValueError):
                channel = decode_channel(blob, limit=_RANKS_MAX)
        if channel is None or len(channel.group.ranks) <= 1:
            return None
        if channel.key not in self._by_key:
            self._by_key[channel.key] = _RankChannel(
                channel, self._comparison.channel(channel, era=0)
            )
        return self._by_key[channel.key]

    def _note_first(self, channel: _RankChannel, index: int) -> None:
        """Note the record with sequence number 1. A second one begins another era: the group was
        destroyed and created again under its former name. Not so if the backend refused the first
        one: its number is used again.
        """
        if channel.first_index and not self.tail.was_never_issued(channel.first_index):
            channel.era += 1
            channel.progress = self._comparison.channel(channel.channel, channel.era)
            channel.ends.clear()
        channel.first_index = index

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
        """Compare a send or receive with that of its peer, if the peer is on this node. Once a rank
        has received from any source, its receives cannot be assigned to sends.
        """
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
            self._message_eras[key] += end is not None  # the group was created again
            end = channel.ends[(peer, op)] = MessageEnd(
                comparison.messages(channel.channel, self._message_eras[key], sender, receiver)
            )
        place = end.add(number, tag)
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
        overwritten = self.tail.issued - self.tail.capacity  # records up to this index
        ready = []
        while self._pending and (ended or self._pending[0][0] != self._heartbeat):
            record = self._pending.popleft()
            if record[1] > overwritten:
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
