"""Tables of the collectives around the fault, side by side: by sequence number on one group, and in
the order of issue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from commlens.diagnosis.index.job_index import ChannelKey, Track
from commlens.model.collective import Collective, State
from commlens.model.grouping import grouped
from commlens.reports.verdict_page.data import (
    ROLES,
    Cell,
    CellState,
    Table,
    TableColumn,
    TableRow,
)
from commlens.reports.verdict_page.job import PageJob, phrase
from commlens.text import (
    args_phrase,
    duration,
    format_ranks,
    frame_phrase,
    group_label,
    group_phrase,
    members_text,
    ranks_phrase,
)

_TABLES_MAX = 6
_TABLES_OF_A_LABEL = 2  # the many groups of one mesh dimension look alike
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


def tables(job: PageJob) -> list[Table]:
    """Return one table for each group with a fault or a wait, and one of all collectives in the
    order of issue.
    """
    centres: dict[ChannelKey, int] = {}  # the number around which each group's table is
    for key, number, _ in job.focus:
        centres.setdefault(key, number)
    waits = grouped(
        (block.op.channel.key, block.op.sequence_number)
        for block in job.graph.blocks.values()
        if not block.op.is_point_to_point
        and block.op.channel.key in job.index.channels
        and block.op.sequence_number
    )
    shown: Counter[str] = Counter()
    blamed = {rank for rank, role in job.roles.items() if role in ("culprit", "awaited")}
    for key, numbers in sorted(
        waits.items(), key=lambda item: (blamed.isdisjoint(item[0][2]), -len(item[1]), item[0])
    ):
        label = job.index.channels[key].group.label
        shown[label] += 1
        if shown[label] <= _TABLES_OF_A_LABEL:
            centres.setdefault(key, min(numbers))
    made = [_aligned(job, key, number) for key, number in list(centres.items())[:_TABLES_MAX]]
    if len(centres) > _TABLES_MAX:
        more = len(centres) - _TABLES_MAX
        note = f"{more} more groups in which ranks wait have no table."
        made[-1].left_out = f"{made[-1].left_out} {note}".lstrip()
    if any(view.history for view in job.index.views.values()):
        made.append(_in_order(job))
    return made


class _Columns:
    """Ranks with the same cells, as columns: the root cause first, and as many as a table shows."""

    def __init__(self, job: PageJob, cells: dict[int, list[Cell]]) -> None:
        columns = grouped(
            (
                (
                    job.role(rank),
                    tuple((c.op, c.what, c.place, c.state, c.differs) for c in column),
                ),
                rank,
            )
            for rank, column in cells.items()
        )
        ordered = sorted(
            ((role, ranks) for (role, _), ranks in columns.items()),
            key=lambda c: (ROLES.index(c[0]), -len(c[1]), c[1]),
        )
        self.ranks = [ranks for _, ranks in ordered[:_COLUMNS_MAX]]
        self.heads = [
            TableColumn(format_ranks(ranks), role) for role, ranks in ordered[:_COLUMNS_MAX]
        ]
        self.cells = [cells[ranks[0]] for ranks in self.ranks]
        rest = [rank for _, ranks in ordered[_COLUMNS_MAX:] for rank in ranks]
        self.left_out = (
            f"Not shown: {ranks_phrase(rest)}, which issued still other collectives."
            if rest
            else ""
        )


# --- by sequence number


def _aligned(job: PageJob, key: ChannelKey, centre: int) -> Table:
    views, group = job.index.views, job.index.channels[key].group
    tracks = {rank: views[rank].tracks.get(key) for rank in key[2] if rank in views}
    newest = max((track.last for track in tracks.values() if track is not None), default=centre)
    numbers = range(max(1, centre - _BEFORE), min(centre + _AFTER, max(newest, centre)) + 1)
    odd, notes = _mismatches(job, key, numbers)
    odd[centre] = odd.get(centre, set()) | _awaited(job, tracks, centre)
    cells = {
        rank: [_cell(tracks, rank, n, differs=rank in odd.get(n, ())) for n in numbers]
        for rank in key[2]
    }
    columns = _Columns(job, cells)
    if len({views[rank].log.host for rank in tracks}) == 1:  # all times are of one clock
        _add_delays(columns, tracks, numbers)
    named = {n for other, n, _ in job.focus if other == key} or {centre}
    rows = [
        TableRow(f"#{n}", [column[i] for column in columns.cells], n in named, notes.get(n, ""))
        for i, n in enumerate(numbers)
    ]
    about = (
        f"The collectives on {group_phrase(group)}, by sequence number; ranks that issued the same"
        " share a column."
    )
    ranks = members_text(group.ranks)
    name = f"{group_label(group)} [{ranks if len(ranks) <= 24 else f'{len(group.ranks)} ranks'}]"
    return Table(name, about, columns.heads, rows, columns.left_out)


def _awaited(job: PageJob, tracks: Mapping[int, Track | None], number: int) -> set[int]:
    """Return the ranks with a part in the fault that have not issued the collective."""
    return {
        rank
        for rank, track in tracks.items()
        if job.role(rank) in ("culprit", "awaited", "involved")
        and (track is None or number > track.last)
    }


def _mismatches(
    job: PageJob, key: ChannelKey, numbers: Sequence[int]
) -> tuple[dict[int, set[int]], dict[int, str]]:
    """Return, by number, the ranks that differ and a note on the difference."""
    odd: dict[int, set[int]] = {}
    notes: dict[int, str] = {}
    for number in numbers:
        mismatch = job.examined.mismatch_at(key, number)
        if mismatch is not None:
            odd[number] = set(mismatch.minority) or {
                rank for party in mismatch.parties for rank in party.ranks
            }
            notes[number] = f"{mismatch.aspect} differs"
    return odd, notes


def _add_delays(columns: _Columns, tracks: dict[int, Track | None], numbers: Sequence[int]) -> None:
    """Note in each cell how long after the first rank the last one of the column issued the
    collective.
    """
    for row, number in enumerate(numbers):
        ops = {
            rank: track.ops[number]
            for rank, track in tracks.items()
            if track is not None and number in track.ops
        }
        times = {rank: op.announced_ns for rank, op in ops.items() if op.announced_ns}
        for ranks, column in zip(columns.ranks, columns.cells, strict=True):
            late = max((times[rank] for rank in ranks if rank in times), default=0) - min(
                times.values(), default=0
            )
            if late >= _LATE_NS:
                column[row].late = f"{duration(late)} after the first"


def _cell(tracks: Mapping[int, Track | None], rank: int, number: int, *, differs: bool) -> Cell:
    track = tracks.get(rank)
    if track is None or number > track.last:
        op_text = "not issued" if rank in tracks else "no record"
        return Cell(op_text, state="absent", differs=differs)
    op = track.ops.get(number)
    if op is None:
        return Cell("overwritten", state="overwritten")
    members = track.members.get(number)
    return _filled(op, f"{op.op} of {len(members)}" if members else op.op, differs)


def _filled(op: Collective, name: str, differs: bool = False) -> Cell:
    return Cell(
        name, args_phrase(op), frame_phrase(op.source), _STATES.get(op.state, "unknown"), differs
    )


# --- in the order of issue


def _in_order(job: PageJob) -> Table:
    """Return the last collectives on all groups, which shows ranks that use another order."""
    cells = {
        rank: [
            _filled(op, phrase(op))
            for op in view.history[-_LAST_MAX:]
            if not (op.coalescing_id and not op.coalesced_members)
        ]
        for rank, view in sorted(job.index.views.items())
    }
    columns = _Columns(job, cells)
    rows = []
    for back in range(max(map(len, columns.cells), default=0), 0, -1):
        row = [
            column[-back] if back <= len(column) else Cell("", state="overwritten")
            for column in columns.cells
        ]
        rows.append(TableRow("last" if back == 1 else f"{back - 1} before", row))
    about = "The last collectives of each rank on all of its groups, the newest at the bottom."
    return Table("In the order of issue", about, columns.heads, rows, columns.left_out)
