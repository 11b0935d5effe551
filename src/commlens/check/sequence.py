"""One rank's sequence: the calls of torch.distributed that it makes, in order, as plain data.

It comes from a run of the program as that rank alone (``run_rank.py``), in which nothing is sent
and everything completes at once. ``schedule.py`` puts the sequences of all ranks together.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from commlens.check.branches import BranchLine
from commlens.model.collective import Collective, Frame, Stack, user_frame
from commlens.model.hazard import Hazard
from commlens.model.ranklog import End

GuessKind = Literal[
    "value",  # a value of a tensor that another rank decides
    "object",  # an object that other ranks decide: gathered objects
    "exchange",  # small tensors that other ranks sent in their runs
    "store",  # a key of the store that other ranks write
    "poll",  # whether a collective has completed
    "source",  # the sender whose message a receive from any source took
    "file",  # a file that other ranks write
    "thread",  # several threads issue collectives: their order may differ in each run
    "gpu",  # what the fake GPU may lack
    "graph",  # values that a CUDA graph computes at each replay
]


class Issue(msgspec.Struct, frozen=True, tag="issue"):
    """A collective or message is issued."""

    op: Collective
    """As a live rank would record it, without times: ``index`` counts the rank's ops from 1."""


class ThreadWait(msgspec.Struct, frozen=True, tag="wait"):
    """A thread waits for a collective or message, and goes on when that has completed."""

    index: int  # of the Collective
    thread: int  # native thread id


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """The rank makes a group, or takes part in making one: its members meet there."""

    call: Collective
    """As in ``RankLog.setups``."""


class StoreCall(msgspec.Struct, frozen=True, tag="store"):
    """The program writes a key into the job's store, or waits for keys."""

    call: Collective
    """As in ``RankLog.keys_written`` or ``RankLog.store_wait``."""
    keys: tuple[str, ...]

    @property
    def waits(self) -> bool:
        """Whether it waits for the keys."""
        return self.call.op != "store.set"


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """The rank destroys a group; all of them if ``group`` is empty."""

    group: str = ""


Event = Issue | ThreadWait | Setup | StoreCall | Leave
"""An event of a rank."""


class Guess(msgspec.Struct, frozen=True):
    """The program asked for something that this rank alone cannot know, and got a guess.

    What the rank does afterwards is proven only if it does not depend on the answer.
    """

    what: GuessKind
    stack: Stack = ()
    after: int = 0  # number of events before it

    @property
    def source(self) -> Frame | None:
        """The user's line that asked."""
        return user_frame(self.stack)


UnseenKind = Literal[
    "address",  # init_process_group meets at an address that the launcher did not give
    "store",  # the program makes a TCPStore at such an address
    "world",  # init_process_group asks for another world size or rank than the one that is run
    "group",  # a group that the program makes by hand: its members are not known
    "graph",  # the replays of a CUDA graph in which collectives were captured
    "guards",  # torch.compile's guards agree across ranks
    "sizes",  # torch.compile exchanges sizes
    "partitioner",  # torch.compile's ranks agree on the values that backward needs
    "autotuning",  # torch.compile's ranks share the choice of kernels
]


class Unseen(msgspec.Struct, frozen=True):
    """The program does something that a run of one rank cannot show, so it may hang there."""

    what: UnseenKind
    frame: Frame | None  # the user's line
    name: str = ""  # the address, the world size or rank, the size of the group


class FileLookup(msgspec.Struct, frozen=True):
    """The program looked whether a file exists, or which files there are."""

    found: int
    """0 or 1 for a file; for several, a checksum of their names."""
    frame: Frame


class RankSequence(msgspec.Struct):
    """The sequence of one rank, and its end."""

    rank: int
    world_size: int
    events: list[Event] = []
    backend: str = ""  # that the program asks for
    steps: int = 0  # optimizer steps completed
    end: End = End.CLEAN
    exit_code: int = 0
    exception: str | None = None  # that ended the program, in one line
    exception_stack: Stack = ()
    misses: GuessKind | None = None  # may be what led to the exception: "file" or "gpu"
    left: bool = False  # it has destroyed its process groups
    cut_off: bool = False  # ended by us, after the requested number of steps or out of time
    out_of_time: bool = False
    guesses: list[Guess] = []
    decisions: list[BranchLine] = []  # lines that asked for values that are not known
    file_lookups: dict[str, FileLookup] = {}  # by path
    unseen: list[Unseen] = []
    hazards: list[Hazard] = []  # latent faults, such as a Work that was never waited for
    problem: str = ""  # why there is no complete sequence, in a sentence: a time limit, a crash

    @property
    def ops(self) -> list[Collective]:
        """The collectives and messages, in the order of their issue."""
        return [event.op for event in self.events if isinstance(event, Issue)]
