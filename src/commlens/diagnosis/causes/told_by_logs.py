"""Faults of a job as a whole, found in text logs: timeouts in groups without a name, signals to the
launcher, other tools' reports.

They count only if the ranks' records show no fault. Example: Slurm's "*** JOB 7 ON n01
CANCELLED AT ... DUE TO TIME LIMIT ***" gives the report ``ended`` with the ending ``time-limit``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, get_args

from commlens.model.cause import (
    OF_THE_STORE,
    JobEnding,
    Kind,
    LogReport,
    ToldByLogs,
    UnplacedTimeout,
    Why,
)
from commlens.model.collective import user_frame
from commlens.model.grouping import grouped
from commlens.text import frame_phrase

if TYPE_CHECKING:
    from commlens.formats.columns import EndingLine, RankColumns

_WHY: Final[dict[JobEnding, Why]] = {"out-of-memory": "out-of-memory", "process-failed": "exit"}
TAKE_A_PROCESS: Final[tuple[JobEnding, ...]] = ("out-of-memory", "node-failure", "evicted")
"""They end single processes or nodes, so that others wait in vain."""
TELL_WHY: Final[tuple[JobEnding, ...]] = (
    "out-of-memory",
    "node-failure",
    "preemption",
    "time-limit",
    "evicted",
    "gpu-error",
)
"""They say why the job ended, so the exceptions that followed add nothing."""
_BY_NOBODY: Final = ("node-failure", "preemption", "time-limit", "evicted", "cancelled")


def find_told(
    dumps: Sequence[RankColumns], chosen: Sequence[RankColumns], timeouts: Sequence[UnplacedTimeout]
) -> ToldByLogs | None:
    """Return the strongest fault in the logs' lines about the job; None if they show no fault.

    Args:
        dumps: of all files.
        chosen: those of the ranks of the job that is diagnosed.
        timeouts: those of :func:`unplaced_timeouts`.
    """
    ranks = sorted({dump.rank for dump in chosen})
    return (
        _lagging(dumps, timeouts, ranks)
        or _find_rank_behind(dumps, timeouts)
        or _timed_out(dumps, timeouts)
        or _ended(dumps, ranks, TELL_WHY)
        or _raised(dumps)
        or _stuck_watchdog(chosen)
        or _ended(dumps, ranks, ["cancelled"] if _was_cancelled(dumps) else get_args(JobEnding))
        or _launcher_ended(dumps, ranks)
        or _find_remark(dumps, ranks)
        or _store_unreached([line for dump in dumps for line in dump.endings])
    )


def unplaced_timeouts(dumps: Sequence[RankColumns]) -> list[UnplacedTimeout]:
    """Return the timeouts that cannot be aligned across ranks, those of most ranks first."""
    by_text = grouped((text, dump.rank) for dump in dumps for text in dump.timeouts)
    known = [
        UnplacedTimeout(text, sorted({rank for rank in ranks if rank >= 0}))
        for text, ranks in by_text.items()
    ]
    return sorted(known, key=lambda one: (-len(one.ranks), one.ranks, one.text))


def _lagging(
    dumps: Sequence[RankColumns], timeouts: Sequence[UnplacedTimeout], ranks: list[int]
) -> ToldByLogs | None:
    """Return the ranks that torch's desync report names: they did not join what others wait in."""
    lagging = sorted({rank for dump in dumps for kind, rank in dump.remarks if kind == "lagging"})
    if not lagging:
        return None
    return ToldByLogs(
        kind="missing",
        why="unknown",
        root_cause=True,
        culprits=lagging,
        blamed_by="absence",
        victims=sorted({*ranks} - {*lagging}),
        confidence="medium",
        report="desync",
        ranks=ranks,
        timeouts=[*timeouts],
    )


def _find_rank_behind(
    dumps: Sequence[RankColumns], timeouts: Sequence[UnplacedTimeout]
) -> ToldByLogs | None:
    """Return the rank that timed out in an earlier collective than all others did, in logs that do
    not name the process group.
    """
    numbers = {dump.rank: dump.unplaced for dump in dumps if dump.unplaced and dump.rank >= 0}
    (op, number), others = _most_met(numbers)
    odd = [rank for rank in numbers if rank not in others]
    if len(odd) != 1 or len(others) < 2:
        return None
    last = max((own for name, own in numbers[odd[0]] if name == op), default=number)
    if last >= number or any(own >= number for _, own in numbers[odd[0]]):
        return None
    return ToldByLogs(
        kind="missing",
        why="unknown",
        root_cause=True,
        culprits=odd,
        blamed_by="rounds",
        victims=others,
        confidence="low",
        report="behind",
        ranks=sorted(numbers),
        timeouts=[*timeouts],
        op=op,
        numbers=[last, number],
    )


def _most_met(numbers: Mapping[int, list[tuple[str, int]]]) -> tuple[tuple[str, int], list[int]]:
    """Return the op and number in which most ranks timed out, and these ranks.

    Args:
        numbers: op and number of the collectives in which each rank timed out.
    """
    met = grouped((one, rank) for rank, ops in sorted(numbers.items()) for one in set(ops))
    return max(met.items(), key=lambda item: (len(item[1]), item[0]), default=(("", 0), []))


def _timed_out(
    dumps: Sequence[RankColumns], timeouts: Sequence[UnplacedTimeout]
) -> ToldByLogs | None:
    """Return a hang in a process group that the logs do not name."""
    if not timeouts:
        return None
    waiting = sorted({dump.rank for dump in dumps if dump.timeouts and dump.rank >= 0})
    return _nobody_blamed("timed-out", "missing", waiting, timeouts=[*timeouts])


def _launcher_ended(dumps: Sequence[RankColumns], ranks: list[int]) -> ToldByLogs | None:
    """Return a signal that ended the launcher, and with it the job: nothing else shows a fault."""
    signals = sorted({dump.launcher_signal for dump in dumps if dump.launcher_signal})
    if not signals:
        return None
    return ToldByLogs(
        kind="dead",
        why="killed",
        root_cause=True,
        blamed_by="nobody",
        victims=ranks,
        confidence="high",
        report="launcher-ended",
        ranks=ranks,
        signals=signals,
    )


def _ended(
    dumps: Sequence[RankColumns], ranks: list[int], endings: Sequence[JobEnding]
) -> ToldByLogs | None:
    """Return why a scheduler, the kernel or a launcher says that the job or a process ended: the
    first of these reasons that a line names.
    """
    told = [line for dump in dumps for line in dump.endings]
    known = {line.ending for line in told} - {*OF_THE_STORE}
    ending = next((one for one in endings if one in known), None)
    if ending is None:
        return None
    lines = [line for line in told if line.ending == ending]
    sure = ending in _BY_NOBODY or ending == "out-of-memory"
    return ToldByLogs(
        kind="dead",
        why=_WHY.get(ending, "killed"),
        root_cause=True,
        blamed_by="nobody" if ending in _BY_NOBODY else "unknown",
        victims=ranks,
        confidence="high" if sure else "medium",
        report="ended",
        ranks=ranks,
        ending=ending,
        lines=list(dict.fromkeys(line.text for line in lines)),
        numbers=sorted({line.xid for line in lines if line.xid}),
        nodes=sorted({*map(attrgetter("node"), lines)} - {""}),
        before_errors=any(map(attrgetter("before_errors"), lines)),
    )


def _was_cancelled(dumps: Sequence[RankColumns]) -> bool:
    """Return whether each log that tells of an end tells first that the job was cancelled: then the
    launchers' statuses follow from that.
    """
    told = ([line for line in dump.endings if line.ending not in OF_THE_STORE] for dump in dumps)
    firsts = [lines[0] for lines in told if lines]
    return bool(firsts) and all(
        line.ending == "cancelled" and line.before_errors for line in firsts
    )


def _store_unreached(told: Sequence[EndingLine]) -> ToldByLogs | None:
    """Return the ranks that gave up reaching torch's store, or failed once, which is no fault.
    If one of them could not listen for it, the others had nothing to connect to.
    """
    lines = [line for ending in OF_THE_STORE for line in told if line.ending == ending]
    if not lines:
        return None
    ending = lines[0].ending
    listens = any(line.ending == ending and line.listens for line in lines)
    alike = [line for line in lines if line.listens == listens]
    ranks = {line.rank for line in alike if line.ending == ending}
    return _nobody_blamed(
        "ended",
        "missing" if ending == "store-unreachable" else "undetermined",
        sorted({line.rank for line in lines} - {-1}),
        ranks=sorted(ranks - {-1}),
        ending=ending,
        lines=list(dict.fromkeys(line.text for line in alike if line.rank in ranks)),
        listens=listens,
    )


def _stuck_watchdog(dumps: Sequence[RankColumns]) -> ToldByLogs | None:
    """Return the ranks whose watchdog made no progress, where no other rank's log tells more."""
    ranks = sorted(dump.rank for dump in dumps if dump.stuck_watchdog_s)
    if not ranks:
        return None
    waited_s = max(dump.stuck_watchdog_s for dump in dumps)
    return _nobody_blamed("watchdog-stuck", "stuck-inside", ranks, waited_s=waited_s)


def _raised(dumps: Sequence[RankColumns]) -> ToldByLogs | None:
    """Return the exception of the launcher, or of a rank that no line of its traceback names."""
    raised = (dump for dump in dumps if dump.is_log and dump.rank < 0 and dump.exception)
    log = next(raised, None)
    if log is None:
        return None
    return ToldByLogs(
        kind="dead",
        why="exception",
        root_cause=True,
        blamed_by="unknown",
        confidence="low",
        report="raised",
        ranks=[],
        exception=log.exception,
        line=frame_phrase(user_frame(log.exception_stack)),
        by_launcher=log.by_launcher,
    )


def _listed_behind(remarks: Sequence[tuple[str, int]]) -> list[int]:
    """Return the ranks that NCCL's RAS lists after the lowest number of operations: it lists those
    of one communicator in one place.
    """
    lowest = min(number for kind, number in remarks if kind == "ras-behind")
    at, listed = lowest, set[int]()
    for kind, number in remarks:
        if kind == "ras-behind":
            at = number
        elif kind == "ras-rank" and at == lowest:
            listed.add(number)
    return sorted(listed)


def _find_remark(dumps: Sequence[RankColumns], ranks: list[int]) -> ToldByLogs | None:
    """Return what other tools' lines tell: NCCL's RAS of a communicator whose ranks launched
    different numbers of operations, or vLLM's engine, which waits for a worker.
    """
    remarks = [remark for dump in dumps for remark in dump.remarks]
    operations = sorted({number for kind, number in remarks if kind == "ras-behind"})
    waits = [number for kind, number in remarks if kind == "broadcast-wait"]
    if len(operations) > 1:
        listed = _listed_behind(remarks)
        return _nobody_blamed("ras-behind", "missing", ranks, numbers=operations, listed=listed)
    if waits:
        return _nobody_blamed("engine-waits", "undetermined", ranks, waited_s=max(waits))
    lost = sorted({number for kind, number in remarks if kind == "store-lost"})
    return _nobody_blamed("store-lost", "undetermined", lost) if lost else None


def _nobody_blamed(report: LogReport, kind: Kind, victims: list[int], **more: Any) -> ToldByLogs:
    """Return a cause without a culprit; its ranks are the victims unless ``more`` names others."""
    return ToldByLogs(
        kind=kind,
        why="unknown",
        root_cause=kind != "undetermined",
        blamed_by="unknown",
        victims=victims,
        confidence="low",
        report=report,
        **{"ranks": victims, **more},
    )
