"""All ranks' operations as columns, from dumps of any origin: one after the other, or reduced in many processes at once."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from commlens.dumps.detect import BLACK_BOX, FLIGHT_RECORDER_JSON, FLIGHT_RECORDER_PICKLE, OBSERVED, TEXT
from commlens.dumps.discover import Gathered, rank_of
from commlens.dumps.read import evidence_of
from commlens.dumps.sources import Named, Source
from commlens.errors import CommlensError
from commlens.text import ranks_phrase

if TYPE_CHECKING:
    from commlens.formats.columns import RankColumns

__all__ = ["every_rank", "narrowed", "read_foreign"]

T = TypeVar("T")
Reduce = Callable[[Iterable["RankColumns"]], list[T]]

_BATCH_BYTES: Final = 32 << 20  # of stored files: enough that sending a batch to another process costs little
_BATCH_FILES: Final = 32
_ENOUGH_BYTES: Final = 128 << 20  # to start processes for, which costs some 0.2 s each
_AHEAD: Final = 4  # batches of each process that wait for it, since archives' members travel with them
_KINDS: Final = {kind.name: kind for kind in (BLACK_BOX, OBSERVED, FLIGHT_RECORDER_PICKLE, FLIGHT_RECORDER_JSON, TEXT)}

Reduced = tuple[list[T], list[str], int]  # what was kept, what could not be read, and the number of files
Batch = list[tuple[Source, str, Named]]  # with the name of its kind, since functions of a kind may not be sent


def read_foreign(
    gathered: Gathered,
    reduce: Reduce[T],
    problems: list[str],
    *,
    executor: Executor | None = None,
    progress: Callable[[int, int], None] | None = None,
    ranks: Collection[int] | None = None,
    nameless: bool = False,
) -> Iterator[T]:
    """Read every dump that is not our own and keep only what ``reduce`` makes of it: memory does not grow with the files.

    Args:
        gathered: what there is.
        reduce: makes what is kept from several ranks' columns, one after the other. It may run in another process, so it is a
            function of a module, and what it gives can be pickled.
        problems: takes a sentence for whatever could not be read.
        executor: where to read: a process pool, Dask's, Ray's, MPI's. By default processes of this machine, or this one where there
            is little to do.
        progress: called with the number of files that were read, and of all.
        ranks: only these.
        nameless: also what may be of any rank; otherwise that is a problem.

    Yields:
        What was kept, in the order of the files.
    """
    total = sum(gathered.kinds.values())
    done = 0
    read = partial(_read_batch, reduce=reduce, ranks=ranks, nameless=nameless)
    for found, told, files in _in_order(_batches(gathered, ranks), read, executor, gathered.size):
        problems += told
        done += files
        if progress is not None:
            progress(done, total)
        yield from found


def _in_order(batches: Iterator[Batch], read: Callable[[Batch], Reduced[T]], executor: Executor | None, size: int) -> Iterator[Reduced[T]]:
    """What each batch holds, in their order, with only so many on their way."""
    with ExitStack() as stack:
        workers = os.cpu_count() or 1
        if executor is None and workers > 1 and size >= _ENOUGH_BYTES and _may_fork():
            context = multiprocessing.get_context("fork")
            executor = stack.enter_context(ProcessPoolExecutor(workers, mp_context=context))
        if executor is None:
            yield from map(read, batches)
            return
        waiting = deque(executor.submit(read, batch) for batch in islice(batches, workers * _AHEAD))
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(executor.submit(read, batch) for batch in islice(batches, 1))


def _may_fork() -> bool:
    """Whether this process has a single thread: only then is a fork safe."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return False
    try:
        return len(list(Path("/proc/self/task").iterdir())) == 1
    except OSError:
        return False


def _batches(gathered: Gathered, ranks: Collection[int] | None) -> Iterator[Batch]:
    batch: Batch = []
    size = 0
    for source, kind in gathered.foreign():
        named = gathered.whose(source.name)
        if ranks is not None and 0 <= named.rank not in ranks:
            continue
        batch.append((source, kind.name, named))
        size += max(source.size, 0)
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_FILES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _read_batch(batch: Batch, reduce: Reduce[T], ranks: Collection[int] | None, nameless: bool) -> Reduced[T]:
    """In whatever process: read, reduce, forget."""
    problems: list[str] = []
    collecting = gc.isenabled()
    gc.disable()  # millions of small objects come and go, none of them in a cycle
    try:
        return reduce(_rows_of(batch, problems, ranks, nameless)), problems, len(batch)
    finally:
        if collecting:
            gc.enable()


def _rows_of(batch: Batch, problems: list[str], ranks: Collection[int] | None, nameless: bool = False) -> Iterator[RankColumns]:
    """What each file says of each rank that it speaks of, with the rank and host that its name tells."""
    for source, kind, named in batch:
        read = _KINDS[kind].read
        if read is None:
            continue
        try:
            several = read(source)
        except CommlensError as error:
            problems.append(str(error))
            continue
        for rows in several:
            rows.rank, note = rank_of(rows.rank, rows.possible_ranks, named)
            rows.host = rows.host or named.host
            rows.problems += [*source.problems, *([note] if note else [])]
            if rows.rank < 0 and not nameless:
                problems.append(f"Of which rank {source.name} is can be seen neither from its name nor from what is in it.")
            elif ranks is None or rows.rank in ranks:
                yield rows


def every_rank(
    gathered: Gathered, problems: list[str], *, ranks: Collection[int] | None = None, seen: Callable[[], None] | None = None
) -> Iterator[RankColumns]:
    """Read everything once, each rank once. Only one rank's operations are in memory at a time, but for black boxes.

    Text logs hold hardly any operations: they are read only where there is nothing else.

    Args:
        gathered: what there is.
        problems: takes a sentence for whatever could not be taken.
        ranks: only these.
        seen: called for each file, for a progress bar.
    """
    from commlens.formats.rank_log_columns import rows_of_log

    taken: dict[int, str] = {}
    if gathered.ours:
        for log in evidence_of(gathered.ours, problems).logs:
            taken[log.rank] = log.source
            if (ranks is None or log.rank in ranks) and log.issued:
                yield rows_of_log(log)
    only_logs = not taken and set(gathered.kinds) <= {TEXT.name}
    for source, kind in gathered.foreign():
        if seen is not None:
            seen()
        named = gathered.whose(source.name)
        if (kind is TEXT and not only_logs) or (ranks is not None and 0 <= named.rank not in ranks):
            continue
        for rows in _rows_of([(source, kind.name, named)], problems, ranks):
            if rows.rank in taken:
                problems.append(
                    f"{rows.source} is of {ranks_phrase([rows.rank])}, as {taken[rows.rank]} is, and is left out. "
                    f"Dumps of two jobs? Give one job's."
                )
                continue
            taken[rows.rank] = rows.source
            problems += [f"{rows.source}: {text}" for text in rows.problems]
            yield rows


def narrowed(rows: RankColumns, groups: Collection[str]) -> RankColumns:
    """Only the operations of some process groups, called by name, description or mesh dimension."""
    import numpy as np

    from commlens.formats.columns import DTYPES

    wanted = [bool({one.group.name, one.group.description, one.group.label} & set(groups)) for one in rows.channels]
    mask = np.array([*wanted, False])[rows.channel]
    chosen = replace(rows, **{one.name: getattr(rows, one.name) for one in fields(rows)})
    chosen.set_columns({name: getattr(rows, name)[mask] for name in DTYPES})
    return chosen
