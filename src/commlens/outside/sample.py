"""The data about a rank that is seen from outside. It travels as JSON from one host to another."""

from __future__ import annotations

from typing import Literal

import msgspec

from commlens.model.collective import Frame, Stack, user_frame, user_lines
from commlens.model.health import NodeHealth
from commlens.model.ranklog import RankLog
from commlens.text import rank_phrase

CallKind = Literal["collective", "message", "request", "backward", "device", "setup", "store"]
"""``request``: the result of an earlier operation is waited for. ``backward``: autograd, in which
hooks issue collectives from C++. ``device``: a GPU is waited for, and so are the collectives that
were enqueued on it. ``store``: a key that another rank has to set.
"""


class Call(msgspec.Struct, frozen=True, omit_defaults=True):
    """A call that waits for other ranks, as its frames show it."""

    kind: CallKind
    op: str = ""  # wire op of a collective or message, else the function's name
    # "the default group", or the name of the variable that holds it; empty: unknown
    group: str = ""
    peer: int | None = None  # messages: the other global rank
    root: int | None = None
    line: Frame | None = None  # the user's line that calls it
    # it makes or uses a group as programs do that make it by hand: other worlds may be in it
    by_hand: bool = False

    @property
    def needs_world(self) -> bool:
        """Whether every rank of its world must reach it."""
        return self.group == DEFAULT_GROUP or self.op == "init_process_group"

    @property
    def phrase(self) -> str:
        """``"all_reduce of the default group"``, ``"recv from rank 1"``, ``"backward"``."""
        if self.kind == "message" and self.peer is not None:
            return f"{self.op} {'to' if self.op == 'send' else 'from'} {rank_phrase(self.peer)}"
        of = (
            f" of {self.group if self.group == DEFAULT_GROUP else f'group `{self.group}`'}"
            if self.group
            else ""
        )
        root = f" from {rank_phrase(self.root)}" if self.root is not None else ""
        if self.kind == "request":
            return f"{self.op}() for an earlier operation"
        if self.kind == "device":
            return f"{self.op}, for the device"
        return f"{self.op or 'torch.distributed'}{of}{root}"


DEFAULT_GROUP = "the default group"


class RankSample(msgspec.Struct):
    """One rank's process, looked at twice or more."""

    # without records; the stacks and the observation of its process are in log.observation
    log: RankLog
    # the call that it stands in, if it stands in one that waits for other ranks
    call: Call | None = None
    # whether its stack or a value on it changed between two looks; None: unknown
    moved: bool | None = None
    counters: dict[str, int] = {}  # loop variables on its stack, by "function.name"
    # pids of ranks on its host to which it has connections as members of a group have; only if the
    # job has several worlds
    linked: list[int] = []
    log_lines: list[str] = []  # of its log, which report an error or a timeout

    @property
    def rank(self) -> int:
        """The global rank."""
        return self.log.rank

    @property
    def stack(self) -> Stack:
        """The frames that say where the rank stands, innermost first."""
        main = self.log.main_stack
        return main.frames if main is not None else ()

    @property
    def path(self) -> tuple[tuple[str, int], ...]:
        """The user's lines, outermost first."""
        return tuple((frame.file, frame.line) for frame in user_lines(self.stack))[::-1]

    @property
    def line(self) -> Frame | None:
        """The user's line at which the rank stands."""
        return (self.call.line if self.call is not None else None) or user_frame(self.stack)


class HostSamples(msgspec.Struct):
    """The ranks of one world that one host found."""

    host: str
    samples: list[RankSample] = []
    world_size: int = 0
    # ranks that this host should have, as far as its launcher's environment says
    expected: list[int] = []
    notes: list[str] = []  # sentences about what could not be seen
    dumps: dict[str, bytes] = {}  # torch's own, by a name that ends with the rank
    window_s: float = 0.0
    health: NodeHealth | None = None  # of the host's hardware
    world: str = ""  # the same on all hosts, and another one for each world
