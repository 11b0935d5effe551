"""``commlens convert``: dumps of any origin, written for other tools."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from commlens.commands.selecting import add_selection, group_names
from commlens.errors import CommandError, EvidenceError, OutputError

if TYPE_CHECKING:
    from commlens.formats.columns import RankColumns

FORMATS = ("fr-pickle", "fr-json", "perfetto", "parquet", "csv")


class ConvertCommand:
    """Write dumps of any origin for other tools.

    fr-pickle and fr-json are what PyTorch's Flight Recorder writes, one file for each rank: torchfrtrace reads the pickles.
    perfetto is a timeline for ui.perfetto.dev, with what never ended left open. parquet and csv are the joined table.
    Exit status: 0 all is written, 2 wrong usage or not written, 3 not enough evidence could be read.
    """

    name = "convert"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's options."""
        parser.add_argument("paths", nargs="+", metavar="PATH", help="what commlens diagnose takes: files, folders, archives, URLs, -")
        parser.add_argument("--to", required=True, choices=FORMATS, help="the format")
        parser.add_argument("-o", "--output", required=True, metavar="OUT", help="the file to write; for fr-pickle and fr-json the folder")
        parser.add_argument("--force", action="store_true", help="overwrite files that exist")
        add_selection(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """Read, write, say what was left out."""
        from commlens.dumps.discover import discover
        from commlens.dumps.parallel import read_ranks

        target = Path(arguments.output)
        in_folder = arguments.to in ("fr-pickle", "fr-json")
        _check_target(target, in_folder, arguments.force)
        files = discover(arguments.paths, prefix=arguments.prefix)
        problems = list(files.problems)
        count = [0, 0]

        def several() -> Iterator[RankColumns]:
            for rows in read_ranks(files, problems, ranks=arguments.ranks):
                chosen = rows.in_groups(arguments.group) if arguments.group else rows
                count[0] += 1
                count[1] += len(chosen)
                groups.update(group_names(rows.channels))
                yield chosen
            # Here, so that what was begun is deleted.
            if not count[0]:
                raise EvidenceError("There is nothing to convert: no rank's dump could be read.")
            if not count[1] and arguments.group:
                raise CommandError(
                    f"No operation is of group {' or '.join(arguments.group)}. The groups here: {', '.join(sorted(groups)) or 'none'}."
                )

        groups: set[str] = set()
        try:
            if in_folder:
                _write_folder(several(), target, arguments.to, problems)
            else:
                _write_file(several(), target, arguments.to)
        except OSError as error:
            raise OutputError(f"{target} could not be written: {error.strerror or error}.") from error
        finally:
            for text in dict.fromkeys(problems):
                print(f"commlens: {text}", file=sys.stderr)
        where = f"{target}/" if in_folder else str(target)
        print(f"{count[1]} operations of {count[0]} ranks were written to {where}", file=sys.stderr)
        return 0


def _check_target(target: Path, in_folder: bool, force: bool) -> None:
    if in_folder:
        if target.exists() and not target.is_dir():
            raise OutputError(f"{target} is a file, and a folder is needed: one file for each rank is written.")
        if not force and target.is_dir() and any(target.iterdir()):
            raise OutputError(f"{target} is not empty, will not write into it without --force.")
    elif target.is_dir():
        raise OutputError(f"{target} is a folder, and a file was to be written there. Name a file in it.")
    elif not force and target.is_file():
        raise OutputError(f"File already exists, will not overwrite without --force: {target}")


def _write_folder(several: Iterator[RankColumns], target: Path, to: str, problems: list[str]) -> None:
    from commlens.atomic_write import write_whole
    from commlens.reports.converted import flight_recorder

    for rows in several:
        if to == "fr-pickle":  # the name that torchfrtrace expects
            write_whole(target / f"nccl_trace_rank_{rows.rank}", flight_recorder.to_pickle(rows, problems))
        else:
            write_whole(target / f"nccl_trace_rank_{rows.rank}.json", flight_recorder.to_json(rows, problems))


def _write_file(several: Iterator[RankColumns], target: Path, to: str) -> None:
    """Piece by piece into a file beside it, which takes its place when all is well and something was written."""
    from commlens.atomic_write import replacing

    with replacing(target) as temporary:
        if to == "parquet":
            from commlens.reports.converted.table import write_parquet

            write_parquet(several, temporary)
            return
        from commlens.reports.converted.perfetto import to_perfetto
        from commlens.reports.converted.table import to_csv

        make: Callable[[Iterator[RankColumns]], Iterator[bytes]] = to_perfetto if to == "perfetto" else to_csv
        with temporary.open("wb") as file:
            for piece in make(several):
                file.write(piece)
