"""Select the dumps of one job, and one dump per rank. Most dumps do not name their job, and some do
not name their rank.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from commlens.diagnosis.index.columns import RankDump
from commlens.model.limits import WORLD_MAX
from commlens.model.ranklog import End
from commlens.text import count, ranks_phrase

_LISTS = ("channels", "groups", "args", "stacks", "problems")
_ROW_COLUMNS = ("sequence", "state", "record_id", "peer", "coalesced", "created_ns", "completed_ns")
# a column, and the table that it indexes
_INDEX_COLUMNS = (("channel", "channels"), ("args_index", "args"), ("stack", "stacks"))


def select_dumps(dumps: Sequence[RankDump]) -> tuple[list[RankDump], list[str]]:
    """Select the job to diagnose and the best dump of each of its ranks, independent of the order
    of the files.

    Returns:
        The dumps by rank, and sentences about what was left out.
    """
    notes: list[str] = []
    dumps = _without_impossible_ranks(dumps, notes)
    text_logs = [dump for dump in dumps if dump.is_log]
    dumps = [dump for dump in dumps if not dump.is_log]
    notes += [
        f"{log.source}: {text}." for log in text_logs if log.rank < 0 for text in log.problems
    ]
    _infer_ranks(dumps)
    unnamed = [dump for dump in dumps if dump.rank < 0]
    if unnamed:
        names = ", ".join(sorted(dump.source for dump in unnamed)[:3]) + (
            " and more" if len(unnamed) > 3 else ""
        )
        notes.append(
            f"{count(len(unnamed), 'dump')} left out, because neither name nor content shows the"
            f" rank: {names}."
        )
    jobs = _group_by_job([dump for dump in dumps if dump.rank >= 0])
    if not jobs:
        return _one_per_rank([dump for dump in text_logs if dump.rank >= 0], notes), notes
    chosen = max(jobs, key=_job_order)
    for job in jobs:
        if job is not chosen:
            folders = sorted({_folder(dump) for dump in job})
            notes.append(
                f"The dumps of {ranks_phrase(dump.rank for dump in job)} in"
                f" {', '.join(folders[:3])} are of another job or another time; they are left out."
            )
    kept = _one_per_rank(chosen, notes)
    return sorted(_add_text_logs(kept, text_logs), key=lambda dump: dump.rank), notes


def _without_impossible_ranks(dumps: Sequence[RankDump], notes: list[str]) -> list[RankDump]:
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


def _folder(dump: RankDump) -> str:
    return dump.source.rpartition("/")[0] or "."


def _newest_ns(dump: RankDump) -> int:
    return int(dump.created_ns.max(initial=0))


def _job_order(job: Sequence[RankDump]) -> tuple[int, int, str]:
    return (
        len({dump.rank for dump in job}),
        max(map(_newest_ns, job)),
        min(dump.source for dump in job),
    )


def _infer_ranks(dumps: Sequence[RankDump]) -> None:
    """Infer an unnamed dump's rank when only one candidate is left."""
    unnamed = [dump for dump in dumps if dump.rank < 0 and dump.possible_ranks]
    taken = {dump.rank for dump in dumps if dump.rank >= 0}
    progress = True
    while progress:
        progress = False
        for dump in unnamed:
            candidates = set(dump.possible_ranks) - taken
            if dump.rank < 0 and len(candidates) == 1:
                dump.rank = candidates.pop()
                taken.add(dump.rank)
                progress = True


def _group_by_job(dumps: Sequence[RankDump]) -> list[list[RankDump]]:
    """Group the dumps by job.

    The nodes of a job may each have a folder, so folders with different ranks are one job. A folder
    that repeats ranks is another.
    """
    folders: dict[tuple[str, str], list[RankDump]] = defaultdict(list)
    for dump in dumps:
        folders[(dump.job, _folder(dump))].append(dump)
    jobs: list[tuple[set[int], int, str, list[RankDump]]] = []
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


def _one_per_rank(dumps: Sequence[RankDump], notes: list[str]) -> list[RankDump]:
    """Keep the newest dump of each rank; join the dumps of its backends."""
    by_rank: dict[int, list[RankDump]] = defaultdict(list)
    for dump in dumps:
        by_rank[dump.rank].append(dump)
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


def _join_backends(dumps: Sequence[RankDump]) -> RankDump | None:
    """Join one rank's dumps of different backends in the order of issue; return None if their
    backends are not distinct.

    Torch 2.14 and later keep one ring buffer per backend, and write a file for each.
    """
    first, *others = dumps
    backends = [{channel.group.backend for channel in dump.channels} for dump in dumps]
    if (
        not others
        or not all(backends)
        or sum(map(len, backends)) != len(set[str]().union(*backends))
    ):
        return None
    order = np.argsort(np.concatenate([dump.created_ns for dump in dumps]), kind="stable")
    values: dict[str, Any] = {
        name: np.concatenate([getattr(dump, name) for dump in dumps])[order]
        for name in _ROW_COLUMNS
    }
    for name, table in _INDEX_COLUMNS:
        parts, offset = [], 0
        for dump in dumps:
            column = getattr(dump, name)
            parts.append(np.where(column >= 0, column + offset, column))
            offset += len(getattr(dump, table))
        values[name] = np.concatenate(parts)[order].astype("int32")
    shift = max(int(dump.coalesced.max(initial=0)) for dump in dumps) + 1
    batches = [
        np.where(dump.coalesced > 0, dump.coalesced + shift * place, 0)
        for place, dump in enumerate(dumps)
    ]
    values["coalesced"] = np.concatenate(batches)[order].astype("int32")
    values |= {name: [one for dump in dumps for one in getattr(dump, name)] for name in _LISTS}
    values["record_id"] = np.arange(len(order), dtype="int64")  # each ring buffer counts from 0
    return dataclasses.replace(
        first,
        **values,
        status={name: status for dump in dumps for name, status in dump.status.items()},
        world_size=max(dump.world_size for dump in dumps),
        captured_ns=max(dump.captured_ns for dump in dumps),
        written_ns=min(dump.written_ns for dump in dumps),
        issued=sum(dump.issued for dump in dumps),
        timed=all(dump.timed for dump in dumps),
        only_active=all(dump.only_active for dump in dumps),
        lost_entries=any(dump.lost_entries for dump in dumps),
        unbroken=0,  # the ids of several ring buffers are not consecutive
    )


def _add_text_logs(kept: Sequence[RankDump], text_logs: Sequence[RankDump]) -> list[RankDump]:
    """Add the errors and process exits in text logs. A rank without a dump is represented by its
    log alone.
    """
    by_rank = {dump.rank: dump for dump in kept}
    for log in text_logs:
        if log.rank < 0:
            continue
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
