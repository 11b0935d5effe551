"""All ranks' operations as columns, from dumps of any origin: one after the other, or reduced in many processes at once."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Final, TypeVar

from commlens.errors import CommlensError
from commlens.formats.detect import BLACK_BOX, FLIGHT_RECORDER_JSON, FLIGHT_RECORDER_PICKLE, OBSERVED, TEXT, Kind
from commlens.formats.evidence import evidence_of
from commlens.formats.gathered import Gathered, rank_of
from commlens.formats.sources import Named, Source
from commlens.model.ranks import ranks_phrase

if TYPE_CHECKING:
    from commlens.formats.rows import Rows

__all__ = ["every_rank", "narrowed", "read_foreign"]

T = TypeVar("T")
Reduce = Callable[[Iterable["Rows"]], list[T]]

_BATCH_BYTES: Final = 32 << 20  # of stored files: enough that sending a batch to another process costs little
_BATCH_FILES: Final = 256
_AT_ONCE: Final = 64  # batches under way: archives' members travel with them
_KINDS: Final = {kind.name: kind for kind in (BLACK_BOX, OBSERVED, FLIGHT_RECORDER_PICKLE, FLIGHT_RECORDER_JSON, TEXT)}

Batch = list[tuple[Source, str, Named]]  # with the name of its kind, since functions of a kind may not be sent


def read_foreign(
    gathered: Gathered,
    reduce: Reduce[T],
    problems: list[str],
    *,
    executor: Executor | None = None,
    progress: Callable[[int, int], None] | None = None,
    ranks: Collection[int] | None = None,
) -> list[T]:
    """Read every dump that is not our own and keep only what ``reduce`` makes of it: memory does not grow with the files.

    Args:
        gathered: what there is.
        reduce: makes what is kept from several ranks' columns, one after the other. It may run in another process, so it is a
            function of a module, and what it gives can be pickled.
        problems: takes a sentence for whatever could not be read.
        executor: where to read; in this process by default. Any will do: a process pool, Dask's, Ray's, MPI's.
        progress: called with the number of files that were read, and of all.
        ranks: only these.
    """
    total = sum(gathered.kinds.values())
    found: list[T] = []
    done = 0

    def take(result: tuple[list[T], list[str]], count: int) -> None:
        nonlocal done
        found.extend(result[0])
        problems.extend(result[1])
        done += count
        if progress is not None:
            progress(done, total)

    running: dict[Future[tuple[list[T], list[str]]], int] = {}
    for batch in _batches(gathered, ranks):
        if executor is None:
            take(_read_batch(batch, reduce, ranks), len(batch))
            continue
        running[executor.submit(_read_batch, batch, reduce, ranks)] = len(batch)
        if len(running) >= _AT_ONCE:
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                take(future.result(), running.pop(future))
    while running:
        ended, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in ended:
            take(future.result(), running.pop(future))
    return found


def _batches(gathered: Gathered, ranks: Collection[int] | None) -> Iterator[Batch]:
    total = sum(gathered.kinds.values())
    files_max = min(_BATCH_FILES, max(1, math.ceil(total / 64)))
    batch: Batch = []
    size = 0
    for source, kind in gathered.foreign():
        named = gathered.whose(source.name)
        if ranks is not None and 0 <= named.rank not in ranks:
            continue
        batch.append((source, kind.name, named))
        size += max(source.size, 0)
        if size >= _BATCH_BYTES or len(batch) >= files_max:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _read_batch(batch: Batch, reduce: Reduce[T], ranks: Collection[int] | None) -> tuple[list[T], list[str]]:
    """In whatever process: read, reduce, forget."""
    problems: list[str] = []
    collecting = gc.isenabled()
    gc.disable()  # millions of small objects come and go, none of them in a cycle
    try:
        return reduce(_rows_of(batch, problems, ranks)), problems
    finally:
        if collecting:
            gc.enable()


def _rows_of(batch: Batch, problems: list[str], ranks: Collection[int] | None) -> Iterator[Rows]:
    for source, kind, named in batch:
        for rows in _read(source, _KINDS[kind], named, problems):
            if rows.rank < 0:
                problems.append(f"Of which rank {source.name} is can be seen neither from its name nor from what is in it.")
            elif ranks is None or rows.rank in ranks:
                yield rows


def _read(source: Source, kind: Kind, named: Named, problems: list[str]) -> list[Rows]:
    """What one file says of each rank that it speaks of, with the rank and host that its name tells."""
    if kind.read is None:
        return []
    try:
        several = kind.read(source)
    except CommlensError as error:
        problems.append(str(error))
        return []
    for rows in several:
        rows.rank, note = rank_of(rows.rank, rows.possible_ranks, named)
        rows.host = rows.host or named.host
        rows.problems += [*source.problems, *([note] if note else [])]
    return several


def every_rank(
    gathered: Gathered, problems: list[str], *, ranks: Collection[int] | None = None, seen: Callable[[], None] | None = None
) -> Iterator[Rows]:
    """Read everything once, each rank once. Only one rank's operations are in memory at a time, but for black boxes.

    Text logs hold hardly any operations: they are read only where there is nothing else.

    Args:
        gathered: what there is.
        problems: takes a sentence for whatever could not be taken.
        ranks: only these.
        seen: called for each file, for a progress bar.
    """
    from commlens.formats.log_rows import rows_of_log

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


def narrowed(rows: Rows, groups: Collection[str]) -> Rows:
    """Only the operations of some process groups, called by name, description or mesh dimension."""
    import numpy as np

    from commlens.formats.rows import DTYPES

    wanted = [bool({one.group.name, one.group.description, one.group.label} & set(groups)) for one in rows.channels]
    mask = np.array([*wanted, False])[rows.channel]
    chosen = replace(rows, **{one.name: getattr(rows, one.name) for one in fields(rows)})
    chosen.set_columns({name: getattr(rows, name)[mask] for name in DTYPES})
    return chosen
