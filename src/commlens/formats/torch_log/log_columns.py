"""Convert what a log says about one rank to the columns that diagnosis reads.

A log names few collectives. Those that timed out become operations, and so do those in NCCL's own
lines. For example, if torch's watchdog on rank 3 says, as group rank 1 of the group "dp"::

    WorkNCCL(SeqNum=8, OpType=ALLREDUCE, NumelIn=4, NumelOut=4, Timeout(ms)=600000) ran for ...
    last enqueued work: 9, last completed work: 7

then the columns of rank 3 have the group "dp" with the status (enqueued 9, started unknown,
completed 7), its group rank 1, and one operation: all_reduce 8, scheduled. A timeout that cannot be
aligned with what other ranks say becomes a sentence in ``timeouts`` instead.
"""

from __future__ import annotations

from textwrap import shorten
from typing import Any, Final

from commlens.formats.columns import (
    COMPLETED,
    DTYPES,
    SCHEDULED,
    STARTED,
    RankColumns,
    stack_of,
)
from commlens.formats.torch_log.lines import NamedGroup, Timeout
from commlens.formats.torch_log.nccl_lines import Communicator, NcclCall
from commlens.formats.torch_log.rank_lines import NO_SEQUENCE_OPS, GroupLines, JobLines, RankLines
from commlens.model.collective import Channel, CollectiveArgs, ProcessGroup, TensorSpec
from commlens.model.ops import REDUCING, ROOTED, UNKNOWN_DTYPE, watchdog_wire_op
from commlens.text import count

NOTES_MAX: Final = 20  # sentences per rank
UNREAD_MAX: Final = 200  # characters of a line that are quoted
# the values of columns that an operation does not set; 0 for all others
_UNKNOWN: Final = {"stack": -1, "record_id": -1, "op_id": -1, "peer": -1, "duration_ns": -1}
# group names in lines of torch 2.15's backend, in words; empty: the line names no group
_GROUPS: Final = {"": "", "0": " of the default group"}


class _Operations:
    """The operations of one rank, column by column."""

    def __init__(self, columns: RankColumns) -> None:
        self._columns = columns
        self._lists: dict[str, list[Any]] = {name: [] for name in DTYPES}
        self._channels: dict[Channel, int] = {}  # index by channel

    def __len__(self) -> int:
        return len(self._lists["sequence"])

    def add(self, channel: Channel, args_index: int, **values: int) -> None:
        """Append an operation; columns without a value are unknown."""
        values["channel"] = self._channels.setdefault(channel, len(self._channels))
        values["args_index"] = args_index
        for column, content in self._lists.items():
            content.append(values.get(column, _UNKNOWN.get(column, 0)))

    def finish(self, failed_stack: list[tuple[str, int, str]]) -> None:
        """Set the columns, and the stack of the failed collective if there is no other one."""
        self._columns.channels = list(self._channels)
        if failed_stack and len(self) == 1:
            self._columns.call_stacks = [stack_of(failed_stack)]
            self._lists["stack"] = [0]
        self._columns.set_columns(self._lists)


def columns_of(rank: int, about: RankLines, job: JobLines) -> RankColumns:
    """Return the columns of a rank.

    Args:
        rank: its global rank; -1: the lines do not say whose they are.
        about: what the lines say about the rank.
        job: what they say about the job.
    """
    columns = about.columns
    columns.rank, columns.world_size = rank, job.world_size
    columns.launcher_signal, columns.remarks = job.launcher_signal, job.remarks
    columns.endings = job.endings + job.store_lines
    columns.of_job = rank < 0 and (columns.by_launcher or about.tells_nothing)
    columns.exception_stack = stack_of(about.exception_frames)
    if job.only_local and rank >= 0:
        columns.problems.append("the log has only local ranks, which were used as ranks")
    if about.unread:
        quoted = shorten(about.first_unread, UNREAD_MAX, placeholder=" ...")
        columns.problems.append(
            f"{count(about.unread, 'line')} of torch's watchdog could not be read: {quoted}"
        )
        columns.lost_entries = True
    operations = _Operations(columns)
    for known in about.groups.values():
        _add_group(columns, operations, known, about.times)
    for communicator in job.communicators:
        _add_calls(columns, operations, communicator)
    _add_unnamed_timeouts(columns, about)
    operations.finish(about.stack)
    return columns


def _add_group(
    columns: RankColumns, operations: _Operations, known: GroupLines, times: dict[int, int]
) -> None:
    """Add a group, its progress, and what timed out in it.

    Args:
        columns: of the rank.
        operations: to add to.
        known: the group.
        times: by sequence number, when a line first said that a collective timed out, in Unix ns.
    """
    group, progress = known.group, known.progress
    # Without a name, it has only a number that differs between ranks; that of the default group is
    # 0 on all of them.
    name = group.name or ("0" if group.is_default else "")
    timeouts = known.timeouts
    columns.timeouts += [
        f"{_timed_out(each)}{_group_phrase(group)}"
        for each in timeouts.values()
        if not each.has_failed and (not name or watchdog_wire_op(each.op) in NO_SEQUENCE_OPS)
    ]
    if not name:
        return
    channel = Channel(
        ProcessGroup(name=name, ranks=(), description=group.description, backend="nccl"), "cuda"
    )
    columns.groups.append(channel)
    columns.numbers[name] = group.rank
    if progress is not None:
        columns.status[name] = (progress.enqueued, progress.started, progress.completed)
    for number, timeout in timeouts.items():
        is_complete = progress is not None and number <= progress.completed
        if is_complete or watchdog_wire_op(timeout.op) in NO_SEQUENCE_OPS:
            continue
        columns.args.append(
            CollectiveArgs(
                watchdog_wire_op(timeout.op),
                timeout.op,
                _elements(timeout.inputs),
                _elements(timeout.outputs),
            )
        )
        has_started = progress is not None and progress.started >= number
        operations.add(
            channel,
            len(columns.args) - 1,
            sequence=number,
            timeout_ms=timeout.timeout_ms,
            created_ns=_created_ns(timeout, times.get(number, 0)),
            state=STARTED if has_started else SCHEDULED,
        )


def _add_calls(columns: RankColumns, operations: _Operations, communicator: Communicator) -> None:
    """Add what a rank issued on a communicator, from NCCL's lines. They say only what was issued:
    up to the number ``met`` all ranks of the communicator issued the same, so that has completed.
    """
    channel = Channel(
        ProcessGroup(name=communicator.name, ranks=communicator.ranks, backend="nccl"), "cuda"
    )
    kinds: dict[NcclCall, int] = {}
    for number, call in communicator.calls.get(columns.rank, {}).items():
        if call not in kinds:
            kinds[call] = len(columns.args)
            columns.args.append(_args_of_call(call))
        operations.add(
            channel,
            kinds[call],
            sequence=number,
            record_id=len(operations),
            state=COMPLETED if number <= communicator.met else SCHEDULED,
        )


def _add_unnamed_timeouts(columns: RankColumns, about: RankLines) -> None:
    """Add sentences on the timeouts whose group or number the log does not name."""
    for (group_rank, _), timeout in about.unassigned.items():
        if timeout.has_failed:
            continue
        rank_text = (
            f" on rank {group_rank} of it" if columns.rank < 0 and group_rank is not None else ""
        )
        columns.timeouts.append(
            f"{_timed_out(timeout)}, in a process group that the log does not name{rank_text}"
        )
        columns.unplaced.append((watchdog_wire_op(timeout.op), timeout.number))
    columns.timeouts += [
        f"an operation{_GROUPS.get(name, f' of group {name}')} timed out{_after(limit)}; its"
        " line does not tell which"
        for name, limit in about.nccl2_timeouts.items()
    ]
    del columns.timeouts[NOTES_MAX:]


def _created_ns(timeout: Timeout, logged_ns: int) -> int:
    """Return when a collective was issued whose timeout was logged at that time; 0: unknown."""
    if not logged_ns or timeout.ran_ms < 0:
        return 0
    return max(0, logged_ns - timeout.ran_ms * 1_000_000)


def _args_of_call(call: NcclCall) -> CollectiveArgs:
    """Return the arguments of a collective in NCCL's words: the count is that of the tensor that
    every rank has.
    """
    specs = (TensorSpec((call.elements,), call.dtype or UNKNOWN_DTYPE, "cuda"),)
    reduce_op = call.reduce_op if call.op in REDUCING and call.reduce_op else None
    return CollectiveArgs(
        call.op, call.op, specs, specs, reduce_op, call.root if call.op in ROOTED else None
    )


def _elements(count: int | None) -> tuple[TensorSpec, ...]:
    return () if count is None else (TensorSpec((count,), UNKNOWN_DTYPE, "cuda"),)


def _timed_out(timeout: Timeout) -> str:
    return f"{watchdog_wire_op(timeout.op)} #{timeout.number} timed out{_after(timeout.timeout_ms)}"


def _after(timeout_ms: int) -> str:
    return f" after {timeout_ms / 1000:g} s" if timeout_ms else ""


def _group_phrase(group: NamedGroup) -> str:
    if group.name:
        return f" in group {group.description or group.name}"
    named = f" ({group.description})" if group.description else ""
    return (
        f" in the process-local group number {group.number}{named}, which other ranks may number"
        " differently"
    )
