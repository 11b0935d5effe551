"""What NCCL's RAS service says about the ranks of a fault: one more witness, which can be wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from commlens.diagnosis.causes.context import Context
from commlens.model.cause import Missing, RasSays, RasWitness, StuckInside, Wait
from commlens.model.health import RasCommunicator, RasRank


def add_ras(context: Context) -> None:
    """Add what RAS says about the group of each root cause, as far as its processes show which of
    the communicators that is.
    """
    reports = [
        node.health.ras
        for node in context.job.nodes
        if node.health.ras is not None and node.health.ras.answered
    ]
    communicators = [each for report in reports for each in report.communicators]
    by_pid = _by_pid(context)
    for case in context.cases:
        cause = case.found.cause
        if not case.claim.root_cause or not isinstance(cause, (StuckInside, Missing)):
            continue
        about = _about(communicators, _groups(cause.waits), by_pid)
        if about is not None:
            cause.ras = _witness(cause, about, by_pid)
            if cause.ras.says == "disagrees" and cause.confidence == "medium":
                cause.confidence = "low"


def _by_pid(context: Context) -> dict[int, int]:
    """Return the rank of each process whose pid no other rank has."""
    pids = Counter(view.log.pid for view in context.job.views.values())
    return {
        view.log.pid: rank
        for rank, view in context.job.views.items()
        if view.log.pid and pids[view.log.pid] == 1
    }


def _groups(waits: Sequence[Wait]) -> list[list[int]]:
    return [wait.group.ranks for wait in waits if wait.group is not None]


def _about(
    communicators: Iterable[RasCommunicator],
    groups: Sequence[Sequence[int]],
    by_pid: Mapping[int, int],
) -> RasCommunicator | None:
    """Return the communicator of one of the groups; of several, one in which RAS sees a problem."""
    same = [each for each in communicators if any(_is_of(each, group, by_pid) for group in groups)]
    wrong = [each for each in same if each.apart or each.silent]
    return next(iter(wrong or same), None)


def _is_of(each: RasCommunicator, group: Sequence[int], by_pid: Mapping[int, int]) -> bool:
    """Return whether a communicator is of a group: its processes are, in the same order."""
    named = [(rank.rank, rank.pid) for rank in (*each.behind, *each.silent)]
    told = list(enumerate(each.pids)) if each.pids else named
    pairs = [(place, by_pid[pid]) for place, pid in told if pid in by_pid]
    fits = not each.size or each.size == len(group)
    return (
        fits
        and bool(pairs)
        and all(place < len(group) and group[place] == rank for place, rank in pairs)
    )


def _witness(
    cause: StuckInside | Missing, about: RasCommunicator, by_pid: Mapping[int, int]
) -> RasWitness:
    behind = _ranks(about.behind, by_pid)
    silent = _ranks(about.silent, by_pid)
    return RasWitness(_says(cause, about, behind, silent), about.op, behind, silent)


def _ranks(named: Sequence[RasRank], by_pid: Mapping[int, int]) -> list[int]:
    return sorted(by_pid[each.pid] for each in named if each.pid in by_pid)


def _says(
    cause: StuckInside | Missing, about: RasCommunicator, behind: list[int], silent: list[int]
) -> RasSays:
    if isinstance(cause, StuckInside):
        return "disagrees" if about.apart else "agrees"
    if not about.apart and not silent:
        return "silent"
    blamed = set(cause.culprits)
    return "agrees" if blamed & {*behind, *silent} else "disagrees"
