"""The index of all ranks: collectives by channel and sequence number, messages by channel and peer,
blocked threads; and how far a rank has come, as its records show it.

``log_index`` fills it from black boxes, ``dump_index`` from other tools' dumps. Collective number 3
of group dp on rank 2 is ``job.views[2].tracks[key].ops[3]``, where ``key`` is the key of the
channel: the group on one device type. The second message that rank 2 sent to rank 0 there is
``job.views[2].pairs[key, 0, "send"][1]``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Final, Literal

from commlens.diagnosis.index.nodes import Node, nodes_of
from commlens.diagnosis.index.process_exit import ProcessExit
from commlens.model.collective import (
    SETUP,
    Channel,
    Collective,
    CollectiveArgs,
    user_lines,
)
from commlens.model.collective import ChannelKey as ChannelKey
from commlens.model.health import NodeHealth
from commlens.model.limits import LOOPBACK
from commlens.model.ranklog import RankLog
from commlens.model.store_identity import parse_address
from commlens.model.topology import Inventory
from commlens.model.worlds import ONE_WORLD, Worlds

if TYPE_CHECKING:
    from commlens.formats.columns import RankColumns


STALL_TIMEOUT_S: Final = 60.0
"""The setting's default, for logs that do not hold it."""

GroupKind = tuple[str, int, int, int]
"""A group's description, number of ranks and stride, and a number that tells such groups of one
rank apart.
"""

PairKey = tuple[ChannelKey, int, str]
"""Channel, peer (-1: any), and ``"send"`` or ``"recv"``."""


@dataclass(slots=True)
class Track:
    """One rank's collectives on one channel."""

    # by sequence number; of a coalesced group, its closing record
    ops: Mapping[int, Collective] = field(default_factory=dict)
    # of coalesced groups, by sequence number
    members: dict[int, list[CollectiveArgs]] = field(default_factory=dict)
    last: int = 0  # highest sequence number
    completed: int = 0  # highest sequence number known to be completed
    open: list[int] = field(default_factory=list)  # sequence numbers in flight, ascending
    thread: int = 0  # issued the last one

    def args_of(self, number: int) -> Sequence[CollectiveArgs]:
        """Return the arguments of the collective with this number, or of the members of a coalesced
        group.
        """
        return self.members.get(number) or (self.ops[number].args,)


How = Literal["wait", "issue", "assumed", "failed", "enqueued", "unknown"]
"""How a thread is blocked.

``wait``: in its wait for an op. ``issue``: in a call that has not returned. ``failed``: it was, in
a wait that failed. ``enqueued``: its device is, in the first op in flight there. ``assumed``: an op
is in flight, and the thread may wait for it in C++, which is not recorded. ``unknown``: it stands
still, perhaps because it waits for its device, and nothing tells whether the device has completed
the rank's last op.
"""

DEVICE: Final = 0
"""The thread of a block for which no thread is known to wait."""


@dataclass(slots=True)
class BlockedThread:
    """A thread that is blocked in an op, or that was until its wait failed."""

    op: Collective
    parts: list[Collective]  # the members of a coalesced point-to-point batch, else the op itself
    thread: int
    since_ns: int
    how: How
    stuck: bool  # longer than the limit, or until its process ended
    age_ns: int


@dataclass(slots=True)
class RankView:
    """One rank's records, indexed."""

    rank: int
    log: RankLog
    exit: ProcessExit
    now_ns: int  # when the records were read, or their newest time

    # What the rank issued.
    history: Sequence[Collective] = ()  # all records, oldest first
    wrapped: bool = False  # older records were overwritten or lost
    tracks: dict[ChannelKey, Track] = field(default_factory=dict)
    pairs: dict[PairKey, list[Collective]] = field(default_factory=dict)
    open_pairs: set[int] = field(default_factory=set)  # indices of point-to-point ops in flight
    # by channel of a library: index of the newest call without a number
    unnumbered: dict[ChannelKey, int] = field(default_factory=dict)

    # Where it is blocked.
    # by thread; 0 is the device, and in dumps that record no threads the rank
    blocks: dict[int, BlockedThread] = field(default_factory=dict)
    main_thread: int = 0
    # the block of the device, which waits in its first op in flight; in dumps that record no
    # threads, of the rank
    head: BlockedThread | None = None
    # first op in flight of each other channel and pair on a device
    heads: list[Collective] = field(default_factory=list)
    # the op that blocks the rank is, or in a dump with nothing but ops in flight may be, older and
    # overwritten
    head_lost: bool = False
    # the last op, if the main thread may wait for the device in it: a message, or a batch of them,
    # of which nothing tells whether it is complete
    unknown_message: Collective | None = None
    running: set[int] = field(default_factory=set)  # indices of ops known to run on the device
    timed: bool = False  # it is recorded when an op starts to run on the device

    # Its routine (``align.routine``).
    # index of the op from which on the program has done several steps; 0: not determined yet
    routine_from: int = 0
    # position in the history from which the rank may have left its routine; None: unknown
    routine_since: int | None = None

    # Only of other tools' dumps.
    dump: RankColumns | None = None  # the log
    ended_messages: dict[PairKey, int] = field(default_factory=dict)  # how many have completed
    first_ns: int = 0  # time of the oldest record; 0 if only ops in flight were recorded
    written_ns: int = 0  # the dump is not newer than this, Unix ns; 0 if unknown
    # other ranks' records show that it has issued more collectives than its dump holds
    outdated: bool = False

    @property
    def died(self) -> bool:
        """Whether the process died of its own error or disappeared. False if it ended because of
        another rank.
        """
        return self.exit.kind in ("own", "gone")

    @property
    def lost_newest(self) -> bool:
        """Whether the newest records of a running process are unreadable, so that it may have
        issued anything.
        """
        return self.log.lost_newest and not self.died

    def is_older_than(self, moment_ns: int) -> bool:
        """Return whether the rank's dump is known to be older than this, so that it does not show
        what the rank issued since.

        Always False for black boxes.
        """
        return self.outdated or 0 < self.written_ns < moment_ns

    @property
    def is_log(self) -> bool:
        """Whether all that is known of the rank is from a text log."""
        return self.dump is not None and self.dump.is_log

    @property
    def timed_out(self) -> bool:
        """Whether a text log tells that a collective of the rank took longer than its timeout."""
        return self.dump is not None and self.dump.timed_out

    def op_at(self, key: ChannelKey, number: int) -> Collective | None:
        """Return the rank's collective with this number on a channel; None without a record."""
        track = self.tracks.get(key)
        return track.ops.get(number) if track is not None else None

    @property
    def last_op(self) -> Collective | None:
        """The rank's newest record."""
        return self.history[-1] if self.history else None

    def has_been_at(self, op: Collective, *, among_last: int = 0) -> bool:
        """Return whether the rank issued a collective from the same lines before this one: among
        its last records, or any (0).
        """
        return any(
            before.call_lines == op.call_lines
            for before in self.history[-among_last:]
            if before.index < op.index
        )

    def is_new_line(self, op: Collective) -> bool:
        """Return whether the rank certainly issued nothing from these lines before."""
        return bool(op.call_lines) and not self.wrapped and not self.has_been_at(op)

    def has_routine(self, op: Collective) -> bool:
        """Return whether the history shows that what repeats before this op are steps, not layers
        or parameters.

        So many records were made that the oldest were overwritten, or the program has done several
        steps or rounds of its outermost loop.
        """
        if self.log.issued > len(self.history):
            return True
        if not self.routine_from:
            self.routine_from = routine_from(self.history, rounds=self.dump is None)
        return self.routine_from <= op.index


@dataclass
class JobIndex:
    """All ranks of a job, indexed."""

    views: dict[int, RankView]
    channels: dict[ChannelKey, Channel]
    size: int
    no_record: list[int]  # ranks that left none on the hosts seen
    elsewhere: list[int]  # ranks that probably run on another node
    stalled_after_ns: int  # a shorter wait is not stuck
    stall_timeout_ns: int = int(STALL_TIMEOUT_S * 1e9)
    # ranks with records of the channel
    users: dict[ChannelKey, list[int]] = field(default_factory=dict)
    # groups whose ranks no file lists: those that use it are known
    unlisted: frozenset[ChannelKey] = frozenset()
    # of no_record: ranks whose process runs without being recorded
    strangers: Mapping[int, RankLog] = field(default_factory=dict)
    # by rank: the ranks without a log that it stands for, because they are in the same state
    stands_for: Mapping[int, int] = field(default_factory=dict)

    # What sort of evidence it is.
    # The records are other tools' dumps, which tell no threads, no splits of all_to_all, nothing of
    # the processes, and perhaps only what is in flight. They tell when an op completed on its
    # device, and a known host may have ranks whose dump is only missing here.
    foreign: bool = False
    # all evidence is from text logs, in which a healthy rank need have no line
    only_logs: bool = False
    # of some ranks only the issue of operations is recorded, not their completion
    issued_only: bool = False
    moving: bool = False  # collectives still completed while the job was dumped
    timed_out: bool = False  # a line of torch's logs tells that a collective took too long
    foreseen: bool = False  # the records tell what a run will do: their times mean nothing

    # What else is known of the job.
    more_health: Sequence[NodeHealth] = ()  # of nodes, collected apart from the records
    inventory: Inventory | None = None  # where hosts are
    worlds: Worlds = ONE_WORLD  # the names of its processes

    @cached_property
    def nodes(self) -> list[Node]:
        """The nodes that told of their hardware."""
        return nodes_of({rank: view.log for rank, view in self.views.items()}, self.more_health)

    @cached_property
    def unrecorded(self) -> frozenset[int]:
        """``no_record`` as a set."""
        return frozenset(self.no_record)

    @cached_property
    def meets_here(self) -> str:
        """The address at which the ranks meet, if only one machine reaches it, and that machine's
        records are here; otherwise empty.
        """
        places = {(view.log.host, view.log.worlds.are_several) for view in self.views.values()}
        if len(places) != 1 or places.pop()[1]:
            return ""
        calls = (
            op
            for view in self.views.values()
            for op in view.log.setups
            if op.op == "init_process_group"
        )
        addresses = {parse_address(op.module) for op in calls}
        address = addresses.pop() if len(addresses) == 1 else None
        return ":".join(address) if address is not None and address.host in LOOPBACK else ""

    @cached_property
    def group_kinds(self) -> dict[ChannelKey, GroupKind]:
        """The kinds of groups, such as the rows of a mesh, by channel: ranks use groups of one kind
        alike.
        """
        kinds: dict[ChannelKey, GroupKind] = {}
        # by rank: its groups of the kind
        taken: dict[tuple[str, int, int], Counter[int]] = defaultdict(Counter)
        for key, channel in sorted(
            self.channels.items(), key=lambda item: (len(item[0][1]), item[0])
        ):
            ranks = key[2]
            alike = (
                channel.group.description,
                len(ranks),
                ranks[1] - ranks[0] if len(ranks) > 1 else 0,
            )
            number = max((taken[alike][rank] for rank in ranks), default=0)
            taken[alike].update(dict.fromkeys(ranks, 1))
            kinds[key] = (*alike, number)
        return kinds

    def has_stack(self, rank: int) -> bool:
        """Return whether the rank's stack is known, or would be if it could have been taken."""
        return not self.foreign or self.views[rank].log.main_stack is not None

    def tracks_on(self, key: ChannelKey) -> dict[int, Track]:
        """Return the tracks of the ranks that have records of a channel."""
        return {rank: self.views[rank].tracks[key] for rank in self.users.get(key, ())}


# --- progress of a rank


def has_issued(view: RankView, key: ChannelKey, number: int, since_ns: int) -> bool | None:
    """Return whether a rank without a record of a collective has issued it; None if the records do
    not show it.

    ``since_ns`` is when another rank issued it.
    """
    track = view.tracks.get(key)
    if track is not None and track.last >= number:
        return True  # its record may be overwritten
    if key[3] == SETUP:
        unseen = view.log.initialised and not view.log.setups and not view.died
        return None if unseen else False
    if view.lost_newest or lost_count(view, key, number):
        # of another tool's dump, not even the status tells: whether it counts messages, too, shows
        # in the entries
        return None
    if view.dump is None:
        return None if track is None and view.wrapped and view.log.collectives else False
    return _dump_shows_issue(view, view.dump.status.get(key[1]), key, number, since_ns)


def lost_count(view: RankView, key: ChannelKey, number: int) -> bool:
    """Return whether a rank has called a library without a number since its last numbered call, as
    after an error that it caught: then nothing tells whether one of these is the call ``number``.
    """
    track = view.tracks.get(key) or Track()
    last = track.ops.get(track.last)
    return number >= track.last and view.unnumbered.get(key, 0) > (last.index if last else 0)


def lacks(view: RankView, op: Collective) -> bool:
    """Return whether a collective needs a rank that has certainly not issued it."""
    if op.is_point_to_point or view.rank not in op.channel.group.ranks:
        return False
    return has_issued(view, op.channel.key, op.sequence_number, op.announced_ns) is False


def _dump_shows_issue(
    view: RankView,
    status: tuple[int, int, int] | None,
    key: ChannelKey,
    number: int,
    since_ns: int,
) -> bool | None:
    """Return the answer of :func:`has_issued` for another tool's dump, with its group's status."""
    track = view.tracks.get(key)
    # then the status counts messages, too
    counts_messages = any(pair[0] == key for pair in (*view.pairs, *view.ended_messages))
    if status is not None and not counts_messages and number <= status[0]:
        return True
    if view.is_log and status is None and track is None and not view.died:
        # its lines tell of the collectives that timed out, not of all: this one would have, too
        return False if view.timed_out and view.history else None
    overwritten = track is None and view.first_ns > since_ns
    return None if overwritten or view.is_older_than(since_ns) else False


def is_queued(view: RankView, op: Collective) -> bool:
    """Return whether an op in flight is only enqueued behind the op that its rank, or the rank's
    device, waits in.
    """
    head = view.head
    if (
        head is None
        or not (
            op.in_flight or op.index in view.open_pairs
        )  # a batch has the state of its messages
        or op.index in view.running
        or not (view.dump is not None or op.channel.runs_ahead)
    ):
        return False
    return head.op.index < op.index and all(part is not op for part in head.parts)


def find_counterpart(
    view: RankView, other: RankView, key: ChannelKey, op: Collective
) -> Collective | None:
    """Return the other side of a message in flight, for dumps of other tools.

    Both sides are counted from the last completed message, since older records may be overwritten;
    if nothing was overwritten, from the first message.

    Returns:
        The other side if it is in flight, ``op`` itself if it has completed, and None if the other
        rank has not issued it.
    """
    back = "recv" if op.op == "send" else "send"
    mine, theirs = view.pairs[(key, other.rank, op.op)], other.pairs.get((key, view.rank, back), [])
    place = next(i for i, one in enumerate(mine) if one is op)
    if not view.wrapped and not other.wrapped:
        place += view.ended_messages.get((key, other.rank, op.op), 0) - other.ended_messages.get(
            (key, view.rank, back), 0
        )
        if place < 0:
            return op
    return theirs[place] if place < len(theirs) else None


# --- from where on a rank's history shows steps: before, what repeats may be a loop over layers

_ROUNDS = 3  # steps, or rounds of the outermost loop, after which a rank has a routine
_NEVER = 1 << 62


def routine_from(history: Sequence[Collective], *, rounds: bool) -> int:
    """Return the index of the op from which on several steps are complete, or several rounds of the
    outermost loop; a huge one if none is.

    Args:
        history: a rank's records, oldest first.
        rounds: whether to look for rounds, which needs the stacks of all ops.
    """
    return min(_after_steps(history), _after_rounds(history) if rounds else _NEVER)


def _after_steps(history: Sequence[Collective]) -> int:
    """Return the index of the op from which on several steps are complete; a huge one if there is
    none.

    A program may have several optimizers. So a step is what they do between two visits of a line,
    most often.
    """
    last: dict[object, int] = {}
    further: Counter[int] = Counter()
    for op in history if history and history[-1].step >= history[0].step + _ROUNDS else ():
        line = op.call_lines
        further[op.step - last.get(line, op.step)] += 1
        last[line] = op.step
    del further[0]
    done = history[0].step + _ROUNDS * further.most_common(1)[0][0] if further else _NEVER
    return next((op.index for op in history if op.step >= done), _NEVER)


def _after_rounds(history: Sequence[Collective]) -> int:
    """Return the index of the op that begins the outermost loop's round ``_ROUNDS`` + 1; a huge one
    if there is none.

    A round begins where the first line that repeats issues again after the last one did: between
    them are inner loops.
    """
    paths = {
        id(op.stack): [(frame.file, frame.line) for frame in user_lines(op.stack)][::-1]
        for op in history
    }
    in_common = takewhile(lambda at: len({*at}) == 1, zip(*paths.values(), strict=False))
    depth = sum(1 for _ in in_common)
    lines = [tuple(paths[id(op.stack)][depth : depth + 1]) for op in history]
    runs = Counter(line for line, _ in groupby(lines) if line)
    # in the order in which they were first seen
    repeated = [line for line, times in runs.items() if times > 1]
    rounds, ended = 0, False
    for op, line in zip(history, lines, strict=True) if repeated else ():
        if line == repeated[-1]:
            ended = True
        elif line == repeated[0] and ended:
            rounds, ended = rounds + 1, False
            if rounds == _ROUNDS:
                return op.index
    return _NEVER
