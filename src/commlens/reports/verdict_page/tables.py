"""Tables of the collectives around the fault, side by side: by sequence number on one group, and in the order of issue."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from commlens.diagnosis.index import ChannelKey, Track
from commlens.model.collective import Collective, State
from commlens.reports.verdict_page.data import Cell, CellState, Role, Table, TableColumn, TableRow
from commlens.reports.verdict_page.job import Job, phrase
from commlens.text import args_phrase, count, duration, format_ranks, frame_phrase, group_label, group_phrase, ranks_phrase

_TABLES_MAX = 6
_OF_A_LABEL = 2
_BEFORE, _AFTER = 5, 4
_COLUMNS_MAX = 10
_LAST_MAX = 12
_LATE_NS = 1_000_000
_STATES: dict[State, CellState] = {
    State.COMPLETED: "completed",
    State.ANNOUNCED: "in-flight",
    State.ISSUED: "in-flight",
    State.FAILED: "failed",
}
_Signature = tuple[Role, tuple[object, ...]]
_ORDER: tuple[Role, ...] = ("culprit", "awaited", "involved", "victim", "unknown", "none")


def tables(job: Job) -> list[Table]:
    """Return one table for each group with a fault or a wait, and one of all collectives in the order of issue."""
    centres: dict[ChannelKey, int] = {}
    named = {(key, number) for key, number, _ in job.focus}
    for key, number, _ in job.focus:
        centres.setdefault(key, number)
    held: Counter[ChannelKey] = Counter()
    first: dict[ChannelKey, int] = {}
    for node in job.graph.blocks.values():
        if not node.op.is_point_to_point and node.op.sequence_number:
            key = node.op.channel.key
            held[key] += 1
            first[key] = min(first.get(key, node.op.sequence_number), node.op.sequence_number)
    by_label: Counter[str] = Counter()
    blamed = {rank for rank, role in job.roles.items() if role in ("culprit", "awaited")}
    for key, _ in sorted(held.items(), key=lambda item: (blamed.isdisjoint(item[0][2]), -item[1], item[0])):
        name = job.world.channels[key].group.label
        by_label[name] += 1
        if by_label[name] <= _OF_A_LABEL:  # the many groups of one mesh dimension look alike
            centres.setdefault(key, first[key])
    left_out = max(0, len(centres) - _TABLES_MAX)
    made = [_aligned(job, key, number, {n for k, n in named if k == key}) for key, number in list(centres.items())[:_TABLES_MAX]]
    if left_out and made:
        made[-1].left_out += f" {left_out} more groups in which ranks wait have no table."
    if job.world.views and any(view.history for view in job.world.views.values()):
        made.append(_in_order(job))
    return made


# --- by sequence number ------------------------------------------------------------------------------------------


def _aligned(job: Job, key: ChannelKey, centre: int, named: set[int]) -> Table:
    views = job.world.views
    channel = job.world.channels[key]
    tracks = {rank: views[rank].tracks.get(key) for rank in key[2] if rank in views}
    newest = max((track.last for track in tracks.values() if track is not None), default=centre)
    numbers = [n for n in range(centre - _BEFORE, min(centre + _AFTER, max(newest, centre)) + 1) if n > 0]
    odd, notes = _mismatches(job, key, numbers)
    firsts = {n: at for n in numbers if (at := _first_arrival(tracks.values(), n))}
    one_clock = len({views[rank].log.host for rank in tracks}) == 1
    signatures: dict[_Signature, list[int]] = defaultdict(list)
    cells: dict[_Signature, list[Cell]] = {}
    late: dict[tuple[_Signature, int], int] = defaultdict(int)
    for rank in key[2]:
        track = tracks.get(rank)
        awaited = rank in views and job.role(rank) in ("culprit", "awaited", "involved")
        column = [_cell(track, n, differs=rank in odd.get(n, ()), awaited=awaited and n == centre, known=rank in views) for n in numbers]
        signature: _Signature = (job.role(rank), tuple((c.op, c.what, c.place, c.state, c.differs) for c in column))
        signatures[signature].append(rank)
        cells.setdefault(signature, column)
        for n in numbers if track is not None else ():
            op = track.ops.get(n) if track is not None else None
            if op is not None and op.announced_ns and n in firsts:
                late[signature, n] = max(late[signature, n], op.announced_ns - firsts[n])
    ordered = sorted(signatures, key=lambda s: (_ORDER.index(s[0]), -len(signatures[s]), signatures[s]))
    shown = ordered[:_COLUMNS_MAX]
    for signature in shown:
        for n, cell in zip(numbers, cells[signature], strict=True):
            if late[signature, n] >= _LATE_NS and one_clock:
                cell.late = f"{duration(late[signature, n])} after the first"
    rows = [
        TableRow(f"#{n}", [cells[signature][i] for signature in shown], n in named or (not named and n == centre), notes.get(n, ""))
        for i, n in enumerate(numbers)
    ]
    columns = [TableColumn(format_ranks(signatures[s]), s[0]) for s in shown]
    rest = sorted(rank for s in ordered[_COLUMNS_MAX:] for rank in signatures[s])
    left_out = f"{ranks_phrase(rest)} issued still other collectives and are left out." if rest else ""
    about = f"The collectives on {group_phrase(channel.group)}, by sequence number; ranks that issued the same share a column."
    return Table(_table_name(job, key), about, columns, rows, left_out)


def _table_name(job: Job, key: ChannelKey) -> str:
    group = job.world.channels[key].group
    ranks = format_ranks(group.ranks)
    name = group_label(group)
    return f"{name} [{ranks if len(ranks) <= 24 else f'{len(group.ranks)} ranks'}]"


def _mismatches(job: Job, key: ChannelKey, numbers: Sequence[int]) -> tuple[dict[int, set[int]], dict[int, str]]:
    """Return, by number, the ranks that differ and a note on the difference."""
    odd: dict[int, set[int]] = {}
    notes: dict[int, str] = {}
    for number in numbers:
        mismatch = job.examined.mismatch_at(key, number)
        if mismatch is not None:
            odd[number] = set(mismatch.minority) or {rank for party in mismatch.parties for rank in party.ranks}
            notes[number] = f"{mismatch.aspect} differs"
    return odd, notes


def _first_arrival(tracks: Iterable[Track | None], number: int) -> int:
    """Return when the first rank issued a number, in Unix ns; 0 if that is unknown."""
    times = [track.ops[number].announced_ns for track in tracks if track is not None and number in track.ops]
    return min(filter(None, times), default=0)


def _cell(track: Track | None, number: int, *, differs: bool, awaited: bool, known: bool) -> Cell:
    """Return the cell of one rank and number. A missing collective of an ``awaited`` rank is the difference."""
    if track is None or number > track.last:
        return Cell("not issued" if known else "no record", state="absent", differs=awaited)
    op = track.ops.get(number)
    if op is None:
        return Cell("overwritten", state="overwritten")
    return _filled(op, op.op if not track.members.get(number) else f"{op.op} of {len(track.members[number])}", differs)


def _filled(op: Collective, name: str, differs: bool = False) -> Cell:
    return Cell(name, args_phrase(op), frame_phrase(op.source), _STATES.get(op.state, "unknown"), differs)


# --- in the order of issue ---------------------------------------------------------------------------------------


def _in_order(job: Job) -> Table:
    """Return the last collectives on all groups, which shows ranks that use another order."""
    signatures: dict[_Signature, list[int]] = defaultdict(list)
    cells: dict[_Signature, list[Cell]] = {}
    for rank, view in sorted(job.world.views.items()):
        recent = [_filled(op, phrase(op)) for op in view.history[-_LAST_MAX:] if not (op.coalescing_id and not op.coalesced_members)]
        signature: _Signature = (job.role(rank), tuple((c.op, c.what, c.place, c.state) for c in recent))
        signatures[signature].append(rank)
        cells.setdefault(signature, recent)
    ordered = sorted(signatures, key=lambda s: (_ORDER.index(s[0]), -len(signatures[s]), signatures[s]))
    shown = ordered[:_COLUMNS_MAX]
    height = max((len(cells[s]) for s in shown), default=0)
    rows = []
    for back in range(height, 0, -1):
        row = [cells[s][-back] if back <= len(cells[s]) else Cell("", state="overwritten") for s in shown]
        rows.append(TableRow("last" if back == 1 else f"{back - 1} before", row))
    rest = sum(len(signatures[s]) for s in ordered[_COLUMNS_MAX:])
    left_out = f"{count(rest, 'rank')} that issued still other collectives {'is' if rest == 1 else 'are'} left out." if rest else ""
    columns = [TableColumn(format_ranks(signatures[s]), s[0]) for s in shown]
    return Table(
        "In the order of issue",
        "The last collectives of each rank on all of its groups, the newest at the bottom.",
        columns,
        rows,
        left_out,
    )
