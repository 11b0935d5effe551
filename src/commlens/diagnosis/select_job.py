"""Which logs belong together: one job, one log for each rank."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from commlens.model.ranklog import RankLog
from commlens.text import count, ranks_phrase


def choose(logs: Sequence[RankLog]) -> tuple[list[RankLog], list[str]]:
    """Pick the job to diagnose and the best log of each of its ranks, whatever the order of the logs.

    Returns:
        The logs by rank, and what was left out, in sentences.
    """
    notes: list[str] = []
    known = [log for log in logs if log.rank >= 0]
    if len(known) < len(logs):
        notes.append(f"{count(len(logs) - len(known), 'log')} without a rank, of processes that ended before they had one: left out.")
    runs: dict[tuple[str, int], list[RankLog]] = defaultdict(list)
    for log in known:
        runs[(log.job, log.restart)].append(log)
    if not runs:
        return [], notes

    def weight(run: tuple[str, int]) -> tuple[int, int, int, str]:
        members = runs[run]
        return (len({log.rank for log in members}), run[1], max(map(last_moment, members)), run[0])

    chosen = max(runs, key=weight)
    for run in sorted(runs):
        if run != chosen:
            what = f"job {run[0] or 'without a name'}" + (f", restart {run[1]}" if run[1] or run[0] == chosen[0] else "")
            notes.append(f"The logs of {ranks_phrase(log.rank for log in runs[run])} belong to {what}; they are left out.")
    by_rank: dict[int, list[RankLog]] = defaultdict(list)
    for log in runs[chosen]:
        by_rank[log.rank].append(log)
    kept = []
    for rank in sorted(by_rank):
        several = sorted(by_rank[rank], key=_completeness)
        kept.append(several[-1])
        if len(several) > 1:
            best = several[-1]
            name = best.source or f"the one of pid {best.pid}"
            notes.append(f"There are {len(several)} logs of rank {rank}; the newest and most complete is used: {name}.")
    return kept, notes


def world_size(logs: Sequence[RankLog]) -> int:
    """What most logs say, at least the highest rank and one."""
    told = Counter(log.world_size for log in logs if log.world_size > 0)
    most = max(told, key=lambda size: (told[size], size)) if told else 0
    return max([most, *(log.rank + 1 for log in logs)], default=0)


def last_moment(log: RankLog) -> int:
    """The latest Unix ns of which the log knows."""
    last = log.collectives[-1] if log.collectives else None
    moments = (last.announced_ns, last.returned_ns, last.wait_began_ns, last.wait_ended_ns, last.done_ns) if last else ()
    return max(log.captured_ns, log.heartbeat_ns, log.stacks_ns, log.observation.seen_ns, *moments)


def _completeness(log: RankLog) -> tuple[int, int, int, int, int, str]:
    newest = log.collectives[-1].announced_ns if log.collectives else 0
    return (max(newest, log.heartbeat_ns), log.issued, len(log.collectives), last_moment(log), log.pid, log.source)


def absent_ranks(logs: Sequence[RankLog], size: int) -> tuple[list[int], list[int]]:
    """Ranks without a log: those that should have left one here, and those that may run on another node.

    Nodes usually run equally many ranks, next to each other. A hole among this host's ranks, or fewer missing ones than one
    host runs, means that they left no record; whole nodes' worth of them are probably elsewhere.
    """
    have = {log.rank for log in logs}
    missing = [rank for rank in range(size) if rank not in have]
    if not missing:
        return [], []
    hosts: dict[str, list[int]] = defaultdict(list)
    for log in logs:
        hosts[log.host].append(log.rank)
    holes = {rank for ranks in hosts.values() for rank in missing if min(ranks) < rank < max(ranks)} if len(hosts) == 1 else set()
    here = max(len(ranks) for ranks in hosts.values())
    if len(hosts) == 1:
        locals_ = [log.local_rank for log in logs if log.local_rank is not None]
        here = max([here, *(local + 1 for local in locals_)])
    for ranks in hosts.values():
        holes.update(rank for rank in missing if min(ranks) < rank < max(ranks))
    rest = [rank for rank in missing if rank not in holes]
    if len(rest) < here:
        return missing, []
    return sorted(holes), rest
