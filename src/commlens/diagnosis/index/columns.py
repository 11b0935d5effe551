"""Other tools' dumps as columns: one array value per operation, turned into :class:`Collective`
objects only on access.

:func:`reduce_dump` runs in worker processes. It reduces the columns of a file to a
:class:`RankDump`, which is all that is sent back: a coalesced group becomes one operation, an entry
that only closes a point-to-point batch is dropped, and of each stack only the lines of the user's
code are kept. An :class:`Interner` stores once what many ranks share (arguments, lines, groups).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import msgspec
import numpy as np

from commlens.formats.columns import COMPLETED, STARTED, TEXT_LOG, Integers, RankColumns
from commlens.model.collective import (
    Channel,
    Collective,
    CollectiveArgs,
    Frame,
    FrameKind,
    LearnedHow,
    Stack,
    State,
    user_frame,
)
from commlens.model.ops import COALESCED, POINT_TO_POINT, UNEVEN, composite_wire_op
from commlens.model.ranklog import End

_LINES = 4  # of the user's code kept of each stack
_KEPT = (
    "rank",
    "world_size",
    "host",
    "place",
    "job",
    "source",
    "origin",
    "version",
    "captured_ns",
    "written_ns",
    "problems",
    "lost_entries",
    "channels",
    "groups",
    "timeouts",
    "unplaced",
    "timed_out",
    "exception",
    "exception_stack",
    "device_assertion",
    "observation",
    "stuck_watchdog_s",
    "launcher_signal",
    "endings",
    "by_launcher",
    "remarks",
)


@dataclass(slots=True)
class RankDump(RankColumns):
    """One rank's columns, reduced to what diagnosis needs: one row per operation, the user's lines
    as ``stacks``.

    ``state`` is at most ``COMPLETED``, also for an operation that its recorder no longer tracks.
    ``coalesced`` numbers the batches of point-to-point operations only. ``status`` is by group
    name. ``possible_ranks`` is empty if the rank is known.
    """

    timed: bool = False  # it records when an operation starts on the device
    only_active: bool = False  # it holds no completed operation, though there were some
    unbroken: int = 0  # number of records, if their ids are consecutive; else 0

    @property
    def is_log(self) -> bool:
        """Whether it is of a text log, in which a rank may have no line about a collective that it
        issued.
        """
        return self.origin == TEXT_LOG

    @property
    def tells_nothing(self) -> bool:
        """Whether a text log only mentions the rank."""
        known = (
            len(self)
            or self.status
            or self.timeouts
            or self.exception
            or self.stuck_watchdog_s
            or self.timed_out
        )
        return self.is_log and not known and self.observation.end is End.UNKNOWN

    @property
    def wrapped(self) -> bool:
        """Whether older operations were overwritten or are unreadable."""
        return self.issued > len(self) or bool(self.problems)


class Interner:
    """Keeps one object of each value that many ranks share, so that it is stored and sent once."""

    def __init__(self) -> None:
        self._args: dict[tuple[CollectiveArgs, ...], list[CollectiveArgs]] = {}
        self._sites: dict[tuple[Stack, ...], list[Stack]] = {}
        self._channels: dict[Channel, Channel] = {}

    def intern(self, dump: RankDump) -> RankDump:
        """Replace the shared values of a dump from another process by this interner's objects."""
        dump.args, dump.stacks = self.args(dump.args), self.sites(dump.stacks)
        dump.channels = [self._channels.setdefault(one, one) for one in dump.channels]
        dump.groups = [self._channels.setdefault(one, one) for one in dump.groups]
        return dump

    def args(self, table: Sequence[CollectiveArgs]) -> list[CollectiveArgs]:
        """Return the interned table of arguments."""
        return self._args.setdefault(tuple(table), list(table))

    def sites(self, table: Sequence[Stack]) -> list[Stack]:
        """Return the interned table of call sites."""
        return self._sites.setdefault(tuple(table), list(table))


# --- reduce a file's columns


def reduce_all(ranks: Iterable[RankColumns]) -> list[RankDump]:
    """Reduce the columns of several files; equal tables become one object."""
    interner = Interner()
    return [reduce_dump(rows, interner) for rows in ranks]


def reduce_dump(rows: RankColumns, interner: Interner) -> RankDump:
    """Reduce the columns of one file to what diagnosis needs."""
    args, args_index, keep = _merge_coalesced(rows)
    sites, site = _user_sites(rows, keep)
    status = {
        name: rows.status[key] for key, name in rows.status_groups.items() if key in rows.status
    }
    dump = RankDump(
        **{name: getattr(rows, name) for name in _KEPT},
        possible_ranks=rows.possible_ranks if rows.rank < 0 else (),
        issued=rows.issued - (len(rows) - len(keep)),
        timed=bool(
            (rows.state == STARTED).any()
            or (rows.started_ns > 0).any()
            or any(started > 0 for _, started, _ in status.values())
        ),
        only_active=bool(len(rows))
        and not bool((rows.state >= COMPLETED).any())
        and int(rows.record_id[0]) > 0,
        unbroken=(
            len(rows)
            if len(rows) and int(rows.record_id[-1]) - int(rows.record_id[0]) + 1 == len(rows)
            else 0
        ),
        status=status,
        args=interner.args(args),
        stacks=interner.sites(sites),
        args_index=args_index[keep].astype("int32"),
        stack=site.astype("int32"),
        state=np.minimum(rows.state[keep], COMPLETED),
    )
    for name in ("channel", "sequence", "record_id", "created_ns", "completed_ns"):
        setattr(dump, name, getattr(rows, name)[keep])
    p2p = is_message(args, dump.args_index)
    dump.peer = np.where(p2p, rows.peer[keep], -1).astype("int32")
    dump.coalesced = np.where(p2p, rows.coalesced[keep], 0).astype("int32")
    return dump


def _merge_coalesced(rows: RankColumns) -> tuple[list[CollectiveArgs], Integers, Integers]:
    """Merge each coalesced group of collectives into one operation.

    Returns:
        The arguments, each row's index into them, and the rows to keep.
    """
    args = list(rows.args)
    index = rows.args_index.astype("int64").copy()
    keep = ~(rows.closes & rows.p2p)
    order = np.flatnonzero(rows.coalesced > 0)
    if not len(order):
        return args, index, np.flatnonzero(keep)
    order = order[np.argsort(rows.coalesced[order], kind="stable")]
    starts = np.flatnonzero(np.diff(rows.coalesced[order], prepend=0))
    merged: dict[tuple[int, ...], int] = {}
    for members in np.split(order, starts[1:]):
        if rows.p2p[members].any():
            continue
        inner = members[~rows.closes[members]]
        last = members[-1]
        keep[members] = False
        keep[last] = True
        parts = tuple(index[inner].tolist())
        key = (*parts, int(index[last]))
        if parts and len(members) > 1:
            if key not in merged:
                merged[key] = len(args)
                args.append(_combine([rows.args[i] for i in parts], rows.args[key[-1]]))
            index[last] = merged[key]
    return args, index, np.flatnonzero(keep)


def _combine(members: Sequence[CollectiveArgs], closing: CollectiveArgs) -> CollectiveArgs:
    """Return a coalesced group as one operation with the tensors of all members."""
    ops = {one.op for one in members}
    return msgspec.structs.replace(
        members[0],
        op=composite_wire_op(closing.dispatcher_op) or (ops.pop() if len(ops) == 1 else COALESCED),
        dispatcher_op="coalesced",
        inputs=tuple(spec for one in members for spec in one.inputs),
        outputs=tuple(spec for one in members for spec in one.outputs),
    )


def _user_sites(rows: RankColumns, keep: Integers) -> tuple[list[Stack], Integers]:
    """Return the distinct user lines of the kept rows' stacks, and each row's index into them."""
    stack = rows.stack[keep]
    used = np.unique(stack)
    places = np.full(int(used[-1]) + 2 if len(used) else 1, -1, "int64")
    sites: dict[Stack, int] = {}
    for number in used.tolist():
        if number >= 0:
            lines = _user_lines(rows.stacks[number])
            places[number] = sites.setdefault(lines, len(sites)) if lines else -1
    return list(sites), places[stack]


def _user_lines(stack: Stack) -> Stack:
    """Return the innermost lines of the user's code; if there are none, the innermost line of a
    library.
    """
    lines: tuple[Frame, ...] = tuple(frame for frame in stack if frame.kind is FrameKind.USER)[
        :_LINES
    ]
    if not lines:
        innermost = user_frame(stack)
        lines = (innermost,) if innermost is not None else ()
    return lines


def is_message(args: Sequence[CollectiveArgs], index: Integers) -> Integers:
    """Return which operations are sends or receives."""
    table = np.array([one.op in POINT_TO_POINT for one in args] or [False])
    found: Integers = table[index] if len(index) else np.zeros(0, "bool")
    return found


# --- columns as collectives


class SharedIds:
    """Integer ids of signatures and call sites, the same on all ranks, so that arrays of them can
    be compared.
    """

    def __init__(self) -> None:
        self._ids: dict[Hashable, int] = {}
        # By the id() of a table, which is kept, so that no other table gets the same id().
        self._of_tables: dict[int, tuple[object, Integers]] = {}

    def signatures(self, table: Sequence[CollectiveArgs]) -> Integers:
        """Return the id of each entry's signature."""
        return self._ids_of(table, map(_signature, table))

    def sites(self, table: Sequence[Stack]) -> Integers:
        """Return the id of each entry's innermost line, and at the end -1, which index -1 (no
        stack) reads.
        """
        return self._ids_of(table, (lines[0] if lines else None for lines in table))

    def _ids_of(self, table: object, values: Iterable[Hashable]) -> Integers:
        known = self._of_tables.get(id(table))
        if known is None:
            ids = [self._ids.setdefault(value, len(self._ids)) for value in values]
            known = self._of_tables[id(table)] = (table, np.array([*ids, -1], "int64"))
        return known[1]


def _signature(args: CollectiveArgs) -> Hashable:
    """Return what must be equal on all ranks, as far as other recorders show it: they omit the
    splits of all_to_all.
    """
    specs = args.payload
    if args.op in UNEVEN or not specs:
        return (args.op, frozenset(spec.dtype for spec in specs))
    return (args.op, tuple((spec.shape, spec.dtype) for spec in specs))


class RankOps:
    """One rank's operations by row. Each becomes an object once, on its first access."""

    def __init__(self, dump: RankDump, channels: Sequence[Channel], ids: SharedIds) -> None:
        self.dump = dump
        self.channels = channels
        self.ids = ids
        self._made: dict[int, Collective] = {}

    def op(self, row: int) -> Collective:
        """Return the operation of a row."""
        made = self._made.get(row)
        if made is None:
            made = self._made[row] = self._make(row)
        return made

    def _make(self, row: int) -> Collective:
        dump = self.dump
        site, peer = int(dump.stack[row]), int(dump.peer[row])
        done = int(dump.state[row]) == COMPLETED
        created = int(dump.created_ns[row])
        return Collective(
            index=int(dump.record_id[row]) + 1,
            channel=self.channels[int(dump.channel[row])],
            sequence_number=int(dump.sequence[row]),
            args=dump.args[int(dump.args_index[row])],
            state=State.COMPLETED if done else State.ISSUED,
            announced_ns=created,
            entered_ns=created,
            returned_ns=created,
            done_ns=int(dump.completed_ns[row]),
            learned_how=LearnedHow.NATIVE_RECORDER if done else LearnedHow.NOT_YET,
            stack=dump.stacks[site] if site >= 0 else (),
            peer=peer if peer >= 0 else None,
        )


class ColumnOps(Mapping[int, Collective]):
    """One rank's operations on one channel, by sequence number."""

    def __init__(self, columns: RankOps, rows: Integers) -> None:
        self.columns = columns
        numbers = columns.dump.sequence[rows]
        if len(numbers) > 1 and not (numbers[1:] > numbers[:-1]).all():
            # the last of those that share a number
            numbers, first = np.unique(numbers[::-1], return_index=True)
            rows = rows[::-1][first]
        self.rows = rows
        self.numbers = numbers

    def row(self, number: int) -> int | None:
        """Return the row of a sequence number; None if there is none."""
        at = int(np.searchsorted(self.numbers, number))
        return (
            int(self.rows[at])
            if at < len(self.numbers) and int(self.numbers[at]) == number
            else None
        )

    def __getitem__(self, number: int) -> Collective:
        row = self.row(number)
        if row is None:
            raise KeyError(number)
        return self.columns.op(row)

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and self.row(number) is not None

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers.tolist())

    def __len__(self) -> int:
        return len(self.numbers)

    def signatures(self) -> Integers:
        """Return the id of each operation's signature."""
        dump = self.columns.dump
        ids: Integers = self.columns.ids.signatures(dump.args)[dump.args_index[self.rows]]
        return ids

    def tokens(self) -> Integers:
        """Return an id of each operation's signature and source line."""
        dump = self.columns.dump
        sites: Integers = self.columns.ids.sites(dump.stacks)[dump.stack[self.rows]]
        return self.signatures() * (1 << 32) + sites


class ColumnHistory(Sequence[Collective]):
    """All operations of one rank, oldest first."""

    def __init__(self, columns: RankOps) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns.dump)

    @overload
    def __getitem__(self, index: int) -> Collective: ...
    @overload
    def __getitem__(self, index: slice) -> list[Collective]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self.columns.op(row) for row in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.columns.op(index)

    def texts(self) -> tuple[str, str]:
        """Return the history as two texts with one letter per operation: with its line and sizes,
        and without.
        """
        dump = self.columns.dump
        args = dump.args_index.astype("int64")
        sites = self.columns.ids.sites(dump.stacks)[dump.stack]
        codes: dict[str, int] = {}
        op = (
            np.array([codes.setdefault(one.op, len(codes)) for one in dump.args] or [0])[args]
            if len(dump)
            else args
        )
        where = dump.channel.astype("int64") * (1 << 20) + (dump.peer.astype("int64") + 1)
        return _letters(where, op, self._sizes(args), sites), _letters(where, op)

    def _sizes(self, args: Integers) -> Integers:
        """Return an id of each operation's sizes; -1 for all_to_all, whose sizes may vary from step
        to step.
        """
        if not len(args):
            return args
        varies = np.array([one.op == "all_to_all" for one in self.columns.dump.args])
        return np.where(varies[args], -1, args)


def _letters(*columns: Any) -> str:
    """Map each different row of several columns of numbers to one character."""
    code = np.zeros(len(columns[0]), "int64")
    for column in columns:
        _, column = np.unique(column, return_inverse=True)
        _, code = np.unique(code * (int(column.max(initial=0)) + 1) + column, return_inverse=True)
    code = code + 0x100
    code[code >= 0xD800] += 0x800
    return str(code.astype("<u4").tobytes().decode("utf-32-le"))
