"""How far the ranks of this node have come on a channel, and where they differ."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from commlens.matching.answer import Aspect, Disagree
from commlens.model.collective import Channel
from commlens.watch.mismatches.signatures import SignatureId

Issue = tuple[SignatureId, int, int]
"""What a rank issues under a sequence number: signature, stack and optimizer step."""

MAX_PENDING: Final = 4096  # sequence numbers per channel that may wait for the slowest rank


Blocks = dict[int, int]
"""By block of sequence numbers: how many were added and, in the lower 32 bits, the exclusive or of
their digests.

One integer, because the reporter of a large job keeps thousands of blocks, which Python's garbage
collector would look through.
"""


class ChannelDigest:
    """What was issued on a channel, in a form that nodes can compare without knowing how far the
    other is.

    Sequence numbers are summed up in blocks of several lengths: short ones show a difference at
    once, long ones still overlap if a channel is fast and the nodes look at it a second apart.
    Blocks with equal counts hold the same sequence numbers.
    """

    LENGTHS: Final = (1, 16, 256, 4096)
    # blocks of each length: enough for nodes that look a second apart, at up to 10,000 collectives
    # a second
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
        0 < mine[number] ^ other[number] < 1 << 32  # the counts are equal
        for mine, other in zip(ours, theirs, strict=False)
        for number in mine.keys() & other.keys()
    )


@dataclass(slots=True, eq=False)
class ChannelProgress:
    """What ranks of this node issue one after the other: the collectives of a channel, their reduce
    ops, which are recorded later, or the messages of a tag. For each sequence number it holds what
    the first rank issued, until all ranks have passed it.
    """

    channel: Channel
    local_ranks: tuple[int, ...]  # its ranks on this node; of messages: the sender, the receiver
    # of messages: the only kind in which ranks must issue different ops
    is_of_messages: bool = False
    # of messages: the number of the one that was added last, among those of all tags
    last_message: int = 0
    # of reduce ops: the collectives that have them
    collectives: ChannelProgress | None = None
    # sequence number: what was issued, by which rank
    first_issue: dict[int, tuple[Issue, int]] = field(default_factory=dict)
    # sequence number: signature of each rank
    compared_together: dict[int, dict[int, SignatureId]] = field(default_factory=dict)
    newest: dict[int, int] = field(default_factory=dict)  # rank: its newest sequence number
    floor: int = 1  # all lower sequence numbers are done
    begin: int = 0  # the first sequence number seen
    # stacks that met, with the difference of their steps
    seen_pairs: set[tuple[int, int, int]] = field(default_factory=set)
    is_concurrent: bool = False  # several threads issue on it at once, so that the order is unknown
    reported: set[int] = field(default_factory=set)  # sequence numbers that disagree
    digest: ChannelDigest | None = None  # of a channel with ranks on other nodes
    # by position in a coalesced group, from 1 (0: not coalesced)
    reduce_ops: dict[int, ChannelProgress] = field(default_factory=dict)
    order_suspected: bool = False  # source lines or steps met that had never met before

    def trim(self) -> int:
        """Forget the sequence numbers that all ranks of this node have passed, and those too far
        ahead of the slowest rank.

        Returns:
            How many were given up before the slowest rank reached them.
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
    """Records of two ranks that differ, as first seen."""

    progress: ChannelProgress
    sequence_number: int
    aspect: Aspect | Literal["shift"]
    answer: Disagree | None  # None: only source lines or steps differ, so a rank may be out of step
    # of a message: its number among those of all tags, as its record has it; the sequence number is
    # its place among those of its tag
    message_number: int = 0
    seen_at: float = 0.0  # time.monotonic()

    @property
    def channel(self) -> Channel:
        """The channel that both ranks use."""
        return self.progress.channel

    @property
    def passed(self) -> int:
        """How many sequence numbers the slowest rank of this node has come past it."""
        newest = self.progress.newest
        return min(newest.get(rank, 0) for rank in self.progress.local_ranks) - self.sequence_number

    @property
    def is_complete(self) -> bool:
        """Whether all ranks of this node have reached it. Which rank is the odd one may depend on
        the last of them.
        """
        return self.passed >= 0
