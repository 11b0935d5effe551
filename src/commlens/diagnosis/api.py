"""Files in, verdict out: what ``commlens.diagnose(paths)`` and ``commlens diagnose PATH ...`` do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor

from commlens.diagnosis.conclusion import examine_logs
from commlens.diagnosis.examined import ExaminedJob
from commlens.dumps.discover import DumpFiles, discover
from commlens.dumps.read import Evidence, read_own_files
from commlens.dumps.sources import Paths as NamedPaths
from commlens.errors import EvidenceError
from commlens.model.verdict import Verdict

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | NamedPaths


_TOLD = 10  # problems named when nothing could be read


def diagnose(
    paths: Paths,
    *,
    stalled_after_s: float = 1.0,
    prefix: str = "",
    executor: Executor | None = None,
    seen: Callable[[int, int], None] | None = None,
) -> Verdict:
    """Say what is wrong with a job, from its dumps or black boxes.

    Args:
        paths: dumps of any origin: files, folders, archives, URLs, in any order.
        stalled_after_s: a collective in flight for less than this in a process that runs is not stuck.
        prefix: take only files whose name begins so, and read the rank after it.
        executor: where other tools' dumps are read, a few files at a time: one of ``concurrent.futures``, of Dask, Ray or MPI.
            Without one, processes of this machine are used where there is enough to do.
        seen: called with how many of such files are read and how many there are, for a progress bar.

    Raises:
        CommandError: a path does not exist or cannot be read.
        EvidenceError: nothing in it could be read.
    """
    return examine_paths(paths, stalled_after_s=stalled_after_s, prefix=prefix, executor=executor, seen=seen).verdict


def examine_paths(
    paths: Paths,
    *,
    stalled_after_s: float = 1.0,
    prefix: str = "",
    executor: Executor | None = None,
    seen: Callable[[int, int], None] | None = None,
) -> ExaminedJob:
    """The same as :func:`diagnose`, with what the verdict was made of."""
    files = discover(paths, prefix=prefix)
    problems = list(files.problems)
    evidence = read_own_files(files.own, problems) if files.own else Evidence(problems=problems)
    if files.kinds:
        found = _examine_recorded(files, evidence, problems, stalled_after_s, executor, seen)
        if found is not None:
            return found
    if not evidence.logs:
        raise EvidenceError(_nothing(problems))
    return examine_logs(evidence.logs, problems=problems, stalled_after_s=stalled_after_s)


def _examine_recorded(
    files: DumpFiles,
    evidence: Evidence,
    problems: list[str],
    stalled_after_s: float,
    executor: Executor | None,
    seen: Callable[[int, int], None] | None,
) -> ExaminedJob | None:
    """Other tools' dumps; black boxes count as such where they are of fewer ranks. None where the black boxes tell more."""
    from commlens.dumps.parallel import import_numpy_single_threaded

    import_numpy_single_threaded()
    from commlens.diagnosis.extract import Shared, extract_all
    from commlens.diagnosis.foreign_dumps import examine_extracts
    from commlens.dumps.parallel import reduce_foreign

    shared = Shared()
    reduced = reduce_foreign(files, extract_all, problems, executor=executor, progress=seen, unnamed=True)
    extracts = [shared.adopt(found) for found in reduced]
    boxed = {log.rank for log in evidence.logs}
    others = {found.rank for found in extracts} - boxed
    if boxed and len(others) < len(boxed):
        if extracts:
            problems.append("There are black boxes and other tools' dumps; the verdict is made from the black boxes, which tell more.")
        return None
    if not extracts:
        return None
    if boxed:
        from commlens.formats.rank_log_columns import columns_from_log

        extracts += extract_all(columns_from_log(log) for log in evidence.logs)
    return examine_extracts(extracts, problems=problems, stalled_after_s=stalled_after_s)


def _nothing(problems: Sequence[str]) -> str:
    told = "".join(f"\n  - {text}" for text in problems[:_TOLD])
    more = f"\n  - and {len(problems) - _TOLD} more" if len(problems) > _TOLD else ""
    return f"Nothing here can be diagnosed: there is no readable black box or dump.{told}{more}"
