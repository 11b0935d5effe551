"""Index other tools' dumps in the form that black boxes are indexed in.

Other recorders do not record threads. A rank is blocked in one operation, its *head*: the first
that is in flight. What it enqueued behind the head has not started, unless the dump records its
start. Of a Flight Recorder dump in which ``all_reduce #40`` has completed and 41 and 42 are
"scheduled", the head is 41.

Some facts show only in the dumps of all ranks together: which ranks a group has (all ranks then
share one channel); whether a dump is older than the others, or was taken while the job still ran;
and, where only the issue of operations is recorded, which are in flight. If ranks 0-2 issued up to
``all_reduce #40`` and rank 3 up to #39, then #40 is in flight on ranks 0-2, and #39 may have
completed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np

from commlens.diagnosis.index.columns import (
    ColumnOps,
    RankOps,
    SharedIds,
    is_message,
)
from commlens.diagnosis.index.job_index import (
    DEVICE,
    BlockedThread,
    JobIndex,
    PairKey,
    RankView,
    Track,
    lacks,
)
from commlens.diagnosis.index.process_exit import attribute_exits, process_exit_of
from commlens.diagnosis.select.job import absent_ranks, world_size
from commlens.formats.columns import COMPLETED, RETIRED, SCHEDULED, STARTED, Integers, RankColumns
from commlens.model.collective import Channel, ChannelKey, Collective
from commlens.model.grouping import grouped
from commlens.model.ops import POINT_TO_POINT, ROOTED, UNEVEN

_RECENT_MIN, _RECENT_MAX = 4, 200  # newest operations in each rank's log
_RECENT_TOTAL = 20_000  # in the logs of all ranks
_IN_FLIGHT_MAX = 16  # operations in flight in each rank's log
_RING_BUFFER_MIN = 64  # records
_WRITTEN_NS = 20_000_000  # a file's time comes from a clock that ticks a hundred times a second
_WRITTEN_SECONDS_NS = 2_000_000_000  # a zip file's times are even seconds
_ROUTINE_WINDOW = 400  # operations before the head within which a rank may have left its routine


class ChannelName(NamedTuple):
    """What a dump says of a channel's group; the ranks are empty if it does not record them."""

    name: str
    description: str
    ranks: tuple[int, ...]


def index_dumps(dumps: Sequence[RankColumns], stalled_after_s: float) -> JobIndex:
    """Index the dumps of one job, one for each rank, in time linear in their records.

    A collective that has been in flight for less than ``stalled_after_s`` in a running job is not
    stuck.
    """
    indexer = _DumpIndexer(dumps, int(stalled_after_s * 1e9))
    views = {dump.rank: indexer.view_of(dump) for dump in sorted(dumps, key=lambda one: one.rank)}
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
        indexer.channels,
        size,
        no_record,
        elsewhere,
        indexer.limit,
        foreign=True,
        only_logs=only_logs,
        issued_only=any(dump.issued_only or dump.issued_messages for dump in dumps),
        unlisted=indexer.unlisted,
    )
    job.users = grouped((key, rank) for rank, view in views.items() for key in view.tracks)
    _find_outdated(job)
    job.moving = _is_moving(job)
    if job.moving:
        _unblock(views.values())
    return job


class _DumpIndexer:
    """Indexes one dump after the other, by what all dumps of the job have in common."""

    def __init__(self, dumps: Sequence[RankColumns], limit: int) -> None:
        self.limit = limit
        self.channels: dict[ChannelKey, Channel] = {}
        self._ids = SharedIds()
        self._unified = _unify_channels(dumps)
        self.unlisted = frozenset(one.key for name, one in self._unified.items() if not name.ranks)
        _find_in_flight(dumps, self._unified)
        self._latest = max(map(_newest_ns, dumps), default=0)
        self._fullest = max((dump.unbroken for dump in dumps if not dump.lost_entries), default=0)
        # a recorder's ring buffer has a round number of records, or a power of two
        is_round = self._fullest % 100 == 0 or self._fullest.bit_count() == 1
        self._may_be_full = self._fullest >= _RING_BUFFER_MIN and is_round
        self._recent = max(_RECENT_MIN, min(_RECENT_MAX, _RECENT_TOTAL // len(dumps)))
        self._written = _written_ns(dumps)

    def view_of(self, dump: RankColumns) -> RankView:
        """Return the index of a rank's dump, and add its channels to the job's."""
        history = RankOps(dump, [self._unified[_name(one)] for one in dump.channels], self._ids)
        # as objects: the newest operations, and the oldest in flight
        in_flight = np.flatnonzero(dump.state != COMPLETED)[:_IN_FLIGHT_MAX].tolist()
        newest = range(len(dump))[-self._recent :]
        dump.collectives = [history.op(row) for row in sorted({*in_flight, *newest})]
        dump.initialised = True
        dump.versions = {dump.origin: dump.version} if dump.version else {}
        # Where a full ring buffer lists only what is in flight, the oldest may be overwritten. A
        # dump of which entries were lost may have been full.
        full = dump.unbroken == self._fullest or dump.lost_entries
        # NCCL's watchdog aborts after a timeout, and writes a dump before. Of a process that aborts
        # for another reason, the recorder leaves no dump.
        on_device = np.array(["ccl" in each.group.backend for each in dump.channels] or [False])
        in_nccl = on_device[dump.channel] & (dump.state != COMPLETED)
        gave_up = dump.timed_out or bool(in_nccl.any())
        view = RankView(
            dump.rank,
            dump,
            process_exit_of(dump, gave_up=gave_up),
            dump.captured_ns or self._latest,
            dump=dump,
            history=history,
            wrapped=dump.wrapped,
            first_ns=0 if dump.only_active or not len(dump) else int(dump.created_ns[0]),
            written_ns=0 if dump.is_log else self._written[dump.rank],
            head_lost=dump.only_active and full and self._may_be_full,
        )
        _add_tracks(view, history, self.channels)
        _find_heads(view, history, self.limit)
        return view


def _add_tracks(view: RankView, history: RankOps, channels: dict[ChannelKey, Channel]) -> None:
    """Fill in the rank's tracks and messages, and add its channels to the job's."""
    dump = history.dump
    message = is_message(dump.args, dump.args_index)
    # a dump may describe one group in several ways
    codes: dict[ChannelKey, list[int]] = defaultdict(list)
    for code in np.unique(dump.channel).tolist():
        channel = history.channels[code]
        channels.setdefault(channel.key, channel)
        codes[channel.key].append(code)
    for key, several in codes.items():
        rows = np.flatnonzero(np.isin(dump.channel, several) & ~message & (dump.sequence >= 0))
        if len(rows):
            ops = ColumnOps(history, rows)
            done = dump.state[ops.rows] == COMPLETED
            view.tracks[key] = Track(
                ops,
                last=int(ops.numbers[-1]),
                completed=int(ops.numbers[done].max(initial=0)),
                open=ops.numbers[~done].tolist(),
            )
    _add_messages(view, history, message)


def _add_messages(view: RankView, columns: RankOps, message: Integers) -> None:
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
    # one number for channel, peer and direction, so that numpy can count them
    code = (dump.channel[over].astype("int64") * (1 << 32) + dump.peer[over] + 1) * 2 + sends
    _, first, counts = np.unique(code, return_index=True, return_counts=True)
    for at, many in zip(first, counts, strict=True):
        of = pair(int(over[at]))
        view.ended_messages[of] = view.ended_messages.get(of, 0) + int(many)
    for row in np.flatnonzero(message & ~ended).tolist():
        op = columns.op(row)
        view.pairs.setdefault(pair(row), []).append(op)
        view.open_pairs.add(op.index)


def _find_heads(view: RankView, columns: RankOps, limit: int) -> None:
    """Find the operation that blocks the rank, with the other messages of its batch, and the first
    in flight of each other channel and pair.
    """
    dump = columns.dump
    open_rows = np.flatnonzero(dump.state != COMPLETED).tolist()
    view.running = {int(dump.record_id[row]) + 1 for row in open_rows if dump.state[row] == STARTED}
    view.timed = dump.timed
    first_of: dict[object, int] = {}
    for row in open_rows:
        code = int(dump.channel[row])
        op = dump.args[int(dump.args_index[row])].op
        first_of.setdefault((code, int(dump.peer[row]), op) if op in POINT_TO_POINT else code, row)
    if not open_rows:
        return
    first = open_rows[0]
    # where to look for the op with which the rank left its routine: before, there is the routine
    view.routine_since = max(1, first // 2, first - _ROUTINE_WINDOW)
    batch = int(dump.coalesced[first])
    parts = [row for row in open_rows if int(dump.coalesced[row]) == batch] if batch else [first]
    head, ops = columns.op(first), [columns.op(row) for row in parts]
    since = head.announced_ns
    age = max(0, view.now_ns - since) if since else 0
    stuck = not (dump.captured_ns and since) or age >= limit  # of unknown age: it hangs
    view.head = BlockedThread(head, ops, DEVICE, since, "enqueued", stuck, age)
    view.blocks[DEVICE] = view.head
    view.heads = [columns.op(row) for row in first_of.values() if row not in parts]


# --- one channel for all ranks


def _name(channel: Channel) -> ChannelName:
    return ChannelName(channel.group.name, channel.group.description, channel.group.ranks)


def _unify_channels(dumps: Iterable[RankColumns]) -> dict[ChannelName, Channel]:
    """Return one channel object for all ranks, by name. Fill in a group's ranks where a dump does
    not record them: those that another dump records, else those that use it.
    """
    found: dict[ChannelName, Channel] = {}
    users: dict[ChannelName, set[int]] = defaultdict(set)  # of groups whose ranks are not recorded
    recorded: dict[tuple[str, str], set[tuple[int, ...]]] = defaultdict(set)
    # by a group's name: global ranks by their numbers in the group
    numbers: dict[str, dict[int, int]] = defaultdict(dict)
    world_size = 0
    for dump in dumps:
        world_size = max(world_size, dump.rank + 1, dump.world_size)
        for group, number in dump.numbers.items():
            numbers[group][number] = dump.rank
        for channel in [*dump.channels, *dump.groups]:
            name = _name(channel)
            found.setdefault(name, channel)
            if name.ranks:
                recorded[name[:2]].add(name.ranks)
            else:
                users[name].add(dump.rank)
    defaults = {name[:2] for name in found if name.description == "default_pg"}
    for name, known_users in users.items():
        known = list(filter(known_users.issubset, recorded[name[:2]]))
        if len(known) == 1:
            ranks = known[0]
        elif not known and defaults == {name[:2]}:
            ranks = tuple(range(world_size))  # also those that left no dump
        else:
            ranks = tuple(sorted(known_users | _ranks_between(numbers[name.name])))
        whole = msgspec.structs.replace(found[name].group, ranks=ranks)
        channel = Channel(whole, found[name].device)
        found[name] = found.setdefault(name._replace(ranks=ranks), channel)
    return found


def _ranks_between(ranks: Mapping[int, int]) -> set[int]:
    """Return the ranks of a group that lie between those known by their numbers in it, if the
    numbers show a regular distance: groups are sorted, and their numbers begin at 0. If numbers 1,
    2 and 4 are ranks 6, 10 and 18, the group is 2, 6, 10, 14 and 18.
    """
    known = sorted(ranks.items())
    steps = {divmod(other[1] - one[1], other[0] - one[0]) for one, other in pairwise(known)}
    step, rest = steps.pop() if len(steps) == 1 else (0, 0)
    several = len(known) > 2
    if rest or not (step == 1 or (several and step > 1)):
        return set()
    (number, rank), (last, _) = known[0], known[-1]
    first = rank - number * step
    return set(
        range(first if several else rank, first + last * step + 1, step) if first >= 0 else ()
    )


# --- dumps in which only the issue of operations is recorded


class _Issued(NamedTuple):
    """The rows of one rank on one channel."""

    dump: RankColumns
    key: ChannelKey
    collectives: Integers
    messages: Integers


def _find_in_flight(dumps: Sequence[RankColumns], channels: Mapping[ChannelName, Channel]) -> None:
    """Decide which operations are in flight, if only their issue is recorded (``RETIRED``): those
    that not all ranks of their group, or not both sides of a message, have issued. The others may
    have completed, and count as if they had.
    """
    if not any(dump.issued_only or dump.issued_messages for dump in dumps):
        return
    issued: list[_Issued] = []
    for dump in dumps:
        dump.state = dump.state.copy()
        message = is_message(dump.args, dump.args_index)
        for code, one in enumerate(dump.channels):
            here = dump.channel == code
            collectives = np.flatnonzero(here & ~message)
            messages = np.flatnonzero(here & message & (dump.peer >= 0))
            issued.append(_Issued(dump, channels[_name(one)].key, collectives, messages))
    wrapped = {dump.rank: dump.wrapped for dump in dumps}
    _set_collectives_in_flight(issued, wrapped)
    _set_messages_in_flight(issued, wrapped)
    for dump in dumps:
        dump.state = np.minimum(dump.state, COMPLETED)


def _set_collectives_in_flight(issued: Sequence[_Issued], wrapped: Mapping[int, bool]) -> None:
    """Set the collectives in flight that not all ranks with complete records have issued."""
    last: dict[tuple[ChannelKey, int], int] = defaultdict(int)
    for dump, key, rows, _ in issued:
        newest = int(dump.sequence[rows].max(initial=0))
        last[key, dump.rank] = max(last[key, dump.rank], newest)
    for dump, key, rows, _ in issued:
        known = [rank for rank in key[2] if rank in wrapped]
        met = (last[key, rank] for rank in known if last[key, rank] or not wrapped[rank])
        later = dump.sequence[rows] > min(met, default=0)
        dump.state[rows[(dump.state[rows] == RETIRED) & later]] = SCHEDULED


def _set_messages_in_flight(issued: Sequence[_Issued], wrapped: Mapping[int, bool]) -> None:
    """Set the newest messages in flight where one side has issued more than the other."""
    # by channel, sender and receiver: how many more messages were sent than received
    balance: Counter[tuple[ChannelKey, int, int]] = Counter()
    for dump, key, _, sent in issued:
        for row in sent.tolist():
            pair, sign = _direction(dump, row)
            balance[(key, *pair)] += sign
    for dump, key, _, sent in issued:
        for row in sent[::-1].tolist():
            pair, sign = _direction(dump, row)
            whole = not (dump.wrapped or wrapped.get(pair[sign > 0], True))
            if whole and dump.state[row] == RETIRED and balance[(key, *pair)] * sign > 0:
                balance[(key, *pair)] -= sign
                dump.state[row] = SCHEDULED


def _direction(dump: RankColumns, row: int) -> tuple[tuple[int, int], int]:
    """Return the sender and the receiver of a message, and 1 if this rank sends it, else -1."""
    peer = int(dump.peer[row])
    sends = dump.args[int(dump.args_index[row])].op == "send"
    return ((dump.rank, peer), 1) if sends else ((peer, dump.rank), -1)


# --- dumps of other moments


def _written_ns(dumps: Sequence[RankColumns]) -> dict[int, int]:
    """Return the latest possible time of each rank's dump, in Unix ns, from its file's time of
    writing; 0 if it is unknown.

    Some archives and object stores keep full seconds, or another time altogether: then a file is
    older than what it holds.
    """
    latest = dict.fromkeys((dump.rank for dump in dumps), 0)
    for dump in dumps:
        if dump.written_ns:
            inexact = _WRITTEN_NS if dump.written_ns % 1_000_000_000 else _WRITTEN_SECONDS_NS
            latest[dump.rank] = dump.written_ns + inexact
    is_wrong = any(0 < latest[dump.rank] < _newest_ns(dump) for dump in dumps)
    return dict.fromkeys(latest, 0) if is_wrong else latest


def _find_outdated(job: JobIndex) -> None:
    """Find the dumps that were taken before the others' collectives completed, in which their ranks
    took part.

    What such a rank did last is unknown: it issued more than its dump holds, and is no longer in
    what its dump has in flight.
    """
    for key, users in job.users.items():
        done = [op for rank in users if (op := _newest_left(job.views[rank], key)) is not None]
        if not done:
            continue
        newest = max(done, key=lambda op: op.sequence_number)
        for view in (job.views[rank] for rank in key[2] if rank in job.views):
            is_complete = not view.is_log and (not view.wrapped or key in view.tracks)
            view.outdated = view.outdated or (is_complete and lacks(view, newest))
    _unblock(view for view in job.views.values() if view.outdated)


def _newest_left(view: RankView, key: ChannelKey) -> Collective | None:
    """Return the newest collective that has completed and needed all ranks of its group; None if
    there is none, or in a log.

    The rank's last operation does not count: its recorder may have given it up because it failed.
    """
    ops = view.tracks[key].ops
    if view.dump is None or view.dump.is_log or not isinstance(ops, ColumnOps):
        return None
    done = ops.rows[view.dump.state[ops.rows] == COMPLETED]
    for row in done[::-1][:_RECENT_MAX].tolist():
        op = ops.columns.op(row)
        if op.op not in ROOTED and op.op not in UNEVEN and row < len(view.history) - 1:
            return op
    return None


def _is_moving(job: JobIndex) -> bool:
    """Return whether the job was still running while it was dumped.

    If so, half of the ranks or more have collectives in flight that others have completed. In a
    hung job, only a rank whose own device makes no progress does.
    """
    completed = {
        key: max(_completed(job.views[rank], key) for rank in users)
        for key, users in job.users.items()
    }
    late = [
        view
        for view in job.views.values()
        if any(
            track.open
            and track.open[0] <= completed[key]
            and track.ops[track.open[0]].op not in ROOTED
            for key, track in view.tracks.items()
        )
    ]
    return len(late) > 1 and len(late) * 2 >= len(job.views)


def _completed(view: RankView, key: ChannelKey) -> int:
    """Return the number of the rank's newest collective known to have completed.

    A dump of what is in flight does not list it: it is the one before the oldest in flight.
    """
    track = view.tracks[key]
    lists_completed = view.dump is None or not view.dump.only_active or view.head_lost
    before_open = track.open[0] - 1 if track.open and not lists_completed else 0
    return max(track.completed, before_open)


def _unblock(views: Iterable[RankView]) -> None:
    """Count none of the ranks' waits as stuck, since each may have ended after the dump."""
    for view in views:
        for block in view.blocks.values():
            block.stuck = False


def _newest_ns(dump: RankColumns) -> int:
    """Return the latest time in a dump, in Unix ns."""
    return max(
        int(dump.created_ns.max(initial=0)), int(dump.completed_ns.max(initial=0)), dump.captured_ns
    )
