"""Lay out the entries around a fault side by side, with a column for all ranks that did the same::

         rank 2                      ranks 0-1,3
    40   all_reduce float32[4]       all_reduce float32[4]
    41   all_gather, in flight       all_reduce, in flight

Collectives of a process group are aligned by sequence number. Ranks share no numbers for messages,
so each rank's messages are listed in the order in which it issued them. Each rank's file is read,
reduced to :class:`RankEntries`, and dropped.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from commlens.diagnosis.index.job_index import JobIndex
from commlens.dumps.discover import discover
from commlens.dumps.parallel import read_ranks, reduce_foreign
from commlens.dumps.sources import Paths
from commlens.model.collective import Channel, CollectiveArgs, user_frame
from commlens.model.entries import Column, EntryCell, EntryTable
from commlens.model.grouping import grouped
from commlens.model.ops import BARRIERS, POINT_TO_POINT
from commlens.model.verdict import NOTHING_FOUND, Verdict
from commlens.text import frame_phrase, group_phrase, tensors_phrase

if TYPE_CHECKING:
    from commlens.formats.columns import RankColumns

_BESIDE = 200  # sequence numbers kept on each side of the fault, or of the newest entry
_ENDS = ("in flight", "started", "done", "retired")  # by state


class EntrySelection(msgspec.Struct, frozen=True):
    """Selects the entries to show."""

    group: str = ""  # name, description or mesh dimension; "": the group with the most traffic
    ranks: tuple[int, ...] = ()  # of that group, where names are not unique
    sequence: int = 0  # sequence number of the fault; 0: the newest entries
    messages: bool = False  # show sends and receives, not collectives
    only: frozenset[int] | None = None  # ranks to show
    culprits: tuple[int, ...] = ()
    kind: str = ""  # of the finding


class RankEntries(msgspec.Struct):
    """One rank's entries on the group, and its op in flight elsewhere."""

    rank: int
    group: str = ""  # "group dp [0-3]"
    cells: dict[int, EntryCell] = {}  # by sequence number
    # the oldest sequence number that the rank's ring buffer still holds; by default below all
    # numbers
    first: int = -_BESIDE
    elsewhere: str = ""  # the oldest op in flight that the table does not show


def select_entries(verdict: Verdict, only: Collection[int] | None = None) -> EntrySelection:
    """Select the group and the collective of the verdict, and the requested ranks."""
    group, collective = verdict.group, verdict.collective
    messages = collective is not None and collective.op in POINT_TO_POINT
    return EntrySelection(
        group=group.name if group is not None else "",
        ranks=tuple(group.ranks) if group is not None else (),
        sequence=collective.sequence_number if collective is not None and not messages else 0,
        messages=messages,
        only=frozenset(only) if only is not None else None,
        culprits=tuple(verdict.culprits),
        kind=verdict.kind,
    )


def select_group(job: JobIndex, name: str, fault: EntrySelection) -> list[EntrySelection]:
    """Select the collectives and the messages of every group with a name, the group of the fault
    first.
    """
    found: dict[tuple[str, tuple[int, ...]], None] = {}
    for channel in job.channels.values():
        if _is_selected(channel, EntrySelection(name)):
            found[channel.group.name.split("@")[0], channel.group.ranks] = None
    of_fault = (fault.group.split("@")[0], fault.ranks)
    selections = []
    for group, ranks in sorted(found, key=lambda each: (each != of_fault, each[1])):
        if fault.only is None or fault.only & set(ranks):
            sequence = fault.sequence if (group, ranks) == of_fault else 0
            chosen = msgspec.structs.replace(
                fault, group=group, ranks=ranks, sequence=sequence, messages=False
            )
            selections += [chosen, msgspec.structs.replace(chosen, sequence=0, messages=True)]
    return selections


# --- one rank's entries


def read_entries(
    job: JobIndex,
    paths: Paths,
    selections: Sequence[EntrySelection],
    *,
    prefix: str = "",
) -> list[list[RankEntries]]:
    """Return each rank's entries, for each selection.

    Black boxes are in the job's index. Other tools' dumps are read again, the selected ranks only:
    diagnosis does not keep all of their entries and stacks. Skips unreadable files, which the
    verdict has reported.
    """
    if not job.foreign:
        from commlens.formats.rank_log_columns import columns_from_log

        collected: Iterable[tuple[int, RankEntries]] = _collect_all(
            (columns_from_log(view.log) for view in job.views.values() if view.log.issued),
            selections,
        )
    else:
        files = discover(paths, prefix=prefix)
        ranks = _ranks_of(selections)
        if files.own:
            collected = _collect_all(read_ranks(files, [], ranks=ranks), selections)
        else:
            collected = reduce_foreign(
                files, partial(_collect_all, selections=selections), [], ranks=ranks
            )
    found: list[dict[int, RankEntries]] = [{} for _ in selections]
    for at, one in collected:
        known = found[at].get(one.rank)
        if known is None or len(known.cells) < len(one.cells):
            found[at][one.rank] = one
    return [list(by_rank.values()) for by_rank in found]


def _ranks_of(selections: Sequence[EntrySelection]) -> frozenset[int] | None:
    """Return the ranks to read; None for all."""
    if all(one.only is not None or one.ranks for one in selections):
        return frozenset(
            rank for one in selections for rank in (one.only if one.only is not None else one.ranks)
        )
    return None


def _collect_all(
    dumps: Iterable[RankColumns], selections: Sequence[EntrySelection]
) -> list[tuple[int, RankEntries]]:
    """Return the entries of each dump with the indices of the selections that they belong to."""
    found = (
        (at, collect_entries(rows, selection))
        for rows in dumps
        for at, selection in enumerate(selections)
    )
    return [(at, entries) for at, entries in found if entries is not None]


def collect_entries(rows: RankColumns, selection: EntrySelection) -> RankEntries | None:
    """Return a rank's entries on the selected group; None if it has none and is no member of the
    group.
    """
    import numpy as np

    if selection.only is not None and rows.rank not in selection.only:
        return None
    channel = _select_channel(rows, selection)
    if channel is None:
        is_member = rows.rank in selection.ranks or (not selection.group and not len(rows))
        return (
            RankEntries(rows.rank, elsewhere=_in_flight_elsewhere(rows, -1)) if is_member else None
        )
    on_group = rows.channel == channel
    elsewhere = _in_flight_elsewhere(rows, channel, selection.messages)
    entries = RankEntries(
        rows.rank, group_phrase(rows.channels[channel].group), elsewhere=elsewhere
    )
    if selection.messages:
        newest = np.flatnonzero(on_group & rows.p2p & ~rows.closes)[-_BESIDE:]
        entries.cells = {
            place: _cell(rows, [row])
            for place, row in enumerate(newest.tolist(), start=1 - len(newest))
        }
        return entries
    own = np.flatnonzero(on_group & ~rows.p2p)
    if not len(own):
        return entries
    numbers = rows.sequence[own]
    entries.first = int(numbers.min())
    middle = selection.sequence or int(numbers.max())
    near = grouped(
        (int(rows.sequence[row]), row) for row in own[abs(numbers - middle) <= _BESIDE].tolist()
    )
    entries.cells = {number: _cell(rows, several) for number, several in near.items()}
    return entries


def _select_channel(rows: RankColumns, selection: EntrySelection) -> int | None:
    """Return the index of the selected group among the rank's channels: of several incarnations,
    the last that has entries.
    """
    import numpy as np

    if not len(rows):
        return None
    if not selection.group:
        traffic = np.bincount(rows.channel[~rows.p2p], minlength=len(rows.channels)) * [
            len(one.group.ranks) or 1 for one in rows.channels
        ]
        return int(traffic.argmax()) if len(traffic) else None
    matching = [
        index for index, channel in enumerate(rows.channels) if _is_selected(channel, selection)
    ]
    return max(
        matching, key=lambda index: (bool((rows.channel == index).any()), index), default=None
    )


def _is_selected(channel: Channel, selection: EntrySelection) -> bool:
    group = channel.group
    named = selection.group in (
        group.name,
        group.name.split("@")[0],
        group.description,
        group.label,
    )
    return named and (
        not selection.ranks or not group.ranks or set(group.ranks) == set(selection.ranks)
    )


def _cell(rows: RankColumns, several: Sequence[int]) -> EntryCell:
    """Return the cell of one collective, or of a coalesced group's members."""
    members = [row for row in several if not rows.closes[row]] or several
    args = [rows.args[int(rows.args_index[row])] for row in members]
    ops = Counter(_op(each, int(rows.peer[row])) for each, row in zip(args, members, strict=True))
    op = ", ".join(f"{count} x {name}" if count > 1 else name for name, count in ops.items())
    last = several[-1]
    stack = rows.stack_at(last)
    return EntryCell(
        op,
        " ".join(dict.fromkeys(map(_tensors, args))),
        _ENDS[int(rows.state[last])],
        frame_phrase(user_frame(stack)),
        stack,
    )


def _op(args: CollectiveArgs, peer: int) -> str:
    return args.op + ("" if peer < 0 else f" to {peer}" if args.op == "send" else f" from {peer}")


def _tensors(args: CollectiveArgs) -> str:
    specs = args.payload
    if not specs or args.op in BARRIERS:
        return ""
    if args.op == "all_to_all":  # its sizes may differ between ranks
        return " ".join(dict.fromkeys(f"{one.dtype}[...]" for one in specs))
    return tensors_phrase(specs) + (f" {args.reduce_op}" if args.reduce_op else "")


def _in_flight_elsewhere(rows: RankColumns, channel: int, messages: bool = False) -> str:
    """Return the oldest operation in flight that the table does not show; empty if there is
    none.
    """
    import numpy as np

    shown = (rows.channel == channel) & (rows.p2p == messages)
    in_flight = np.flatnonzero((rows.state < 2) & ~shown & ~((rows.coalesced > 0) & ~rows.closes))
    if not len(in_flight):
        return ""
    row = int(in_flight[0])
    op, group = rows.args[int(rows.args_index[row])].op, rows.channels[int(rows.channel[row])].group
    return f"{op} #{int(rows.sequence[row])} of {group_phrase(group)}"


# --- the tables of all ranks


def lay_out_groups(
    entries: Sequence[Iterable[RankEntries]],
    selections: Sequence[EntrySelection],
    *,
    rows: int,
    columns: int,
) -> list[EntryTable]:
    """Return a table for each selection of a group's collectives or messages that has entries,
    those with ops in flight first.
    """
    tables = [
        lay_out(found, chosen, rows=rows, columns=columns)
        for found, chosen in zip(entries, selections, strict=True)
    ]
    filled = [table for table in tables if table.numbers]
    return sorted(filled, key=lambda table: (not table.fault, not table.has_open))


def lay_out(
    entries: Iterable[RankEntries], selection: EntrySelection, *, rows: int, columns: int
) -> EntryTable:
    """Put the ranks that did the same into one column, and choose the sequence numbers around the
    fault.

    At most ``rows`` numbers and ``columns`` columns: culprits first, then ranks with an op in
    flight, then the most common kinds.
    """
    ranks = sorted(entries, key=lambda one: one.rank)
    group = Counter(one.group for one in ranks if one.group).most_common(1)
    fault = selection.sequence if any(selection.sequence in one.cells for one in ranks) else 0
    numbers = _numbers(ranks, fault, rows)
    kinds: dict[tuple[object, ...], list[RankEntries]] = defaultdict(list)
    for one in ranks:
        did = (
            (cell.what, cell.end) if (cell := one.cells.get(number)) else number < one.first
            for number in numbers
        )
        key = (one.rank not in selection.culprits, *did)
        kinds[key].append(one)
    ordered = sorted(
        kinds.items(),
        key=lambda item: (
            item[0][0],
            not any(cell.is_open for cell in item[1][0].cells.values()),
            -len(item[1]),
            item[1][0].rank,
        ),
    )
    kept, dropped = ordered[:columns], ordered[columns:]
    elsewhere = grouped((one.elsewhere, one.rank) for one in ranks)
    elsewhere.pop("", None)
    culprits_first = sorted(
        elsewhere.items(),
        key=lambda item: (not set(item[1]) & set(selection.culprits), -len(item[1]), item[1]),
    )
    return EntryTable(
        group=group[0][0] if group else "",
        numbers=numbers,
        columns=[_column(kind, numbers, selection, fault) for _, kind in kept],
        fault=fault,
        messages=selection.messages,
        elsewhere=[(members, text) for text, members in culprits_first],
        left_out=sorted(one.rank for _, kind in dropped for one in kind),
        kinds_left_out=len(dropped),
    )


def _numbers(ranks: Sequence[RankEntries], fault: int, rows: int) -> list[int]:
    """Choose the rows: the newest numbers, or the numbers around the fault, up to a third of them
    after it.
    """
    numbers = sorted({number for one in ranks for number in one.cells})
    if len(numbers) <= rows:
        return numbers
    if not fault:
        return numbers[-rows:]
    after = min(rows // 3, sum(number > fault for number in numbers))
    end = numbers.index(fault) + after + 1
    return numbers[max(0, end - rows) : max(end, rows)]


def _column(
    kind: Sequence[RankEntries], numbers: Sequence[int], selection: EntrySelection, fault: int
) -> Column:
    first = kind[0]
    if first.rank in selection.culprits and selection.kind not in NOTHING_FOUND:
        role = "culprit"
    else:
        cell = first.cells.get(fault) if fault else None
        role = "waiting" if cell is not None and cell.is_open else ""
    return Column(
        ranks=[one.rank for one in kind],
        cells=[first.cells.get(number) for number in numbers],
        forgotten=[number < first.first for number in numbers],
        role=role,
    )
