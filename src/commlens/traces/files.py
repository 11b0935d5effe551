"""Reading trace files and folders, one file per rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from commlens.errors import CommandError, FormatError
from commlens.model.grouping import grouped
from commlens.text import printable
from commlens.traces.ranks import RankTraces
from commlens.traces.trace import Trace

_ENDINGS = (".json", ".json.gz")


def read_ranks(paths: Sequence[str | Path]) -> tuple[RankTraces, list[str]]:
    """Return the traces, one per rank, of files and of folders with ``*.json`` and ``*.json.gz``
    files, and notes on other files of a folder and on traces that are hardly of one job.

    A named file must be a trace.

    Raises:
        FormatError: a named file is not a trace, or a folder has none.
        CommandError: two files are from the same rank.
    """
    traces: dict[int, tuple[Path, Trace]] = {}
    notes: list[str] = []
    for path in map(Path, paths):
        loaded = _load_folder(path, notes) if path.is_dir() else [(path, Trace.load(path))]
        for file, trace in loaded:
            rank = trace.data.rank
            if rank in traces:
                raise CommandError(
                    f"{traces[rank][0]} and {file} are both from rank {rank}: give one file per"
                    " rank, or compare them with commlens compare."
                )
            traces[rank] = (file, trace)
    found_traces = [trace for _, trace in traces.values()]
    return RankTraces(found_traces), [*notes, *_different_jobs(found_traces)]


def _load_folder(folder: Path, notes: list[str]) -> list[tuple[Path, Trace]]:
    """Load the traces of a folder, at least one; add a note for each other file to ``notes``."""
    traces: list[tuple[Path, Trace]] = []
    skipped: list[str] = []
    try:
        files = sorted(
            file
            for file in folder.iterdir()
            if file.name.endswith(_ENDINGS) and not file.name.startswith(".")
        )
    except OSError as error:
        raise FormatError(f"{folder} cannot be read: {error.strerror or error}.") from None
    for file in files:
        try:
            traces.append((file, Trace.load(file)))
        except FormatError as error:
            skipped.append(printable(str(error)))
    if not traces:
        raise FormatError(
            f"There is no trace in {folder}: none of its {len(files)} files named *.json or"
            f" *.json.gz is a trace.{''.join(f' {note}' for note in skipped[:1])}"
        )
    notes += skipped
    return traces


def _different_jobs(traces: Iterable[Trace]) -> list[str]:
    """Note traces with different world sizes, which are hardly from one job."""
    sizes = grouped((trace.data.world_size, trace.data.rank) for trace in traces)
    if len(sizes) < 2:
        return []
    listed = ", ".join(
        f"rank {ranks[0]} has world size {size}" for size, ranks in sorted(sizes.items())
    )
    return [f"These traces are from different jobs: {listed}."]
