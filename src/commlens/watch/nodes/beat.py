"""The value that a node publishes for the other nodes of its job, and overwrites about once a
second.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import Final, NamedTuple, TypeVar

import msgspec

from commlens.speed.pace import Judgement, Sample
from commlens.watch.mismatches.channel_progress import Blocks
from commlens.watch.nodes.states_tree import Tree

Digests = dict[str, list[Blocks]]
"""The digests of what a node issued, by channel; only channels with ranks of other nodes."""

_PREFIX: Final = "commlens/7"  # the number changes with the values' meaning
_SIZE_MAX: Final = 1 << 24
Value = TypeVar("Value")


QUESTION: Final = 1 << 32
"""Added to the counter of nodes by each ``commlens status``, so that a watcher at rest learns of it
without another request.
"""
COMMAND: Final = -2
"""In place of the slot of a node that asks."""


class Request(msgspec.Struct, frozen=True, array_like=True):
    """A request for evidence: of the node that reports, in its value, or of a command, under a key
    of its own.
    """

    number: int
    slot: int = COMMAND  # of the node that asks
    nodes: list[int] = []  # the slots of those that are asked; empty: all
    records: int = 0  # newest records of each rank; 0: as many as the size of the job allows
    # of the states of all ranks, in place of records: the tree in which the nodes join them
    tree: Tree | None = None

    @property
    def id(self) -> tuple[int, int]:
        """What answers name it by: the slot of the node that asks, and the number."""
        return self.slot, self.number

    def concerns(self, slot: int) -> bool:
        """Return whether the node with this slot is asked."""
        return not self.nodes or slot in self.nodes


LAST: Final = Request(1, -1)
"""The request that a node answers unasked when it leaves or one of its ranks has died, because the
store may end at any moment.
"""


class News(msgspec.Struct, frozen=True):
    """A line that the reporting node publishes for the other nodes."""

    number: int
    text: str
    kind: str = ""  # of the verdict, if the line is a verdict's first one
    abort: bool = False  # whether every node must end its ranks
    to: list[int] = []  # the slots that it is for; empty: all


class ByHand(NamedTuple):
    """The members of a group made by hand that a node sees."""

    store: str  # with its prefixes, called as other hosts call it
    size: int
    ordinal: int  # groups of this size made with this store before
    members: tuple[int, ...]


class Beat(msgspec.Struct, frozen=True):
    """A node's value in the store."""

    slot: int
    host: str
    ranks: list[int]
    world_size: int = 0  # 0: unknown
    count: int = 0  # of its beats: it rises as long as the node lives
    wait_id: int = 0  # identifies its oldest wait; 0: none
    wait_s: float = 0.0  # the oldest wait's age; the reporter's value holds that of the whole job
    dead: list[int] = []
    disagreements: int = 0  # between its own ranks, so far
    # packed, because those of most nodes are alike: unpacking them cost more than all the rest
    digests: msgspec.Raw = msgspec.Raw(b"\x80")
    pace: list[Sample] = []  # of its ranks; empty while it is not known
    # the ranks of the job that are slow; only the reporter sets it; None: each node judges its own
    judgement: Judgement | None = None
    finished: bool = False  # it has left the exchange, and publishes nothing more
    ended: bool = False  # all its ranks have ended
    # number of slots drawn by all nodes when its ranks had ended; 0: they run, or it is unknown
    ended_at: int = 0
    asked: Request | None = None  # its last request for evidence
    answered: tuple[int, int] = (-1, 0)  # the id of the request that its evidence answers
    news: list[News] = []
    serves_store: bool = False  # the job's store ends only with all ranks of this node
    dump_dir: str = ""
    dump: str = ""  # the folder of its last dump
    # the slots of the nodes that would report next; only the reporter's are read
    successors: list[int] = []
    by_hand: list[ByHand] = []  # the groups made by hand that its ranks are in

    def shares_incarnation(self, other: Beat) -> bool:
        """Return whether both nodes' ranks belong to the same incarnation of the job.

        A node draws a new slot when its workers are restarted, and torchelastic restarts no workers
        before the former ones of all nodes have ended. So if a slot was drawn after another node's
        ranks had ended, its ranks belong to a later incarnation. Restart counts do not show this:
        torchelastic increases them only on the node whose workers failed.
        """
        if (self.ended_at and other.slot >= self.ended_at) or (
            other.ended_at and self.slot >= other.ended_at
        ):
            return False
        sizes = {self.world_size, other.world_size} - {0}
        return len(sizes) < 2 and not set(self.ranks) & set(other.ranks) - {-1}

    @property
    def order(self) -> tuple[int, int]:
        """A sort key: the node with the lowest one reports."""
        return (min(self.ranks, default=1 << 62), self.slot)


def decoded(value: bytes, kind: type[Value]) -> Value | None:
    """Return a value as it was encoded; None if it is damaged."""
    try:
        return msgspec.msgpack.decode(value, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def inflated(value: bytes, kind: type[Value]) -> Value | None:
    """Return a value as it was encoded, before it was compressed; None if it is damaged."""
    try:
        return decoded(zlib.decompressobj().decompress(value, _SIZE_MAX), kind)
    except zlib.error:
        return None


def pack_digests(digests: Digests) -> msgspec.Raw:
    """Return digests as a node's value holds them."""
    return msgspec.Raw(msgspec.msgpack.encode(digests))


@lru_cache(maxsize=64)
def unpack_digests(packed: bytes) -> Digests:
    """Return what :func:`pack_digests` packed; nothing if it is damaged or missing."""
    return decoded(packed, Digests) or {}


def key(*parts: object) -> str:
    """Return a key in the store, from parts: ``"nodes"`` (the number of slots drawn) or ``"node",
    slot`` (a node's value).
    """
    return "/".join([_PREFIX, *map(str, parts)])
