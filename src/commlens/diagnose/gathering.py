"""Reads other tools' dumps, each once: in worker processes every file becomes a small extract, and the file is forgotten."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from commlens.diagnose.extract import Extract, Shared, extract
from commlens.errors import CommlensError
from commlens.formats.detect import Kind
from commlens.formats.gathered import Gathered, rank_of
from commlens.formats.sources import Named, Source

_FILES_MAX = 32  # read in one go
_BYTES_MAX = 32 << 20
_ENOUGH_BYTES = 24 << 20  # to start processes for, which costs a few tens of ms each
_AHEAD = 4  # parcels of each process that wait for it, since some hold their bytes


class Parcel(NamedTuple):
    """Files to read in one go, with what is said of them elsewhere."""

    files: list[tuple[Source, Kind, Named]]


class Reduced(NamedTuple):
    """What a parcel holds."""

    extracts: list[Extract]
    problems: list[str]
    files: int


def read_all(
    gathered: Gathered, problems: list[str], executor: Executor | None = None, seen: Callable[[int, int], None] | None = None
) -> list[Extract]:
    """The extracts of all ranks, in the order of the files.

    Args:
        gathered: what there is.
        problems: takes a sentence for whatever could not be read.
        executor: where to read; None for processes of this machine, or this one where there is little to do.
        seen: called with how many files are read and how many there are.
    """
    total = sum(gathered.kinds.values())
    done = 0
    found: list[Extract] = []
    shared = Shared()

    def take(reduced: Reduced) -> None:
        nonlocal done
        done += reduced.files
        problems.extend(reduced.problems)
        found.extend(shared.adopt(one) for one in reduced.extracts)
        if seen is not None:
            seen(done, total)

    with ExitStack() as stack:
        parcels = _parcels(gathered)
        workers = os.cpu_count() or 1
        if executor is None and workers > 1 and gathered.size >= _ENOUGH_BYTES and _may_fork():
            context = multiprocessing.get_context("fork")
            executor = stack.enter_context(ProcessPoolExecutor(workers, mp_context=context))
        if executor is None:
            for parcel in parcels:
                take(reduce_files(parcel))
        else:
            for reduced in _in_order(executor, parcels, workers * _AHEAD):
                take(reduced)
    return found


def _in_order(executor: Executor, parcels: Iterator[Parcel], at_most: int) -> Iterator[Reduced]:
    """What each parcel holds, in their order, with only so many on their way."""
    waiting: list[Future[Reduced]] = []
    more = True
    while more or waiting:
        while more and len(waiting) < at_most:
            parcel = next(parcels, None)
            if parcel is None:
                more = False
            else:
                waiting.append(executor.submit(reduce_files, parcel))
        if waiting:
            if not waiting[0].done():
                wait(waiting, return_when=FIRST_COMPLETED)
            while waiting and waiting[0].done():
                yield waiting.pop(0).result()


def reduce_files(parcel: Parcel) -> Reduced:
    """Read some files and keep what diagnosis needs: this is what runs in other processes."""
    extracts: list[Extract] = []
    problems: list[str] = []
    shared = Shared()
    for source, kind, named in parcel.files:
        if kind.read is None:
            continue
        try:
            several = kind.read(source)
        except CommlensError as error:
            problems.append(str(error))
            continue
        for rows in several:
            rows.rank, note = rank_of(rows.rank, rows.possible_ranks, named)
            rows.host = rows.host or named.host
            rows.problems += [*source.problems, *([note] if note else [])]
            extracts.append(extract(rows, shared))
    return Reduced(extracts, problems, len(parcel.files))


def _parcels(gathered: Gathered) -> Iterator[Parcel]:
    files: list[tuple[Source, Kind, Named]] = []
    size = 0
    for source, kind in gathered.foreign():
        files.append((source, kind, gathered.whose(source.name)))
        size += max(source.size, 0)
        if len(files) >= _FILES_MAX or size >= _BYTES_MAX:
            yield Parcel(files)
            files, size = [], 0
    if files:
        yield Parcel(files)


def _may_fork() -> bool:
    """Whether this process has a single thread: only then is a fork safe."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return False
    try:
        return len(list(Path("/proc/self/task").iterdir())) == 1
    except OSError:
        return False
