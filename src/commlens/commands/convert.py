"""``commlens convert``: dumps of any origin, converted for other tools."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from commlens.atomic_write import replacing, write_whole
from commlens.commands.progress import working
from commlens.commands.selecting import add_selection, group_names
from commlens.errors import CommandError, EvidenceError, OutputError

if TYPE_CHECKING:
    from commlens.formats.columns import RankColumns

FORMATS = ("fr-pickle", "fr-json", "perfetto", "parquet", "csv")


class ConvertCommand:
    """Convert dumps to Flight Recorder files, Perfetto, Parquet or CSV.

    fr-pickle and fr-json are the files of PyTorch's Flight Recorder, one per rank; torchfrtrace
    reads the pickles. perfetto is a timeline for ui.perfetto.dev, in which collectives that never
    ended stay open. parquet and csv are one table of all ranks. Exit status: 0 everything was
    written, 2 wrong usage or a file could not be written, 3 too little evidence could be read.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "paths",
            nargs="+",
            metavar="PATH",
            help="dumps as for commlens diagnose: files, folders, archives, URLs, -",
        )
        parser.add_argument("--to", required=True, choices=FORMATS, help="convert to this format")
        parser.add_argument(
            "-o",
            "--output",
            required=True,
            metavar="OUT",
            help="the file to write (for fr-pickle and fr-json: the folder)",
        )
        parser.add_argument("--force", action="store_true", help="overwrite existing files")
        add_selection(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        from commlens.dumps.discover import discover
        from commlens.dumps.parallel import read_ranks

        target = Path(arguments.output)
        in_folder = arguments.to in ("fr-pickle", "fr-json")
        _check_target(target, in_folder, arguments.force)
        files = discover(arguments.paths, prefix=arguments.prefix)
        problems = list(files.problems)
        ranks = operations = 0
        groups: set[str] = set()

        def several() -> Iterator[RankColumns]:
            nonlocal ranks, operations
            for rows in read_ranks(files, problems, ranks=arguments.ranks):
                chosen = rows.in_groups(arguments.group) if arguments.group else rows
                ranks += 1
                say(f"{ranks} ranks")
                operations += len(chosen)
                groups.update(group_names(rows.channels))
                yield chosen
            # Raised in here, so that a file that was begun is deleted.
            if not ranks:
                raise EvidenceError(
                    "There is nothing to convert, because no rank's dump could be read."
                )
            if not operations and arguments.group:
                raise CommandError(
                    f"No operation belongs to group {' or '.join(arguments.group)}. Groups:"
                    f" {', '.join(sorted(groups)) or 'unknown'}."
                )

        try:
            with working("Converting dumps") as say:
                if in_folder:
                    _write_folder(several(), target, arguments.to, problems)
                else:
                    _write_file(several(), target, arguments.to)
        except OSError as error:
            raise OutputError(
                f"{target} could not be written: {error.strerror or error}."
            ) from error
        finally:
            for text in dict.fromkeys(problems):
                print(f"commlens: {text}", file=sys.stderr)
        print(
            f"Wrote {operations} operations of {ranks} ranks to {target}{'/' if in_folder else ''}",
            file=sys.stderr,
        )
        return 0


def _check_target(target: Path, in_folder: bool, force: bool) -> None:
    if in_folder:
        if target.exists() and not target.is_dir():
            raise OutputError(
                f"{target} is a file, but the output must be a folder: one file per rank is"
                " written."
            )
        if not force and target.is_dir() and any(target.iterdir()):
            raise OutputError(f"{target} is not empty, will not write into it without --force.")
    elif target.is_dir():
        raise OutputError(
            f"{target} is a folder, but the output must be a file. Name a file in it."
        )
    elif not force and target.is_file():
        raise OutputError(f"File already exists, will not overwrite without --force: {target}")


def _write_folder(
    several: Iterator[RankColumns], target: Path, to: str, problems: list[str]
) -> None:
    from commlens.reports.converted.flight_recorder import to_json, to_pickle

    make, ending = (to_pickle, "") if to == "fr-pickle" else (to_json, ".json")
    for rows in several:
        # the name that torchfrtrace expects
        write_whole(target / f"nccl_trace_rank_{rows.rank}{ending}", make(rows, problems))


def _write_file(several: Iterator[RankColumns], target: Path, to: str) -> None:
    """Write to a temporary file next to the target, which replaces the target if nothing fails."""
    with replacing(target) as temporary:
        if to == "parquet":
            from commlens.reports.converted.table import write_parquet

            write_parquet(several, temporary)
            return
        from commlens.reports.converted.perfetto import to_perfetto
        from commlens.reports.converted.table import to_csv

        with temporary.open("wb") as file:
            file.writelines(to_perfetto(several) if to == "perfetto" else to_csv(several))
