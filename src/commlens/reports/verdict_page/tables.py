"""What ranks issued around the fault, side by side: by sequence number on one group, and in the order of issue."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from commlens.diagnosis.index import ChannelKey, Track
from commlens.matching.answer import Disagree
from commlens.matching.collectives import compare_coalesced
from commlens.model.collective import Collective, CollectiveArgs, State
from commlens.reports.verdict_page.model import Cell, CellState, Role, Table, TableColumn, TableRow
from commlens.reports.verdict_page.scene import Scene, phrase
from commlens.text import args_phrase, duration, format_ranks, frame_phrase, group_label, group_phrase, ranks_phrase

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


def tables(scene: Scene) -> list[Table]:
    """One for each group on which something is wrong or waited for, and one of everything in the order of issue."""
    centres: dict[ChannelKey, int] = {}
    named = {(key, number) for key, number, _ in scene.focus}
    for key, number, _ in scene.focus:
        centres.setdefault(key, number)
    held: Counter[ChannelKey] = Counter()
    first: dict[ChannelKey, int] = {}
    for node in scene.graph.blocks.values():
        if not node.op.is_point_to_point and node.op.sequence_number:
            key = node.op.channel.key
            held[key] += 1
            first[key] = min(first.get(key, node.op.sequence_number), node.op.sequence_number)
    by_label: Counter[str] = Counter()
    blamed = {rank for rank, role in scene.roles.items() if role in ("culprit", "awaited")}
    for key, _ in sorted(held.items(), key=lambda item: (blamed.isdisjoint(item[0][2]), -item[1], item[0])):
        name = scene.world.channels[key].group.label
        by_label[name] += 1
        if by_label[name] <= _OF_A_LABEL:  # the many groups of one mesh dimension look alike
            centres.setdefault(key, first[key])
    left_out = max(0, len(centres) - _TABLES_MAX)
    made = [_aligned(scene, key, number, {n for k, n in named if k == key}) for key, number in list(centres.items())[:_TABLES_MAX]]
    if left_out and made:
        made[-1].left_out += f" {left_out} more groups in which ranks wait have no table."
    if scene.world.views and any(view.history for view in scene.world.views.values()):
        made.append(_in_order(scene))
    return made


# --- by sequence number ------------------------------------------------------------------------------------------


def _aligned(scene: Scene, key: ChannelKey, centre: int, named: set[int]) -> Table:
    views = scene.world.views
    channel = scene.world.channels[key]
    tracks = {rank: views[rank].tracks.get(key) for rank in key[2] if rank in views}
    newest = max((track.last for track in tracks.values() if track is not None), default=centre)
    numbers = [n for n in range(centre - _BEFORE, min(centre + _AFTER, max(newest, centre)) + 1) if n > 0]
    odd, notes, firsts = _odd_ones(key, tracks, numbers)
    one_clock = len({views[rank].log.host for rank in tracks}) == 1
    signatures: dict[_Signature, list[int]] = defaultdict(list)
    cells: dict[_Signature, list[Cell]] = {}
    late: dict[tuple[_Signature, int], int] = defaultdict(int)
    for rank in key[2]:
        track = tracks.get(rank)
        awaited = rank in views and scene.role(rank) in ("culprit", "awaited", "involved")
        column = [_cell(track, n, differs=rank in odd.get(n, ()), awaited=awaited and n == centre, known=rank in views) for n in numbers]
        signature: _Signature = (scene.role(rank), tuple((c.op, c.what, c.place, c.state, c.differs) for c in column))
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
    left_out = f"{ranks_phrase(rest)} issued yet other things and are left out." if rest else ""
    about = f"What the ranks issued on {group_phrase(channel.group)}, by sequence number; a column is all ranks that issued the same."
    return Table(_table_name(scene, key), about, columns, rows, left_out)


def _table_name(scene: Scene, key: ChannelKey) -> str:
    group = scene.world.channels[key].group
    ranks = format_ranks(group.ranks)
    name = group_label(group)
    return f"{name} [{ranks if len(ranks) <= 24 else f'{len(group.ranks)} ranks'}]"


def _odd_ones(
    key: ChannelKey, tracks: dict[int, Track | None], numbers: Sequence[int]
) -> tuple[dict[int, set[int]], dict[int, str], dict[int, int]]:
    """Of each number: the ranks that differ, in what, and when the first came."""
    odd: dict[int, set[int]] = {}
    notes: dict[int, str] = {}
    firsts: dict[int, int] = {}
    for n in numbers:
        asked: dict[int, Sequence[CollectiveArgs]] = {}
        for rank, track in tracks.items():
            if track is not None and n in track.ops:
                asked[rank] = track.asked(n)
                at = track.ops[n].announced_ns
                if at:
                    firsts[n] = min(firsts.get(n, at), at)
        answer = compare_coalesced(asked, key[2]) if len(asked) > 1 else None
        if isinstance(answer, Disagree):
            odd[n] = set(answer.minority) or {rank for party in answer.parties for rank in party.ranks}
            notes[n] = f"{answer.aspect} differs"
    return odd, notes, firsts


def _cell(track: Track | None, number: int, *, differs: bool, awaited: bool, known: bool) -> Cell:
    """``awaited``: should it not have come, that is the difference."""
    if track is None or number > track.last:
        return Cell("not issued" if known else "no record", state="absent", differs=awaited)
    op = track.ops.get(number)
    if op is None:
        return Cell("overwritten", state="overwritten")
    return _filled(op, op.op if not track.members.get(number) else f"{op.op} of {len(track.members[number])}", differs)


def _filled(op: Collective, name: str, differs: bool = False) -> Cell:
    return Cell(name, args_phrase(op), frame_phrase(op.source), _STATES.get(op.state, "unknown"), differs)


# --- in the order of issue ---------------------------------------------------------------------------------------


def _in_order(scene: Scene) -> Table:
    """The last collectives of one rank of each class, whatever their group: what shows another order."""
    signatures: dict[_Signature, list[int]] = defaultdict(list)
    cells: dict[_Signature, list[Cell]] = {}
    for rank, view in sorted(scene.world.views.items()):
        recent = [_filled(op, phrase(op)) for op in view.history[-_LAST_MAX:] if not (op.coalescing_id and not op.coalesced_members)]
        signature: _Signature = (scene.role(rank), tuple((c.op, c.what, c.place, c.state) for c in recent))
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
    left_out = f"{rest} ranks that issued yet other things are left out." if rest else ""
    columns = [TableColumn(format_ranks(signatures[s]), s[0]) for s in shown]
    return Table(
        "In the order of issue",
        "The last collectives of each rank on all of its groups, the newest at the bottom.",
        columns,
        rows,
        left_out,
    )
