"""The entries around a fault, side by side: one column for all ranks that did the same.

Collectives of one process group are aligned by their numbers. Messages have no number that ranks share, so they stand in the order
in which each rank issued them. A rank's file is read, reduced to a :class:`RankEntries`, and forgotten.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from commlens.dumps.discover import discover
from commlens.dumps.parallel import read_ranks, reduce_foreign
from commlens.dumps.sources import Paths
from commlens.model.collective import Channel, CollectiveArgs, Stack, user_frame
from commlens.model.entries import Cell, Column, EntryTable
from commlens.model.ops import BARRIERS, POINT_TO_POINT
from commlens.model.verdict import Verdict
from commlens.text import group_phrase, tensors_phrase

if TYPE_CHECKING:
    from commlens.formats.columns import Integers, RankColumns

__all__ = ["RankEntries", "Wanted", "entries_in", "entries_of", "lay_out", "wanted_by"]

_BESIDE = 200  # numbers kept on both sides of the fault, and at the end where there is none
_ENDS = ("in flight", "started", "done", "retired")


class Wanted(msgspec.Struct, frozen=True):
    """Which entries to show."""

    group: str = ""  # name, description or mesh dimension; "" the group that is used most
    ranks: tuple[int, ...] = ()  # of that group, where names are not unique
    sequence: int = 0  # the fault; 0 the newest entries
    messages: bool = False
    only: frozenset[int] | None = None  # ranks to show
    culprits: tuple[int, ...] = ()
    kind: str = ""  # of the finding


class RankEntries(msgspec.Struct):
    """One rank's entries on the group, and where it is otherwise."""

    rank: int
    group: str = ""  # "group dp [0-3]"
    cells: dict[int, Cell] = {}
    first: int = 0  # the oldest number that the rank's ring still holds
    newest: int = 0
    elsewhere: str = ""  # what it has in flight on other groups, first of all


def wanted_by(verdict: Verdict, groups: Sequence[str] = (), only: Collection[int] | None = None) -> Wanted:
    """What the verdict speaks of; another group or other ranks where these are asked for."""
    group, collective = verdict.group, verdict.collective
    chosen = frozenset(only) if only is not None else None
    named = {group.name, group.description} if group is not None else set()
    if groups and not named & set(groups):
        return Wanted(groups[0], only=chosen, culprits=tuple(verdict.culprits), kind=verdict.kind)
    messages = collective is not None and collective.op in POINT_TO_POINT
    return Wanted(
        group=group.name if group is not None else "",
        ranks=tuple(group.ranks) if group is not None else (),
        sequence=collective.sequence_number if collective is not None and not messages else 0,
        messages=messages,
        only=chosen,
        culprits=tuple(verdict.culprits),
        kind=verdict.kind,
    )


def entries_of(rows: RankColumns, wanted: Wanted) -> RankEntries | None:
    """A rank's entries on the group; None when it has none there and is no member of it."""
    import numpy as np

    if wanted.only is not None and rows.rank not in wanted.only:
        return None
    number = _channel(rows, wanted)
    if number is None:
        member = rows.rank in wanted.ranks
        return RankEntries(rows.rank, elsewhere=_elsewhere(rows, -1)) if member or (not wanted.group and not len(rows)) else None
    on_group = rows.channel == number
    found = RankEntries(rows.rank, group_phrase(rows.channels[number].group), elsewhere=_elsewhere(rows, number, wanted.messages))
    if wanted.messages:
        chosen = np.flatnonzero(on_group & rows.p2p & ~rows.closes)[-_BESIDE:]
        for place, at in enumerate(chosen.tolist(), start=1 - len(chosen)):
            found.cells[place] = _cell(rows, [at])
        return found
    mine = np.flatnonzero(on_group & ~rows.p2p)
    if not len(mine):
        return found
    numbers = rows.sequence[mine]
    found.first, found.newest = int(numbers.min()), int(numbers.max())
    middle = wanted.sequence or found.newest
    near: dict[int, list[int]] = defaultdict(list)
    for at in mine[abs(numbers - middle) <= _BESIDE].tolist():
        near[int(rows.sequence[at])].append(at)
    found.cells = {sequence: _cell(rows, ats) for sequence, ats in near.items()}
    return found


def entries_in(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | Paths,
    wanted: Wanted,
    *,
    prefix: str = "",
    executor: Executor | None = None,
) -> list[RankEntries]:
    """Of every rank whose dump lies there. What cannot be read is passed over: the verdict has said so."""
    files = discover(paths, prefix=prefix)
    ranks = wanted.only if wanted.only is not None else (frozenset(wanted.ranks) or None)
    if files.own:
        return reduce_entries(read_ranks(files, [], ranks=ranks), wanted)
    found: dict[int, RankEntries] = {}
    for one in reduce_foreign(files, partial(reduce_entries, wanted=wanted), [], executor=executor, ranks=ranks):
        known = found.get(one.rank)
        if known is None or len(known.cells) < len(one.cells):
            found[one.rank] = one
    return list(found.values())


def reduce_entries(several: Iterable[RankColumns], wanted: Wanted) -> list[RankEntries]:
    """What :func:`entries_of` makes of each."""
    return [found for rows in several if (found := entries_of(rows, wanted)) is not None]


def lay_out(several: Iterable[RankEntries], wanted: Wanted, *, rows: int, columns: int) -> EntryTable:
    """Put the ranks that did the same into one column, and choose the numbers around the fault.

    Args:
        several: of each rank.
        wanted: what they were made for.
        rows: at most so many numbers.
        columns: at most so many columns; those of most ranks are kept, and those to blame.
    """
    ranks = sorted(several, key=lambda one: one.rank)
    group = Counter(one.group for one in ranks if one.group).most_common(1)
    fault = wanted.sequence if any(wanted.sequence in one.cells for one in ranks) else 0
    numbers = _numbers(ranks, fault, rows)
    kinds: dict[tuple[object, ...], list[RankEntries]] = defaultdict(list)
    for one in ranks:
        blamed = one.rank in wanted.culprits
        key = tuple((cell.what, cell.end) if (cell := one.cells.get(number)) else number < one.first for number in numbers)
        kinds[(blamed, *key)].append(one)
    ordered = sorted(kinds.items(), key=lambda item: (not item[0][0], not _flying(item[1][0]), -len(item[1]), item[1][0].rank))
    kept, dropped = ordered[:columns], ordered[columns:]
    elsewhere: dict[str, list[int]] = defaultdict(list)
    for one in ranks:
        if one.elsewhere:
            elsewhere[one.elsewhere].append(one.rank)
    by_weight = sorted(elsewhere.items(), key=lambda item: (not set(item[1]) & set(wanted.culprits), -len(item[1]), item[1]))
    return EntryTable(
        group=group[0][0] if group else "",
        numbers=numbers,
        columns=[_column(members, numbers, bool(key[0]), wanted, fault) for key, members in kept],
        fault=fault,
        messages=wanted.messages,
        elsewhere=[(members, text) for text, members in by_weight],
        left_out=sorted(one.rank for _, members in dropped for one in members),
        kinds_left_out=len(dropped),
    )


def _numbers(ranks: Sequence[RankEntries], fault: int, rows: int) -> list[int]:
    there = sorted({number for one in ranks for number in one.cells})
    if len(there) <= rows:
        return there
    if not fault:
        return there[-rows:]
    after = min(rows // 3, sum(number > fault for number in there))
    end = there.index(fault) + after + 1
    return there[max(0, end - rows) : max(end, rows)]


def _flying(one: RankEntries) -> bool:
    return any(cell.end in ("in flight", "started") for cell in one.cells.values())


def _column(members: Sequence[RankEntries], numbers: Sequence[int], blamed: bool, wanted: Wanted, fault: int) -> Column:
    first = members[0]
    if blamed and wanted.kind != "healthy":
        role = "to blame"
    else:
        cell = first.cells.get(fault) if fault else None
        role = "waiting" if cell is not None and cell.end in ("in flight", "started") else ""
    return Column(
        ranks=[one.rank for one in members],
        cells=[first.cells.get(number) for number in numbers],
        forgotten=[number < first.first for number in numbers],
        role=role,
    )


def _channel(rows: RankColumns, wanted: Wanted) -> int | None:
    """The place of the wanted group among the rank's channels: of several incarnations the last."""
    import numpy as np

    if not len(rows):
        return None
    if not wanted.group:
        counts = np.bincount(rows.channel[~rows.p2p], minlength=len(rows.channels)) * [len(one.group.ranks) or 1 for one in rows.channels]
        return int(counts.argmax()) if len(counts) else None
    fitting = [place for place, one in enumerate(rows.channels) if _fits(one, wanted)]
    return max(fitting, key=lambda place: (one_count(rows.channel, place) > 0, place), default=None)


def one_count(channel: Integers, place: int) -> int:
    """How many operations a rank issued on a channel."""
    return int((channel == place).sum())


def _fits(channel: Channel, wanted: Wanted) -> bool:
    group = channel.group
    called = wanted.group in (group.name, group.name.split("@")[0], group.description, group.label)
    return called and (not wanted.ranks or not group.ranks or set(group.ranks) == set(wanted.ranks))


def _cell(rows: RankColumns, ats: Sequence[int]) -> Cell:
    """One collective, or the members of a coalesced group as one."""
    members = [at for at in ats if not rows.closes[at]] or list(ats)
    ops = Counter(_op(rows.args[int(rows.args_index[at])], int(rows.peer[at])) for at in members)
    op = ", ".join(f"{count} x {name}" if count > 1 else name for name, count in ops.items())
    tensors = " ".join(dict.fromkeys(_tensors(rows.args[int(rows.args_index[at])]) for at in members))
    last = ats[-1]
    stack: Stack = rows.stacks[int(rows.stack[last])] if rows.stack[last] >= 0 else ()
    frame = user_frame(stack)
    return Cell(op, tensors, _ENDS[int(rows.state[last])], f"{frame.where} {frame.function}" if frame is not None else "", stack)


def _op(asked: CollectiveArgs, peer: int) -> str:
    return asked.op + ("" if peer < 0 else f" to {peer}" if asked.op == "send" else f" from {peer}")


def _tensors(asked: CollectiveArgs) -> str:
    specs = asked.payload
    if not specs or asked.op in BARRIERS:
        return ""
    if asked.op == "all_to_all":  # its sizes differ from rank to rank, as they may
        return " ".join(dict.fromkeys(f"{one.dtype}[...]" for one in specs))
    return tensors_phrase(specs) + (f" {asked.reduce_op}" if asked.reduce_op else "")


def _elsewhere(rows: RankColumns, number: int, messages: bool = False) -> str:
    """The first operation in flight that is not among those shown."""
    import numpy as np

    flying = np.flatnonzero(
        (rows.state < 2) & ~((rows.channel == number) & (rows.p2p == messages)) & ~((rows.coalesced > 0) & ~rows.closes)
    )
    if not len(flying):
        return ""
    at = int(flying[0])
    asked = rows.args[int(rows.args_index[at])]
    group = rows.channels[int(rows.channel[at])].group
    return f"{asked.op} #{int(rows.sequence[at])} of {group_phrase(group)}"
