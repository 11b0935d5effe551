"""Paths in, verdict out: the work of ``commlens.diagnose(paths)`` and ``commlens diagnose PATH
...``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, NamedTuple

from commlens.diagnosis.examine import ExaminedJob, examine_dumps, examine_logs
from commlens.dumps.discover import DumpFiles, discover
from commlens.dumps.read import JobLogs, read_own_files, read_verdict
from commlens.dumps.sources import Paths, Source
from commlens.errors import EvidenceError
from commlens.model.health import NodeHealth
from commlens.model.ranklog import Observation, RankLog
from commlens.model.topology import Inventory
from commlens.model.verdict import Verdict
from commlens.text import joined, printable

if TYPE_CHECKING:
    from commlens.formats.columns import RankColumns

_PROBLEMS_LISTED = 10  # in the error if nothing is readable
_PATHS_NAMED = 3


def diagnose(
    paths: Paths,
    *,
    stalled_after_s: float = 1.0,
    prefix: str = "",
    executor: Executor | None = None,
    seen: Callable[[int, int], None] | None = None,
) -> Verdict:
    """Diagnose a job from its dumps or black boxes.

    Args:
        paths: dumps of any tool: files, folders, archives, URLs, in any order.
        stalled_after_s: a collective that has been in flight for less than this in a running
            process is not stuck.
        prefix: read only files whose names start with it, and take the rank from the rest of the
            name.
        executor: runs the reduction of other tools' dumps, a few files per task: any
            ``concurrent.futures`` executor, such as those of Dask, Ray or MPI. Without one,
            processes of this machine are used if there is enough work.
        seen: called with the number of such files read so far and their total, for a progress bar.

    Raises:
        CommandError: a path does not exist or cannot be read.
        EvidenceError: no file in the paths is readable as a black box or dump.
    """
    return examine_paths(
        paths, stalled_after_s=stalled_after_s, prefix=prefix, executor=executor, seen=seen
    ).verdict


def examine_paths(
    paths: Paths,
    *,
    stalled_after_s: float = 1.0,
    prefix: str = "",
    executor: Executor | None = None,
    seen: Callable[[int, int], None] | None = None,
    health: Sequence[NodeHealth] = (),
    inventory: Inventory | None = None,
    observed: Mapping[int, Observation] | None = None,
) -> ExaminedJob:
    """Diagnose a job as :func:`diagnose` does, and return the evidence with the verdict. ``health``
    is the hardware of nodes, besides that in the dumps; ``inventory`` says where hosts are;
    ``observed`` is what was seen of the ranks' processes around the time of other tools' dumps.
    """
    files = discover(paths, prefix=prefix)
    problems = list(files.problems)
    evidence = read_own_files(files.own, problems) if files.own else JobLogs(problems=problems)
    foreign = (
        _read_foreign_dumps(files, evidence, problems, executor=executor, seen=seen)
        if files.kinds
        else None
    )
    if foreign is not None:
        examined = examine_dumps(
            foreign.dumps,
            problems=problems,
            stalled_after_s=stalled_after_s,
            unread=foreign.unread,
            health=health,
            inventory=inventory,
            observed={**evidence.cores, **(observed or {})},
        )
        verdict = examined.verdict
        # A log may hold no record and still tell the fault.
        if not examined.job.views and not verdict.looked_at and not verdict.is_fault:
            raise EvidenceError(_nothing_readable(files.paths, verdict.missing_evidence))
        return examined
    if not evidence.logs:
        if evidence.cores:
            problems.append("Core files hold stacks alone: name the job's dumps, too.")
        raise EvidenceError(_nothing_readable(files.paths, problems))
    problems += [
        f"The core file of rank {rank} is left out: the rank has no black box."
        for rank in evidence.cores
    ]
    examined = examine_logs(
        evidence.logs,
        problems=problems,
        stalled_after_s=stalled_after_s,
        slow=True,
        unread=evidence.unread,
        health=health,
        inventory=inventory,
    )
    if not examined.verdict.is_fault and (found := _diverged(files.reports, evidence.logs)):
        return examined._replace(verdict=found)
    return examined


def _diverged(reports: Iterable[Source], logs: Iterable[RankLog]) -> Verdict | None:
    """Return the verdict "diverged" that was saved in the folder of these black boxes, if there is
    one: black boxes hold no tensors, so it cannot be found again in them.
    """
    folders = {log.source.rpartition("/")[0] for log in logs}
    beside = (each for each in reports if each.name.rpartition("/")[0] in folders)
    verdicts = (read_verdict(each) for each in beside)
    return next((each for each in verdicts if each is not None and each.kind == "diverged"), None)


class _ForeignDumps(NamedTuple):
    """The records and facts that other tools' files hold about the ranks."""

    dumps: list[RankColumns]  # with the black boxes, if there are any
    unread: int  # files


def _read_foreign_dumps(
    files: DumpFiles,
    evidence: JobLogs,
    problems: list[str],
    *,
    executor: Executor | None,
    seen: Callable[[int, int], None] | None,
) -> _ForeignDumps | None:
    """Read other tools' dumps, and add the black boxes. What cannot be read is appended to
    ``problems``.

    Returns:
        None if the dumps add fewer ranks than have black boxes, or if no dump is readable.
    """
    from commlens.dumps.parallel import import_numpy_single_threaded

    import_numpy_single_threaded()
    from commlens.diagnosis.index.columns import Interner, reduce_all
    from commlens.dumps.parallel import reduce_foreign

    interner = Interner()
    unread = list(files.unread)
    found = reduce_foreign(
        files, reduce_all, problems, executor=executor, progress=seen, unnamed=True, unread=unread
    )
    dumps = [interner.intern(dump) for dump in found]
    boxed = {log.rank for log in evidence.logs}
    # A log that says nothing counts where there are only logs: it shows that the rank was there.
    if boxed or not all(dump.is_log for dump in dumps):
        dumps = [dump for dump in dumps if not dump.tells_nothing]
    only_in_dumps = {dump.rank for dump in dumps} - boxed
    if boxed and len(only_in_dumps) < len(boxed):
        if dumps:
            problems.append(
                "There are black boxes and other tools' dumps; the verdict is made from the black"
                " boxes, which record more."
            )
        return None
    if not dumps:
        return None
    unread, more = _without_records(files, unread, dumps, boxed)
    dumps += more
    if boxed:
        from commlens.formats.rank_log_columns import columns_from_log

        dumps += reduce_all(columns_from_log(log) for log in evidence.logs)
    return _ForeignDumps(dumps, len(unread) + evidence.unread)


def _without_records(
    files: DumpFiles, unread: list[str], dumps: Sequence[RankColumns], boxed: Collection[int]
) -> tuple[list[str], list[RankColumns]]:
    """Return the files that may hold records of ranks without a dump, and an empty dump for each
    rank whose log is empty or whose dump cannot be read.
    """
    silent: list[RankColumns] = []
    if all(dump.is_log for dump in dumps):
        empty = set(files.empty)
        silent = _silent_logs(files, empty.intersection(unread), dumps, boxed)
        unread = [source for source in unread if source not in empty]
    return unread, [*silent, *_unread_dumps(files, unread, [*dumps, *silent], boxed)]


def _silent_logs(
    files: DumpFiles, empty: Collection[str], dumps: Sequence[RankColumns], boxed: Collection[int]
) -> list[RankColumns]:
    """Return an empty log for each rank that has written nothing: a rank that was killed prints
    nothing.
    """
    from commlens.formats.columns import TEXT_LOG, RankColumns

    known = {dump.rank for dump in dumps} | set(boxed)
    ranks = {files.by_name(source).rank: source for source in sorted(empty)}
    return [
        RankColumns(rank=rank, source=source, host=files.by_name(source).host, origin=TEXT_LOG)
        for rank, source in sorted(ranks.items())
        if rank >= 0 and rank not in known
    ]


def _unread_dumps(
    files: DumpFiles, unread: Sequence[str], dumps: Sequence[RankColumns], boxed: Collection[int]
) -> list[RankColumns]:
    """Return an empty dump for each rank whose dump cannot be read: unlike a rank without one, it
    did write a dump.
    """
    from commlens.formats.columns import RankColumns

    known = {dump.rank for dump in dumps} | set(boxed)
    size = max((dump.world_size for dump in dumps), default=0)
    if any(files.by_name(dump.source).rank not in (-1, dump.rank) for dump in dumps):
        return []  # the numbers in the files' names are no ranks
    ranks = {
        name.rank: (source, name.host)
        for source in unread
        if (name := files.by_name(source)).rank >= 0
    }
    return [
        RankColumns(
            rank=rank,
            source=source,
            host=host,
            job=dumps[0].job,
            problems=["its dump could not be read"],
            lost_entries=True,
        )
        for rank, (source, host) in sorted(ranks.items())
        if rank not in known and (rank < size or not size)
    ]


def _nothing_readable(paths: Sequence[str], problems: Sequence[str]) -> str:
    names = [printable(path) for path in paths]
    others = len(names) - _PATHS_NAMED
    where = (
        joined([*names[:_PATHS_NAMED], f"{others} more"] if others > 0 else names)
        or "an empty list of paths"
    )
    listed = "".join(f"\n  - {text}" for text in problems[:_PROBLEMS_LISTED])
    more = (
        f"\n  - and {len(problems) - _PROBLEMS_LISTED} more"
        if len(problems) > _PROBLEMS_LISTED
        else ""
    )
    return f"There is nothing to diagnose in {where}: no readable black box or dump.{listed}{more}"
