"""Read all ranks' dumps as columns: one after the other, or in parallel processes that return only
a reduced form.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from commlens.dumps.detect import TEXT, Kind
from commlens.dumps.discover import DumpFiles
from commlens.dumps.garbage import collector_paused
from commlens.dumps.read import read_own_files
from commlens.dumps.sources import FileName, Source
from commlens.dumps.sources.rank_from_name import rank_of_dump
from commlens.errors import CommlensError
from commlens.text import ranks_phrase

if TYPE_CHECKING:
    from commlens.formats.columns import RankColumns

T = TypeVar("T")
Reduce = Callable[[Iterable["RankColumns"]], list[T]]

_BATCH_BYTES: Final = 32 << 20  # stored bytes: enough to make the cost of sending a batch small
_BATCH_FILES: Final = 32
_PARALLEL_BYTES: Final = 128 << 20  # stored bytes that justify worker processes, at 0.2 s each
_AHEAD: Final = 4  # queued batches per process; few, since members of archives hold their bytes
_NUMPY_THREADS: Final = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")

# results, problems, names of unreadable files, number of files
Reduced = tuple[list[T], list[str], list[str], int]
Batch = list[tuple[Source, Kind, FileName]]


def import_numpy_single_threaded() -> None:
    """Import numpy without its linear algebra threads, which commlens does not use.

    Call it before anything imports numpy: a process with several threads cannot fork safely, and
    :func:`reduce_foreign` forks.
    """
    if "numpy" in sys.modules:
        return
    before = {name: os.environ.get(name) for name in _NUMPY_THREADS}
    os.environ.update(dict.fromkeys(_NUMPY_THREADS, "1"))
    try:
        import numpy  # noqa: F401
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def reduce_foreign(
    files: DumpFiles,
    reduce: Reduce[T],
    problems: list[str],
    *,
    executor: Executor | None = None,
    progress: Callable[[int, int], None] | None = None,
    ranks: Collection[int] | None = None,
    unnamed: bool = False,
    unread: list[str] | None = None,
) -> Iterator[T]:
    """Read every other tool's dump and keep only what ``reduce`` returns, so that memory does not
    grow with the files.

    Args:
        files: the discovered files.
        reduce: turns the columns of several ranks, one after the other, into results. It may run in
            another process, so both the function and its results must be picklable.
        problems: is extended by a sentence per file that cannot be read.
        executor: where to read: a process pool, Dask's, Ray's, MPI's. By default local processes,
            or this process if the files are small.
        progress: called with the number of files read so far and in total.
        ranks: read only these ranks.
        unnamed: include dumps of unknown rank; otherwise each one is a problem.
        unread: is extended by the names of the dumps that cannot be read.

    Yields:
        The results, in the order of the files.
    """
    total = sum(files.kinds.values())
    done = 0
    read = partial(_read_batch, reduce=reduce, ranks=ranks, unnamed=unnamed)
    for found, new_problems, failed, count in _in_order(
        _batches(files, ranks), read, executor, files.size
    ):
        problems += new_problems
        if unread is not None:
            unread += failed
        done += count
        if progress is not None:
            progress(done, total)
        yield from found


def _in_order(
    batches: Iterator[Batch],
    read: Callable[[Batch], Reduced[T]],
    executor: Executor | None,
    size: int,
) -> Iterator[Reduced[T]]:
    """Yield each batch's results in order, with a bounded number of batches in flight."""
    with ExitStack() as stack:
        workers = os.cpu_count() or 1
        if executor is None and workers > 1 and size >= _PARALLEL_BYTES and _may_fork():
            executor = stack.enter_context(
                ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork"))
            )
        if executor is None:
            yield from map(read, batches)
            return
        waiting = deque(executor.submit(read, batch) for batch in islice(batches, workers * _AHEAD))
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(executor.submit(read, batch) for batch in islice(batches, 1))


def _may_fork() -> bool:
    """Return whether this process has a single thread, so that a fork is safe."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return False
    try:
        return len(list(Path("/proc/self/task").iterdir())) == 1
    except OSError:
        return False


def _batches(files: DumpFiles, ranks: Collection[int] | None) -> Iterator[Batch]:
    batch: Batch = []
    size = 0
    for source, kind in files.foreign():
        name = files.file_name(source, kind)
        if ranks is not None and name.rank >= 0 and name.rank not in ranks:
            continue
        batch.append((source, kind, name))
        size += max(source.size, 0)
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_FILES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _read_batch(
    batch: Batch, reduce: Reduce[T], ranks: Collection[int] | None, unnamed: bool
) -> Reduced[T]:
    """Read and reduce a batch, in this process or a worker."""
    problems: list[str] = []
    unread: list[str] = []
    with collector_paused():
        return (
            reduce(_read_files(batch, problems, unread, ranks, unnamed)),
            problems,
            unread,
            len(batch),
        )


def _read_files(
    batch: Batch,
    problems: list[str],
    unread: list[str],
    ranks: Collection[int] | None,
    unnamed: bool = False,
) -> Iterator[RankColumns]:
    """Yield the columns of each rank in each file; its name completes rank and host."""
    for source, kind, name in batch:
        if kind.read is None:
            continue
        try:
            several = kind.read(source)
        except CommlensError as error:
            problems.append(str(error))
            if kind is not TEXT:
                unread.append(source.name)
            continue
        if kind is TEXT:
            several = _with_unnamed_lines(several, name)
            problems += _notes_on_name(several, name)
        for columns in several:
            _complete(columns, source, name)
            if columns.rank < 0 and not unnamed:
                problems.append(
                    f"{source.name} is left out: neither its name nor its content reveals its rank."
                )
            elif ranks is None or columns.rank in ranks:
                yield columns


def _notes_on_name(several: list[RankColumns], name: FileName) -> list[str]:
    """Return why a log's name may not show its rank, if no line does."""
    needs_name = any(one.rank < 0 and (name.sure or not one.of_job) for one in several)
    return [name.note] if needs_name and name.note else []


def _complete(columns: RankColumns, source: Source, name: FileName) -> None:
    """Add the facts in the file's name, and a note on the part that could not be read."""
    note = ""
    if not columns.of_job or name.sure:
        columns.rank, note = rank_of_dump(columns.rank, columns.possible_ranks, name)
    columns.host = columns.host or name.host
    columns.written_ns = source.modified_ns
    columns.problems += [*source.problems, *([note] if note else [])]
    columns.lost_entries = columns.lost_entries or bool(source.problems)


def _with_unnamed_lines(several: list[RankColumns], name: FileName) -> list[RankColumns]:
    """Join an error in a log's lines without a rank to the other lines of the rank whose log it is,
    by its name: C++ prints no rank.
    """
    unnamed = next((one for one in several if one.rank < 0 and not one.of_job), None)
    own = next((one for one in several if one.rank == name.rank and one.rank >= 0), None)
    if unnamed is None or own is None or len(unnamed) or not unnamed.exception:
        return several
    if not own.exception:
        own.exception, own.exception_stack = unnamed.exception, unnamed.exception_stack
        own.device_assertion = unnamed.device_assertion
    return [one for one in several if one is not unnamed]


def read_ranks(
    files: DumpFiles, problems: list[str], *, ranks: Collection[int] | None = None
) -> Iterator[RankColumns]:
    """Yield the columns of each rank once. Only one rank's operations are in memory at a time,
    except for black boxes.

    Text logs hold few operations, so they are read only if there is nothing else. ``problems`` is
    extended by a sentence per file that is left out.
    """
    from commlens.formats.rank_log_columns import columns_from_log

    taken: dict[int, str] = {}
    if files.own:
        for log in read_own_files(files.own, problems).logs:
            taken[log.rank] = log.source
            if (ranks is None or log.rank in ranks) and log.issued:
                yield columns_from_log(log)
    only_logs = not taken and set(files.kinds) <= {TEXT.name}
    for source, kind in files.foreign():
        name = files.file_name(source, kind)
        if (kind is TEXT and not only_logs) or (ranks is not None and 0 <= name.rank not in ranks):
            continue
        for columns in _read_files([(source, kind, name)], problems, [], ranks):
            if columns.rank in taken:
                problems.append(
                    f"{columns.source} is a second dump of {ranks_phrase([columns.rank])}, besides"
                    f" {taken[columns.rank]}, and is left out. If the dumps are of two jobs, pass"
                    " only one job's."
                )
                continue
            taken[columns.rank] = columns.source
            problems += [f"{columns.source}: {text}" for text in columns.problems]
            yield columns
