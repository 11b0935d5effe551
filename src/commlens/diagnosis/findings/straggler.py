"""Who arrives last, how late and how often, where nothing is stuck.

Arrival counts, not duration: a collective makes those who wait look slow. Clocks of hosts differ; since all leave a collective
together, the moments at which they leave tell by how much.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from commlens.diagnosis.columns import ColumnOps
from commlens.diagnosis.extract import Integers
from commlens.diagnosis.findings.context import Context, make_finding
from commlens.diagnosis.index import World
from commlens.model.collective import ChannelKey
from commlens.model.ops import ROOTED
from commlens.text import count, duration, frame_phrase, group_phrase, op_phrase

_TIMES = 3  # that a rank must have been last
_SHARE = 0.1  # of the time, for which others waited for it
_OTHERS = 3.0  # times as long as for any other rank
_LATE_NS = 5_000_000  # less is noise: of clocks, and of when a recorder notices
_NOTICED_NS = 100_000_000  # a watchdog notices completions this late at most


class Lateness(NamedTuple):
    """How one rank came to one group's collectives."""

    key: ChannelKey
    rank: int
    times: int  # that it came last, and late
    of: int  # collectives
    lost_ns: int  # for which the others waited for it alone
    worst: int  # number of the one to which it came latest


def lateness(world: World) -> list[Lateness]:
    """Of every group, its ranks that came last and late, by the time that was lost."""
    found: list[Lateness] = []
    for key in sorted(world.users):
        tracks = {rank: world.views[rank].tracks[key].ops for rank in world.users[key]}
        columns = {rank: ops for rank, ops in tracks.items() if isinstance(ops, ColumnOps)}
        if len(columns) == len(key[2]) > 1:
            found += _of_group(key, columns)
    return sorted(found, key=lambda one: (-one.lost_ns, one.rank, one.key))


def _of_group(key: ChannelKey, columns: dict[int, ColumnOps]) -> list[Lateness]:
    first = max(int(ops.numbers[0]) for ops in columns.values())
    last = min(int(ops.numbers[-1]) for ops in columns.values())
    if last - first + 1 < _TIMES:
        return []
    ranks = sorted(columns)
    came, left = [], []
    for rank in ranks:
        ops = columns[rank]
        begin, end = np.searchsorted(ops.numbers, [first, last + 1])
        if end - begin != last - first + 1:
            return []
        rows = ops.rows[begin:end]
        came.append(ops.columns.extract.created_ns[rows])
        left.append(ops.columns.extract.completed_ns[rows])
    arrived, gone = np.array(came), np.array(left)
    known = (arrived > 0).all(axis=0) & (gone > 0).all(axis=0)
    if int(known.sum()) < _TIMES:
        return []
    arrived = _corrected(arrived[:, known], gone[:, known])
    numbers = np.flatnonzero(known) + first
    order = np.sort(arrived, axis=0)
    late: Integers = order[-1] - order[-2]
    who = arrived.argmax(axis=0)
    found = []
    for place_, rank in enumerate(ranks):
        mine = (who == place_) & (late > _LATE_NS)
        if mine.any():
            worst = int(numbers[mine][late[mine].argmax()])
            found.append(Lateness(key, rank, int(mine.sum()), len(numbers), int(late[mine].sum()), worst))
    return found


def _corrected(arrived: Integers, gone: Integers) -> Integers:
    """Arrivals by one clock: the difference of clocks is what ranks usually differ by when they leave.

    What is left of a constant difference within the time that a recorder takes to notice is taken for its error.
    """
    offset = np.median(gone - np.median(gone, axis=0), axis=1)
    corrected = arrived - offset.astype("int64")[:, None]
    usual = np.median(corrected - np.median(corrected, axis=0), axis=1)
    usual = np.where(np.abs(usual) < _NOTICED_NS, usual, 0)
    result: Integers = corrected - usual.astype("int64")[:, None]
    return result


def find_stragglers(context: Context) -> None:
    """One finding, where one rank makes the others wait for a good part of the time."""
    world = context.world
    lost: dict[int, Lateness] = {}
    for one in lateness(world):
        lost.setdefault(one.rank, one)
    ranked = sorted(lost.values(), key=lambda one: -one.lost_ns)
    if not ranked:
        return
    worst = ranked[0]
    spans: dict[int, int] = defaultdict(int)
    for rank, view in world.views.items():
        if view.columns is not None and len(view.columns.extract):
            created = view.columns.extract.created_ns
            spans[rank] = int(created.max() - created[created > 0].min()) if (created > 0).any() else 0
    span = max(spans.values(), default=0)
    second = ranked[1].lost_ns if len(ranked) > 1 else 0
    if worst.times < _TIMES or worst.lost_ns < _SHARE * span or worst.lost_ns < _OTHERS * second:
        return
    op = world.views[worst.rank].tracks[worst.key].ops[worst.worst]
    if op.op in ROOTED:
        return
    channel = world.channels[worst.key]
    mean = worst.lost_ns // worst.times
    others = sorted(set(worst.key[2]) - {worst.rank})
    summary = (
        f"nothing is stuck, but rank {worst.rank} comes last to {group_phrase(channel.group)}: {count(worst.times, 'time')} of {worst.of}, "
        f"{duration(mean)} after the others"
    )
    at = f" before {frame_phrase(op.source)}" if op.source is not None else ""
    explanation = (
        f"The others waited {duration(worst.lost_ns)} of {duration(span)} for it, longest in {op_phrase(op)}. Clocks are corrected by when "
        "the ranks leave their collectives."
    )
    context.add(
        make_finding(
            "straggler", "user-code", [worst.rank], others, "medium", summary, explanation,
            f"look at what rank {worst.rank} does{at}: data loading, a slower GPU or host", op, op.source, [],
            "A profile of that rank would show what it does meanwhile.",
        )
    )  # fmt: skip
