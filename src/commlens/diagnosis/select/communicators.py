"""Join what NCCL's plugin wrote with the ranks' records.

A record says that thread 71 of rank 0 was inside torch's ``all_reduce`` from 10.0 to 10.4 ms. The
plugin says that thread 71 called ``AllReduce`` number 7 of communicator 5f3a at 10.2 ms, and that
its kernel has ended. So communicator 5f3a is one that torch made, and the record's collective has
completed. Names are not needed for this.

If no rank has such a record of a communicator, it was made past torch, as vLLM's pynccl or CuPy
make theirs. It becomes a group made by hand, whose members all know its hash, and each call becomes
a record. The collectives that CUDA graphs launch on it are those of a second group: nothing orders
them among the calls of hosts. If one rank calls what the graphs of another one launch, the
communicator is mixed: only the sum of both can be compared, so each rank gets one record, of the
collective in which its device is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

import msgspec

from commlens.model.collective import (
    BY_PLUGIN,
    NCCL_STORE,
    Channel,
    Collective,
    CollectiveArgs,
    HandMade,
    LearnedHow,
    ProcessGroup,
    State,
    TensorSpec,
)
from commlens.model.nccl import NcclCommunicator, NcclOp, NcclRecord
from commlens.model.ops import ROOTED, UNKNOWN_DTYPE
from commlens.model.ranklog import RankLog

_SIZE_MAX: Final = 1 << 20  # a larger one is not believed
_SLACK_NS: Final = 1_000  # a record's times are in ticks, and rounded
_NOTED_WITHIN_NS: Final = 1_000_000_000
"""If an operation was launched longer ago, and no start of its kernel is noted, it has not started:
NCCL looks for it all the time.
"""
_OF_GRAPHS: Final = "in CUDA graphs"
_OPS: Final = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
    "AlltoAll": "all_to_all",
    "Gather": "gather",
    "Scatter": "scatter",
}
"""NCCL's names of collectives, and the wire ops."""
_DTYPES: Final = {
    "Float16": "float16",
    "Float32": "float32",
    "Float64": "float64",
    "Bfloat16": "bfloat16",
    "Int8": "int8",
    "Int32": "int32",
    "Int64": "int64",
    "Uint8": "uint8",
    "Uint32": "uint32",
    "Uint64": "uint64",
    "Float8e4m3": "float8_e4m3fn",
    "Float8e5m2": "float8_e5m2",
}


class _Part(NamedTuple):
    """A half of a communicator past torch that becomes one group: the collectives that hosts
    called, or those that CUDA graphs launched.
    """

    hash: str
    of_graphs: bool


def with_communicators(logs: Sequence[RankLog]) -> list[RankLog]:
    """Return the logs with what the plugin wrote: in the records of calls that torch made, and as
    records of groups made by hand for the communicators of which no rank has such a record.
    """
    written = [log.nccl for log in logs if log.nccl is not None]
    if not written:
        return list(logs)
    ranks = [_RankWithNccl(log) for log in logs]
    of_torch = {each for rank in ranks for each in rank.of_torch}
    mixed = _mixed(written) - of_torch
    parts = {
        _Part(comm.hash, of_graphs)
        for each in written
        for comm in each.communicators
        for of_graphs in (False, True)
        if _collectives_of(comm, of_graphs) and comm.hash not in of_torch | mixed
    }
    return [rank.joined(parts, mixed) for rank in ranks]


def _collectives_of(comm: NcclCommunicator, of_graphs: bool) -> int:
    """Return how many collectives were called, or were launched by graphs."""
    return comm.replayed if of_graphs else comm.collectives


def _mixed(written: Iterable[NcclRecord]) -> set[str]:
    """Return the hashes of the communicators on which a rank called what the graphs of another
    launched, as far as their counts show it: rank 0 called 5 and launched 2, rank 1 called 4 and
    launched 3. That is legal, and only the sums can be compared then.
    """
    counts: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for each in written:
        for comm in each.communicators if each.level != "calls" else ():
            counts[comm.hash].add((comm.collectives, comm.replayed))
    return {
        comm
        for comm, pairs in counts.items()
        if any(
            called < others_called and launched > others_launched
            for called, launched in pairs
            for others_called, others_launched in pairs
        )
    }


# --- one rank


class _RankWithNccl:
    """A rank's records, and what the plugin wrote of the calls in them."""

    def __init__(self, log: RankLog) -> None:
        self._log = log
        self._in_records: dict[int, list[NcclOp]] = defaultdict(list)
        """By index of a record: the operations that its call made."""
        self._cut: set[int] = set()
        """The records of calls of which the plugin may have kept only a part."""
        device = [op for op in log.collectives if op.channel.runs_ahead]
        groups = [*{id(op.channel): op.channel.group for op in device}.values()]
        calls = _CallsByThread(device)
        communicators = log.nccl.communicators if log.nccl is not None else ()
        # else it is not known whether the rank's graphs launched any
        self._notes_launches = log.nccl is not None and log.nccl.level != "calls"
        self._comms = [
            comm
            for comm in communicators
            if 1 < comm.size <= _SIZE_MAX and 0 <= comm.rank < comm.size and not comm.closed_ns
        ]
        self.of_torch: set[str] = set()
        """The hashes of the communicators that torch made."""
        for comm in self._comms:
            self._place(comm, calls)
            if _has_torchs_name(comm, groups, log.rank):
                self.of_torch.add(comm.hash)

    def _place(self, comm: NcclCommunicator, calls: _CallsByThread) -> None:
        """Place a communicator's operations in the records of the calls that made them."""
        placed: dict[int, list[NcclOp]] = defaultdict(list)
        known = {False: {0}, True: {0}}  # by whether they are messages: the numbers of all calls
        for op in comm.ops:
            if op.is_replay:
                continue
            if (record := calls.record_of(op, comm, self._log.rank)) is not None:
                placed[record.index].append(op)
                self.of_torch.add(comm.hash)
            if not op.captured:
                known[op.is_message].add(op.number)
        for index, ops in placed.items():
            self._in_records[index] += ops
            if _may_be_cut(ops, comm, known):
                self._cut.add(index)

    def joined(self, parts: Collection[_Part], mixed: Collection[str]) -> RankLog:
        """Return the log with what the plugin wrote.

        Args:
            parts: of the communicators past torch, those in which some rank has a collective.
            mixed: the hashes of those on which one rank calls what another one's graphs launch.
        """
        added: list[Collective] = []
        unused: list[ProcessGroup] = []
        for comm in self._comms:
            for of_graphs in (False, True) if self._notes_launches else (False,):
                if _Part(comm.hash, of_graphs) not in parts:
                    continue
                channel = _channel_of(comm, of_graphs)
                added += _records_of(comm, channel, self._log, of_graphs)
                if not _collectives_of(comm, of_graphs):
                    unused.append(channel.group)  # other ranks use it, and wait for this one
            if comm.hash in mixed:
                added += _newest_of_both(comm, self._log)
        if not (self._in_records or added or unused):
            return self._log
        known = [
            _enriched(
                op,
                self._in_records.get(op.index),
                self._log.captured_ns,
                is_cut=op.index in self._cut,
            )
            for op in self._log.collectives
        ]
        return msgspec.structs.replace(
            self._log,
            collectives=_merged(known, added),
            issued=self._log.issued + len(added),
            unused_groups=unused,
        )


def _may_be_cut(
    ops: Sequence[NcclOp], comm: NcclCommunicator, known: Mapping[bool, Collection[int]]
) -> bool:
    """Return whether a call may have made more operations than these: the plugin keeps the newest
    ones only. The numbers of a whole call have no gap, and the numbers before and after them are
    known, too.

    Args:
        ops: the known ops of the call.
        comm: their communicator.
        known: the numbers of all known collectives, and (True) of all known messages.
    """
    for is_message, called in ((False, comm.collectives), (True, comm.messages)):
        mine = [op.number for op in ops if op.is_message == is_message]
        if not mine:
            continue
        first, last = min(mine), max(mine)
        ends_within = last >= called or last + 1 in known[is_message]
        if last - first >= len(mine) or first - 1 not in known[is_message] or not ends_within:
            return True
    return False


class _CallsByThread:
    """The records of a rank's calls that enqueue on a device, by thread and time."""

    def __init__(self, records: Sequence[Collective]) -> None:
        self._by_thread: dict[int, list[Collective]] = defaultdict(list)
        for op in records:
            if op.announced_ns:
                self._by_thread[op.issue_thread].append(op)
        self._begins = {
            thread: list(accumulate((op.announced_ns for op in ops), max))
            for thread, ops in self._by_thread.items()
        }

    def record_of(self, op: NcclOp, comm: NcclCommunicator, rank: int) -> Collective | None:
        """Return the record of the call in which NCCL was called; None if there is none, or if its
        group cannot be that of the communicator.
        """
        ops = self._by_thread.get(op.thread, ())
        if not ops or not op.called_ns:
            return None
        at = bisect_right(self._begins[op.thread], op.called_ns + _SLACK_NS) - 1
        record = ops[at] if at >= 0 else None
        if record is None:
            return None
        # the thread has left the call if it made a later one, whatever the record says
        until_ns = record.returned_ns or (0 if at + 1 < len(ops) else op.called_ns)
        if until_ns < op.called_ns - _SLACK_NS:
            return None
        return record if _has_place(comm, record.channel.group, rank) else None


def _has_place(comm: NcclCommunicator, group: ProcessGroup, rank: int) -> bool:
    """Return whether a rank has the same place in a group as in a communicator. The members of
    groups made by hand are known by their place only.
    """
    if group.hand_made is not None:
        return (group.hand_made.member, group.hand_made.size) == (comm.rank, comm.size)
    ranks = group.ranks
    return len(ranks) == comm.size and ranks[comm.rank] == rank


def _has_torchs_name(comm: NcclCommunicator, groups: Iterable[ProcessGroup], rank: int) -> bool:
    """Return whether a communicator has the name that torch gives it: that of a group with records,
    perhaps behind the group's description (``default_pg:0``).
    """
    name = comm.name.rpartition(":")[2]
    return bool(name) and any(
        group.name == name and _has_place(comm, group, rank) for group in groups
    )


# --- communicators past torch


def _channel_of(comm: NcclCommunicator, of_graphs: bool) -> Channel:
    """Return the channel of a communicator that torch did not make, or of its part in graphs."""
    suffix = f" {_OF_GRAPHS}" if of_graphs else ""
    name = f"{comm.hash}{suffix}"
    group = ProcessGroup(
        name,
        (),
        f"NCCL communicator {comm.name or comm.hash}{suffix}",
        "nccl",
        hand_made=HandMade(comm.rank, comm.size, f"{NCCL_STORE}{name}"),
    )
    return Channel(group, "cuda", runs_ahead=True, completion=BY_PLUGIN)


def _records_of(
    comm: NcclCommunicator, channel: Channel, log: RankLog, of_graphs: bool
) -> Iterator[Collective]:
    """Yield the collectives of a communicator that torch did not make. The records of older calls
    of torch may be overwritten: nothing tells who made a call before the oldest one.
    """
    is_wrapped = log.issued > len(log.collectives) > 0
    since_ns = log.collectives[0].announced_ns if is_wrapped else 0
    knows_kernels = not of_graphs or _knows_launched_kernels(comm)
    for op in comm.ops:
        # a call that was captured did not run: its launches are those of graphs
        is_of_part = (op.is_replay, op.captured) == (of_graphs, of_graphs)
        if op.is_message or not is_of_part or op.called_ns < since_ns:
            continue
        record = _record_of(op, channel)
        is_passed = not of_graphs and op.number < comm.finished  # one behind it has ended
        if is_passed and not op.has_stopped:
            record.state, record.learned_how = State.COMPLETED, LearnedHow.NATIVE_RECORDER
            record.nccl = (op,)
            yield record
        else:
            known = [op] if knows_kernels else None
            yield _enriched(record, known, log.captured_ns, is_cut=False)


def _newest_of_both(comm: NcclCommunicator, log: RankLog) -> Iterator[Collective]:
    """Yield one record of a mixed communicator: of the collective in which the device is, else of
    the last one that it ended. Its number is that among calls and launches together, in which all
    ranks agree. None if the kernels of some are not known.
    """
    ran = [op for op in comm.ops if not op.is_message and op.captured == op.is_replay]
    knows_kernels = all(op.with_kernels for op in ran) and _knows_launched_kernels(comm)
    if not (ran and knows_kernels and _is_whole(log.nccl)):
        return
    waiting = [
        op for op in ran if not op.has_stopped and (op.is_replay or op.number > comm.finished)
    ]
    if (op := _newest(ran, waiting)) is not None:
        record = _record_of(op, _channel_of(comm, of_graphs=False))
        ended = comm.collectives + comm.replayed - len(waiting)
        record.sequence_number = ended + bool(waiting)
        yield _enriched(record, [op], log.captured_ns, is_cut=False)


def _knows_launched_kernels(comm: NcclCommunicator) -> bool:
    """Return whether the plugin sees the kernels that graphs launch, and not a graph only as it is
    captured.
    """
    return not comm.replayed or any(op.is_replay and op.started_on for op in comm.ops)


def _is_whole(written: NcclRecord | None) -> bool:
    return written is not None and not (written.lost or written.torn)


def _newest(ran: Sequence[NcclOp], waiting: Sequence[NcclOp]) -> NcclOp | None:
    """Return the operation in which a device is, else the last one that it ended. None if none of
    those that wait has started: a launch by a graph is noted only when its kernel starts, so one
    may come before them.
    """
    if not waiting:
        return max(ran, key=lambda each: each.stopped_ns)
    started = [op for op in waiting if op.started_on]
    if not started:
        return None
    return min(started, key=lambda each: (each.started_ns, each.number))


def _record_of(op: NcclOp, channel: Channel) -> Collective:
    wire = _OPS.get(op.func, op.func)
    dtype = _DTYPES.get(op.datatype.removeprefix("nccl"), op.datatype)
    tensor = TensorSpec((op.count,), dtype or UNKNOWN_DTYPE, "cuda")
    root = op.root if wire in ROOTED and op.root >= 0 else None
    return Collective(
        index=0,
        channel=channel,
        sequence_number=op.number,
        args=CollectiveArgs(wire, op.func, (tensor,), root=root),
        state=State.UNKNOWN,
        announced_ns=op.called_ns,
        entered_ns=op.called_ns,
        returned_ns=op.returned_ns or op.called_ns,
        issue_thread=op.thread,
    )


# --- what the plugin wrote of a record


def _enriched(
    record: Collective, ops: Sequence[NcclOp] | None, captured_ns: int, *, is_cut: bool
) -> Collective:
    """Return a record with what the plugin wrote of it: whether its kernels have started and ended.
    A call that was captured did not run, so its state stays as it is.

    Args:
        record: of a call.
        ops: the operations that the plugin noted of this call.
        captured_ns: when the rank's records were read.
        is_cut: whether the call may have made more operations than these.
    """
    if not ops:
        return record
    more: dict[str, Any] = {"nccl": tuple(ops)}
    has_run = not record.captured and all(op.is_replay or not op.captured for op in ops)
    is_open = has_run and (record.in_flight or record.state is State.UNKNOWN)
    has_ended = all(op.has_stopped for op in ops)
    if is_open and has_ended:
        if not is_cut:
            more["state"], more["done_ns"] = State.COMPLETED, max(op.stopped_ns for op in ops)
            more["learned_how"] = LearnedHow.NATIVE_RECORDER
    elif is_open and all(op.with_kernels for op in ops):
        more["state"], more["learned_how"] = State.ISSUED, _how_far(ops, captured_ns, is_cut=is_cut)
    return msgspec.structs.replace(record, **more)


def _how_far(ops: Sequence[NcclOp], captured_ns: int, *, is_cut: bool) -> LearnedHow:
    """Return how far the device is in a call that has not ended there."""
    if any(op.started_on for op in ops):
        return LearnedHow.STARTED
    launched_ns = max(op.launched_ns for op in ops)
    has_not_started = not is_cut and captured_ns - launched_ns >= _NOTED_WITHIN_NS
    return LearnedHow.ENQUEUED if has_not_started else LearnedHow.NATIVE_RECORDER


def _merged(records: Sequence[Collective], added: Sequence[Collective]) -> list[Collective]:
    """Return all records in the order of their calls, numbered anew: 8 and 9 with a new one
    between them become 8, 9 and 10. Numbers of records that were overwritten stay free.
    """
    if not added:
        return list(records)
    more = sorted(added, key=lambda op: op.announced_ns)
    merged: list[Collective] = []
    before, step, index = 0, 0, 0
    for op in records:
        while before < len(more) and more[before].announced_ns < op.announced_ns:
            index = op.index + before
            merged.append(msgspec.structs.replace(more[before], index=index, step=step))
            before += 1
        index, step = op.index + before, op.step
        merged.append(msgspec.structs.replace(op, index=index))
    for op in more[before:]:
        index += 1
        merged.append(msgspec.structs.replace(op, index=index, step=step))
    return merged


# --- the communicators of a group


def hashes_of(groups: Iterable[Sequence[int]], logs: Iterable[RankLog]) -> set[str]:
    """Return the hashes of the communicators that consist of the ranks of one of these groups, in
    its order, if the plugins of all these ranks name them.
    """
    by_rank = {log.rank: log.nccl.communicators for log in logs if log.nccl is not None}
    found: set[str] = set()
    for ranks in groups:
        if not by_rank.keys() >= {*ranks}:
            continue
        of_ranks = [
            {
                comm.hash
                for comm in by_rank[rank]
                if (comm.size, comm.rank) == (len(ranks), place) and not comm.closed_ns
            }
            for place, rank in enumerate(ranks)
        ]
        found |= set.intersection(*of_ranks) if of_ranks else set()
    return found
