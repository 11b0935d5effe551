"""Trace files as the command line names them: files and folders, one file for each rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from commlens.errors import CommandError, FormatError
from commlens.traces.ranks import RankTraces
from commlens.traces.trace import Trace

_ENDINGS = (".json", ".json.gz")


@dataclass
class Read:
    """What was found, and what else lay there."""

    ranks: RankTraces
    notes: list[str] = field(default_factory=list)  # files of a folder that are no traces, in sentences


def read_ranks(paths: Sequence[str | Path]) -> Read:
    """Read traces, one of each rank.

    Args:
        paths: trace files, or folders whose ``*.json`` and ``*.json.gz`` are looked at. A file that was named must be a trace;
            in a folder others are passed over, and noted.

    Raises:
        FormatError: a file is no trace, or a folder holds none.
        CommandError: two files are of the same rank.
    """
    traces: dict[int, tuple[Path, Trace]] = {}
    notes: list[str] = []
    for path in map(Path, paths):
        files = _files(path) if path.is_dir() else [path]
        found = 0
        for file in files:
            try:
                trace = Trace.load(file)
            except FormatError as error:
                if not path.is_dir():
                    raise
                notes.append(str(error))
                continue
            found += 1
            rank = trace.data.rank
            if rank in traces:
                raise CommandError(
                    f"{traces[rank][0]} and {file} are both of rank {rank}: give one file for each rank, or compare them with "
                    f"commlens compare."
                )
            traces[rank] = (file, trace)
        if not found:
            why = f" {notes[0]}" if notes else ""
            raise FormatError(f"There is no trace in {path}: none of its {len(files)} files named *.json or *.json.gz is one.{why}")
    return Read(RankTraces(trace for _, trace in traces.values()), [*notes, *_strangers(trace for _, trace in traces.values())])


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(file for file in folder.iterdir() if file.name.endswith(_ENDINGS) and not file.name.startswith("."))
    except OSError as error:
        raise FormatError(f"{folder} cannot be read: {error.strerror or error}.") from None


def _strangers(traces: Iterable[Trace]) -> list[str]:
    """Ranks of jobs of different sizes are hardly of one job."""
    sizes: dict[int, list[int]] = {}
    for trace in traces:
        sizes.setdefault(trace.data.world_size, []).append(trace.data.rank)
    if len(sizes) < 2:
        return []
    return [f"These are not of one job: {', '.join(f'rank {ranks[0]} is of a world of {size}' for size, ranks in sorted(sizes.items()))}."]
