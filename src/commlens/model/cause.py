"""The causes of faults, as data: the ranks to blame, by what these were decided, the ranks that
wait, and how sure both are. Words are made of a cause, and the JSON of a verdict holds it.

"rank 2 never reached all_reduce #7; ranks 0-1,3 wait for it" is made of ``Missing(kind="missing",
why="data-loading", culprits=[2], blamed_by="absence", victims=[0, 1, 3], confidence="high",
outcome="never-reached", ...)``. :class:`Cause` holds what all causes have in common. There is a
class for each sort of cause:

* ranks do not come: Missing, Working, HelpersAwaited, Unrecorded; no rank writes a key: Unwritten
* all have come, and none gets on: StuckInside; they wait for each other: Cycle
* ranks disagree: Mismatch, Swapped, GroupsDiffer, NoSuchPeer, TakenMessage, Fewer, Diverged
* processes ended: Dead, Ended; exist twice: StartedTwice
* only errors or logs tell it: ToldByErrors, Refused, ToldByLogs
* ranks are slow: Slow, Straggler; the program has a fault that stops nothing: LatentFault
* nothing is wrong, or nothing shows: NoFault, NoneWaits, Motionless, Unexplained
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import msgspec

from commlens.model.collective import TensorSpec
from commlens.model.hazard import Access, HazardKind, Operand
from commlens.model.health import Fault, HealthEvent
from commlens.model.nccl import TransferState

Kind = Literal[
    "mismatch/op",
    "mismatch/shape",
    "mismatch/dtype",
    "mismatch/reduce-op",
    "mismatch/root",
    "mismatch/splits",
    "mismatch/p2p",
    "mismatch/device",
    "mismatch/layout",
    "mismatch/group",
    "missing",
    "cycle",
    "dead",
    "stuck-inside",
    "straggler",
    "waiting",
    "hazard",
    "diverged",
    "healthy",
    "undetermined",
]
"""The fault. Claim none: ``waiting`` (the ranks wait for one that visibly works) and
``undetermined`` (evidence is unreadable). ``hazard`` is a latent fault of the program, never the
kind of a verdict.
"""

Why = Literal[
    "data-loading",
    "checkpoint-io",
    "compilation",
    "throttled",
    "no-cpu",
    "uninterruptible-io",
    "memory-pressure",
    "stopped",
    "holding-gil",
    "in-collective",
    "initialising",
    "finished",
    "exception",
    "exit",
    "killed",
    "out-of-memory",
    "skipped",
    "extra",
    "user-code",
    "parameter",
    "buffer",
    "gradient",
    "optimizer-state",
    "rng",
    "same-batch",
    "collective-output",
    "op-output",
    "nan",
    "value",
    "slow-device",
    "slow-link",
    "uneven-work",
    "unknown",
    Fault,
]
"""The class of the cause, from stacks, ``/proc``, cgroup files and what the nodes tell of their
hardware; of ``diverged``, the kind of tensor.
"""

Confidence = Literal["high", "medium", "low"]

Rank = Annotated[int, msgspec.Meta(ge=0)]
"""A global rank."""


class GroupRef(msgspec.Struct, frozen=True):
    """A process group in a verdict."""

    name: str  # torch's own name of the group
    description: str
    ranks: list[Rank]  # global ranks of its members, in group order


class CollectiveRef(msgspec.Struct, frozen=True, omit_defaults=True):
    """A collective in a verdict."""

    op: str
    sequence_number: Annotated[int, msgspec.Meta(ge=0)]  # 0: unknown
    # point-to-point only: the other rank, as the culprit or its victim names it
    peer: int | None = None


BlamedBy = Literal[
    "absence",
    "majority",
    "rounds",
    "routine",
    "midway",
    "other-groups",
    "process",
    "device",
    "exit",
    "lateness",
    "earliness",
    "arguments",
    "recomputation",
    "hardware",
    "undecided",
    "unknown",
    "nobody",
]
"""By what the culprits were decided.

``absence``: they do not arrive, or left no record. ``majority``: most of the group do otherwise.
``rounds``: most ranks came to this line, or round their loop, more or less often.
``routine``: they left what they did before. ``midway``: they ended inside of what they repeat,
where the others go on with it. ``earliness``: a NaN came up there first. ``arguments``: their calls
are wrong, whatever the others do. ``recomputation``: activation checkpointing issued a message
again there, and the other side did not. ``hardware``: what they run on broke when they stopped.
``undecided``: nothing chooses between the sides. ``unknown``: what they waited for is not in the
records. ``nobody``: no rank is at fault, or known to be.
"""


class Decision(NamedTuple):
    """The ranks to blame, and by what they were decided."""

    culprits: tuple[Rank, ...]  # sorted; empty if undecided
    by: BlamedBy


ExitKind = Literal["alive", "leaving", "clean", "own", "peer", "terminated", "gone", "unrecorded"]
"""Whether a process runs, or how it ended.

``leaving``: it said goodbye but still exists. ``clean``: it ended well. ``own``: it failed by
itself. ``peer``: it failed because of another rank. ``terminated``: it was ended from outside.
``gone``: how it ended is unknown.
"""


class Wait(msgspec.Struct, frozen=True, omit_defaults=True):
    """Ranks that wait in one collective, or in messages of one number, at one line."""

    ranks: list[Rank]
    collective: CollectiveRef
    group: GroupRef | None = None
    source: str | None = None  # file name and line number
    waited_s: float = 0.0  # the longest of these ranks; 0: unknown


class Doing(msgspec.Struct, frozen=True):
    """What ranks do outside of collectives."""

    why: Why
    works: bool  # visibly
    observed: bool  # their processes were watched for movement
    unclear: bool  # nothing shows work or a fault: they may wait for a disk or a server
    source: str | None = None  # the user's innermost line


class LostNode(msgspec.Struct, frozen=True):
    """A node that has fallen silent."""

    host: str
    ranks: list[Rank]
    silent_s: float
    vanished: bool  # connections to its ranks were closed at that moment; else it only is silent


class InitMeeting(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far the ranks of a job have come in ``init_process_group``."""

    size: int  # ranks that are to come
    came: list[Rank]
    missing: list[Rank] = []  # that have not come
    maker: Rank = 0  # makes the store, unless the launcher does
    address: str = ""  # where they meet, if it is of a host that was looked at
    listens: bool | None = None  # a process accepts connections there; None: unknown
    agent: bool = False  # their environment leaves the store to the launcher
    again: bool = False  # they called init_process_group before


CompilerPart = Literal["guards", "sizes", "partitioner", "autotuning", "group"]
"""The part of torch.compile that issues a collective: to learn whether the guards of all ranks
hold, to exchange sizes when it compiles, to agree on what backward needs or on kernels, or to make
a group for these.
"""


class CompilerCall(msgspec.Struct, frozen=True):
    """A collective that torch.compile issues by itself."""

    part: CompilerPart
    op: str
    ranks: list[Rank]  # that stand in it
    all_waiting: bool  # no rank waits elsewhere
    source: str | None  # file name and line number of the call of the compiled function


class Cause(msgspec.Struct, kw_only=True, tag_field="type"):
    """What all causes tell."""

    kind: Kind
    why: Why
    root_cause: bool  # false: a consequence of another cause, or nothing is wrong
    # sorted; empty if nothing is wrong or no rank can be named
    culprits: list[Rank] = []
    blamed_by: BlamedBy
    victims: list[Rank] = []  # ranks that wait or ended because of it, sorted
    certain: bool = False  # something is wrong for good, whoever is to blame
    confidence: Confidence  # how sure it is which ranks are to blame
    lost_nodes: list[LostNode] = []  # those of ranks that ended, or that others wait for
    init: InitMeeting | None = None  # of ranks that wait in init_process_group
    compiler: CompilerCall | None = None

    def __post_init__(self) -> None:
        """Of root causes, a mismatch, a cycle and a death are certain, whoever is to blame."""
        if self.root_cause and (self.kind.startswith("mismatch") or self.kind in ("cycle", "dead")):
            self.certain = True


class Hardware(msgspec.Struct, frozen=True, omit_defaults=True):
    """A change of a node's hardware at the time of a fault, in a place that fits it."""

    node: str
    ranks: list[Rank]  # that use the part, or run on the node
    event: HealthEvent  # the first of its kind there
    # how long before the fault it happened, at most, or before the look; negative: after
    before_s: float
    # it can have this effect, at this time, in this place; else it may be a coincidence
    explains: bool
    own: bool = False  # these ranks use the part alone, and the others have their own
    times: int = 1  # it happened
    before: Literal["fault", "look"] = "fault"  # "look": the time of the fault is not known


RasSays = Literal["agrees", "disagrees", "silent"]
"""Whether NCCL's RAS service says the same as the records.

``silent``: it sees nothing wrong, as it often does while a job hangs.
"""


class RasWitness(msgspec.Struct, frozen=True, omit_defaults=True):
    """What NCCL's RAS service says about the ranks of a collective."""

    says: RasSays
    op: str = ""  # the op that some ranks have launched fewer times, by NCCL's name
    behind: list[Rank] = []  # these
    not_answering: list[Rank] = []


PlaceKind = Literal["host", "leaf", "rack", "rail", "gpu"]
"""A part of the cluster that ranks share.

``leaf``: the switch that their hosts are connected to. ``rail``: the network adapter nearest to
their GPUs has the same place on its host. ``gpu``: their GPU has the same index on its host.
"""


class SharedPlace(msgspec.Struct, frozen=True, omit_defaults=True):
    """A place that all affected ranks share, and none of the others that were examined."""

    kind: PlaceKind
    name: str
    ranks: list[Rank]  # the affected ones
    others: int  # ranks elsewhere
    chance: float  # that as many ranks share such a place alone, if any of them may be affected
    nic: str = ""  # of a rail: the adapter, if it has one name on all hosts


class OfHardware(Cause, kw_only=True):
    """A cause behind which there may be one of the hardware."""

    hardware: list[Hardware] = []  # changes at the time of the fault, the likeliest cause first
    ras: RasWitness | None = None
    place: SharedPlace | None = None


class LastAtLine(msgspec.Struct, frozen=True):
    """Ranks, and the number of their last collective or message from a line."""

    ranks: list[Rank]
    number: int


class Rounds(msgspec.Struct, frozen=True):
    """How far ranks got at a line: those of one program come to it equally often."""

    op: str
    line: str  # file name, line number and function
    last: list[LastAtLine]  # those of most ranks of the job are the last in the list
    went_on: str | None = None  # where those that got less far wait, if it is new to them
    steps: int = 0  # optimizer steps that all of them did up to there; 0: they differ, or none

    @property
    def odd(self) -> frozenset[Rank]:
        """The ranks that differ from most of the job."""
        return frozenset(rank for at in self.last[:-1] for rank in at.ranks)


class Recomputed(msgspec.Struct, frozen=True):
    """A message that a rank issues again where activation checkpointing repeats a forward pass."""

    rank: Rank
    message: CollectiveRef
    issued: int  # by the other side, to match it and those before it
    source: str | None  # file name and line number


Outcome = Literal[
    "never-reached",
    "finished",
    "reached-too-late",
    "message-missing",
    "key-missing",
    "extra-message",
    "extra-collective",
    "extra-line",
]
"""What the ranks that do not arrive did instead.

``finished``: they ended without the collective. ``reached-too-late``: the others had given up.
``message-missing``: they never sent or received it. ``key-missing``: they have not written it.
``extra-message``, ``extra-collective``: they are right to have finished; the waiting ranks issued
one too many. ``extra-line``: only the waiting ranks came to a line before, and since then the
collectives pair up wrongly.
"""

Doubt = Literal[
    "may-be-working",
    "outside-not-recorded",
    "ended-unobserved",
    "not-observed",
    "only-issued",
    "completion-unknown",
    "may-wait-in-message",
    "refused-elsewhere",
    "undecided",
    "majority-assumed",
    "loop-may-end-there",
    "wait-inferred",
    "members-unknown",
    "many-outside",
    "lock-holder-unknown",
    "store-elsewhere",
    "helper-unseen",
]
"""What limits the confidence.

``may-be-working``: a rank that works for so long may be in an endless loop.
``outside-not-recorded``: there are no stacks. ``ended-unobserved``, ``not-observed``: whether it
made progress. ``only-issued``: logs tell what was issued, not what completed.
``completion-unknown``: nothing tells whether the others' collective completed.
``may-wait-in-message``: the ranks may wait for their devices in a message, of which nothing tells
whether it completed; then nobody is blamed.
``refused-elsewhere``: strict verification ended their wait first. ``undecided``: nothing chooses
between the sides. ``majority-assumed``: that most ranks are right. ``loop-may-end-there``: where
the culprits ended it. ``wait-inferred``: no thread was seen in a wait. ``members-unknown``: stacks
do not tell the ranks of the group. ``many-outside``: more ranks are outside of collectives than
wait, or at several places. ``lock-holder-unknown``: the ranks poll a lock. ``store-elsewhere``: a
process outside of the job may make the store.
``helper-unseen``: the rank may wait for a process that it started.
"""


class LoopRound(msgspec.Struct, frozen=True):
    """A rank whose loop is in another round than the others, as its stack shows it."""

    rank: Rank
    variable: str  # of the loop
    value: int
    others: int  # the value on all others that wait; of a ring of two ranks, on the other one


class Missing(OfHardware, tag="missing", kw_only=True):
    """Ranks that do not arrive where others wait for them."""

    ranks: list[Rank]
    # issued what these ranks did not, or issued too late: they wait, or are done with it
    came: list[Rank]
    processes: list[ExitKind]  # in the order of the ranks
    outcome: Outcome
    activity: Doing  # of the ranks, which all do the same
    waits: list[Wait]  # for these ranks, the most waited for first
    # how long the job has been held up, if threads beside the main ones have waited for longer
    held_up_s: float | None = None
    timed_out: bool = False  # the wait ended at its timeout
    over: bool = False  # the culprits' processes have ended
    works_too_long: bool = False  # they visibly work, but for too long
    # the missing ranks are right, and those that wait for them are not
    blames_waiting: bool = False
    new_line: bool = False  # the waiting rank issued nothing from this line before
    rounds: Rounds | None = None  # that decided
    recomputed: Recomputed | None = None
    locked_out: list[Rank] = []  # wait for a lock that no other thread of their process releases
    doubt: Doubt | None


class HelperCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where the stack of a process stands that a rank started, and whose calls are not recorded."""

    rank: Rank  # that started it
    pid: int
    op: str = ""  # the collective that it is in; empty: in none
    source: str | None = None  # the line that called the collective, or the innermost line
    is_idle: bool = False  # it waits for a request, as far as its stack shows


class HelpersAwaited(Cause, tag="helpers-awaited", kw_only=True):
    """Ranks that others wait for, and which have started processes that are in a collective of
    their own process group.
    """

    ranks: list[Rank]
    waits: list[Wait]  # for these ranks, the most waited for first
    inside: list[HelperCall]  # the processes that these ranks started
    outside: list[HelperCall]  # those of other ranks, which meet them and are in no collective


class Working(Cause, tag="working", kw_only=True):
    """Ranks that visibly work, and may yet arrive where others wait for them."""

    ranks: list[Rank]
    activity: Doing  # of the ranks, which all do the same
    expected: bool = False  # they are in a block marked as slow
    waits: list[Wait]
    # how long the job has been held up, if threads beside the main ones have waited for longer
    held_up_s: float | None = None
    patience_s: float | None = None  # they count as stuck after this; None: there is no limit
    wakes_in_s: float | None = None  # they sleep, the last one for so much longer


NoRecord = Literal[
    "silent",
    "watchdog-stuck",
    "not-recorded",
    "outdated",
    "unreadable",
    "left-nothing",
    "not-started",
    "fewer-than-expected",
    "out-of-sight",
]
"""Why nothing tells what a rank did.

``silent``: no line of a log tells that it came. ``watchdog-stuck``: its watchdog could not run.
``not-recorded``: its process runs without recording. ``outdated``: its dump is older than the
wait. ``unreadable``: its newest records are. ``left-nothing``: it ended, on this machine.
``not-started``: all ranks meet on this machine, and it did not come. ``fewer-than-expected``: the
ranks with a record wait for more. ``out-of-sight``: it probably runs on another node.
"""


class Unrecorded(Cause, tag="unrecorded", kw_only=True):
    """Ranks that others wait for, and whose calls no record shows."""

    ranks: list[Rank]
    processes: list[ExitKind]  # in the order of the ranks
    reason: NoRecord
    stuck_s: int = 0  # how long torch's watchdog of one of them made no progress
    waits: list[Wait]
    idle: list[Rank] = []  # that wait for no rank, one of which may be such a member of a group
    job_size: int  # ranks of the job


StuckState = Literal[
    "held-up",
    "moving",
    "not-started",
    "no-progress",
    "left-behind",
    "completion-unknown",
    "may-be-running",
    "nobody-listens",
]
"""Why ranks do not leave a collective that all of them have entered.

``held-up``: the process of one cannot run. ``moving``: data still moves. ``not-started``: the
devices of some have not begun it. ``no-progress``: nothing shows. ``left-behind``: it completed on
others. ``completion-unknown``: it may have completed. ``may-be-running``: the dumps may be those of
a running job. ``nobody-listens``: at the address where ``init_process_group`` meets.
"""

Agreement = Literal["all", "sizes", "sizes-and-dtypes", "unknown"]
"""On what the ranks of a collective agree, as far as their records tell it."""


class StalledTransfer(msgspec.Struct, frozen=True):
    """A transfer of NCCL between two ranks that is behind all others of its collective."""

    sender: Rank
    receiver: Rank
    channel: int
    done: int  # steps
    steps: int  # in all
    sender_state: TransferState  # what its oldest step under way waits for
    receiver_state: TransferState


class StuckInside(OfHardware, tag="stuck-inside", kw_only=True):
    """A collective that all its ranks have entered, and that does not complete."""

    state: StuckState
    ranks: list[Rank]  # that have entered it, and have a record
    waits: list[Wait]
    activity: Doing | None = None  # of the culprits, if their processes cannot run
    busy: list[Rank] = []  # use CPU inside
    not_started_on: list[Rank] = []  # their devices have not begun it
    started_on: list[Rank] = []  # their devices have begun it
    completed_on: list[Rank] = []
    transfer: StalledTransfer | None = None
    agreement: Agreement = "unknown"
    not_compared: list[str] = []  # aspects that the records do not tell and that may be at fault
    perhaps_members: list[Rank] = []  # may be in the group, whose ranks no log lists


class Unwritten(Cause, tag="unwritten", kw_only=True):
    """A key of the job's store that ranks wait for and no rank writes, or a ``TCPStore`` whose
    server or clients do not come.
    """

    key: str  # or the store's address
    ranks: list[Rank]  # that wait for it
    waits: list[Wait]
    written_before: bool  # the culprit wrote such keys before, and now waits for these ranks
    # the ranks wait for a TCPStore to be made: whether a process listens at its address
    listens: bool | None = None
    agent: bool = False  # torch made every rank a client, as the launcher's environment asks
    # the group made by hand, with a store at another address, in which all other ranks wait
    elsewhere: GroupName | None = None


class RingWait(msgspec.Struct, frozen=True, omit_defaults=True):
    """A rank of a ring, and the rank that it waits for."""

    rank: Rank
    awaited: Rank
    collective: CollectiveRef
    group: GroupRef | None = None
    source: str | None = None  # file name and line number


class LeftOrder(msgspec.Struct, frozen=True, omit_defaults=True):
    """A rank that left the order in which it, or the others, use their groups."""

    rank: Rank
    collective: CollectiveRef  # to which it moved on
    group: GroupRef | None = None
    instead_of: CollectiveRef | None = None  # what it, or the others, used to issue here
    group_before: GroupRef | None = None
    one_more: bool = False  # of its group, no other rank has issued it
    new_line: bool = False  # the rank issued nothing from these lines before


class UnmetMessage(msgspec.Struct, frozen=True):
    """A message that the other side has not issued: its rank waits in a collective first."""

    rank: Rank  # that waits for the message
    message: CollectiveRef
    issued: int  # messages of the other side so far
    stands_in: CollectiveRef  # where the other side waits


class AwaitedResult(msgspec.Struct, frozen=True):
    """Two ranks that wait for each other: one waits for a key that the other writes, and the other
    waits for its next command, a collective whose root is the first.
    """

    rank: Rank  # that waits for the key
    key: str
    writer: Rank
    command: CollectiveRef


class Cycle(Cause, tag="cycle", kw_only=True):
    """Ranks that wait for each other."""

    ranks: list[Rank]  # that do so
    ring: list[RingWait] = []  # a shortest cycle; empty: not all of its waits are in the records
    waits: list[Wait] = []  # for ranks that are not known to have come
    left_order: list[LeftOrder] = []  # the culprits
    unmet_message: UnmetMessage | None = None
    awaited_result: AwaitedResult | None = None
    rounds: Rounds | None = None  # that decided
    recomputed: Recomputed | None = None
    perhaps_come: list[Rank] = []  # awaited; their dumps may be older than the others
    other_round: LoopRound | None = None


class Arguments(msgspec.Struct, frozen=True, omit_defaults=True):
    """The arguments of a collective that its ranks must agree on."""

    tensors: tuple[TensorSpec, ...] = ()  # that every rank has
    reduce_op: str | None = None
    root: Rank | None = None
    input_splits: tuple[int, ...] = ()  # empty: even, or unknown
    output_splits: tuple[int, ...] = ()


class Issued(msgspec.Struct, frozen=True, omit_defaults=True):
    """Ranks that issued the same at one line."""

    ranks: list[Rank]
    collective: CollectiveRef
    arguments: Arguments
    source: str | None = None  # file name and line number


class Swapped(Cause, tag="swapped", kw_only=True):
    """A rank that issued collectives of one shape in another order than the others: their results
    are mixed up, and nothing hangs.
    """

    group: GroupRef | None
    first: int  # number of the first of these collectives
    last: int
    own: list[str | None]  # lines of the rank, by number
    others: list[str | None]  # lines of the others

    def __post_init__(self) -> None:
        """Unlike a mismatch, it may be on purpose: only the lines show it."""


MAIN_THREAD = "MainThread"
"""Python's name of the thread that a process starts with."""


class ThreadRace(msgspec.Struct, frozen=True):
    """Two threads of each rank whose collectives come in any order."""

    ranks: list[Rank]  # that had collectives of both in flight at once
    main: CollectiveRef  # of the thread that runs the training, as a rule the main one
    main_source: str | None
    beside: CollectiveRef  # of the other thread
    beside_source: str | None
    main_thread: str = ""  # its name; empty if it is not known
    beside_thread: str = ""


MismatchDoubt = Literal[
    "order-of-threads",
    "splits-unknown",
    "undecided",
    "routine-may-change",
    "groups-may-differ",
    "single-match",
    "race-not-seen",
]
"""What limits the confidence in a mismatch.

``order-of-threads``: several threads issue the group's collectives. ``splits-unknown``: the records
do not tell them. ``undecided``: nothing chooses between the sides. ``routine-may-change``,
``groups-may-differ``: on purpose. ``single-match``: one collective alone fits the shift.
``race-not-seen``: some ranks had not both threads' collectives in flight at once.
"""


class Mismatch(Cause, tag="mismatch", kw_only=True):
    """Ranks that met in one collective or message and disagree on it in the aspect that the kind
    names; or that are out of step, if the kind is ``missing``.
    """

    group: GroupRef | None
    number: int  # of the collective or message
    issued: list[Issued]  # the most ranks first, at most eight
    not_seen: list[Rank] = []  # of the group: no record tells what they issued
    gone_on: list[Rank] = []  # of these: their recorder tells that they completed it
    departure: Literal["skipped", "extra", "either"] | None = None  # of the culprits, if any
    shifted_by: int = 0  # collectives that a rank is ahead of the others from here on
    matches: int = 0  # later collectives that agree with the shift
    rounds: Rounds | None = None  # at the line of the first culprit, or of the others
    steps_ahead: int = 0  # optimizer steps that the first of the culprits did more than the others
    silent: bool = False  # no rank hangs because of it
    refused: bool = False  # strict verification raised before anything was sent
    race: ThreadRace | None = None
    held_up: list[Rank] = []  # wait because of it
    ended_by_it: list[Rank] = []  # their processes died of it
    repeats: int = 0  # later collectives with the same mismatch
    alike: int = 0  # collectives of other ranks or groups in which the same lines disagree
    other_round: LoopRound | None = None
    doubt: MismatchDoubt | None = None


class Claims(msgspec.Struct, frozen=True):
    """The processes that have the same rank."""

    rank: Rank
    pids: list[int]
    started_by: list[int]  # the process that started each


class StartedTwice(Cause, tag="started-twice", kw_only=True):
    """Ranks that exist twice: the launcher starts them, and each of them starts all again."""

    ranks: list[Rank]
    claims: list[Claims]


class Slow(Cause, tag="slow", kw_only=True):
    """A rank that makes the others wait again and again, in a job that is not stuck."""

    times: int  # collectives to which it came last, and late
    of: int  # collectives
    lost_s: float  # the others waited for it alone
    span_s: float  # of this time


class HotLine(msgspec.Struct, frozen=True):
    """A line in which a slow rank spends more time than another one."""

    source: str  # file name and line number
    share: float  # of the slow rank's time
    other: Rank | None  # None: no other was sampled
    share_other: float


Phase = Literal["before-the-backward", "backward", "backward-or-before", "optimizer"]
"""The part of a training step: data loading and the forward pass, the backward pass, either, or the
optimizer step.
"""


class SlowStretch(msgspec.Struct, frozen=True):
    """The time between two collectives, for which slow ranks take longer than the others."""

    after: str  # op
    after_source: str | None  # file name and line number
    before: str  # op
    before_source: str | None
    phase: Phase | None
    extra_s: float  # per step


class SlowTransfer(msgspec.Struct, frozen=True):
    """A collective that takes longer in the group of slow ranks than in groups that do the same.
    The waits for late ranks are taken off.
    """

    group: GroupRef
    op: str
    ratio: float
    extra_s: float  # per step, of all collectives of the group


class Straggler(OfHardware, tag="straggler", kw_only=True):
    """Ranks that make the others wait in each step of a running job."""

    cost: float  # share of the time for which all others wait
    step_s: float
    steps: int  # that were seen
    # share of the time for which what ``why`` tells holds them back; none: nothing is known to
    held_back: float | None = None
    hot_line: HotLine | None = None
    stretch: SlowStretch | None = None
    since_ns: int = 0  # Unix; 0: in all samples, or not known
    since_step: int = 0  # about
    slower: float | None = None  # how many times as long a step takes since then
    by_rounds: bool = False  # the steps are rounds of collectives: no rank counts an optimizer's
    transfer: SlowTransfer | None = None  # of ``slow-link``
    # of ``uneven-work``: the elements that they contribute to collectives, against the others'
    work_ratio: float | None = None


TensorKind = Literal[
    "collective-output",
    "op-output",
    "parameter",
    "buffer",
    "gradient",
    "optimizer-state",
    "hyperparameter",
    "rng",
    "batch",
    "module",
    "value",
]
"""The part of a program that a compared tensor has. ``module``: no tensor, but a module that ran.
``value``: named by the user.
"""

Departure = Literal[
    "not-broadcast",
    "other-outputs",
    "other-gradients",
    "other-hyperparameters",
    "one-bit",
    "one-element",
    "not-updated",
    "other-random-numbers",
    "other-order",
    "other-tensors",
    "rounding",
    "same-data",
    "not-finite",
    "other-result",
    "other-op",
    "other-arguments",
    "other-inputs",
    "changed-outside",
    "unclear",
]
"""The cause that fits how values that must agree came to differ.

``not-broadcast``: they differed from the first check on. ``other-outputs``: they are outputs of one
collective. ``one-bit``: of one tensor, as when hardware fails. ``one-element``: of one tensor, in
more than one bit. ``not-updated``: they stayed what they were at the check before.
``other-order``: parameters are registered in another order. ``other-tensors``: ranks have tensors
that others lack. ``rounding``: all of them differ by little. ``same-data``: ranks read the same
batch. ``not-finite``: they are NaN.

Of the first op of torch after which they differ: ``other-result``: it had the same inputs on all
ranks. ``other-op``: not all ranks ran it. ``other-arguments``: a number among its arguments
differed. ``other-inputs``: one of its inputs differed. ``changed-outside``: no op changed them.
"""


class TensorSide(msgspec.Struct, frozen=True, omit_defaults=True):
    """Ranks on which a tensor has the same bytes."""

    ranks: list[Rank]
    digest: str  # of the bytes, 16 hexadecimal digits
    norm: float | None = None  # None: not finite
    mean: float | None = None
    nans: int = 0
    infs: int = 0


class DivergedTensor(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tensor that ranks must have alike, and do not."""

    kind: TensorKind
    name: str
    sides: list[TensorSide]  # the most ranks first
    element: int | None = None  # the only one that differs, counted from 0
    bit: int | None = None  # the only one of that element that differs
    source: str | None = None  # of a collective's output: file name and line number of the call


class OwnTensors(msgspec.Struct, frozen=True):
    """Ranks that have tensors which others of their group lack."""

    ranks: list[Rank]
    names: list[str]


class Compared(msgspec.Struct, frozen=True):
    """A check of the same tensors."""

    step: int
    differing: int  # tensors


class OpSide(msgspec.Struct, frozen=True, omit_defaults=True):
    """The op that some ranks ran."""

    ranks: list[Rank]
    op: str | None = None  # as torch names it; None: they ran none, "": no op of torch
    module: str | None = None
    backward: bool = False  # in the backward pass of the module
    # file name and line number; in a backward pass, of the forward pass
    source: str | None = None
    after: str | None = None  # the last collective that was issued before
    arguments: list[str] = []  # of tensors, type and layout


DivergedDoubt = Literal[
    "which-is-right", "first-unseen", "on-all", "no-majority", "others-changed", "inferred"
]
"""Why it is not sure which ranks are to blame for tensors that differ.

``which-is-right``: they have the same data, and nothing tells which of them should have other data.
``first-unseen``: where a NaN came up first was not watched. ``on-all``: all ranks have it.
``no-majority``: no majority of the ranks agrees. ``others-changed``: nor does it here, and the
ranks are blamed whose value did not change. ``inferred``: that the ranks must agree follows only
from earlier checks, in which they did.
"""


class Diverged(Cause, tag="diverged", kw_only=True):
    """Tensors that ranks must have alike, and do not."""

    ranks: list[Rank]  # compared
    source: str  # the check: an optimizer, or a call of the program
    step: int
    # the last check before that found no difference; None: there was none
    equal_at: int | None = None
    departure: Departure
    doubt: DivergedDoubt | None = None
    tensors: list[DivergedTensor]  # of the first kind that differs; at most 20
    differing: int  # number of such tensors
    compared: int  # tensors of all kinds
    # the other kinds of the first tensor that were compared: those that agree, those that do not
    equal_kinds: list[TensorKind] = []
    unequal_kinds: list[TensorKind] = []
    only_on: list[OwnTensors] = []
    history: list[Compared] = []  # the last checks of these tensors, this one included; at most 20
    module: str | None = None  # the first whose output was NaN
    op: str | None = None  # or the first collective whose input was
    ops: list[OpSide] = []  # the first op that left the tensor different, the most ranks first
    origins: list[OpSide] = []  # the ops that made its input that differs


class Fewer(Cause, tag="fewer", kw_only=True):
    """Ranks that issued fewer collectives than the others, in a job that ended well."""

    ranks: list[Rank]
    others: list[Rank]
    issued: int  # by these ranks
    others_issued: int


GroupDifference = Literal[
    "order", "skipped", "skipped-first", "one-too-many", "name", "store", "size"
]
"""How the groups of ranks differ from the others'.

``order``: they made them in another order. ``skipped``: they left out the group that the others
make. ``skipped-first``: so did they, and made no other. ``one-too-many``: the others make theirs
next. ``name``: they wait for a group of the same ranks under another name, which
``use_local_synchronization`` makes of the number of groups that a process is in. ``store``: they
wait for the other members of a group made by hand at another address, or under another prefix.
``size``: they wait for another number of members.
"""


class MadeGroup(msgspec.Struct, frozen=True, omit_defaults=True):
    """A group that some ranks made."""

    made_by: list[Rank]
    group: GroupRef
    source: str | None = None  # file name and line number


class GroupName(msgspec.Struct, frozen=True, omit_defaults=True):
    """The name under which ranks wait for the other members of a group."""

    ranks: list[Rank]
    name: str
    groups_before: int | None = None  # that these ranks are in, as the name tells


class GroupsDiffer(Cause, tag="groups-differ", kw_only=True):
    """Ranks that ask for different groups or meshes in one call, or do not make the call."""

    sides: list[list[Rank]]  # that ask for the same, the most ranks first
    not_called_by: list[Rank] = []  # went on without the call
    waiting: list[Rank]  # or waited until they failed
    difference: GroupDifference | None = None  # of the second side from the first
    names: list[GroupName] = []  # on each side, if the names differ
    one_more: list[MadeGroup] = []  # made by the side that is in the most groups, and by no other


class Motionless(Cause, tag="motionless", kw_only=True):
    """A job in which no rank has moved for long, and none is in a collective."""

    ranks: list[Rank]
    still_s: list[float]  # for which each has not moved, in the order of the ranks
    helpers: list[HelperCall] = []  # the processes that they started


HowEnded = Literal["after-a-peer", "kept-address", "unobserved", "from-outside"]
"""How processes ended that no other cause explains.

``after-a-peer``: a peer ended or did not answer. ``kept-address``: nobody listens at an address
that the store kept from an earlier start. ``unobserved``: nobody saw it. ``from-outside``: a signal
ended the job.
"""


class Ended(Cause, tag="ended", kw_only=True):
    """Processes that ended without a known cause."""

    ranks: list[Rank]
    first: Rank = 0  # of them: the first to end, as far as is known
    processes: list[ExitKind]  # in the order of the ranks
    how: HowEnded
    silent: list[Rank] = []  # no line of a log tells anything of them
    error: str = ""  # of the first, after a peer
    signal: str | None = None
    addresses: list[str] = []  # those at which nobody listened
    restarts: int = 0  # of the workers, before


DeathDoubt = Literal["first-unknown", "perhaps-aborted", "unobserved", "unspecific"]
"""What limits the confidence in a death.

``first-unknown``: all ranks ended, and nothing tells which did first. ``perhaps-aborted``: NCCL's
watchdog may have aborted them, because another rank did not come. ``unobserved``: nobody saw how
they ended. ``unspecific``: their error does not tell whether another rank caused it.
"""


class Dead(OfHardware, tag="dead", kw_only=True):
    """Processes that ended in the same way, and not because a peer had."""

    ranks: list[Rank]
    processes: list[ExitKind]  # in the order of the ranks
    waits: list[Wait]  # for these ranks
    awaited: list[Rank] = []  # those of the ranks that the waits are for
    ended_by_it: list[Rank] = []  # their processes ended after these
    signal: str = ""  # that ended the first of them: "SIGKILL"
    error: str = ""  # that it raised, and NCCL's warnings before it
    status: str = ""  # with which it exited
    doubt: DeathDoubt | None = None


class Side(msgspec.Struct, frozen=True):
    """Ranks that did the same, according to errors."""

    ranks: list[Rank]
    did: str  # the op, shape, dtype or number of parameters


ErrorReport = Literal[
    "op", "shape", "dtype", "parameters", "not-exchanged", "checkpoint", "sizes", "barrier"
]
"""What the errors that ranks raised tell.

``op``, ``shape``, ``dtype``: torch compared the collectives of ranks. ``parameters``: DDP compared
their models. ``not-exchanged``: it read counts of parameters that their own ranks contradict, or
that no model has. ``checkpoint``: it failed on ranks that every error names. ``sizes``: a message
had another size than its receiver expects. ``barrier``: ranks did not come to a monitored barrier.
"""


class ToldByErrors(Cause, tag="told-by-errors", kw_only=True):
    """Ranks that other ranks' errors name, or that differ according to these errors."""

    report: ErrorReport
    raised: list[Rank]  # the error
    sides: list[Side] = []  # the most ranks first
    named: list[Rank] = []  # by all errors
    global_ranks: bool  # false: the errors may number the ranks of a smaller group
    error: str | None = None  # of the rank that failed; of sizes, both
    file: str | None = None  # that a rank failed on in a checkpoint


class NoSuchPeer(Cause, tag="no-such-peer", kw_only=True):
    """Messages to or from a rank that their group does not have."""

    ranks: list[Rank]  # that sent or received them
    collective: CollectiveRef  # of the first of these ranks
    group: GroupRef | None
    source: str | None  # file name and line number


class TakenMessage(Cause, tag="taken-message", kw_only=True):
    """A receive that names a sender, after a receive from any source took that sender's message."""

    rank: Rank  # that receives
    receive: CollectiveRef
    group: GroupRef | None
    # file names and line numbers: of the receive, of the one from any source, of the message that
    # this took, and of the message of another rank that it could have taken
    source: str | None
    taken_at: str | None
    sent_at: str | None
    other_sender: Rank
    other_sent_at: str | None
    races: bool  # nothing orders the two messages


RefusedFor = Literal["wrong-arguments", "ended", "not-arrived", "cycle", "disagreement"]
"""Why strict verification refused a call, where the records do not show it.

``wrong-arguments``: they are wrong, whatever the other ranks do. ``ended``, ``not-arrived``: ranks
that the others waited for. ``cycle``: ranks wait for each other. ``disagreement``: the arguments
of ranks differ.
"""


class RankWait(msgspec.Struct, frozen=True):
    """A rank, and the ranks that it waited for."""

    rank: Rank
    awaited: list[Rank]


class Refused(Cause, tag="refused", kw_only=True):
    """Calls that strict verification refused, and the records do not show why."""

    refused_for: RefusedFor
    raised: list[Rank]  # the exception
    absent: list[Rank] = []  # had ended, or did not arrive
    processes: list[ExitKind] = []  # of the absent ranks, in their order
    collective: CollectiveRef | None = None  # for which they were absent
    waits: list[RankWait] = []  # of a cycle


class LatentFault(Cause, tag="latent-fault", kw_only=True):
    """What a program does wrong at one line without being stopped by it."""

    what: HazardKind
    op: str  # the function of torch.distributed that the line calls
    times: int  # on the first of the culprits
    source: str | None  # file name and line number
    # Of an op that touched a tensor of an asynchronous collective before its wait: the op, its
    # line, and the part that the tensor has in the collective.
    touched_by: str | None = None
    touched_at: str | None = None
    access: Access | None = None
    operand: Operand | None = None
    tensor: str | None = None


JobEnding = Literal[
    "out-of-memory",
    "node-failure",
    "preemption",
    "time-limit",
    "evicted",
    "gpu-error",
    "killed",
    "process-failed",
    "cancelled",
    "store-unreachable",
    "store-awaited",
]
"""Why a job or one of its processes ended, according to a scheduler, the kernel or a launcher. The
strongest reason first.

``store-unreachable``: a process gave up to connect to torch's store, or to listen for it.
``store-awaited``: it failed once, and tries again.
"""

OF_THE_STORE: tuple[JobEnding, ...] = ("store-unreachable", "store-awaited")

LogReport = Literal[
    "behind",
    "desync",
    "timed-out",
    "launcher-ended",
    "ended",
    "raised",
    "watchdog-stuck",
    "ras-behind",
    "engine-waits",
    "store-lost",
]
"""What text logs tell of a job as a whole.

``behind``: a rank timed out in an earlier collective than the others. ``desync``: torch's desync
report names the ranks that did not join a collective. ``timed-out``: ranks timed out in an unknown
group. ``launcher-ended``: a signal ended the launcher. ``ended``: a scheduler, the kernel or a
launcher tells why the job or a process of it ended. ``raised``: the launcher or an unknown rank
raised an exception. ``watchdog-stuck``: the watchdog of ranks made no progress. ``ras-behind``:
NCCL's RAS reports ranks that are apart. ``engine-waits``: vLLM's engine waits for a worker.
``store-lost``: ranks do not reach torch's store, as after the end of its process.
"""


class UnplacedTimeout(msgspec.Struct, frozen=True):
    """A timeout that cannot be aligned across ranks, as a log tells it."""

    text: str
    ranks: list[Rank]  # in whose logs it stands, as far as the logs name their rank


class ToldByLogs(Cause, tag="told-by-logs", kw_only=True):
    """Faults that text logs tell of a job as a whole, and no rank's records show."""

    report: LogReport
    ranks: list[Rank]  # of which there are logs, or that did not reach torch's store
    timeouts: list[UnplacedTimeout] = []
    op: str = ""  # in which ranks timed out
    exception: str = ""
    line: str = ""  # that raised it: file name, line number and function
    signals: list[str] = []
    ending: JobEnding | None = None
    lines: list[str] = []  # that tell the ending
    nodes: list[str] = []  # that failed, as far as the lines name them
    before_errors: bool = False  # one of these lines stands before the first exception of a rank
    listens: bool = False  # the ranks host torch's store, and could not listen for connections
    by_launcher: bool = False  # the launcher raised the exception
    listed: list[int] = []  # ranks of the communicator that NCCL's RAS lists as behind
    numbers: list[int] = []  # of the collectives in which ranks are, or of Xids; ascending
    waited_s: float | None = None


class Unexplained(Cause, tag="unexplained", kw_only=True):
    """Ranks that wait, and nothing shows for which ranks."""

    ranks: list[Rank]
    too_many_waits: bool  # in too many different collectives to follow them


NoFaultState = Literal[
    "all-agree",
    "part-agrees",
    "running",
    "unreadable",
    "logs-tell-none",
    "newest-unreadable",
    "files-unreadable",
    "only-issued",
]
"""Why no fault shows.

``all-agree``: all ranks have records, and agree. ``part-agrees``: so do those that have one.
``running``: the job was moving when it was dumped. ``unreadable``: no record is readable.
``logs-tell-none``: no line of a log tells a fault. ``newest-unreadable``: the newest records of
some ranks. ``files-unreadable``: files that may be of ranks without a record. ``only-issued``: all
ranks issued the same, and nothing tells what completed.
"""


class NoFault(Cause, tag="no-fault", kw_only=True):
    """Nothing is wrong, or nothing shows in the readable part of the evidence."""

    state: NoFaultState
    ranks: list[Rank]  # with a record
    finished: list[Rank]
    newest_unreadable: list[Rank]
    files_unreadable: int


class NoneWaits(Cause, tag="none-waits", kw_only=True):
    """In a job without records, no rank is seen to wait for another."""

    ranks: list[Rank]  # that were seen
    moving: list[Rank]
    unreadable: list[Rank]  # their stacks
    whole_job: bool  # all of its ranks were seen


AnyCause = (
    Diverged
    | Missing
    | HelpersAwaited
    | Working
    | Unrecorded
    | StuckInside
    | Unwritten
    | Cycle
    | Mismatch
    | Swapped
    | StartedTwice
    | Slow
    | Straggler
    | Fewer
    | GroupsDiffer
    | Motionless
    | Ended
    | Dead
    | ToldByErrors
    | Refused
    | NoSuchPeer
    | TakenMessage
    | LatentFault
    | ToldByLogs
    | Unexplained
    | NoFault
    | NoneWaits
)
