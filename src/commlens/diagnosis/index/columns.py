"""Hold other tools' dumps as columns: one array value per operation, turned into
:class:`Collective` objects only on access.

Thousands of ranks with thousands of operations are too many for objects. In columns, the operation
in row 7 has its sequence number in ``dump.sequence[7]``, and ``dump.args_index[7]`` is the place of
its arguments in the table ``dump.args``, which all operations with equal arguments share.

First, :func:`reduce_dump` makes the columns of one file smaller, in a worker process: a coalesced
group becomes one operation, an entry that only closes a point-to-point batch is dropped, and of
each stack only the lines of the user's code are kept. Then an :class:`Interner` stores once what
many ranks share. ``RankOps(dump, ...)[7]`` is row 7 as a collective, ``ColumnOps(...)[40]`` the
collective with number 40 of one channel. :func:`differing_numbers` compares ranks without making
any.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar, overload

import numpy as np
from msgspec.structs import replace

from commlens.formats.columns import COMPLETED, DTYPES, RETIRED, STARTED, Integers, RankColumns
from commlens.model.collective import (
    Channel,
    Collective,
    CollectiveArgs,
    LearnedHow,
    Stack,
    State,
    user_frame,
    user_lines,
)
from commlens.model.ops import COALESCED, POINT_TO_POINT, UNEVEN, composite_wire_op

_LINES = 4  # of the user's code kept of each stack
T = TypeVar("T")

# columns that only the reduction reads
_DROPPED = ("op_id", "retired", "p2p", "started_ns", "duration_ns", "timeout_ms", "closes")


class Interner:
    """Keeps one object of each table that many ranks share, so that it is stored once."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def intern(self, dump: RankColumns) -> RankColumns:
        """Replace the shared values of a dump by this interner's objects."""
        one = self._known.setdefault
        dump.args = one(tuple(dump.args), dump.args)
        dump.call_stacks = one(tuple(dump.call_stacks), dump.call_stacks)
        dump.channels = [one(each, each) for each in dump.channels]
        dump.groups = [one(each, each) for each in dump.groups]
        return dump


# --- reduce a file's columns


def reduce_all(ranks: Iterable[RankColumns]) -> list[RankColumns]:
    """Reduce the columns of several files."""
    return [reduce_dump(rows) for rows in ranks]


def reduce_dump(rows: RankColumns) -> RankColumns:
    """Return the columns of one file, reduced to what diagnosis needs: one row per operation, the
    user's lines as stacks.

    ``state`` is at most ``COMPLETED``, also for an operation that its recorder no longer tracks;
    ``RETIRED`` where that may be in flight, until the dumps are indexed. ``coalesced`` numbers the
    batches of point-to-point operations only. ``possible_ranks`` is empty if the rank is known.
    """
    args, args_index, keep = _merge_coalesced(rows)
    sites, site = _user_sites(rows, keep)
    first, last = map(int, rows.record_id[[0, -1]]) if len(rows) else (0, 0)
    dump = replace(
        rows,
        possible_ranks=rows.possible_ranks if rows.rank < 0 else (),
        issued=rows.issued - (len(rows) - len(keep)),
        timed=bool(
            (rows.state == STARTED).any()
            or (rows.started_ns > 0).any()
            or any(started > 0 for _, started, _ in rows.status.values())
        ),
        only_active=bool(first > 0) and not bool((rows.state >= COMPLETED).any()),
        unbroken=len(rows) if last - first + 1 == len(rows) else 0,
        args=args,
        call_stacks=sites,
        args_index=args_index[keep].astype("int32"),
        stack=site.astype("int32"),
        state=np.minimum(
            rows.state[keep], RETIRED if rows.issued_only or rows.issued_messages else COMPLETED
        ),
        **{name: np.zeros(0, DTYPES[name]) for name in _DROPPED},
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
        if rows.p2p[members].any():  # a batch of messages: each is an operation of its own
            continue
        inner = members[~rows.closes[members]]  # without the entry that closes the group
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
    return replace(
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
            stack_lines = tuple(islice(user_lines(rows.call_stacks[number]), _LINES))
            # without lines of the user's code, the innermost line of a library
            lines = stack_lines or tuple(filter(None, [user_frame(rows.call_stacks[number])]))
            places[number] = sites.setdefault(lines, len(sites)) if lines else -1
    return list(sites), places[stack]


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

    def of(self, table: Sequence[T], value_of: Callable[[T], Hashable]) -> Integers:
        """Return the id of each entry's value, and at the end -1, which index -1 (none) reads."""
        known = self._of_tables.get(id(table))
        if known is None:
            ids = [self._ids.setdefault(value_of(one), len(self._ids)) for one in table]
            known = self._of_tables[id(table)] = (table, np.array([*ids, -1], "int64"))
        return known[1]


def _signature(args: CollectiveArgs) -> Hashable:
    """Return what must be equal on all ranks, as far as other recorders show it: of an all_to_all,
    whose sizes may differ, they omit the splits.
    """
    specs = args.payload
    if args.op in UNEVEN or not specs:
        return (args.op, frozenset(spec.dtype for spec in specs))
    return (args.op, tuple((spec.shape, spec.dtype) for spec in specs))


class RankOps(Sequence[Collective]):
    """All operations of one rank, oldest first. Each becomes an object once, on its first
    access.
    """

    def __init__(self, dump: RankColumns, channels: Sequence[Channel], ids: SharedIds) -> None:
        self.dump = dump
        self.channels = channels
        self.ids = ids
        self._made: dict[int, Collective] = {}

    def __len__(self) -> int:
        return len(self.dump)

    @overload
    def __getitem__(self, index: int) -> Collective: ...
    @overload
    def __getitem__(self, index: slice) -> list[Collective]: ...
    def __getitem__(self, index: Any) -> Any:
        rows = range(len(self))[index]
        return self.op(rows) if isinstance(rows, int) else list(map(self.op, rows))

    def op(self, row: int) -> Collective:
        """Return the operation of a row."""
        made = self._made.get(row)
        if made is None:
            dump = self.dump
            site, peer = int(dump.stack[row]), int(dump.peer[row])
            done = int(dump.state[row]) == COMPLETED
            created = int(dump.created_ns[row])
            made = self._made[row] = Collective(
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
                stack=dump.call_stacks[site] if site >= 0 else (),
                peer=peer if peer >= 0 else None,
            )
        return made


class ColumnOps(Mapping[int, Collective]):
    """One rank's operations on one channel, by sequence number."""

    def __init__(self, columns: RankOps, rows: Integers) -> None:
        self.columns = columns
        numbers = columns.dump.sequence[rows]
        if len(numbers) > 1 and not (numbers[1:] > numbers[:-1]).all():
            # Of records that share a number, keep the last. Reversed, it is the first of them.
            numbers, first = np.unique(numbers[::-1], return_index=True)
            rows = rows[::-1][first]
        self.rows = rows
        self.numbers = numbers

    def __getitem__(self, number: int) -> Collective:
        at = int(np.searchsorted(self.numbers, number))
        if at == len(self.numbers) or self.numbers[at] != number:
            raise KeyError(number)
        return self.columns.op(int(self.rows[at]))

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers.tolist())

    def __len__(self) -> int:
        return len(self.numbers)

    def signatures(self) -> Integers:
        """Return the id of each operation's signature."""
        dump = self.columns.dump
        ids: Integers = self.columns.ids.of(dump.args, _signature)[dump.args_index[self.rows]]
        return ids

    def tokens(self) -> Integers:
        """Return an id of each operation's signature and source line, each in 32 bits."""
        dump = self.columns.dump
        sites: Integers = self.columns.ids.of(
            dump.call_stacks, lambda stack: stack[0] if stack else None
        )[dump.stack[self.rows]]
        return self.signatures() * (1 << 32) + sites


_NUMBERS_MAX = 256  # of one channel: later differences follow from the first one
_RANKS_OF_A_KIND = 3  # that represent all ranks with equal ops and lines
_KINDS_MAX = 24


def differing_numbers(ranks: Iterable[Mapping[int, Collective]]) -> list[int]:
    """Return the sequence numbers under which ranks' arguments differ, ascending."""
    columns = ((ops.numbers, ops.signatures()) for ops in ranks if isinstance(ops, ColumnOps))
    # most ranks have the same numbers and signatures: one of each kind is enough
    kinds = {(one.tobytes(), other.tobytes()): (one, other) for one, other in columns}
    if len(kinds) < 2:
        return []
    numbers, signatures = map(np.concatenate, zip(*kinds.values(), strict=True))
    order = np.lexsort((signatures, numbers))
    numbers, signatures = numbers[order], signatures[order]
    differ = (numbers[1:] == numbers[:-1]) & (signatures[1:] != signatures[:-1])
    found: list[int] = np.unique(numbers[1:][differ])[:_NUMBERS_MAX].tolist()
    return found


def representatives(by_rank: Mapping[int, Mapping[int, Collective]]) -> dict[int, list[int]]:
    """Return a few ranks of each kind, each with the ranks that it stands for, itself included, if
    ops or lines differ between ranks; none if all are equal. Ranks are of one kind if they are
    equal in the numbers that all of them have.
    """
    columns = {rank: ops for rank, ops in by_rank.items() if isinstance(ops, ColumnOps)}
    first = max(int(ops.numbers[0]) for ops in columns.values())
    last = min(int(ops.numbers[-1]) for ops in columns.values())
    kinds: dict[bytes, list[int]] = {}
    for rank, ops in sorted(columns.items()):
        begin, end = np.searchsorted(ops.numbers, [first, last + 1])
        value = ops.tokens()
        kinds.setdefault(
            value[begin:end].tobytes() if first <= last else value.tobytes(), []
        ).append(rank)
    if len(kinds) < 2:
        return {}
    largest = sorted(kinds.values(), key=lambda ranks: (-len(ranks), ranks))
    return {
        rank: ranks[at::_RANKS_OF_A_KIND]
        for ranks in largest[:_KINDS_MAX]
        for at, rank in enumerate(ranks[:_RANKS_OF_A_KIND])
    }
