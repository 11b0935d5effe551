"""What a node tells the other nodes of its job: one small value, overwritten about once a
second.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from commlens.speed.job_pace import Judgement, Sample
from commlens.watch.mismatches.channel_progress import Blocks

_PREFIX: Final = "commlens/4"  # the number changes with the values' meaning


class Request(NamedTuple):
    """A request for evidence by the node that reports."""

    slot: int  # of the node that asks
    number: int
    records: int = 0  # newest records of each rank; 0: as many as the size of the job allows


LAST: Final = Request(-1, 1)
"""The request under which a node stores its evidence unasked when it leaves or one of its ranks has
died: the store may end at once.
"""


class News(msgspec.Struct, frozen=True):
    """A line of the reporter for the other nodes."""

    number: int
    text: str
    kind: str = ""  # of the verdict that it is the first line of
    abort: bool = False  # every node ends its ranks


class Beat(msgspec.Struct, frozen=True):
    """A node's value in the store."""

    slot: int
    host: str
    ranks: list[int]
    world_size: int = 0  # 0: unknown
    count: int = 0  # of beats: a node that lives changes it
    wait_id: int = 0  # identifies its oldest wait; 0: none
    wait_s: float = 0.0  # the oldest wait's age; the reporter's value holds that of the whole job
    dead: list[int] = []
    disagreements: int = 0  # that its ranks have among themselves, so far
    digests: dict[str, list[Blocks]] = {}  # of the channels that reach other nodes
    pace: list[Sample] = []  # of its ranks; empty while it is not known
    # of the reporter: which ranks of the job are slow; None: each node judges its own
    judgement: Judgement | None = None
    finished: bool = False  # it has left in order
    ended: bool = False  # all its ranks have ended
    # how many slots had been drawn when its ranks had ended; 0: they have not, or that is not known
    # yet
    ended_at: int = 0
    asks: int = 0  # the number of its last request for evidence
    asked_nodes: list[int] = []  # the slots of those that it asks; empty: all
    asked_records: int = 0  # newest records of each rank; 0: as many as the size of the job allows
    answered: tuple[int, int] = (-1, 0)  # slot and number of the request that its evidence answers
    news: list[News] = []
    serves_store: bool = False  # the job's store ends only with all ranks of this node
    dump_dir: str = ""
    dump: str = ""  # the folder of its last dump
    successors: list[int] = []  # of the reporter: the slots of the nodes that would report next

    def meets(self, other: Beat) -> bool:
        """Return whether another node's ranks are of the same incarnation of the job as this
        node's.

        A node draws a new slot when its workers are restarted, and torchelastic starts nobody's
        workers before everybody's former ones have ended. So workers with a slot that was drawn
        after others had ended are of a later incarnation, whatever the restart counts say, which
        torchelastic increases only on the node whose workers failed.
        """
        if (self.ended_at and other.slot >= self.ended_at) or (
            other.ended_at and self.slot >= other.ended_at
        ):
            return False
        sizes = {self.world_size, other.world_size} - {0}
        return len(sizes) < 2 and not set(self.ranks) & set(other.ranks) - {-1}

    def request_to(self, slot: int) -> Request | None:
        """Return the last request of this node if it asks the node with this slot."""
        return (
            Request(self.slot, self.asks, self.asked_records)
            if self.asks and (not self.asked_nodes or slot in self.asked_nodes)
            else None
        )

    @property
    def order(self) -> tuple[int, int]:
        """The node with the lowest order reports."""
        return (min(self.ranks, default=1 << 62), self.slot)


def decoded(value: bytes) -> Beat | None:
    """Return a node's value; None if it cannot be read."""
    try:
        return msgspec.msgpack.decode(value, type=Beat)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def key(*parts: object) -> str:
    """Return a key in the store: ``"nodes"``, the number of nodes; ``"node", slot``, a node's
    value.
    """
    return "/".join([_PREFIX, *map(str, parts)])
