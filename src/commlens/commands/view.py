"""``commlens view``: a trace file, in words or as a page."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commlens.errors import CommandError
from commlens.text import size

if TYPE_CHECKING:
    from commlens.traces.ranks import RankTraces

_FILTERS = {
    "phase": "forward, backward, recomputation, optimizer, outside or unclassified",
    "op": "all_reduce, all_gather, ...",
    "mesh-dim": "mesh dimension",
    "group": "mesh dimension, description or name of the process group",
    "module": "path of a module, with or without the model's class: it and its children; * stands for one part",
    "owner": "library (FSDP2, DDP) or wrapped block whose parameters are carried",
    "cause": "implicit, explicit, or the op that made DTensor redistribute",
    "source": "train.py:57, train.py, or a function",
    "dtype": "float32, bfloat16, ...",
    "step": "optimizer step from 0, or 2:4 for 2 and 3",
}


class ViewCommand:
    """Show what a trace holds: which collectives, where, why, and how many bytes.

    Given the files of several ranks, or a folder of them, says first whether all ranks issued the same, and where they differ; then
    shows one of the largest class. CommDebugMode's JSON is read, too. With -o the trace is one HTML page that works without a network;
    without any file, an empty page that takes a file dropped on it. Exit status: 0, or 2 when a file is no trace.
    """

    name = "view"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's options."""
        from commlens.traces.network import PRESETS

        parser.add_argument("paths", nargs="*", metavar="PATH", help="trace files (x.json, x.json.gz), or folders with one for each rank")
        filters = parser.add_argument_group(
            "filters", "show only what has these values; several, with commas or by repeating, are a choice"
        )
        for name, text in _FILTERS.items():
            filters.add_argument(f"--{name}", action="append", metavar="VALUE", help=text)
        filters.add_argument("--rank", type=int, metavar="N", help="of several ranks' files, this one")
        forms = parser.add_argument_group("what to print instead of the summary").add_mutually_exclusive_group()
        forms.add_argument("--events", action="store_true", help="every collective, in order")
        forms.add_argument("--ops", action="store_true", help="every tensor op, in order, where the trace was made with depth ops")
        forms.add_argument("--json", action="store_true", help="the summary as JSON (of several ranks: a list of them)")
        forms.add_argument("--rows", action="store_true", help="every collective as one line of JSON")
        files = parser.add_argument_group("files to write")
        files.add_argument("-o", "--html", metavar="FILE", help="one HTML page with everything in it, to look at in a browser")
        files.add_argument("--network", metavar="PRESET", help=f"estimate times for the page: {', '.join(PRESETS)}")
        files.add_argument("--csv", metavar="FILE", help="every collective as one line of CSV; - is standard output")
        files.add_argument("--perfetto", metavar="FILE", help="Chrome trace event JSON for ui.perfetto.dev")
        files.add_argument("--force", action="store_true", help="overwrite a file that is there")

    def run(self, arguments: argparse.Namespace) -> int:
        """Read, cut, print."""
        from commlens.traces.files import read_ranks

        if not arguments.paths:
            return _empty_viewer(arguments)
        if arguments.network and not arguments.html:
            raise CommandError("--network is for the page: give -o FILE, too. commlens preview prints an estimate.")
        read = read_ranks(arguments.paths)
        ranks, wanted = read.ranks, self._wanted(arguments)
        for note in read.notes:
            _say(note)
        if arguments.rank is not None:
            from commlens.traces.ranks import RankTraces

            if arguments.rank not in ranks.by_rank:
                raise CommandError(f"There is no trace of rank {arguments.rank} here; there are those of {_listed(ranks)}.")
            ranks = RankTraces([ranks[arguments.rank]])
        whole, ranks = ranks, ranks.filter(**wanted) if wanted else ranks
        nothing = bool(wanted) and not any(trace.ops if arguments.ops else trace.events for trace in ranks)
        if nothing:
            _say(_nothing(whole, wanted))
        wrote = self._write(ranks, arguments)
        if arguments.html:
            _write_page(ranks, read.notes, arguments)
            wrote = True
        if arguments.rows:
            from commlens.reports.trace_csv import to_json_lines

            sys.stdout.write(to_json_lines(ranks.to_rows()))
        elif arguments.json:
            import msgspec

            summaries = [trace.to_summary() for trace in ranks]
            print(msgspec.json.format(msgspec.json.encode(summaries if len(summaries) > 1 else summaries[0]), indent=2).decode())
        elif arguments.ops:
            from commlens.reports.trace_terminal import print_ops

            print_ops([op for trace in ranks for op in trace.ops])
        elif arguments.events:
            from commlens.reports.trace_terminal import print_events

            print_events(ranks.to_rows(), whys=[why for trace in ranks for why in trace.whys()], with_rank=len(ranks) > 1)
        elif not wrote and not nothing:
            _print_summary(ranks)
        return 0

    @staticmethod
    def _wanted(arguments: argparse.Namespace) -> dict[str, list[str]]:
        wanted = {}
        for name in _FILTERS:
            field = name.replace("-", "_")
            values = getattr(arguments, field)
            if values:
                # A cause may hold commas itself: "(Shard(dim=0), Replicate())".
                wanted[field] = values if name == "cause" else [part for value in values for part in value.split(",") if part]
        return wanted

    @staticmethod
    def _write(ranks: RankTraces, arguments: argparse.Namespace) -> bool:
        from commlens.atomic_write import write_whole

        if arguments.csv:
            from commlens.reports.trace_csv import to_csv
            from commlens.traces.rows import COLUMNS

            rows = ranks.to_rows()
            text = to_csv(rows, COLUMNS)
            if arguments.csv == "-":
                sys.stdout.write(text)
            else:
                write_whole(Path(arguments.csv), text.encode(), overwrite=arguments.force)
                _say(f"Wrote {arguments.csv}: {len(rows)} rows.")
        if arguments.perfetto:
            from commlens.reports.trace_perfetto import to_perfetto

            content, left_out = to_perfetto((trace.data.rank, trace.data.started_unix_ns, trace.to_rows()) for trace in ranks)
            write_whole(Path(arguments.perfetto), content, overwrite=arguments.force)
            _say(f"Wrote {arguments.perfetto}: open it at https://ui.perfetto.dev.")
            if left_out:
                _say(f"{left_out} collectives were summarised and have no times: they are not in it.")
            if any(trace.data.preview for trace in ranks):
                _say("This is a preview, made without a network: its times mean nothing.")
        return bool(arguments.csv or arguments.perfetto)


def _write_page(ranks: RankTraces, notes: list[str], arguments: argparse.Namespace) -> None:
    from commlens.atomic_write import write_whole
    from commlens.reports.trace_page import trace_page
    from commlens.traces.network import preset

    name = Path(arguments.paths[0]).name or arguments.paths[0]
    names = [name] if len(ranks) == 1 else [f"{name}, rank {rank}" for rank in ranks.ranks]
    network = preset(arguments.network) if arguments.network else None
    page = trace_page(ranks, name=name, names=names, notes=notes, network=network)
    write_whole(Path(arguments.html), page, overwrite=arguments.force)
    _say(f"Wrote {arguments.html} ({size(len(page))}): open it in a browser.")


def _empty_viewer(arguments: argparse.Namespace) -> int:
    """Write the page that waits for a file, and open it where somebody sits before a browser."""
    import webbrowser

    from commlens.atomic_write import write_whole
    from commlens.reports.trace_page import VIEWER_FILE, viewer_page

    given = [name for name, value in vars(arguments).items() if value and name not in ("command", "html", "force", "paths")]
    if given:
        raise CommandError("Which trace? For example: commlens view x.json. Without any option, commlens view makes an empty viewer page.")
    path, page = Path(arguments.html or VIEWER_FILE), viewer_page()
    if not path.is_file() or path.read_bytes() != page:
        write_whole(path, page, overwrite=arguments.force)
    opened = not arguments.html and sys.stdout.isatty() and has_browser() and webbrowser.open(path.resolve().as_uri())
    _say(f"{'Opened' if opened else 'Wrote'} {path}: {'drop' if opened else 'open it in a browser and drop'} a trace on it.")
    return 0


def has_browser() -> bool:
    """Whether a browser would have a screen to open on: on a cluster's node a text browser would take the terminal."""
    return sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def _print_summary(ranks: RankTraces) -> None:
    from commlens.reports.trace_terminal import print_differences

    shown = ranks.classes()[0][0]
    if len(ranks) > 1:
        print_differences(ranks.differences(), ranks.answer())
        print()
    ranks[shown].summary()


def _say(text: str) -> None:
    print(f"commlens: {text}", file=sys.stderr)


def _listed(ranks: RankTraces) -> str:
    from commlens.text import ranks_phrase

    return ranks_phrase(ranks.ranks)


def _nothing(ranks: RankTraces, wanted: dict[str, Any]) -> str:
    """Which of the filters is to blame, and what there is."""
    for name, values in wanted.items():
        if not any(trace.filter(**{name: values}).events for trace in ranks):
            there = sorted({str(value) for trace in ranks for value in trace.counts(by=name) if value is not None})
            listed = ", ".join(there[:8]) + (", ..." if len(there) > 8 else "")
            return f"No collective has {name} {' or '.join(values)}. " + (f"There is: {listed}." if there else f"None has any {name}.")
    return "No collective has all of these values together."
