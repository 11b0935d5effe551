"""What NCCL's RAS service says about the ranks of a fault: one more witness, which can be wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from commlens.diagnosis.causes.context import Context
from commlens.model.cause import Cause, Missing, RasSays, RasWitness, StuckInside, Wait
from commlens.model.health import RasCommunicator, RasRank, RasReport
from commlens.model.ranklog import RankLog


def add_ras(context: Context) -> None:
    """Add what RAS says about the group of each root cause, as far as its processes show which of
    the communicators that is.
    """
    reports = [node.health.ras for node in context.job.nodes if node.health.ras is not None]
    logs = [view.log for view in context.job.views.values()]
    for case in context.cases:
        if case.claim.root_cause:
            ask_witness(case.found.cause, reports, logs)


def ask_witness(
    cause: Cause, reports: Iterable[RasReport], logs: Sequence[RankLog], *, any_group: bool = False
) -> None:
    """Add to a cause what RAS says about its group.

    Args:
        cause: what was found.
        reports: the answers of RAS.
        logs: of all ranks.
        any_group: where the ranks of the group are not known, any communicator of the job counts.
    """
    if not isinstance(cause, (StuckInside, Missing)):
        return
    communicators = [each for report in reports if report.answered for each in report.communicators]
    by_pid = _by_pid(logs)
    groups = _groups(cause.waits)
    if any_group and not groups:
        groups = [_ranks_of(each, by_pid) for each in communicators]
    about = _about(communicators, groups, {log.rank: log.pid for log in logs if log.pid})
    if about is not None:
        cause.ras = _witness(cause, about, by_pid)
        if cause.ras.says == "disagrees" and cause.confidence == "medium":
            cause.confidence = "low"


def _by_pid(logs: Sequence[RankLog]) -> dict[int, int]:
    """Return the rank of each process whose pid no other rank has."""
    pids = Counter(log.pid for log in logs)
    return {log.pid: log.rank for log in logs if log.pid and pids[log.pid] == 1}


def _ranks_of(each: RasCommunicator, by_pid: Mapping[int, int]) -> list[int]:
    """Return the ranks of a communicator; none if one of its processes is not known."""
    ranks = [by_pid.get(pid, -1) for pid in each.pids]
    return ranks if -1 not in ranks else []


def _groups(waits: Sequence[Wait]) -> list[list[int]]:
    return [wait.group.ranks for wait in waits if wait.group is not None]


def _about(
    communicators: Iterable[RasCommunicator],
    groups: Sequence[Sequence[int]],
    pids: Mapping[int, int],
) -> RasCommunicator | None:
    """Return the communicator of one of the groups; of several, one in which RAS sees a problem."""
    same = [each for each in communicators if any(_is_of(each, group, pids) for group in groups)]
    wrong = [each for each in same if each.apart or each.silent]
    return next(iter(wrong or same), None)


def _is_of(each: RasCommunicator, group: Sequence[int], pids: Mapping[int, int]) -> bool:
    """Return whether a communicator is of a group: its processes are, in the same order.

    Jobs on one node share RAS's default port, so the answer may be another job's. A process that is
    not the rank's shows that, even if others have the same pids on another node.

    Args:
        each: the communicator.
        group: the global ranks.
        pids: of the job's ranks, as far as they are known.
    """
    named = [(rank.rank, rank.pid) for rank in (*each.behind, *each.silent)]
    told = list(enumerate(each.pids)) if each.pids else named
    if any(place >= len(group) for place, _ in told) or each.size not in (0, len(group)):
        return False
    known = [(pid, pids[group[place]]) for place, pid in told if pid and group[place] in pids]
    return bool(known) and all(pid == own for pid, own in known)


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
