"""Verified channels, and collectives that were announced on one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NewType

from commlens.tap.groups import LiveGroup
from commlens.tap.interned_args import InternedArgs
from commlens.text import DEFAULT_LABELS

# how long a rank of a rooted op waits for ranks that it does not need
ROOTED_PATIENCE_NS: Final = 1_000_000_000
BoardCode = NewType("BoardCode", int)
"""A reduce op as boards hold it: torch's code plus 1; 0: none, or one that cannot be read."""


def board_code(reduce_op: int | None) -> BoardCode:
    """Return torch's code of a reduce op, if there is one, as boards hold it."""
    return BoardCode(0 if reduce_op is None else reduce_op + 1)


@dataclass(slots=True, eq=False)
class VerifiedChannel:
    """A channel of this rank, or the messages of one tag from one rank to another."""

    group: LiveGroup
    key: int
    slot: int  # on this rank's own board; 0 if it has none left
    members: tuple[int, ...]  # global ranks
    peers: list[int]  # members whose boards can be read here
    family: int = 0  # of messages: the key of all tags in this direction
    native: Any = None  # the same channel in C++, until the peers change
    rooted_patience_ns: int = ROOTED_PATIENCE_NS
    # number of refusals that all members raised: a retry must not match the first attempt
    round: int = 0
    refusals_seen: int = 0


class BoardArgs:
    """The arguments of a collective, as a board's blob holds them."""

    __slots__ = ("content", "op", "peer", "tag")

    def __init__(self, content: dict[str, Any]) -> None:
        self.op: str = content["op"]
        self.content = content
        self.peer, self.tag = content.get("peer", -1), content.get("tag", 0)


class FunctionCall(BoardArgs):
    """A call of a user's function, verified like a collective."""

    __slots__ = ()

    def __init__(self, name: str, leaves: Any) -> None:
        no_tensors: dict[str, Any] = {"in": [], "out": [], "root": None, "is": [], "os": []}
        super().__init__({"op": name, "dop": name, **no_tensors, "async": False, "leaves": leaves})


class Pending:
    """An announced collective that has not been compared with all peers yet."""

    __slots__ = ("absent", "args", "channel", "code", "number", "signature")

    def __init__(
        self,
        channel: VerifiedChannel,
        number: int,
        signature: int,
        code: BoardCode,
        args: InternedArgs | BoardArgs,
    ) -> None:
        self.channel = channel
        self.number = number  # with its round
        self.signature = signature
        self.code = code
        self.args = args
        self.absent: list[int] = channel.peers


def group_label(group: LiveGroup) -> str:
    """Return what a group is called in messages, the same as in verdicts: ``"dp"``; empty for the
    default group.
    """
    label = group.mesh_dim or group.description or group.name
    return "" if label in DEFAULT_LABELS else label
