"""Compare what the ranks of this node issue under the same sequence number of a channel.

Each rank's call is compared with that of the first rank that reached the number. Equal signatures
cost one look-up; :mod:`commlens.matching` decides about signatures that differ, once for each pair
of them. Two signs of a fault come out as a :class:`Discrepancy`:

* Signatures disagree: rank 0 calls ``all_reduce`` as #57 and rank 1 ``broadcast``, or with another
  shape.
* Signatures agree, but two source lines meet under one number that have never met before, long
  after the first calls: a rank may have left out a call, and be one call ahead ever since::

      #      rank 0                 rank 1
      56     all_reduce, line 10    all_reduce, line 10
      57     all_reduce, line 20    all_reduce, line 10     rank 1 left out line 20

:mod:`~commlens.watch.mismatches.record_reader` reads the records and calls ``add``. A discrepancy
is only a sign: a diagnosis of all records then decides. Memory stays bounded.
"""

from __future__ import annotations

import itertools
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from commlens.matching.answer import Answer, Disagree
from commlens.matching.collectives import compare_coalesced
from commlens.matching.point_to_point import compare_pair
from commlens.model.collective import Channel
from commlens.watch.mismatches.channel_progress import (
    MAX_PENDING,
    Blocks,
    ChannelDigest,
    ChannelProgress,
    Discrepancy,
    Issue,
)
from commlens.watch.mismatches.signatures import (
    CACHE_SIZE,
    BoundedCache,
    SignatureId,
    SignatureTable,
)

ChannelKey = tuple[int, str, tuple[int, ...], str]

# calls on a channel before a new pair of source lines is suspicious: the first ones are all new
SETTLED: Final = 16
PAIRS_CACHE_SIZE: Final = 1024  # pairs of source lines of a channel


@dataclass(slots=True)
class Messages:
    """The messages from one rank to another."""

    channel: Channel
    sender: int
    receiver: int
    by_tag: dict[int, ChannelProgress] = field(default_factory=dict)
    # sends can no longer be assigned to receives, so nothing more is compared
    pairing_lost: bool = False

    def of_tag(self, tag: int) -> ChannelProgress:
        """Return the progress of the messages with a tag: they are received in the order in which
        they are sent.
        """
        if tag not in self.by_tag:
            ranks = (self.sender, self.receiver)
            self.by_tag[tag] = ChannelProgress(self.channel, ranks, is_of_messages=True)
        return self.by_tag[tag]


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
        self.given_up = 0
        """Collectives and messages that were not compared, because a rank was too far behind."""
        self.discrepancies: list[Discrepancy] = []  # not collected yet
        stack_ids = itertools.count(1)
        self.stacks: BoundedCache[bytes, int] = BoundedCache(lambda _: next(stack_ids))
        """The id of each stack, by its bytes."""
        # An *era* counts how often a group was destroyed and made again under its former name.
        # channels, by era, on which ranks receive from any source: which send that is, is unknown
        self.any_source: set[tuple[ChannelKey, int]] = set()
        self._channels: dict[tuple[ChannelKey, int], ChannelProgress] = {}
        self._messages: dict[tuple[ChannelKey, int, int, int], Messages] = {}
        self._answers: dict[tuple[object, ...], Answer] = {}  # of signatures that were compared
        # the discrepancies that were found: channel, aspect, the values that differ
        self._found: set[tuple[object, ...]] = set()

    # --- what a record reader asks for

    def channel(self, channel: Channel, era: int) -> ChannelProgress:
        """Return the progress on a channel, which all ranks share. If it has ranks on other nodes,
        these compare its digest.
        """
        local_ranks = tuple(rank for rank in channel.group.ranks if rank in self.local_ranks)
        progress = self._channels.get((channel.key, era))
        if progress is None:
            progress = self._channels[(channel.key, era)] = ChannelProgress(channel, local_ranks)
            if len(local_ranks) < len(channel.group.ranks):
                progress.digest = ChannelDigest()
        return progress

    def reduce_ops(self, progress: ChannelProgress, member: int) -> ChannelProgress:
        """Return the progress of the reduce ops of a channel's collectives, or of those at a place
        in its coalesced groups.
        """
        found = progress.reduce_ops.get(member)
        if found is None:
            found = progress.reduce_ops[member] = ChannelProgress(
                progress.channel, progress.local_ranks, collectives=progress
            )
            if progress.digest is not None and not member:
                found.digest = ChannelDigest()
        return found

    def digests(self) -> dict[str, list[Blocks]]:
        """Return the digests of the channels that have ranks on other nodes, by a name that is the
        same on all nodes.
        """
        return {
            f"{zlib.crc32(repr((key, era, kind)).encode()):x}": blocks
            for (key, era), progress in self._channels.items()
            for kind, each in (("", progress), ("reduce op", progress.reduce_ops.get(0)))
            if each is not None and each.digest is not None and any(blocks := each.digest.blocks())
        }

    def messages(self, channel: Channel, era: int, sender: int, receiver: int) -> Messages:
        """Return the messages from one rank to another, which both share."""
        return self._messages.setdefault(
            (channel.key, era, sender, receiver), Messages(channel, sender, receiver)
        )

    def trim(self, channels: Iterable[ChannelProgress]) -> None:
        """Forget the sequence numbers that are done, and all answers if there are too many."""
        if len(self._answers) > CACHE_SIZE:
            self._answers.clear()
        for progress in channels:
            given_up = progress.trim()
            if progress.collectives is None:
                self.given_up += given_up

    # --- what a rank issues

    def add(self, progress: ChannelProgress, number: int, rank: int, issue: Issue) -> None:
        """Add a rank's call, and compare it with the first rank's call of this sequence number."""
        first = progress.first_issue.get(number)
        if first is None:
            if number >= progress.floor:
                progress.first_issue[number] = (issue, rank)
                progress.begin = progress.begin or number
                if progress.digest is not None:
                    progress.digest.add(number, self.signatures.digests[issue[0]])
        elif first[1] == rank:  # refused before it was issued, so that its number is used again
            progress.first_issue[number] = (issue, rank)
        elif first[0] != issue:
            self._compare_with_first(progress, number, rank, issue)
        if number > progress.newest.get(rank, 0):
            progress.newest[rank] = number

    def add_to_all(
        self, progress: ChannelProgress, number: int, rank: int, signature: SignatureId
    ) -> None:
        """Add a rank's signature of an ``all_to_all``, and compare the signatures of all ranks once
        all have arrived: each rank must receive what every other rank sends to it.
        """
        by_rank = progress.arrived.setdefault(number, {})
        by_rank[rank] = signature
        if len(by_rank) == len(progress.local_ranks):
            del progress.arrived[number]
            values = tuple(sorted(by_rank.values()))
            self._compare(progress, number, by_rank, values, by_rank=True)
        elif len(progress.arrived) > MAX_PENDING:
            del progress.arrived[next(iter(progress.arrived))]

    def _compare_with_first(
        self, progress: ChannelProgress, number: int, rank: int, issue: Issue
    ) -> None:
        """Compare a rank's call with the first rank's, which is known to differ from it: in the
        signature, the source lines or the step.
        """
        (first, first_stack, first_step), first_rank = progress.first_issue[number]
        signature, stack, step = issue
        if signature != first and signature and first:  # 0: unreadable
            by_rank = not self.signatures.needs_all_ranks.isdisjoint((signature, first))
            issued = {first_rank: first, rank: signature}
            values = progress.local_ranks if progress.is_of_messages else (first, signature)
            if self._compare(progress, number, issued, values, by_rank=by_rank):
                return
        # with the step: of a line that each step passes, a rank may be a whole step ahead
        pair = (first_stack, stack, step - first_step)
        if stack and first_stack and pair not in progress.seen_pairs:
            self._add_pair(progress, number, pair)

    def _add_pair(self, progress: ChannelProgress, number: int, pair: tuple[int, int, int]) -> None:
        """Add two stacks, with the difference of their steps, that meet for the first time under
        the same number. That is suspicious once the channel's calls have settled, unless several
        threads issue them in any order.
        """
        is_settled = number - progress.begin >= SETTLED
        if is_settled and not progress.order_suspected and not progress.is_concurrent:
            progress.order_suspected = True
            self.discrepancies.append(Discrepancy(progress, number, "shift", None))
        if len(progress.seen_pairs) < PAIRS_CACHE_SIZE:
            progress.seen_pairs.add(pair)

    def _compare(
        self,
        progress: ChannelProgress,
        number: int,
        issued: Mapping[int, SignatureId],
        values: tuple[object, ...],
        *,
        by_rank: bool,
    ) -> bool:
        """Compare the ranks' signatures, unless the same were compared before, and return whether
        they disagree.

        Args:
            progress: of the calls.
            number: their sequence number.
            issued: the signature of each rank.
            values: what identifies this discrepancy on the channel; of several with the same
                values, the first is kept.
            by_rank: whether it matters which rank issued which signature: in ``all_to_all``, the
                ranks' splits differ and must fit together.
        """
        parts = {rank: self.signatures.parts(signature) for rank, signature in issued.items()}
        if not all(parts.values()):  # unreadable, or forgotten
            return False
        # lists of outputs, as of an uneven all_gather, must fit what each single rank puts in
        by_rank = by_rank or any(len(args[0].outputs) > 1 for args in parts.values())
        channel = progress.channel
        key: tuple[object, ...] = (
            (channel.key, *sorted(issued.items())) if by_rank else tuple(issued.values())
        )
        answer = self._answers.get(key)
        if answer is None and progress.is_of_messages:
            sender, receiver = progress.local_ranks
            answer = compare_pair(sender, parts[sender][0], receiver, parts[receiver][0])
        elif answer is None:
            answer = compare_coalesced(parts, channel.group.ranks)
        self._answers[key] = answer
        if isinstance(answer, Disagree):
            self._add_disagreement(progress, number, answer, values)
        return isinstance(answer, Disagree)

    def _add_disagreement(
        self, progress: ChannelProgress, number: int, answer: Disagree, values: tuple[object, ...]
    ) -> None:
        """Count a disagreement, and keep it as a discrepancy the first time that these values meet
        on this channel.
        """
        about = progress.collectives or progress
        if number in about.reported or about.is_concurrent:
            return
        if len(about.reported) > MAX_PENDING:
            about.reported = {each for each in about.reported if each >= about.floor}
        about.reported.add(number)
        key = progress.channel.key
        self.disagreement_counts[(key, answer.aspect)] += 1
        distinct = (key, answer.aspect, *values)
        if distinct not in self._found and len(self._found) <= CACHE_SIZE:
            self._found.add(distinct)
            self.discrepancies.append(
                Discrepancy(progress, number, answer.aspect, answer, progress.last_message)
            )
