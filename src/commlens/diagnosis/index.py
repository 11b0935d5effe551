"""The logs, indexed: who issued what on which channel, point-to-point by pair, and what each thread is blocked in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from commlens.diagnosis import activity
from commlens.diagnosis.process_exit import ProcessExit, attribute_exits, process_exit_of
from commlens.diagnosis.select_job import absent_ranks, last_moment, world_size
from commlens.matching.error_texts import is_peer_error, is_refusal
from commlens.model.collective import Channel, Collective, CollectiveArgs, State
from commlens.model.collective import ChannelKey as ChannelKey
from commlens.model.ranklog import RankLog

if TYPE_CHECKING:
    from commlens.diagnosis.columns import RankColumns

PairKey = tuple[ChannelKey, int, str]
"""Channel, peer (-1: any), ``"send"`` or ``"recv"``."""


@dataclass(slots=True)
class Track:
    """What one rank issued on one channel."""

    ops: Mapping[int, Collective] = field(default_factory=dict)  # by sequence number; a coalesced group is its closing record
    members: dict[int, list[CollectiveArgs]] = field(default_factory=dict)  # of coalesced groups
    first: int = 0
    last: int = 0
    completed: int = 0  # the highest sequence number known to be completed
    open: list[int] = field(default_factory=list)  # in flight, ascending
    thread: int = 0  # that issued last

    def asked(self, number: int) -> Sequence[CollectiveArgs]:
        """What was asked under this number: one collective, or a coalesced group's members."""
        return self.members.get(number) or (self.ops[number].args,)


@dataclass(slots=True)
class Block:
    """A thread that is blocked in an op, or was when its wait failed."""

    op: Collective
    parts: list[Collective]  # the members of a coalesced point-to-point batch, else the op itself
    thread: int
    since_ns: int
    how: Literal["wait", "issue", "assumed", "failed", "enqueued"]
    stuck: bool  # for longer than the limit, or its process has ended
    age_ns: int


@dataclass(slots=True)
class View:
    """One rank, indexed."""

    rank: int
    log: RankLog
    exit: ProcessExit
    now_ns: int
    tracks: dict[ChannelKey, Track] = field(default_factory=dict)
    pairs: dict[PairKey, list[Collective]] = field(default_factory=dict)
    open_pairs: set[int] = field(default_factory=set)  # indices of point-to-point ops in flight
    blocks: dict[int, Block] = field(default_factory=dict)  # by thread
    main_thread: int = 0
    wrapped: bool = False  # older records were overwritten or lost
    history: Sequence[Collective] = ()  # all that is recorded, oldest first
    # Of dumps that other tools wrote:
    columns: RankColumns | None = None
    heads: list[Collective] = field(default_factory=list)  # the first in flight of each other channel and pair
    sent: dict[PairKey, int] = field(default_factory=dict)  # messages that ended
    running: set[int] = field(default_factory=set)  # indices of those known to run on the device
    timed: bool = False  # it is recorded when an operation starts to run
    routine_since: int | None = None  # position in the history from which on it may have left its routine
    first_ns: int = 0  # of the oldest record; 0 where only what is in flight was recorded
    head_lost: bool = False  # all its records are in flight: what it is stuck in may be older, and overwritten

    @property
    def last_op(self) -> Collective | None:
        """The rank's newest record."""
        return self.history[-1] if self.history else None


@dataclass
class World:
    """All ranks."""

    views: dict[int, View]
    channels: dict[ChannelKey, Channel]
    size: int
    no_record: list[int]  # left none here
    elsewhere: list[int]  # have none here, and probably run on another node
    stalled_after_ns: int
    users: dict[ChannelKey, list[int]] = field(default_factory=dict)  # ranks that have records of it
    foreign: bool = False  # of dumps that other tools wrote
    moving: bool = False  # it was dumped while collectives completed

    @cached_property
    def unrecorded(self) -> frozenset[int]:
        """``no_record``, to look up."""
        return frozenset(self.no_record)


def build(logs: Sequence[RankLog], stalled_after_s: float) -> World:
    """Index the logs of one job. Linear in their records."""
    limit = int(stalled_after_s * 1e9)
    exits = attribute_exits({log.rank: process_exit_of(log) for log in logs})
    size = world_size(logs)
    no_record, elsewhere = absent_ranks(logs, size)
    world = World({}, {}, size, no_record, elsewhere, limit)
    for log in logs:
        view = _view(log, exits[log.rank], world)
        world.views[log.rank] = view
        for key in view.tracks:
            world.users.setdefault(key, []).append(log.rank)
    _wait_for_the_dead(world)
    return world


def _wait_for_the_dead(world: World) -> None:
    """Who waits for a rank that has died waits for ever, however short it has been so far."""
    dead = [view for view in world.views.values() if view.exit.kind in ("own", "gone")]
    if not dead:
        return
    for view in world.views.values():
        for block in view.blocks.values():
            if not block.stuck and block.how != "assumed":
                block.stuck = any(_never_comes(other, part) for other in dead for part in block.parts)


def _never_comes(dead: View, op: Collective) -> bool:
    """Whether a rank that has died had not issued its side of a collective."""
    if op.is_point_to_point or dead.wrapped or dead.rank not in op.channel.group.ranks:
        return False
    track = dead.tracks.get(op.channel.key)
    return track is None or track.last < op.sequence_number


def _view(log: RankLog, end: ProcessExit, world: World) -> View:
    now = log.captured_ns or last_moment(log)
    main = log.main_stack
    view = View(log.rank, log, end, now, main_thread=main.thread if main is not None and main.thread else log.pid, history=log.collectives)
    view.wrapped = log.issued > len(log.collectives) or bool(log.problems)
    closers: dict[int, Collective] = {}
    groups: dict[int, list[Collective]] = {}
    for op in log.collectives:
        if op.coalescing_id:
            if op.coalesced_members:
                closers[op.coalescing_id] = op
            else:
                groups.setdefault(op.coalescing_id, []).append(op)
    failed: list[Collective] = []
    open_ops: list[Collective] = []
    keys: dict[int, ChannelKey] = {}  # building a key costs more than looking it up by the channel's identity
    for op in log.collectives:
        key = keys.get(id(op.channel))
        if key is None:
            key = keys[id(op.channel)] = op.channel.key
            world.channels.setdefault(key, op.channel)
        closer = closers.get(op.coalescing_id) if op.coalescing_id else None
        if op.is_point_to_point:
            peer = -1 if op.peer is None else op.peer
            view.pairs.setdefault((key, peer, op.op), []).append(op)
            if op.in_flight or (closer is not None and closer.in_flight):
                view.open_pairs.add(op.index)
        elif op.sequence_number > 0 and not (op.coalescing_id and closer is not None and op is not closer):
            _put(view.tracks.setdefault(key, Track()), op, groups)
        if op.in_flight and (closer is None or op is closer):
            open_ops.append(op)
        elif op.state is State.FAILED:
            failed.append(op)
    for track in view.tracks.values():
        # A later op of the channel that is done says that this one is, where nobody is seen to wait for it: gloo's
        # reduce_scatter never says so itself.
        track.open = sorted(n for n in track.open if n > track.completed or track.ops[n].waited_for or not track.ops[n].returned_ns)
    _find_blocks(view, open_ops, failed, groups, world.stalled_after_ns)
    return view


def _put(track: Track, op: Collective, groups: dict[int, list[Collective]]) -> None:
    number = op.sequence_number
    track.ops[number] = op  # type: ignore[index]
    if op.coalescing_id:
        track.members[number] = [member.args for member in groups.get(op.coalescing_id, []) if not member.is_point_to_point]
    track.first = min(track.first or number, number)
    if number >= track.last:
        track.last, track.thread = number, op.issue_thread
    if op.state is State.COMPLETED:
        track.completed = max(track.completed, number)
    elif op.in_flight:
        track.open.append(number)


# --- what threads are blocked in ---------------------------------------------------------------------------------


def _find_blocks(view: View, open_ops: list[Collective], failed: list[Collective], groups: dict[int, list[Collective]], limit: int) -> None:
    loose: list[Collective] = []
    for op in open_ops:
        if op.waited_for:
            _block(view, op, op.wait_thread or op.issue_thread, op.wait_began_ns, "wait", groups, limit)
        elif not op.returned_ns:
            _block(view, op, op.issue_thread, op.entered_ns or op.announced_ns, "issue", groups, limit)
        elif _may_be_pending(view, op):
            loose.append(op)
    for op in failed:
        gave_up = is_peer_error(op.error) or (is_refusal(op.error) and view.exit.kind != "clean")
        if gave_up and op.issue_thread not in view.blocks and _is_last_of_thread(view, op):
            _block(view, op, op.wait_thread or op.issue_thread, op.wait_began_ns or op.announced_ns, "failed", groups, limit)
    if loose and _main_may_wait_in_cpp(view, loose[0]):
        _block(view, loose[0], view.main_thread, loose[0].announced_ns, "assumed", groups, limit)


def _block(
    view: View, op: Collective, thread: int, since: int, how: Literal["wait", "issue", "assumed", "failed"],
    groups: dict[int, list[Collective]], limit: int,
) -> None:  # fmt: skip
    known = view.blocks.get(thread)
    if known is not None and (how == "failed" or known.since_ns >= since):
        return  # a thread is blocked in what it began to wait for last
    parts = [op]
    if op.coalescing_id and not op.sequence_number:
        parts = groups.get(op.coalescing_id) or [op]
    age = max(0, view.now_ns - since)
    # A rank that died, or that the launcher ended, was in it until its end, however short that was.
    stuck = age >= limit or how == "failed" or view.exit.failed or (view.exit.ended and how != "assumed")
    view.blocks[thread] = Block(op, parts, thread, since, how, stuck, age)


def _may_be_pending(view: View, op: Collective) -> bool:
    """Whether an op that returned and that nobody is seen to wait for may be what holds the rank up."""
    key = op.channel.key
    if op.is_point_to_point:
        ops = view.pairs.get((key, -1 if op.peer is None else op.peer, op.op), [])
        return not any(other.state is State.COMPLETED and other.index > op.index for other in reversed(ops[-64:]))
    track = view.tracks.get(key)
    return track is None or op.sequence_number in track.open or not op.sequence_number


def _main_may_wait_in_cpp(view: View, oldest: Collective) -> bool:
    """DDP's reducer and functional collectives wait in C++: there is no record, but the main thread is inside torch."""
    if view.main_thread in view.blocks or any(block.how in ("wait", "issue") for block in view.blocks.values()):
        return False
    if view.exit.kind == "clean":
        return False
    stack = view.log.main_stack
    if stack is None or not stack.frames or (stack.taken_ns and stack.taken_ns < oldest.announced_ns):
        return True
    state, _ = activity._by_frames(view.log, stack.frames)
    if state is not None:
        return False
    # On an accelerator the thread may wait in any call that reads a result, such as .item().
    return oldest.channel.device != "cpu" or activity.torch_is_innermost(stack.frames)


def _is_last_of_thread(view: View, failed: Collective) -> bool:
    """Whether its thread did nothing more after it failed."""
    for op in reversed(view.log.collectives):
        if op is failed:
            return True
        if op.issue_thread == failed.issue_thread and op.state is not State.FAILED:
            return False
    return True
