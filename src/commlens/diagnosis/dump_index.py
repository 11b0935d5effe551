"""From ranks' extracts to the indexed world that the rest of diagnosis works on.

A recorder of another tool knows no threads: a rank has one place where it is stuck, its *head*, the first operation that has not
ended. What it enqueued behind the head has not arrived.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from commlens.diagnosis.columns import Catalogue, ColumnHistory, ColumnOps, RankColumns, is_message
from commlens.diagnosis.extract import DONE, RUNNING, Extract, Integers
from commlens.diagnosis.index import Block, Track, View, World
from commlens.diagnosis.process_exit import ProcessExit, attribute_exits, process_exit_of
from commlens.diagnosis.select_job import absent_ranks, world_size
from commlens.model.collective import Channel, ChannelKey
from commlens.model.ops import ROOTED
from commlens.model.ranklog import RankLog

_RECENT = 4  # operations of a rank that its log names at least
_RECENT_MOST = 200
_RECENT_ALL = 20_000  # of all ranks together
_IN_FLIGHT = 16
_RING_LEAST = 64
_BEFORE = 400  # operations before the head among which a rank may have left its routine


def _log(found: Extract, columns: RankColumns, recent: int) -> RankLog:
    """What is known of the rank itself, with its newest operations."""
    length = len(found)
    in_flight = np.flatnonzero(found.state != DONE)[:_IN_FLIGHT].tolist()
    rows = sorted({*in_flight, *range(max(0, length - recent), length)})
    return RankLog(
        rank=found.rank,
        world_size=found.world_size,
        job=found.job,
        host=found.host,
        collectives=[columns.op(row) for row in rows],
        issued=found.issued,
        captured_ns=found.captured_ns,
        initialised=True,
        source=found.source,
        problems=list(found.problems),
        exception=found.exception or None,
        exception_stack=found.exception_stack,
        observation=found.observation,
        versions={found.origin: found.version} if found.version else {},
    )


def build_world(extracts: Sequence[Extract], stalled_after_s: float) -> World:
    """Index the ranks of one job. Linear in their records.

    Args:
        extracts: one for each rank.
        stalled_after_s: a collective in flight for less than this in a job that runs is not stuck.
    """
    catalogue = Catalogue()
    names = _channels(extracts)
    latest = max((newest_ns(found) for found in extracts), default=0)
    fullest = max((found.unbroken for found in extracts), default=0)
    exits: dict[int, ProcessExit] = {}
    views: dict[int, View] = {}
    channels: dict[object, Channel] = {}
    users: dict[object, list[int]] = defaultdict(list)
    for found in sorted(extracts, key=lambda one: one.rank):
        mine = [names[_name(channel)] for channel in found.channels]
        columns = RankColumns(found, mine, catalogue)
        log = _log(found, columns, max(_RECENT, min(_RECENT_MOST, _RECENT_ALL // len(extracts))))
        exits[found.rank] = process_exit_of(log)
        view = View(found.rank, log, exits[found.rank], found.captured_ns or latest, main_thread=0)
        view.columns = columns
        view.history = ColumnHistory(columns)
        view.wrapped = found.wrapped
        view.first_ns = 0 if found.only_active or not len(found) else int(found.created_ns[0])
        view.head_lost = found.only_active and found.unbroken == fullest and _may_be_a_size(fullest)
        for key, channel in _index(view, found, columns, int(stalled_after_s * 1e9)).items():
            channels.setdefault(key, channel)
            if key in view.tracks:
                users[key].append(found.rank)
        views[found.rank] = view
    for rank, end in attribute_exits(exits).items():
        views[rank].exit = end
    logs = [view.log for view in views.values()]
    size = world_size(logs)
    no_record, elsewhere = absent_ranks(logs, size)
    world = World(views, channels, size, no_record, elsewhere, int(stalled_after_s * 1e9), users=dict(users))  # type: ignore[arg-type]
    world.foreign = True
    world.moving = _moves(world)
    if world.moving:
        for view in views.values():
            for block in view.blocks.values():
                block.stuck = False
    return world


def _moves(world: World) -> bool:
    """Whether the job went on while it was dumped: most ranks have in flight what others have seen completed.

    In a job that hangs everything has settled, but for a rank whose own device does not get on.
    """
    ended = {key: max(world.views[rank].tracks[key].completed for rank in users) for key, users in world.users.items()}
    late = 0
    for view in world.views.values():
        late += any(
            track.open and track.open[0] <= ended[key] and track.ops[track.open[0]].op not in ROOTED for key, track in view.tracks.items()
        )
    return late > 1 and late * 2 > len(world.views)


def _may_be_a_size(records: int) -> bool:
    """Whether somebody may have set it as the size of a recorder's buffer."""
    return records >= _RING_LEAST and (records % 100 == 0 or records.bit_count() == 1)


def newest_ns(found: Extract) -> int:
    """The latest Unix ns that a rank's dump knows."""
    return max(int(found.created_ns.max(initial=0)), int(found.completed_ns.max(initial=0)), found.captured_ns)


def _name(channel: Channel) -> tuple[str, str, tuple[int, ...]]:
    return (channel.group.name, channel.group.description, channel.group.ranks)


def _channels(extracts: Iterable[Extract]) -> dict[tuple[str, str, tuple[int, ...]], Channel]:
    """One object for what is one channel on all ranks, with the ranks that some files do not tell."""
    found: dict[tuple[str, str, tuple[int, ...]], Channel] = {}
    users: dict[tuple[str, str], set[int]] = defaultdict(set)
    told: dict[tuple[str, str], set[tuple[int, ...]]] = defaultdict(set)
    for extract in extracts:
        for channel in [*extract.channels, *extract.groups]:
            name = _name(channel)
            if name not in found:
                found[name] = channel
            if name[2]:
                told[name[:2]].add(name[2])
            else:
                users[name[:2]].add(extract.rank)
    everybody = tuple(sorted({extract.rank for extract in extracts}))
    for name, channel in list(found.items()):
        if name[2]:
            continue
        known = [ranks for ranks in told[name[:2]] if users[name[:2]] <= set(ranks)]
        ranks = known[0] if len(known) == 1 else tuple(sorted(users[name[:2]]))
        if not known and channel.group.description == "default_pg":
            ranks = everybody
        same = found.get((*name[:2], ranks))
        if same is None:
            same = Channel(msgspec.structs.replace(channel.group, ranks=ranks), channel.device)
            found[(*name[:2], ranks)] = same
        found[name] = same
    return found


def _index(view: View, found: Extract, columns: RankColumns, limit: int) -> dict[object, Channel]:
    """Fill in the rank's tracks, messages and head. Returns its channels by key."""
    known: dict[object, Channel] = {}
    message = is_message(found.args, found.args_index)
    ended = found.state == DONE
    open_rows = np.flatnonzero(~ended)
    codes = found.channel.astype("int64")
    for number in np.unique(codes).tolist():
        channel = columns.channels[number]
        key = channel.key
        known[key] = channel
        rows = np.flatnonzero((codes == number) & ~message)
        if len(rows):
            view.tracks[key] = _track(ColumnOps(columns, rows), view.tracks.get(key))
    _messages(view, found, columns, message, ended)
    heads: list[int] = []
    seen: set[object] = set()
    for row in open_rows.tolist():
        if message[row]:
            place: object = (int(codes[row]), int(found.peer[row]), found.args[int(found.args_index[row])].op)
        else:
            place = int(codes[row])
        if place not in seen:
            seen.add(place)
            heads.append(row)
    view.running = {int(found.record[row]) + 1 for row in open_rows.tolist() if found.state[row] == RUNNING}
    view.timed = found.timed
    if heads:
        first = heads[0]
        view.routine_since = max(1, first // 2, first - _BEFORE)  # a routine is known once it has been seen for a while
        batch = int(found.batch[first])
        parts = [row for row in open_rows.tolist() if batch and int(found.batch[row]) == batch] or [first]
        op = columns.op(first)
        age = max(0, view.now_ns - op.announced_ns)
        view.blocks[0] = Block(
            op, [columns.op(row) for row in parts], 0, op.announced_ns, "enqueued", not view.log.captured_ns or age >= limit, age
        )
        view.heads = [columns.op(row) for row in heads if row not in parts]
    return known


def _track(ops: ColumnOps, before: Track | None) -> Track:
    e = ops.columns.extract
    open_ = ops.numbers[e.state[ops.rows] != DONE]
    ended = ops.numbers[e.state[ops.rows] == DONE]
    return Track(
        ops=ops,
        first=int(ops.numbers[0]),
        last=int(ops.numbers[-1]),
        completed=int(ended[-1]) if len(ended) else 0,
        open=open_.tolist(),
    )


def _messages(view: View, found: Extract, columns: RankColumns, message: Integers, ended: Integers) -> None:
    """Keep the messages in flight by channel, peer and direction, and count those that ended."""
    if not message.any():
        return

    def pair(row: int) -> tuple[ChannelKey, int, str]:
        return (columns.channels[int(found.channel[row])].key, int(found.peer[row]), found.args[int(found.args_index[row])].op)

    over = np.flatnonzero(message & ended)
    sends = np.array([one.op == "send" for one in found.args])[found.args_index[over]]
    code = (found.channel[over].astype("int64") * (1 << 32) + found.peer[over] + 1) * 2 + sends
    _, first, counts = np.unique(code, return_index=True, return_counts=True)
    view.sent = {pair(int(over[at])): int(many) for at, many in zip(first, counts, strict=True)}
    for row in np.flatnonzero(message & ~ended).tolist():
        op = columns.op(row)
        view.pairs.setdefault(pair(row), []).append(op)
        view.open_pairs.add(op.index)
