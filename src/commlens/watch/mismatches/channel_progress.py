"""The sequence numbers that the ranks of this node have reached on a channel, and the discrepancies
between the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from commlens.matching.answer import Aspect, Disagree
from commlens.model.collective import Channel
from commlens.watch.mismatches.signatures import SignatureId

Issue = tuple[SignatureId, int, int]
"""A rank's call of one sequence number: signature, stack and optimizer step."""

MAX_PENDING: Final = 4096  # sequence numbers per channel that may wait for the slowest rank


Blocks = dict[int, int]
"""Blocks of sequence numbers by index. The value holds the number of collectives in the block and,
in the lower 32 bits, the exclusive or of their digests.

It is one integer because the reporter of a large job keeps thousands of blocks, and Python's
garbage collector visits no integers.
"""


class ChannelDigest:
    """The collectives of a channel, in a form that two nodes can compare although one may be ahead
    of the other.

    The sequence numbers are summed up in blocks of several lengths. A short block shows a
    difference at once; a long one still overlaps with the other node's if the channel is fast and
    the nodes look at it a second apart. Blocks with equal counts hold the same sequence numbers.
    """

    LENGTHS: Final = (1, 16, 256, 4096)
    # how many blocks of each length are kept: enough for nodes that look a second apart, at up to
    # 10,000 collectives a second
    KEPT: Final = (8, 6, 6, 4)

    def __init__(self) -> None:
        self._blocks: list[dict[int, list[int]]] = [{} for _ in self.LENGTHS]

    def add(self, number: int, digest: int) -> None:
        """Add what was issued under a sequence number."""
        # The number is mixed in, because an exclusive or of equal digests would be 0.
        value = (digest * 0x9E3779B1 + number * 0x85EBCA77) & 0xFFFFFFFF
        for blocks, length, kept in zip(self._blocks, self.LENGTHS, self.KEPT, strict=True):
            block = blocks.get(number // length)
            if block is None:
                block = blocks[number // length] = [0, 0]
                if len(blocks) > kept:
                    del blocks[min(blocks)]
            block[0] += 1
            block[1] ^= value

    def blocks(self) -> list[Blocks]:
        """Return the newest blocks of each length."""
        return [
            {number: count << 32 | value for number, (count, value) in blocks.items()}
            for blocks in self._blocks
        ]


def differ(ours: list[Blocks], theirs: list[Blocks]) -> bool:
    """Return whether two nodes issued different collectives on a channel, as far as their blocks
    overlap.
    """
    return any(
        0 < mine[index] ^ other[index] < 1 << 32  # the counts are equal, and the digests are not
        for mine, other in zip(ours, theirs, strict=False)
        for index in mine.keys() & other.keys()
    )


@dataclass(slots=True, eq=False)
class ChannelProgress:
    """One sequence of calls that the ranks of this node make in the same order.

    There are three kinds: the collectives of a channel; their reduce ops, which are recorded later;
    and the messages with one tag. For each sequence number, the first rank's call is kept until all
    ranks have passed it.
    """

    channel: Channel
    local_ranks: tuple[int, ...]  # its ranks on this node; of messages: the sender, the receiver

    # --- of messages, the only kind in which the ranks' ops must differ
    is_of_messages: bool = False
    last_message: int = 0  # the newest message's number, counted over all tags

    # --- of reduce ops
    collectives: ChannelProgress | None = None  # the collectives that have these reduce ops

    # --- of collectives
    # by position in a coalesced group, from 1 (0: not coalesced)
    reduce_ops: dict[int, ChannelProgress] = field(default_factory=dict)
    # sequence number: the signatures of the ranks that have arrived, to be compared once all have
    arrived: dict[int, dict[int, SignatureId]] = field(default_factory=dict)

    # --- of all three kinds
    digest: ChannelDigest | None = None  # None: all ranks of the channel are on this node
    # sequence number: the first rank's call, and that rank
    first_issue: dict[int, tuple[Issue, int]] = field(default_factory=dict)
    newest: dict[int, int] = field(default_factory=dict)  # rank: its newest sequence number
    floor: int = 1  # all lower sequence numbers are done
    begin: int = 0  # the first sequence number seen
    # pairs of stacks that had the same sequence number, with the difference of their steps
    seen_pairs: set[tuple[int, int, int]] = field(default_factory=set)
    order_suspected: bool = False  # a new pair of stacks came long after the first calls
    is_concurrent: bool = False  # several threads issue on it at once, so that the order is unknown
    reported: set[int] = field(default_factory=set)  # sequence numbers that disagree

    def trim(self) -> int:
        """Forget the sequence numbers that all ranks of this node have passed, and give up the
        oldest of the others if more than MAX_PENDING wait for the slowest rank.

        Returns:
            How many sequence numbers were given up.
        """
        slowest = min((self.newest.get(rank, 0) for rank in self.local_ranks), default=0)
        floor = max(slowest + 1, max(self.newest.values(), default=0) - MAX_PENDING)
        if floor <= self.floor:
            return 0
        first_issue = self.first_issue
        if floor - self.floor < 4 * len(first_issue) + 64:
            for number in range(self.floor, floor):
                first_issue.pop(number, None)
        else:
            self.first_issue = {
                number: issue for number, issue in first_issue.items() if number >= floor
            }
        given_up = floor - max(self.floor, slowest + 1)
        self.floor = floor
        return given_up


@dataclass(slots=True, eq=False)
class Discrepancy:
    """The first sequence number at which the records of two ranks differ in an aspect."""

    progress: ChannelProgress
    sequence_number: int  # of a message: counted over its tag
    aspect: Aspect | Literal["shift"]
    answer: Disagree | None  # None: only source lines or steps differ, so a rank may be out of step
    message_number: int = 0  # of a message: counted over all tags, as in its record
    seen_at: float = 0.0  # time.monotonic()

    @property
    def channel(self) -> Channel:
        """The channel that both ranks use."""
        return self.progress.channel

    @property
    def passed(self) -> int:
        """How many sequence numbers the slowest rank of this node is past it; negative: before, so
        that it is not certain which rank is the odd one.
        """
        newest = self.progress.newest
        return min(newest.get(rank, 0) for rank in self.progress.local_ranks) - self.sequence_number
