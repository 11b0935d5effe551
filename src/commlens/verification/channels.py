"""What is verified: channels as boards have them, and ops that were announced on one."""

from __future__ import annotations

from typing import Any, Final

from commlens.tap.groups import Group
from commlens.tap.interned_args import InternedArgs

ROOTED_PATIENCE_NS: Final = 1_000_000_000  # a root may legally leave before the others come: so long it waits for them


class Watched:
    """A channel of ours, or one direction between two of its ranks."""

    __slots__ = ("alarms_seen", "family", "group", "key", "members", "native", "peers", "rooted_patience_ns", "round", "slot")

    def __init__(self, group: Group, key: int, slot: int, members: tuple[int, ...], peers: list[int]) -> None:
        self.group = group
        self.key = key
        self.slot = slot  # on our own board; 0 where it has no room
        self.members = members  # global ranks
        self.peers = peers  # those whose boards can be read here
        self.native: Any = None  # the same in C++, while the peers are these
        self.rooted_patience_ns = ROOTED_PATIENCE_NS
        self.round = 0  # how many refusals all its members raised: what is tried again after one does not meet the first attempt
        self.alarms_seen = 0
        self.family = 0  # of a message's direction: the key that all tags of it share


class Call:
    """A call of a user's function, in the place of a collective."""

    __slots__ = ("content", "op", "peer", "tag")

    def __init__(self, name: str, leaves: Any) -> None:
        self.op = name
        self.content = {"op": name, "dop": name, "in": [], "out": [], "root": None, "is": [], "os": [], "async": False, "leaves": leaves}
        self.peer, self.tag = -1, 0


class Pending:
    """An announced op whose comparison is not complete."""

    __slots__ = ("absent", "asked", "channel", "code", "number", "signature")

    def __init__(self, channel: Watched, number: int, signature: int, code: int, asked: InternedArgs | Call) -> None:
        self.channel = channel
        self.number = number  # with its round
        self.signature = signature
        self.code = code  # of the reduce op, plus 1
        self.asked = asked
        self.absent: list[int] = channel.peers


def label(group: Group) -> str:
    """What people call a group."""
    described = "" if group.description == "undefined" else group.description  # what torch says of a group that nobody described
    return group.mesh_dim or described or group.name
