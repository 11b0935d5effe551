"""Select the logs of one job, and one log per rank; determine the world size and the ranks without
a log.

A folder may hold the logs of several starts of a job: those of the start with most ranks are
taken, of equally many those of the later one, and a note says what is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec

from commlens.diagnosis.select.communicators import with_communicators
from commlens.diagnosis.select.worlds import join_worlds
from commlens.model.grouping import grouped
from commlens.model.ranklog import RankLog
from commlens.model.store_identity import joined_runs, seen_from
from commlens.model.worlds import ONE_WORLD, Worlds
from commlens.text import count, ranks_phrase

_Run = tuple[str, int]
"""A job's name and its restart."""


class SelectedJob(NamedTuple):
    """The logs of one job, one a process."""

    logs: list[RankLog]
    notes: list[str]  # sentences about what was left out
    worlds: Worlds = ONE_WORLD


def select_job(logs: Sequence[RankLog]) -> SelectedJob:
    """Select the job to diagnose and the best log of each of its ranks, independent of the order of
    the logs. Worlds that share a group made by hand are one job.
    """
    notes: list[str] = []
    known = with_communicators([log for log in logs if log.rank >= 0])
    if len(known) < len(logs):
        notes.append(
            f"{count(len(logs) - len(known), 'log')} without a rank, of processes that ended before"
            " they had one: left out."
        )
    runs = grouped(((log.job, log.restart), log) for log in known)
    if not runs:
        return SelectedJob([], notes)

    def order(run: _Run) -> tuple[int, int, int, str]:
        members = runs[run]
        return (len({log.rank for log in members}), run[1], max(map(last_moment, members)), run[0])

    chosen = max(runs, key=order)
    joined = joined_runs(runs, chosen)
    for run in sorted(set(runs) - joined):
        name = f"job {run[0] or 'without a name'}" + (
            f", restart {run[1]}" if run[1] or run[0] == chosen[0] else ""
        )
        notes.append(
            f"The logs of {ranks_phrase(log.rank for log in runs[run])} belong to {name}; they are"
            " left out."
        )
    kept = join_worlds([_best_logs(runs[run], notes) for run in sorted(joined)])
    if len({log.host for log in kept}) > 1:
        kept = [_seen_from_host(log) for log in kept]
    return SelectedJob(kept, notes, kept[0].worlds)


def _seen_from_host(log: RankLog) -> RankLog:
    """Return a log in which a store that its process waits for has the name of its host."""
    op = log.store_wait
    if op is None or not op.is_for_store:
        return log
    group = msgspec.structs.replace(op.channel.group, name=seen_from(log, op.channel.group.name))
    channel = msgspec.structs.replace(op.channel, group=group)
    return msgspec.structs.replace(log, store_wait=msgspec.structs.replace(op, channel=channel))


def _best_logs(logs: Sequence[RankLog], notes: list[str]) -> list[RankLog]:
    """Return the best log of each rank, and note which others are left out."""
    by_rank = grouped((log.rank, log) for log in logs)
    kept = []
    for rank in sorted(by_rank):
        *others, best = sorted(by_rank[rank], key=_completeness)
        kept.append(best)
        if others:
            name = best.source or f"the one of pid {best.pid}"
            notes.append(
                f"There are {len(others) + 1} logs of rank {rank}; the newest and most complete is"
                f" used: {name}."
            )
    return kept


def world_size(logs: Sequence[RankLog]) -> int:
    """Return the world size that most logs record; at least the highest rank plus one."""
    recorded = Counter(log.world_size for log in logs if log.world_size > 0)
    most = max(recorded, key=lambda size: (recorded[size], size), default=0)
    return max([most, *(log.rank + 1 for log in logs)], default=0)


def last_moment(log: RankLog) -> int:
    """Return the latest time in the log, in Unix ns."""
    last = log.collectives[-1] if log.collectives else None
    moments = (
        (last.announced_ns, last.returned_ns, last.wait_began_ns, last.wait_ended_ns, last.done_ns)
        if last
        else ()
    )
    return max(log.captured_ns, log.heartbeat_ns, log.stacks_ns, log.observation.seen_ns, *moments)


def _completeness(log: RankLog) -> tuple[int, int, int, int, int, str]:
    last_issue = log.collectives[-1].announced_ns if log.collectives else 0
    return (
        max(last_issue, log.heartbeat_ns),
        log.issued,
        len(log.collectives),
        last_moment(log),
        log.pid,
        log.source,
    )


def _of_worlds_away(logs: Sequence[RankLog], have: Collection[int]) -> set[int]:
    """Return the ranks of the worlds without any log."""
    worlds = [world.numbers for log in logs[:1] for world in log.worlds.worlds]
    return {rank for numbers in worlds if set(numbers).isdisjoint(have) for rank in numbers}


def absent_ranks(
    logs: Sequence[RankLog], size: int, alike: Collection[int] = ()
) -> tuple[list[int], list[int]]:
    """Return the ranks that left no log on the hosts seen, and the ranks that probably run on
    another node.

    Nodes usually run equally many ranks, numbered consecutively. If the logs of host a are those of
    ranks 0, 1 and 3, of 8 ranks, rank 2 ran there and left no log. Ranks 4-7 are more than a host
    may hide, so they are probably on another node; if fewer were missing than one host runs, they
    would count as without a log. A world without any log is on other nodes.

    Args:
        logs: of the job's ranks.
        size: of the job.
        alike: ranks without a log that are in the state of ranks with one.
    """
    have = {log.rank for log in logs}.union(alike)
    away = _of_worlds_away(logs, have)
    missing = sorted({*range(size)} - have - away)
    if not missing:
        return [], sorted(away)
    hosts = grouped((log.host, log.rank) for log in logs)
    here = max(map(len, hosts.values()))
    if len(hosts) == 1:
        here = max([here, *(log.local_rank + 1 for log in logs if log.local_rank is not None)])
    inside = [range(min(ranks), max(ranks)) for ranks in hosts.values()]
    holes = {rank for rank in missing if any(rank in one for one in inside)}
    rest = [rank for rank in missing if rank not in holes]
    if len(rest) < here:
        return missing, sorted(away)
    return sorted(holes), sorted([*rest, *away])
