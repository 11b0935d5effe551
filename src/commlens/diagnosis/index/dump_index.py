"""Index other tools' dumps in the form that black boxes are indexed in.

Other recorders do not record threads. A rank is blocked in one operation, its *head*: the first
that is in flight. What it enqueued behind the head has not started, unless the dump records its
start.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from commlens.diagnosis.index.columns import (
    ColumnHistory,
    ColumnOps,
    RankDump,
    RankOps,
    SharedIds,
    is_message,
)
from commlens.diagnosis.index.job_index import (
    DEVICE,
    FOREIGN_DUMPS,
    Block,
    JobIndex,
    PairKey,
    RankView,
    Track,
    has_issued,
)
from commlens.diagnosis.index.process_exit import attribute_exits, process_exit_of
from commlens.diagnosis.select.job import absent_ranks, world_size
from commlens.formats.columns import COMPLETED, STARTED, Integers
from commlens.model.collective import Channel, ChannelKey, Collective
from commlens.model.ops import ROOTED, UNEVEN
from commlens.model.ranklog import RankLog

_RECENT_MIN, _RECENT_MAX = 4, 200  # newest operations in each rank's log
_RECENT_TOTAL = 20_000  # in the logs of all ranks
_IN_FLIGHT_MAX = 16  # operations in flight in each rank's log
_RING_BUFFER_MIN = 64  # records
_WRITTEN_NS = 20_000_000  # a file's time comes from a clock that ticks a hundred times a second
_WRITTEN_SECONDS_NS = 2_000_000_000  # a zip file's times are even seconds
_ROUTINE_WINDOW = 400  # operations before the head within which a rank may have left its routine

ChannelName = tuple[str, str, tuple[int, ...]]
"""Group name, description and ranks; the ranks are empty if a dump does not record them."""


def _log(dump: RankDump, columns: RankOps, recent: int) -> RankLog:
    """Return the facts about the rank's process, with its newest operations."""
    length = len(dump)
    in_flight = np.flatnonzero(dump.state != COMPLETED)[:_IN_FLIGHT_MAX].tolist()
    rows = sorted({*in_flight, *range(max(0, length - recent), length)})
    return RankLog(
        rank=dump.rank,
        world_size=dump.world_size,
        job=dump.job,
        host=dump.host,
        place=dump.place,
        collectives=[columns.op(row) for row in rows],
        issued=dump.issued,
        captured_ns=dump.captured_ns,
        initialised=True,
        source=dump.source,
        problems=list(dump.problems),
        exception=dump.exception or None,
        exception_stack=dump.exception_stack,
        device_assertion=dump.device_assertion,
        observation=dump.observation,
        versions={dump.origin: dump.version} if dump.version else {},
    )


def index_dumps(dumps: Sequence[RankDump], stalled_after_s: float) -> JobIndex:
    """Index the dumps of one job, one for each rank, in time linear in their records.

    A collective that has been in flight for less than ``stalled_after_s`` in a running job is not
    stuck.
    """
    ids = SharedIds()
    unified = _unify_channels(dumps)
    latest = max((_newest_ns(dump) for dump in dumps), default=0)
    limit = int(stalled_after_s * 1e9)
    fullest = max((dump.unbroken for dump in dumps if not dump.lost_entries), default=0)
    recent = max(_RECENT_MIN, min(_RECENT_MAX, _RECENT_TOTAL // len(dumps)))
    views: dict[int, RankView] = {}
    channels: dict[ChannelKey, Channel] = {}
    users: dict[ChannelKey, list[int]] = defaultdict(list)
    written = _written_ns(dumps)
    for dump in sorted(dumps, key=lambda one: one.rank):
        columns = RankOps(dump, [unified[_name(channel)] for channel in dump.channels], ids)
        log = _log(dump, columns, recent)
        view = RankView(
            dump.rank, log, process_exit_of(log, gave_up=_gave_up(dump)), dump.captured_ns or latest
        )
        view.columns = columns
        view.history = ColumnHistory(columns)
        view.wrapped = dump.wrapped
        view.first_ns = 0 if dump.only_active or not len(dump) else int(dump.created_ns[0])
        view.written_ns = 0 if dump.is_log else written[dump.rank]
        full = dump.unbroken == fullest or dump.lost_entries  # it may have been
        view.head_lost = dump.only_active and full and _may_be_buffer_size(fullest)
        for key, channel in _index(view, columns, limit).items():
            channels.setdefault(key, channel)
            if key in view.tracks:
                users[key].append(dump.rank)
        views[dump.rank] = view
    for rank, end in attribute_exits({rank: view.exit for rank, view in views.items()}).items():
        views[rank].exit = end
    logs = [view.log for view in views.values()]
    size = world_size(logs)
    only_logs = all(view.is_log for view in views.values())
    no_record, elsewhere = (
        absent_ranks(logs, size) if not only_logs else (sorted(set(range(size)) - set(views)), [])
    )
    job = JobIndex(
        views,
        channels,
        size,
        no_record,
        elsewhere,
        limit,
        users=dict(users),
        knows=FOREIGN_DUMPS,
        only_logs=only_logs,
    )
    job.unlisted = frozenset(channel.key for name, channel in unified.items() if not name[2])
    _find_outdated(job)
    job.moving = _is_moving(job)
    if job.moving:
        for view in views.values():
            for block in view.blocks.values():
                block.stuck = False
    return job


def _written_ns(dumps: Sequence[RankDump]) -> dict[int, int]:
    """Return the latest possible time of each rank's dump, in Unix ns, from its file's time of
    writing; 0 where that tells nothing.

    Some archives and object stores keep full seconds, or another time altogether: then a file is
    older than what it holds.
    """
    latest = {
        dump.rank: (
            dump.written_ns
            + (_WRITTEN_NS if dump.written_ns % 1_000_000_000 else _WRITTEN_SECONDS_NS)
        )
        for dump in dumps
    }
    if any(dump.written_ns and latest[dump.rank] < _newest_ns(dump) for dump in dumps):
        return dict.fromkeys(latest, 0)
    return {dump.rank: latest[dump.rank] if dump.written_ns else 0 for dump in dumps}


def _find_outdated(job: JobIndex) -> None:
    """Find the dumps that were taken before the others' collectives completed, in which their ranks
    took part.

    What such a rank did last is unknown: it issued more than its dump holds, and is no longer in
    what its dump has in flight.
    """
    outdated: set[int] = set()
    for key, users in job.users.items():
        done = [op for rank in users if (op := _newest_left(job.views[rank], key)) is not None]
        if done:
            newest = max(done, key=lambda op: op.sequence_number)
            outdated |= {
                rank for rank in key[2] if rank in job.views and _lacks(job.views[rank], newest)
            }
    for rank in outdated:
        job.views[rank].outdated = True
        for block in job.views[rank].blocks.values():
            block.stuck = False


def _newest_left(view: RankView, key: ChannelKey) -> Collective | None:
    """Return the newest collective that has completed and needed all ranks of its group; None if
    there is none, or in a log.

    The rank's last operation does not count: its recorder may have given it up because it failed.
    """
    ops = view.tracks[key].ops
    if view.columns is None or view.columns.dump.is_log or not isinstance(ops, ColumnOps):
        return None
    done = ops.rows[view.columns.dump.state[ops.rows] == COMPLETED]
    for row in done[::-1][:_RECENT_MAX].tolist():
        op = view.columns.op(row)
        if op.op not in ROOTED and op.op not in UNEVEN and row < len(view.history) - 1:
            return op
    return None


def _lacks(view: RankView, op: Collective) -> bool:
    """Return whether a rank's dump, which is not damaged, ends before the rank issued this
    collective.
    """
    track = view.tracks.get(op.channel.key)
    if (
        view.columns is None
        or view.columns.dump.is_log
        or view.lost_newest
        or (track is None and view.wrapped)
    ):
        return False
    return (track is None or track.last < op.sequence_number) and has_issued(
        view, op.channel.key, op.sequence_number, op.announced_ns
    ) is False


def _gave_up(dump: RankDump) -> bool:
    """Return whether NCCL's watchdog had a reason to abort the rank.

    It does so after a timeout, and writes a dump before. Of a process that aborts for another
    reason, the recorder leaves no dump.
    """
    on_device = np.array(["ccl" in channel.group.backend for channel in dump.channels] or [False])
    return dump.timed_out or bool((on_device[dump.channel] & (dump.state != COMPLETED)).any())


def _is_moving(job: JobIndex) -> bool:
    """Return whether the job was still running while it was dumped.

    If so, half of the ranks or more have collectives in flight that others have completed. In a
    hung job, only a rank whose own device makes no progress does.
    """
    completed = {
        key: max(_completed(job.views[rank], key) for rank in users)
        for key, users in job.users.items()
    }
    late = 0
    for view in job.views.values():
        running = [
            (key, track)
            for key, track in view.tracks.items()
            if track.open and track.ops[track.open[0]].op not in ROOTED
        ]
        late += any(track.open[0] <= completed[key] for key, track in running)
    return late > 1 and late * 2 >= len(job.views)


def _completed(view: RankView, key: ChannelKey) -> int:
    """Return the number of the rank's newest collective known to have completed.

    A dump of what is in flight does not list it: it is the one before the oldest in flight.
    """
    track = view.tracks[key]
    lists_completed = view.columns is None or not view.columns.dump.only_active or view.head_lost
    return (
        track.completed
        if lists_completed or not track.open
        else max(track.completed, track.open[0] - 1)
    )


def _may_be_buffer_size(records: int) -> bool:
    """Return whether this may be the size of a recorder's ring buffer: a round number or a power of
    two.
    """
    return records >= _RING_BUFFER_MIN and (records % 100 == 0 or records.bit_count() == 1)


def _newest_ns(dump: RankDump) -> int:
    """Return the latest time in a dump, in Unix ns."""
    return max(
        int(dump.created_ns.max(initial=0)), int(dump.completed_ns.max(initial=0)), dump.captured_ns
    )


def _name(channel: Channel) -> ChannelName:
    return (channel.group.name, channel.group.description, channel.group.ranks)


def _unify_channels(dumps: Iterable[RankDump]) -> dict[ChannelName, Channel]:
    """Return one channel object for all ranks, by name. Fill in a group's ranks where a dump does
    not record them.
    """
    found: dict[ChannelName, Channel] = {}
    users: dict[tuple[str, str], set[int]] = defaultdict(set)
    recorded: dict[tuple[str, str], set[tuple[int, ...]]] = defaultdict(set)
    for dump in dumps:
        for channel in [*dump.channels, *dump.groups]:
            name = _name(channel)
            found.setdefault(name, channel)
            if name[2]:
                recorded[name[:2]].add(name[2])
            else:
                users[name[:2]].add(dump.rank)
    # also those that left no dump
    all_ranks = range(max((max(dump.rank + 1, dump.world_size) for dump in dumps), default=0))
    one_default = len({name[0] for name in found if name[1] == "default_pg"}) == 1
    for name, channel in list(found.items()):
        if name[2]:
            continue
        known = [ranks for ranks in recorded[name[:2]] if users[name[:2]] <= set(ranks)]
        ranks = known[0] if len(known) == 1 else tuple(sorted(users[name[:2]]))
        if not known and channel.group.description == "default_pg" and one_default:
            ranks = tuple(all_ranks)
        full_name = (*name[:2], ranks)
        if full_name not in found:
            found[full_name] = Channel(
                msgspec.structs.replace(channel.group, ranks=ranks), channel.device
            )
        found[name] = found[full_name]
    return found


def _index(view: RankView, columns: RankOps, limit: int) -> dict[ChannelKey, Channel]:
    """Fill in the rank's tracks, messages and head, and return its channels by key."""
    dump = columns.dump
    known: dict[ChannelKey, Channel] = {}
    message = is_message(dump.args, dump.args_index)
    codes = dump.channel.astype("int64")
    # a dump may describe one group in several ways
    by_key: dict[ChannelKey, list[int]] = defaultdict(list)
    for number in np.unique(codes).tolist():
        channel = columns.channels[number]
        known.setdefault(channel.key, channel)
        by_key[channel.key].append(number)
    for key, numbers in by_key.items():
        rows = np.flatnonzero(
            ((codes == numbers[0]) if len(numbers) == 1 else np.isin(codes, numbers)) & ~message
        )
        if len(rows):
            view.tracks[key] = _track(ColumnOps(columns, rows))
    _index_messages(view, columns, message)
    _find_heads(view, columns, message, limit)
    return known


def _find_heads(view: RankView, columns: RankOps, message: Integers, limit: int) -> None:
    """Find the operation that blocks the rank, and the first in flight of each other channel and
    pair.
    """
    dump = columns.dump
    open_rows = np.flatnonzero(dump.state != COMPLETED).tolist()
    view.running = {int(dump.record_id[row]) + 1 for row in open_rows if dump.state[row] == STARTED}
    view.timed = dump.timed
    first_of: dict[object, int] = {}
    for row in open_rows:
        code = int(dump.channel[row])
        pair = (code, int(dump.peer[row]), dump.args[int(dump.args_index[row])].op)
        first_of.setdefault(pair if message[row] else code, row)
    if not open_rows:
        return
    first = open_rows[0]
    # learn the routine from the operations before
    view.routine_since = max(1, first // 2, first - _ROUTINE_WINDOW)
    batch = int(dump.coalesced[first])
    parts = [row for row in open_rows if batch and int(dump.coalesced[row]) == batch] or [first]
    op = columns.op(first)
    age = max(0, view.now_ns - op.announced_ns) if op.announced_ns else 0
    stuck = not (view.log.captured_ns and op.announced_ns) or age >= limit
    view.head = Block(
        op, [columns.op(row) for row in parts], DEVICE, op.announced_ns, "enqueued", stuck, age
    )
    view.blocks[DEVICE] = view.head
    view.heads = [columns.op(row) for row in first_of.values() if row not in parts]


def _track(ops: ColumnOps) -> Track:
    done = ops.columns.dump.state[ops.rows] == COMPLETED
    completed = ops.numbers[done]
    newest = int(completed[-1]) if len(completed) else 0
    return Track(
        ops,
        first=int(ops.numbers[0]),
        last=int(ops.numbers[-1]),
        completed=newest,
        open=ops.numbers[~done].tolist(),
    )


def _index_messages(view: RankView, columns: RankOps, message: Integers) -> None:
    """Keep the messages in flight by channel, peer and direction, and count the completed ones."""
    if not message.any():
        return
    dump = columns.dump
    ended = dump.state == COMPLETED

    def pair(row: int) -> PairKey:
        return (
            columns.channels[int(dump.channel[row])].key,
            int(dump.peer[row]),
            dump.args[int(dump.args_index[row])].op,
        )

    over = np.flatnonzero(message & ended)
    sends = np.array([one.op == "send" for one in dump.args])[dump.args_index[over]]
    code = (dump.channel[over].astype("int64") * (1 << 32) + dump.peer[over] + 1) * 2 + sends
    _, first, counts = np.unique(code, return_index=True, return_counts=True)
    ended_messages: Counter[PairKey] = Counter()
    for at, many in zip(first, counts, strict=True):
        ended_messages[pair(int(over[at]))] += int(many)
    view.ended_messages = dict(ended_messages)
    for row in np.flatnonzero(message & ~ended).tolist():
        op = columns.op(row)
        view.pairs.setdefault(pair(row), []).append(op)
        view.open_pairs.add(op.index)
