"""Which dumps belong together: one job, one dump of each rank. Most dumps do not say of which job they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from commlens.diagnosis.backend_rings import joined
from commlens.diagnosis.extract import Extract
from commlens.model.ranklog import End
from commlens.text import count, ranks_phrase


def choose_extracts(extracts: Sequence[Extract]) -> tuple[list[Extract], list[str]]:
    """Pick the job to diagnose and the best dump of each of its ranks, whatever the order of the files.

    Returns:
        The extracts by rank, and what was left out, in sentences.
    """
    notes: list[str] = []
    dumps = [found for found in extracts if found.origin != "torch-log"]
    told = [found for found in extracts if found.origin == "torch-log"]
    _name_the_last(dumps)
    nameless = [found for found in dumps if found.rank < 0]
    if nameless:
        names = ", ".join(sorted(found.source for found in nameless)[:3]) + (" and more" if len(nameless) > 3 else "")
        notes.append(f"{count(len(nameless), 'dump')} left out, because neither name nor content shows the rank: {names}.")
    jobs = _jobs([found for found in dumps if found.rank >= 0])
    if not jobs:
        return _one_per_rank([found for found in told if found.rank >= 0], notes), notes
    chosen = max(jobs, key=_weight)
    for job in jobs:
        if job is not chosen:
            where = sorted({_folder(found) for found in job})
            notes.append(
                f"The dumps of {ranks_phrase(found.rank for found in job)} in {', '.join(where[:3])} are of another job or another "
                "time; they are left out."
            )
    kept = _one_per_rank(chosen, notes)
    return sorted(_with_logs(kept, told), key=lambda found: found.rank), notes


def _folder(found: Extract) -> str:
    return found.source.rpartition("/")[0] or "."


def _newest(found: Extract) -> int:
    return int(found.created_ns.max(initial=0))


def _weight(job: Sequence[Extract]) -> tuple[int, int, str]:
    return (len({found.rank for found in job}), max(map(_newest, job)), min(found.source for found in job))


def _name_the_last(dumps: Sequence[Extract]) -> None:
    """Where all but one of the ranks that could have written it are taken, that one has."""
    open_ = [found for found in dumps if found.rank < 0 and found.possible_ranks]
    taken = {found.rank for found in dumps if found.rank >= 0}
    while True:
        named = False
        for found in open_:
            left = set(found.possible_ranks) - taken
            if found.rank < 0 and len(left) == 1:
                found.rank = left.pop()
                taken.add(found.rank)
                named = True
        if not named:
            return


def _jobs(dumps: Sequence[Extract]) -> list[list[Extract]]:
    """One job is all of its nodes' folders; a folder that has the same ranks once more is of another."""
    folders: dict[tuple[str, str], list[Extract]] = defaultdict(list)
    for found in dumps:
        folders[(found.job, _folder(found))].append(found)
    jobs: list[tuple[set[int], int, str, list[Extract]]] = []
    for (name, _), several in sorted(folders.items(), key=lambda item: (-len(item[1]), item[0])):
        ranks = {found.rank for found in several}
        size = max(found.world_size for found in several)
        for place, (taken, other_size, other_name, members) in enumerate(jobs):
            if not taken & ranks and (not size or not other_size or size == other_size) and name == other_name:
                jobs[place] = (taken | ranks, size or other_size, name, [*members, *several])
                break
        else:
            jobs.append((ranks, size, name, list(several)))
    return [members for *_, members in jobs]


def _one_per_rank(dumps: Sequence[Extract], notes: list[str]) -> list[Extract]:
    by_rank: dict[int, list[Extract]] = defaultdict(list)
    for found in dumps:
        by_rank[found.rank].append(found)
    kept = []
    for rank in sorted(by_rank):
        several = sorted(by_rank[rank], key=lambda found: (_newest(found), len(found), found.source))
        together = joined(several)
        if together is not None:
            kept.append(together)
            continue
        kept.append(several[-1])
        if len(several) > 1:
            notes.append(f"There are {len(several)} dumps of rank {rank}; the newest is used: {several[-1].source}.")
    return kept


def _with_logs(kept: Sequence[Extract], told: Sequence[Extract]) -> list[Extract]:
    """Add what text logs say of how ranks ended. A rank that has no dump is known by its log alone."""
    by_rank = {found.rank: found for found in kept}
    for found in told:
        if found.rank < 0:
            continue
        mine = by_rank.get(found.rank)
        if mine is None:
            by_rank[found.rank] = found
            continue
        mine.troubles = [*mine.troubles, *found.troubles]
        mine.exception = mine.exception or found.exception
        mine.exception_stack = mine.exception_stack or found.exception_stack
        if mine.observation.end is End.UNKNOWN:
            mine.observation = msgspec.structs.replace(found.observation)
    return list(by_rank.values())
