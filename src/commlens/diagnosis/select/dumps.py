"""Select the dumps of one job, and one dump per rank. Most dumps do not name their job, and some do
not name their rank.

Say folder a has dumps of ranks 0-3, folder b of ranks 4-7, and folder c of ranks 0-1: a and b are
of one job, each folder from a node; c repeats ranks, so it is of another job or another time, and
left out with a note. A dump without a rank gets the only rank that it may be of and no other dump
has.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from commlens.formats.columns import Integers, RankColumns
from commlens.model.grouping import grouped
from commlens.model.limits import WORLD_MAX
from commlens.model.ranklog import End
from commlens.text import count, ranks_phrase

_LISTS = ("channels", "groups", "args", "call_stacks", "problems")
_ROW_COLUMNS = ("sequence", "state", "record_id", "peer", "coalesced", "created_ns", "completed_ns")
_JOINED: Mapping[str, Callable[[Iterable[Any]], Any]] = {
    "world_size": max,
    "captured_ns": max,
    "written_ns": min,
    "issued": sum,
    "timed": all,
    "only_active": all,
    "lost_entries": any,
}
"""How the facts of several dumps of one rank make one."""
# a column, and the table that it indexes
_INDEX_COLUMNS = (("channel", "channels"), ("args_index", "args"), ("stack", "call_stacks"))


def select_dumps(dumps: Sequence[RankColumns]) -> tuple[list[RankColumns], list[str]]:
    """Select the job to diagnose and the best dump of each of its ranks, independent of the order
    of the files.

    Returns:
        The dumps by rank, and sentences about what was left out.
    """
    notes: list[str] = []
    possible = _without_impossible_ranks(dumps, notes)
    text_logs = [dump for dump in possible if dump.is_log]
    recorded = [dump for dump in possible if not dump.is_log]
    notes += [
        f"{log.source}: {text}." for log in text_logs if log.rank < 0 for text in log.problems
    ]
    text_logs = [log for log in text_logs if log.rank >= 0]
    chosen = _one_job(_with_ranks(recorded, notes), notes)
    if not chosen:  # there are text logs alone
        return _one_per_rank(text_logs, notes), notes
    kept = _add_text_logs(_one_per_rank(chosen, notes), text_logs)
    return sorted(kept, key=lambda dump: dump.rank), notes


def _one_job(dumps: Sequence[RankColumns], notes: list[str]) -> list[RankColumns]:
    """Return the dumps of the job with most ranks, and note those of others."""
    jobs = _group_by_job(dumps)
    chosen = max(
        jobs,
        key=lambda job: (
            len({dump.rank for dump in job}),
            max(map(_newest_ns, job)),
            min(dump.source for dump in job),
        ),
        default=[],
    )
    for job in jobs:
        if job is not chosen:
            folders = sorted({_folder(dump) for dump in job})
            notes.append(
                f"The dumps of {ranks_phrase(dump.rank for dump in job)} in"
                f" {', '.join(folders[:3])} are of another job or another time; they are left out."
            )
    return chosen


def _without_impossible_ranks(dumps: Sequence[RankColumns], notes: list[str]) -> list[RankColumns]:
    """Leave out the dumps of ranks that no job has, and world sizes of that kind: a sentence
    each.
    """
    beyond = [dump for dump in dumps if dump.rank >= WORLD_MAX]
    if beyond:
        names = ", ".join(sorted({dump.source for dump in beyond})[:3])
        left_out = (
            f"{count(len(beyond), 'dump')} of {ranks_phrase(dump.rank for dump in beyond)}"
            f" {'is' if len(beyond) == 1 else 'are'} left out"
        )
        notes.append(
            f"{left_out}, because no job has so many ranks (at most {WORLD_MAX:,}): {names}."
        )
    kept = [dump for dump in dumps if dump.rank < WORLD_MAX]
    sizes = [dump.world_size for dump in kept if dump.world_size > WORLD_MAX]
    for dump in kept:
        dump.world_size = dump.world_size if dump.world_size <= WORLD_MAX else 0
    if sizes:
        notes.append(
            f"A world size of {max(sizes):,} is not used, because no job has so many ranks (at most"
            f" {WORLD_MAX:,})."
        )
    return kept


def _folder(dump: RankColumns) -> str:
    return dump.source.rpartition("/")[0] or "."


def _newest_ns(dump: RankColumns) -> int:
    return int(dump.created_ns.max(initial=0))


def _with_ranks(dumps: Sequence[RankColumns], notes: list[str]) -> list[RankColumns]:
    """Return the dumps whose rank is known, or is the only candidate left; note the others."""
    unnamed = [dump for dump in dumps if dump.rank < 0]
    taken = {dump.rank for dump in dumps if dump.rank >= 0}
    progress = True
    while progress:  # a rank that is given to one dump is no candidate for the others
        progress = False
        for dump in unnamed:
            candidates = set(dump.possible_ranks) - taken
            if dump.rank < 0 and len(candidates) == 1:
                dump.rank = candidates.pop()
                taken.add(dump.rank)
                progress = True
    if left := sorted(dump.source for dump in dumps if dump.rank < 0):
        names = ", ".join(left[:3]) + (" and more" if len(left) > 3 else "")
        notes.append(
            f"{count(len(left), 'dump')} left out, because neither name nor content shows the rank:"
            f" {names}."
        )
    return [dump for dump in dumps if dump.rank >= 0]


def _group_by_job(dumps: Sequence[RankColumns]) -> list[list[RankColumns]]:
    """Group the dumps by job.

    The nodes of a job may each have a folder, so folders with different ranks are one job. A folder
    that repeats ranks is another.
    """
    folders = grouped(((dump.job, _folder(dump)), dump) for dump in dumps)
    # ranks, world size (0: unknown), name, dumps
    jobs: list[tuple[set[int], int, str, list[RankColumns]]] = []
    # the largest folder first: smaller ones join it, if they fit
    for (name, _), added in sorted(folders.items(), key=lambda item: (-len(item[1]), item[0])):
        ranks = {dump.rank for dump in added}
        size = max(dump.world_size for dump in added)
        for place, (taken, other_size, other_name, members) in enumerate(jobs):
            if (
                not taken & ranks
                and (not size or not other_size or size == other_size)
                and name == other_name
            ):
                jobs[place] = (taken | ranks, size or other_size, name, [*members, *added])
                break
        else:
            jobs.append((ranks, size, name, list(added)))
    return [members for *_, members in jobs]


def _one_per_rank(dumps: Sequence[RankColumns], notes: list[str]) -> list[RankColumns]:
    """Keep the newest dump of each rank; join the dumps of its backends."""
    by_rank = grouped((dump.rank, dump) for dump in dumps)
    kept = []
    for rank in sorted(by_rank):
        candidates = sorted(
            by_rank[rank], key=lambda dump: (_newest_ns(dump), len(dump), dump.source)
        )
        joined = _join_backends(candidates)
        kept.append(candidates[-1] if joined is None else joined)
        if joined is None and len(candidates) > 1:
            notes.append(
                f"There are {len(candidates)} dumps of rank {rank}; the newest is used:"
                f" {candidates[-1].source}."
            )
    return kept


def _join_backends(dumps: Sequence[RankColumns]) -> RankColumns | None:
    """Join one rank's dumps of different backends in the order of issue; return None if their
    backends are not distinct.

    Torch 2.14 and later keep one ring buffer per backend, and write a file for each.
    """
    backends = [{channel.group.backend for channel in dump.channels} for dump in dumps]
    distinct = all(backends) and sum(map(len, backends)) == len(set[str]().union(*backends))
    if len(dumps) < 2 or not distinct:
        return None
    values = _joined_rows(dumps)
    values |= {name: [one for dump in dumps for one in getattr(dump, name)] for name in _LISTS}
    values |= {name: join(getattr(dump, name) for dump in dumps) for name, join in _JOINED.items()}
    values["status"] = {name: status for dump in dumps for name, status in dump.status.items()}
    # the ids of several ring buffers are not consecutive
    return msgspec.structs.replace(dumps[0], **values, unbroken=0)


def _joined_rows(dumps: Sequence[RankColumns]) -> dict[str, Any]:
    """Return the columns of several dumps as one, in the order of issue."""
    order = np.argsort(np.concatenate([dump.created_ns for dump in dumps]), kind="stable")
    values: dict[str, Any] = {
        name: np.concatenate([getattr(dump, name) for dump in dumps])[order]
        for name in _ROW_COLUMNS
    }
    for name, table in _INDEX_COLUMNS:
        values[name] = _shifted(dumps, name, [len(getattr(dump, table)) for dump in dumps])[order]
    batches = max(int(dump.coalesced.max(initial=0)) for dump in dumps) + 1
    values["coalesced"] = _shifted(dumps, "coalesced", [batches] * len(dumps), first=1)[order]
    values["record_id"] = np.arange(len(order), dtype="int64")  # each ring buffer counts from 0
    return values


def _shifted(
    dumps: Sequence[RankColumns], name: str, sizes: Sequence[int], *, first: int = 0
) -> Integers:
    """Join a column of several dumps, each of whose values from ``first`` on is shifted by the
    sizes of those before.
    """
    columns = [getattr(dump, name) for dump in dumps]
    offsets = itertools.accumulate(sizes, initial=0)
    parts = [
        np.where(column >= first, column + offset, column)
        for column, offset in zip(columns, offsets, strict=False)
    ]
    joined: Integers = np.concatenate(parts).astype("int32")
    return joined


def _add_text_logs(
    kept: Sequence[RankColumns], text_logs: Sequence[RankColumns]
) -> list[RankColumns]:
    """Add the errors and process exits in text logs. A rank without a dump is represented by its
    log alone.
    """
    by_rank = {dump.rank: dump for dump in kept}
    for log in text_logs:
        dump = by_rank.setdefault(log.rank, log)
        if dump is log:
            continue
        dump.timeouts = [*dump.timeouts, *log.timeouts]
        dump.unplaced = [*dump.unplaced, *log.unplaced]
        dump.timed_out = dump.timed_out or log.timed_out
        dump.exception = dump.exception or log.exception
        dump.exception_stack = dump.exception_stack or log.exception_stack
        dump.device_assertion = dump.device_assertion or log.device_assertion
        if dump.observation.end is End.UNKNOWN:
            dump.observation = msgspec.structs.replace(log.observation)
    return list(by_rank.values())
