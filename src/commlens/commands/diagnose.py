"""``commlens diagnose``."""

from __future__ import annotations

import argparse
import math
from contextlib import suppress
from datetime import datetime, time
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from commlens.commands.progress import ProgressBar
from commlens.commands.selecting import add_selection, group_names
from commlens.commands.table import print_table
from commlens.commands.verdict_output import add_html, add_json, show_verdict, write_page
from commlens.errors import CommandError
from commlens.text import capital, count, duration, ranks_and_verb, ranks_phrase, utc

if TYPE_CHECKING:
    from commlens.diagnosis.examine import ExaminedJob
    from commlens.model.health import NodeHealth
    from commlens.model.ranklog import RankLog
    from commlens.model.topology import Inventory
    from commlens.model.verdict import Verdict

EXIT_NOTHING_WRONG = 0
EXIT_FAULT = 1
EXIT_UNDETERMINED = 3
_TABLES_MAX = 8  # for each name of --group


class DiagnoseCommand:
    """Diagnose dumps or black boxes: name the fault, the rank, the collective and the line.

    Exit status: 0 no fault was found (or the ranks wait for a rank that is visibly working), 1 a
    fault was found, 2 wrong usage, 3 too little evidence could be read.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "paths",
            nargs="+",
            metavar="PATH",
            help="dumps: files, folders, archives or URLs, in any order",
        )
        add_json(parser)
        add_html(parser, "which needs no network")
        parser.add_argument(
            "--stalled-after",
            type=_seconds,
            default=1.0,
            metavar="S",
            help=(
                "treat a collective of a running process as stuck only after S seconds in flight"
                " (default: 1)"
            ),
        )
        parser.add_argument(
            "--slow",
            action="store_true",
            help=(
                "also show how long each rank of a running job waits in collectives: those that"
                " wait least make it slow"
            ),
        )
        parser.add_argument(
            "--since",
            type=_step_or_time,
            metavar="WHEN",
            help=(
                "for --slow, use only the records since this step (4120) or this time in UTC"
                " (12:03:40 or 2026-11-30T12:03:40)"
            ),
        )
        parser.add_argument(
            "--health",
            type=Path,
            metavar="FOLDER",
            help=(
                "also use files about the nodes' hardware: a folder for each host with its kernel"
                " log, /sys, /proc and tables of nvidia-smi"
            ),
        )
        entries = parser.add_argument_group("the records around the fault, side by side")
        entries.add_argument(
            "--entries",
            nargs="?",
            type=_rows,
            const=0,
            metavar="N",
            help=(
                "show N rows of records, aligned by sequence number; ranks that did the same share"
                " a column (default: as fits the screen)"
            ),
        )
        entries.add_argument(
            "--stacks", action="store_true", help="also show the stacks that issued them"
        )
        add_selection(entries)

    def run(self, arguments: argparse.Namespace) -> int:
        side_by_side = arguments.entries is not None or arguments.stacks
        if arguments.json and (side_by_side or arguments.slow):
            raise CommandError(
                "--entries, --stacks and --slow print text, so --json cannot be given with them."
                " For data, use commlens convert --to csv."
            )
        if not side_by_side and (arguments.group or arguments.ranks):
            raise CommandError(
                "--group and --ranks only select what --entries shows: give --entries, too. The"
                " verdict always uses all evidence."
            )
        if arguments.since is not None and not arguments.slow:
            raise CommandError(
                "--since only selects what --slow shows: give --slow, too. The verdict always uses"
                " all evidence."
            )
        from commlens.diagnosis.api import examine_paths

        inventory = _read_inventory(arguments.health)
        health = _read_health(arguments.health, inventory) if arguments.health is not None else []
        with ProgressBar("reading dumps") as seen:
            examined = examine_paths(
                arguments.paths,
                stalled_after_s=arguments.stalled_after,
                prefix=arguments.prefix,
                seen=seen,
                health=health,
                inventory=inventory,
            )
        verdict = examined.verdict
        show_verdict(verdict, as_json=arguments.json)
        if arguments.slow:
            _print_pace(examined, arguments.since)
        if side_by_side:
            _print_entries(arguments, examined)
        if arguments.html is not None:
            write_page(arguments.html, examined)
        return exit_status(verdict)


def _read_health(folder: Path, inventory: Inventory | None) -> list[NodeHealth]:
    from commlens.health.bundle import read_bundle

    try:
        found = read_bundle(folder, inventory)
    except OSError as error:
        raise CommandError(f"{folder} cannot be read: {error.strerror or error}.") from None
    if not found:
        raise CommandError(
            f"{folder} holds no files of nodes: it needs kern.log, sys, proc or nvidia-smi.csv, or"
            " a folder with these for each host, named after it."
        )
    return found


def _read_inventory(folder: Path | None) -> Inventory | None:
    """Return where hosts are: by a file in the folder of nodes' files, else by the setting."""
    from commlens.config import load_settings
    from commlens.health.bundle import inventory_file
    from commlens.health.topology import read_inventory

    path = inventory_file(folder) if folder is not None else None
    topology = load_settings().settings.topology
    if path is None and topology is not None:
        path = Path(topology)
    return read_inventory(path) if path is not None else None


def exit_status(verdict: Verdict) -> int:
    """Return 1 for a fault, 3 if none was found but part of the evidence is unreadable, otherwise
    0.
    """
    if verdict.kind == "undetermined":
        return EXIT_UNDETERMINED
    return EXIT_FAULT if verdict.is_fault else EXIT_NOTHING_WRONG


def _logs_since(logs: list[RankLog], since: int | time | datetime) -> list[RankLog]:
    from commlens.speed import rhythm

    newest = [log.collectives[-1] for log in logs if log.collectives]
    found = rhythm.since(logs, since)
    if newest and not all(log.collectives for log in found):
        last = max(newest, key=lambda op: op.announced_ns)
        raise CommandError(
            f"--since {since}: not all ranks have records since then; the last is of step"
            f" {last.step:,} ({utc(last.announced_ns)})."
        )
    return found


def _print_pace(examined: ExaminedJob, since: int | time | datetime | None) -> None:
    from commlens.reports.step_table import change_words, period_words, rate_words
    from commlens.speed import pace, rhythm
    from commlens.speed.bandwidth import reached_rates
    from commlens.speed.device_times import timed_collectives

    all_logs = [view.log for _, view in sorted(examined.job.views.items())]
    logs = _logs_since(all_logs, since) if since is not None else all_logs
    measured = pace.measure(logs)
    print()
    if measured is None:
        few = since is not None and pace.measure(all_logs) is not None
        needed = (
            "it needs the black boxes of at least two ranks, with records of the same time, and on"
            " an accelerator the setting timing"
        )
        print(
            "How long each rank waits is unknown:"
            f" {'there are too few records since then' if few else needed}."
        )
        return
    print(
        f"In the last {duration(measured.window_s * 1e9)}, of which all ranks have records"
        f" ({count(measured.steps, 'step')}):"
    )
    rows = [(ranks_phrase(ranks), f"{share:.0%}") for share, ranks in pace.shares(measured)]
    print_table(rows, headings=("", "in collectives"), indent=2)
    least, gap = pace.waits_least(measured)
    print(
        f"{capital(ranks_and_verb(least, 'waits', 'wait'))} least: {gap:.0%} of the time less than"
        f" all others. A difference of {measured.min_cost:.0%} or more, over at least"
        f" {pace.MIN_STEPS} steps and {pace.MIN_S:.0f} s, is reported as a slow rank."
    )
    moments = [*rhythm.first_moments(logs[0]).items()]
    if (change := rhythm.find_change(moments)) is not None:
        print(change_words(change))
    runs_ahead = any(op.channel.runs_ahead for op in logs[0].collectives[-1:])
    # a host that runs ahead of its device issues several steps at once
    extra = {} if runs_ahead else rhythm.longer_than_usual(moments)
    if (pause := rhythm.find_period(moments, extra)) is not None:
        print(period_words(pause))
    for reached in reached_rates(timed_collectives(logs, pace.timed_span(logs)), logs):
        print(rate_words(reached))


def _print_entries(arguments: argparse.Namespace, examined: ExaminedJob) -> None:
    from commlens.diagnosis.views.entries import (
        lay_out,
        lay_out_groups,
        read_entries,
        select_entries,
        select_group,
    )
    from commlens.reports.entries_terminal import print_entries, room

    rows, columns, _ = room()
    rows = arguments.entries or rows
    fault = select_entries(examined.verdict, arguments.ranks)
    if not arguments.group:
        (entries,) = read_entries(examined.job, arguments.paths, [fault], prefix=arguments.prefix)
        print()
        print_entries(lay_out(entries, fault, rows=rows, columns=columns), stacks=arguments.stacks)
        return
    chosen = {name: select_group(examined.job, name, fault) for name in arguments.group}
    found = iter(
        read_entries(
            examined.job,
            arguments.paths,
            list(chain.from_iterable(chosen.values())),
            prefix=arguments.prefix,
        )
    )
    for name, selections in chosen.items():
        tables = lay_out_groups(
            list(islice(found, len(selections))), selections, rows=rows, columns=columns
        )
        for table in tables[:_TABLES_MAX]:
            print()
            print_entries(table, stacks=arguments.stacks)
        print()
        if len(tables) > _TABLES_MAX:
            groups = ", ".join(dict.fromkeys(table.group for table in tables[_TABLES_MAX:]))
            print(f"Not shown: {groups}. --ranks selects others.")
        elif not tables:
            known = ", ".join(sorted(group_names(examined.job.channels.values())))
            print(
                f"There are no entries to show of a group named {name}; the groups are:"
                f" {known or 'none'}."
            )


def _step_or_time(text: str) -> int | time | datetime:
    if text.isascii() and (step := text.replace(",", "")).isdecimal() and len(step) < 20:
        return int(step)
    for parse in (time.fromisoformat, datetime.fromisoformat):
        with suppress(ValueError):
            return parse(text.removesuffix(" UTC").removesuffix("Z"))
    raise argparse.ArgumentTypeError(
        f"{text[:40]!r} is neither a step such as 4120 nor a time such as 12:03:40 or"
        " 2026-11-30T12:03:40"
    )


def _rows(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text) <= 100_000):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of rows")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value
