"""Stragglers: nothing is stuck, but a rank keeps the others waiting, again and again.

How long a collective takes shows victims as slow, so arrivals are compared: when each member issued it. The clocks of hosts disagree, and
a collective corrects them: all leave it together. A rank counts as late only for what is its own: not for the time in which it was itself
held up in an operation that others came late to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from commlens.diagnose.extract import DONE, Extract, Integers
from commlens.diagnose.words import capital, count, duration, group_phrase, place, ranks_phrase, verb
from commlens.model.collective import Channel, Frame, user_frame
from commlens.model.ops import POINT_TO_POINT
from commlens.model.verdict import Finding, GroupRef

LATE_NS = 100_000_000
"""Less is not told apart from the turns of a watchdog thread, which notices every 100 ms what has completed."""

AGAIN = 3
"""Late so often, it is a straggler; once or twice, it was a checkpoint."""

_OPERATIONS_MAX = 4_000_000  # looked at, the newest of every rank
_ROUNDS = 15  # of correcting clocks
_GROUPS_TOLD = 3


@dataclass
class _Arrivals:
    """Completed collectives, one row for each member, sorted by collective."""

    rank: Integers  # index into the extracts
    row: Integers  # of the extract
    channel: Integers  # index into channels
    starts: Integers  # where each collective's rows begin
    created: Integers  # ns since some moment, by each rank's own clock
    completed: Integers
    channels: list[Channel]


@dataclass
class _Delay:
    """A time when one rank came late, through its own doing."""

    rank: int
    row: int
    lost_ns: float
    channel: Channel
    site: Frame | None


def find_stragglers(extracts: Sequence[Extract]) -> list[Finding]:
    """The rank (or ranks) that kept the others waiting most, where there is one.

    Args:
        extracts: one of each rank, of a job in which nothing is stuck.
    """
    arrivals = _gather(extracts)
    if arrivals is None:
        return []
    offsets = _clock_offsets(arrivals, len(extracts))
    delays = _delays(arrivals, offsets, extracts)
    by_rank: dict[int, list[_Delay]] = {}
    for delay in delays:
        by_rank.setdefault(delay.rank, []).append(delay)
    lost = {rank: sum(d.lost_ns for d in several) for rank, several in by_rank.items() if len(several) >= AGAIN}
    if not lost:
        return []
    worst = max(lost.values())
    culprits = sorted(rank for rank, ns in lost.items() if ns >= worst / 2)
    return [_finding(culprits, by_rank, extracts)]


def _gather(extracts: Sequence[Extract]) -> _Arrivals | None:
    """What all members of a group completed and are known to have."""
    each = max(400, _OPERATIONS_MAX // max(1, len(extracts)))
    codes: dict[tuple[str, str, tuple[int, ...]], int] = {}
    channels: list[Channel] = []
    columns: list[tuple[Integers, ...]] = []
    for index, found in enumerate(extracts):
        length = len(found)
        if not length:
            continue
        local = []
        for channel in found.channels:
            group = channel.group
            key = (group.name, channel.device, group.ranks)
            if key not in codes:
                codes[key] = len(channels)
                channels.append(channel)
            local.append(codes[key])
        messages = np.array([one.op in POINT_TO_POINT for one in found.asked] or [False])
        rows = np.arange(max(0, length - each), length)
        known = (found.state[rows] == DONE) & (found.completed_ns[rows] > 0) & ~messages[found.asked_index[rows]]
        rows = rows[known]
        columns.append((
            np.full(len(rows), index), rows, np.array(local)[found.channel[rows]], found.number[rows], found.created_ns[rows],
            found.completed_ns[rows],
        ))  # fmt: skip
    if not columns:
        return None
    rank, row, code, number, created, completed = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    sizes = np.array([len(one.group.ranks) for one in channels])
    order = np.lexsort((created, number, code))
    code, number = code[order], number[order]
    begins = np.flatnonzero((np.diff(code, prepend=-1) != 0) | (np.diff(number, prepend=-1) != 0))
    counts = np.diff(np.append(begins, len(order)))
    whole = (counts == sizes[code[begins]]) & (counts > 1)
    if not whole.any():
        return None
    chosen = np.repeat(whole, counts)
    order = order[chosen]
    kept = counts[whole]
    zero = int(created.min())
    return _Arrivals(
        rank[order], row[order], code[chosen], np.cumsum(kept) - kept,
        (created[order] - zero).astype("float64"), (completed[order] - zero).astype("float64"), channels,
    )  # fmt: skip


def _clock_offsets(arrivals: _Arrivals, ranks: int) -> Integers:
    """How far each rank's clock is ahead, ns: members leave a collective together, so their times of leaving tell."""
    counts = np.diff(np.append(arrivals.starts, len(arrivals.rank)))
    offsets = _first_offsets(arrivals, counts, ranks)
    many = np.maximum(np.bincount(arrivals.rank, minlength=ranks), 1)
    for _ in range(_ROUNDS):
        together = np.add.reduceat(arrivals.completed - offsets[arrivals.rank], arrivals.starts) / counts
        offsets = np.bincount(arrivals.rank, arrivals.completed - np.repeat(together, counts), ranks) / many
    return offsets


def _first_offsets(arrivals: _Arrivals, counts: Integers, ranks: int) -> Integers:
    """The same from as few groups as reach everybody, the largest first: near enough to be corrected by all in a few rounds."""
    offsets, known = np.zeros(ranks), np.zeros(ranks, "bool")
    channels = arrivals.channel[arrivals.starts]
    for channel in sorted(set(channels.tolist()), key=lambda one: -len(arrivals.channels[one].group.ranks)):
        if known.all():
            break
        meetings = np.flatnonzero(channels == channel)
        size = int(counts[meetings[0]])
        rows = arrivals.starts[meetings][:, None] + np.arange(size)
        order = np.argsort(arrivals.rank[rows], axis=1)
        members = np.sort(arrivals.rank[rows[0]])
        if known[members].all():
            continue
        left = np.take_along_axis(arrivals.completed[rows], order, axis=1) - offsets[members]
        anchors = known[members] if known[members].any() else np.ones(size, "bool")
        offsets[members] += np.where(known[members], 0, (left - left[:, anchors].mean(axis=1, keepdims=True)).mean(axis=0))
        known[members] = True
    return offsets


def _delays(arrivals: _Arrivals, offsets: Integers, extracts: Sequence[Extract]) -> list[_Delay]:
    """Each time that a rank was the last by far, once for all that it issued late together."""
    came = arrivals.created - offsets[arrivals.rank]
    left = arrivals.completed - offsets[arrivals.rank]
    counts = np.diff(np.append(arrivals.starts, len(came)))
    of = np.repeat(np.arange(len(counts)), counts)
    order = np.lexsort((came, of))
    sorted_came = came[order]
    last = order[arrivals.starts + counts - 1]
    others = sorted_came[arrivals.starts + (counts - 2) // 2]  # the middle one of the others
    late = np.flatnonzero(came[last] - others >= LATE_NS)
    delays: dict[tuple[int, int], _Delay] = {}
    ended: dict[int, tuple[Integers, Integers]] = {}
    for meeting in late.tolist():
        at = int(last[meeting])
        rank = int(arrivals.rank[at])
        if rank not in ended:
            mine = np.flatnonzero(arrivals.rank == rank)
            ended[rank] = (np.sort(left[mine]), mine)
        before = int(np.searchsorted(ended[rank][0], came[at])) - 1
        held_until = ended[rank][0][before] if before >= 0 else -np.inf
        lost = came[at] - max(others[meeting], held_until)
        if lost < LATE_NS or before < 0:
            continue
        found, row = extracts[rank], int(arrivals.row[at])
        site = int(found.site[row])
        channel = arrivals.channels[int(arrivals.channel[at])]
        delay = _Delay(found.rank, row, float(lost), channel, user_frame(found.sites[site]) if site >= 0 else None)
        known = delays.get((rank, before))
        if known is None or row < known.row:
            delays[rank, before] = delay
    return list(delays.values())


def _finding(culprits: list[int], by_rank: dict[int, list[_Delay]], extracts: Sequence[Extract]) -> Finding:
    delays = [delay for rank in culprits for delay in by_rank[rank]]
    several = sorted(delay.lost_ns for delay in delays)
    times, usual = len(several) // len(culprits), several[len(several) // 2]
    groups: dict[str, list[_Delay]] = {}
    for delay in delays:
        groups.setdefault(group_phrase(delay.channel.group), []).append(delay)
    most = max(groups.values(), key=len)
    group = most[0].channel.group
    sites = [delay.site for delay in delays if delay.site is not None]
    site = max(sites, key=sites.count) if sites else None
    who = ranks_phrase(culprits)
    where = f", before {place(site)}" if site is not None else ""
    evidence = [
        f"In {name}, {who} came last by {duration(round(max(d.lost_ns for d in late)))} at most, {count(len(late), 'time')}."
        for name, late in sorted(groups.items(), key=lambda item: -len(item[1]))[:_GROUPS_TOLD]
    ]
    return Finding(
        kind="straggler",
        why="user-code",
        root_cause=True,
        culprits=culprits,
        victims=sorted({found.rank for found in extracts} - set(culprits)),
        confidence="medium",
        summary=f"{who} {verb(culprits, 'keeps', 'keep')} the others waiting: {times} times late, by {duration(round(usual))} as a rule; "
        "nothing is stuck",
        explanation=f"{capital(who)} arrived last{where}, {duration(round(sum(several)))} in all. Time in which it was itself held up "
        "is not counted, and the clocks of the hosts are corrected by when all left the same collectives.",
        next_step=f"profile {who} between its collectives: slow input, another process on its cores, a throttled device",
        group=GroupRef(group.name, group.label, list(group.ranks)),
        source=site.where if site is not None else None,
        source_file=f"{site.file}:{site.line}" if site is not None else None,
        function=site.function if site is not None else None,
        evidence=evidence,
        would_raise_confidence="A longer recording (a larger ring) would show whether it goes on.",
    )
