"""Compares what the ranks issue under the same sequence number: equal signatures cost one look-up,
and memory stays bounded.

Each sequence number of a channel is compared with the first rank that reached it.
:mod:`commlens.matching` decides about signatures that differ, once for each pair of them.
"""

from __future__ import annotations

import itertools
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from commlens.matching.answer import Answer, Disagree
from commlens.matching.collectives import compare_coalesced, compare_collectives
from commlens.matching.point_to_point import compare_pair
from commlens.model.collective import Channel
from commlens.watch.mismatches.channel_progress import (
    MAX_PENDING,
    Blocks,
    ChannelDigest,
    ChannelProgress,
    Discrepancy,
    Issue,
    SequenceNumber,
)
from commlens.watch.mismatches.message_stream import MessageStream, StreamEnd
from commlens.watch.mismatches.signatures import (
    CACHE_SIZE,
    BoundedCache,
    SignatureId,
    SignatureTable,
)

ChannelKey = tuple[int, str, tuple[int, ...], str]

# sequence numbers of a channel after which a new pair of source lines is suspicious
SETTLED: Final = 16
PAIRS_CACHE_SIZE: Final = 1024  # pairs of source lines of a channel


class SignatureComparison:
    """The comparison of all ranks of this node.

    Args:
        local_ranks: the ranks whose records are read. Ranks of other nodes are not compared.
    """

    def __init__(self, local_ranks: Iterable[int]) -> None:
        self.local_ranks = frozenset(local_ranks)
        self.signatures = SignatureTable()
        # by channel and aspect
        self.disagreement_counts: Counter[tuple[ChannelKey, str]] = Counter()
        self._given_up = 0  # sequence numbers that were given up before all ranks had reached them
        self._discrepancies: list[Discrepancy] = []
        stack_ids = itertools.count(1)
        self._stacks: BoundedCache[bytes, int] = BoundedCache(lambda _: next(stack_ids))
        self._channels: dict[tuple[ChannelKey, int], ChannelProgress] = {}
        self._streams: dict[tuple[ChannelKey, int, int, int], MessageStream] = {}
        self._any_source: set[tuple[ChannelKey, int]] = set()
        self._answers: dict[tuple[object, ...], Answer] = {}
        self._reported: set[tuple[object, ...]] = set()

    def take_discrepancies(self) -> list[Discrepancy]:
        """Return the discrepancies that are new since the last call."""
        taken, self._discrepancies = self._discrepancies, []
        return taken

    @property
    def given_up(self) -> int:
        """Collectives and messages that were not compared, because a rank was too far behind."""
        return self._given_up + sum(stream.dropped for stream in self._streams.values())

    # --- what a record reader asks for

    def intern_stack(self, payload: bytes | None) -> int:
        """Return the id of a stack; 0 if it is unknown."""
        return self._stacks[payload] if payload is not None else 0

    def channel(self, channel: Channel, era: int) -> ChannelProgress:
        """Return the progress on a channel, which all ranks share."""
        local_ranks = tuple(rank for rank in channel.group.ranks if rank in self.local_ranks)
        progress = self._channels.get((channel.key, era))
        if progress is None:
            progress = self._channels[(channel.key, era)] = ChannelProgress(channel, local_ranks)
            if len(local_ranks) < len(channel.group.ranks):
                progress.digest, progress.reduce_digest = ChannelDigest(), ChannelDigest()
        return progress

    def digests(self) -> dict[str, list[Blocks]]:
        """Return the digests of the channels that other nodes have ranks on, by a name that is the
        same on all nodes.
        """
        found: dict[str, list[Blocks]] = {}
        for (key, era), progress in self._channels.items():
            for kind, digest in (("", progress.digest), ("reduce op", progress.reduce_digest)):
                if digest is not None and any(blocks := digest.blocks()):
                    found[f"{zlib.crc32(repr((key, era, kind)).encode()):x}"] = blocks
        return found

    def stream(self, channel: Channel, era: int, sender: int, receiver: int) -> MessageStream:
        """Return the messages from one rank to another, which both share."""
        return self._streams.setdefault(
            (channel.key, era, sender, receiver), MessageStream(channel, sender, receiver)
        )

    def trim(self, channels: Iterable[ChannelProgress]) -> None:
        """Forget the sequence numbers that are done, and all answers if there are too many."""
        if len(self._answers) > CACHE_SIZE:
            self._answers.clear()
        for progress in channels:
            self._given_up += progress.trim()

    # --- collectives

    def compare_with_first(
        self, progress: ChannelProgress, number: int, rank: int, issue: Issue
    ) -> None:
        """Compare what a rank issues with what the first rank issued under this sequence number.
        The caller knows that they differ.
        """
        (first, first_stack, first_step), first_rank = progress.first_issue[number]
        signature, stack, step = issue
        if signature != first and signature and first:
            needs_all = self.signatures.needs_all_ranks
            by_rank = signature in needs_all or first in needs_all
            answer = self._compare(progress, {first_rank: first, rank: signature}, by_rank=by_rank)
            if isinstance(answer, Disagree):
                self._add_disagreement(progress, number, answer, (first, signature))
                return
        if stack and first_stack:
            pair = (first_stack, stack, step - first_step)
            if pair not in progress.seen_pairs:
                if (
                    number - progress.begin >= SETTLED
                    and not progress.order_suspected
                    and not progress.is_concurrent
                ):
                    progress.order_suspected = True
                    self._discrepancies.append(
                        Discrepancy(progress.channel, number, "shift", None, progress=progress)
                    )
                if len(progress.seen_pairs) < PAIRS_CACHE_SIZE:
                    progress.seen_pairs.add(pair)

    def compare_all_ranks(
        self, progress: ChannelProgress, number: int, rank: int, signature: SignatureId
    ) -> None:
        """Compare every pair of ranks, once all have arrived: each rank must receive what every
        other rank sends it.
        """
        by_rank = progress.compared_together.setdefault(number, {})
        by_rank[rank] = signature
        if len(by_rank) == len(progress.local_ranks):
            del progress.compared_together[number]
            answer = self._compare(progress, by_rank, by_rank=True)
            if isinstance(answer, Disagree):
                self._add_disagreement(progress, number, answer, tuple(sorted(by_rank.values())))
        elif len(progress.compared_together) > MAX_PENDING:
            del progress.compared_together[next(iter(progress.compared_together))]

    def compare_reduce_op(
        self,
        progress: ChannelProgress,
        where: SequenceNumber,
        rank: int,
        signature: SignatureId,
        op: int,
    ) -> None:
        """Compare a rank's reduce op, which is recorded later than the rest, with that of the first
        rank.
        """
        first = progress.reduce_ops.get(where)
        number = where[0]
        if first is None:
            progress.reduce_ops[where] = (op, signature, rank)
            if progress.reduce_digest is not None and not where[1]:
                progress.reduce_digest.add(number, op)
            if len(progress.reduce_ops) > 2 * MAX_PENDING:
                del progress.reduce_ops[next(iter(progress.reduce_ops))]
            return
        first_op, first_signature, first_rank = first
        if first_op == op or number in progress.reported:
            return
        key = ("reduce", first_op, first_signature, op, signature)
        answer = self._answers.get(key)
        if answer is None:
            full = self.signatures.with_reduce_op
            asked = {first_rank: full(first_signature, first_op), rank: full(signature, op)}
            known = {each: args for each, args in asked.items() if args is not None}
            answer = self._answers[key] = compare_collectives(known, progress.channel.group.ranks)
        if isinstance(answer, Disagree):
            self._add_disagreement(progress, number, answer, key)

    def _compare(
        self, progress: ChannelProgress, issued: Mapping[int, SignatureId], *, by_rank: bool
    ) -> Answer | None:
        """Compare signatures, each combination once. Which rank issued which only matters where
        ranks may legally differ.
        """
        known = {rank: self.signatures.get(signature) for rank, signature in issued.items()}
        parts = {
            rank: signature.parts
            for rank, signature in known.items()
            if signature is not None and signature.args is not None
        }
        if len(parts) < len(issued):
            return None
        by_rank = by_rank or any(len(args[0].outputs) > 1 for args in parts.values())
        key: tuple[object, ...] = (
            (progress.channel.key, *sorted(issued.items())) if by_rank else tuple(issued.values())
        )
        if key not in self._answers:
            self._answers[key] = compare_coalesced(parts, progress.channel.group.ranks)
        return self._answers[key]

    def _add_disagreement(
        self, progress: ChannelProgress, number: int, answer: Disagree, values: tuple[object, ...]
    ) -> None:
        """Count a disagreement, and keep it as a discrepancy the first time that these values meet
        on this channel.
        """
        if number in progress.reported or progress.is_concurrent:
            return
        if len(progress.reported) > MAX_PENDING:
            progress.reported = {each for each in progress.reported if each >= progress.floor}
        progress.reported.add(number)
        key = progress.channel.key
        self.disagreement_counts[(key, answer.aspect)] += 1
        distinct = (key, answer.aspect, *values)
        if distinct in self._reported or len(self._reported) > CACHE_SIZE:
            return
        self._reported.add(distinct)
        self._discrepancies.append(
            Discrepancy(progress.channel, number, answer.aspect, answer, progress=progress)
        )

    # --- point to point

    def add_message(self, end: StreamEnd, signature: SignatureId, number: int, tag: int) -> None:
        """Add a send or a receive, and compare it with its counterpart if that was added before."""
        matched = end.match(signature, number, tag)
        if matched is None:
            return
        stream = end.stream
        key = ("p2p", *matched)
        answer = self._answers.get(key)
        if answer is None:
            sent, received = (self.signatures.get(each) for each in matched)
            if sent is None or received is None or sent.args is None or received.args is None:
                return
            answer = self._answers[key] = compare_pair(
                stream.sender, sent.args, stream.receiver, received.args
            )
        channel_key = stream.channel.key
        if isinstance(answer, Disagree) and (channel_key, stream.receiver) not in self._any_source:
            self.disagreement_counts[(channel_key, "p2p")] += 1
            distinct = (channel_key, stream.sender, stream.receiver)
            if distinct not in self._reported:
                self._reported.add(distinct)
                self._discrepancies.append(Discrepancy(stream.channel, number, "p2p", answer))

    def receive_from_any_source(self, channel: Channel, rank: int) -> None:
        """Stop comparing the messages to a rank that receives from any source: which send it
        receives is unknown.
        """
        self._any_source.add((channel.key, rank))
