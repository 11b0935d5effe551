"""``commlens view``: show a trace as text, as JSON or as an HTML page."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from commlens.atomic_write import write_whole
from commlens.commands.progress import working
from commlens.errors import CommandError, CommlensError, FormatError
from commlens.reports.json_report import print_json
from commlens.text import printable, ranks_phrase, size
from commlens.traces.fields import check_exists
from commlens.traces.files import read_ranks
from commlens.traces.network import PRESETS
from commlens.traces.ranks import RankTraces
from commlens.traces.rows import to_csv
from commlens.traces.trace import Trace
from commlens.traces.wording import some_of

_FILTERS = {
    "phase": "forward, backward, recomputation, optimizer, outside or unclassified",
    "op": "all_reduce, all_gather, ...",
    "mesh-dim": "mesh dimension",
    "group": "mesh dimension, description or name of the process group",
    "module": (
        "path of a module and its children, with or without the model's class; * matches one part"
    ),
    "owner": "library (FSDP2, DDP) or wrapped block that owns the parameters",
    "cause": "implicit, explicit, or the op for which DTensor redistributes",
    "source": "train.py:57, train.py, or a function's name",
    "dtype": "float32, bfloat16, ...",
    "step": "optimizer step, counted from 0; 2:4 for steps 2 and 3",
}


class ViewCommand:
    """Show a trace: which collectives a rank issued, where, why, and how many bytes.

    Given several ranks' files, or a folder of them, first report whether all ranks issued the same
    collectives and where they differ, then show one rank of the largest class. CommDebugMode's JSON
    works too. With -o, write one HTML page that works offline. Without any file, write an empty
    page that shows a trace dropped on it. Exit status: 0, or 2 if a file is not a trace or a
    module, group, op or phase to filter by does not exist.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "paths",
            nargs="*",
            metavar="PATH",
            help="trace files (x.json, x.json.gz), or folders with one per rank",
        )
        filters = parser.add_argument_group(
            "filters",
            "show only collectives with these values; separate alternatives with commas, or repeat"
            " the option",
        )
        for name, text in _FILTERS.items():
            filters.add_argument(f"--{name}", action="append", metavar="VALUE", help=text)
        filters.add_argument("--rank", type=int, metavar="N", help="show this rank of several")
        timing = parser.add_argument_group("times")
        timing.add_argument(
            "--profile",
            metavar="FILE",
            action="append",
            help=(
                "take times from this trace of torch.profiler (export_chrome_trace), of the same"
                " rank"
            ),
        )
        timing.add_argument(
            "--network",
            metavar="PRESET",
            help=f"also show times estimated for a network: {', '.join(PRESETS)}",
        )
        forms = parser.add_argument_group(
            "output instead of the summary"
        ).add_mutually_exclusive_group()
        forms.add_argument("--events", action="store_true", help="every collective, in order")
        forms.add_argument(
            "--ops",
            action="store_true",
            help="every tensor op, in order, if the trace has depth ops",
        )
        forms.add_argument(
            "--json", action="store_true", help="the summary as JSON; a list for several ranks"
        )
        files = parser.add_argument_group("files to write")
        files.add_argument(
            "-o", "--html", metavar="FILE", help="one HTML page with everything, for a browser"
        )
        files.add_argument(
            "--csv",
            metavar="FILE",
            help="every collective as one line of CSV; - for standard output",
        )
        files.add_argument(
            "--perfetto", metavar="FILE", help="Chrome trace event JSON for ui.perfetto.dev"
        )
        files.add_argument("--force", action="store_true", help="overwrite existing files")

    def run(self, arguments: argparse.Namespace) -> int:
        if not arguments.paths:
            return _empty_viewer(arguments)
        if arguments.csv == "-" and (arguments.json or arguments.ops or arguments.events):
            raise CommandError(
                "--csv - writes to standard output, and so do --json, --ops and --events: give"
                " --csv the name of a file."
            )
        ranks, notes = _read(arguments)
        wanted = self._wanted(arguments)
        for name, values in wanted.items():
            check_exists([trace.data for trace in ranks], name, values)
        chosen = ranks.filter(**wanted) if wanted else ranks
        nothing = bool(wanted) and _is_nothing_left(ranks, chosen, ops=arguments.ops)
        if nothing:
            _print_note(_why_nothing_matches(ranks, chosen, wanted))
        self._write(chosen, arguments)
        if arguments.html:
            _write_page(chosen, notes, arguments)
        if not nothing or arguments.json or arguments.events:
            _print(chosen, arguments)
        return 0

    @staticmethod
    def _wanted(arguments: argparse.Namespace) -> dict[str, list[str]]:
        fields = (name.replace("-", "_") for name in _FILTERS)
        given = {field: values for field in fields if (values := getattr(arguments, field))}
        # A cause may contain commas: "(Shard(dim=0), Replicate())".
        return {
            field: values if field == "cause" else [*filter(None, ",".join(values).split(","))]
            for field, values in given.items()
        }

    @staticmethod
    def _write(ranks: RankTraces, arguments: argparse.Namespace) -> None:
        if arguments.csv:
            rows = ranks.to_rows()
            text = to_csv(rows)
            if arguments.csv == "-":
                sys.stdout.write(text)
            else:
                write_whole(Path(arguments.csv), text.encode(), overwrite=arguments.force)
                _print_note(f"Wrote {arguments.csv}: {len(rows)} rows.")
        if arguments.perfetto:
            from commlens.reports.converted.perfetto_traces import trace_to_perfetto

            content, left_out = trace_to_perfetto(
                (trace.data.rank, trace.data.started_unix_ns, trace.to_rows()) for trace in ranks
            )
            write_whole(Path(arguments.perfetto), content, overwrite=arguments.force)
            _print_note(f"Wrote {arguments.perfetto}: open it at https://ui.perfetto.dev.")
            if left_out:
                _print_note(
                    f"{left_out} collectives are summarised, have no times, and are left out."
                )
            if any(trace.data.preview for trace in ranks):
                _print_note("This trace is a preview without a network: its times mean nothing.")


def _read(arguments: argparse.Namespace) -> tuple[RankTraces, list[str]]:
    """Return the traces that are asked for, with the times of profiles, and notes about them."""
    try:
        with working("Reading traces"):
            ranks, notes = read_ranks(arguments.paths)
    except FormatError as error:
        raise _unless_dump(arguments.paths, error) from None
    for note in notes:
        _print_note(note)
    if arguments.rank is not None:
        if arguments.rank not in ranks.by_rank:
            raise CommandError(
                f"There is no trace of rank {arguments.rank}; there are traces of"
                f" {ranks_phrase(ranks.ranks)}."
            )
        ranks = RankTraces([ranks[arguments.rank]])
    if arguments.profile:
        ranks = _with_profiles(ranks, arguments.profile)
    return ranks, notes


def _unless_dump(paths: list[str], error: FormatError) -> CommlensError:
    """Return the error, or one that names ``commlens diagnose`` if the paths hold dumps of a
    job.
    """
    from commlens.dumps.discover import discover

    try:
        found = discover(paths)
    except CommlensError:
        return error
    if not found.holds_dumps:
        return error
    them, is_dump = "it", "is a dump" if Path(paths[0]).is_file() else "holds a dump"
    if len(paths) > 1:
        them, is_dump = "them", "hold dumps"
    return CommandError(
        f"{', '.join(paths)} {is_dump} of a job, not a trace: `commlens diagnose"
        f" {shlex.join(paths)}` diagnoses {them}."
    )


def _write_page(ranks: RankTraces, notes: list[str], arguments: argparse.Namespace) -> None:
    name = printable(Path(arguments.paths[0]).name or arguments.paths[0])
    names = [name] if len(ranks) == 1 else [f"{name}, rank {rank}" for rank in ranks.ranks]
    with working("Writing the page"):
        page = ranks.to_html(name=name, names=names, notes=notes, network=arguments.network)
        write_whole(Path(arguments.html), page, overwrite=arguments.force)
    _print_note(f"Wrote {arguments.html} ({size(len(page))}): open it in a browser.")


def _empty_viewer(arguments: argparse.Namespace) -> int:
    import webbrowser

    from commlens.reports.trace_page import VIEWER_FILE, viewer_page

    given = [
        name
        for name, value in vars(arguments).items()
        if value not in (None, "", [])
        and value is not False
        and name not in ("command", "html", "force", "paths")
    ]
    if given:
        raise CommandError(
            "Which trace? For example: commlens view x.json. Without any option, commlens view"
            " writes an empty viewer page."
        )
    path, page = Path(arguments.html or VIEWER_FILE), viewer_page()
    if not path.is_file() or path.read_bytes() != page:
        write_whole(path, page, overwrite=arguments.force)
    opened = (
        not arguments.html
        and sys.stdout.isatty()
        and has_browser()
        and webbrowser.open(path.resolve().as_uri())
    )
    _print_note(
        f"{'Opened' if opened else 'Wrote'} {path}:"
        f" {'drop' if opened else 'open it in a browser and drop'} a trace on it."
    )
    return 0


def has_browser() -> bool:
    """Check for a display: without one, as on a cluster node, a text browser would take over the
    terminal.
    """
    return sys.platform == "darwin" or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
    )


def _print(ranks: RankTraces, arguments: argparse.Namespace) -> None:
    """Print the traces as JSON, tensor ops or events, whichever option asks for; without such an
    option, and unless a file is written, print the summary.
    """
    if arguments.json:
        summaries = [trace.to_summary(network=arguments.network) for trace in ranks]
        print_json(summaries if len(summaries) > 1 else summaries[0])
    elif arguments.ops:
        from commlens.reports.trace_terminal import print_ops

        print_ops([op for trace in ranks for op in trace.ops])
    elif arguments.events:
        from commlens.reports.trace_terminal import print_events

        print_events(
            ranks.to_rows(),
            whys=[why for trace in ranks for why in trace.whys()],
            with_rank=len(ranks) > 1,
        )
    elif not (arguments.html or arguments.csv or arguments.perfetto):
        from commlens.reports.trace_terminal import print_differences

        shown = ranks.classes()[0][0]
        if len(ranks) > 1:
            print_differences(ranks.differences(), ranks.answer())
            print()
        ranks[shown].summary(network=arguments.network)


def _with_profiles(ranks: RankTraces, files: list[str]) -> RankTraces:
    """Return the traces with the times of profiles, one for each rank; a profile that does not name
    its rank is for the only trace.
    """
    from commlens.formats.kineto import read_kineto
    from commlens.traces.profile import join

    joined = {trace.data.rank: trace for trace in ranks}
    for file in files:
        rank = read_kineto(Path(file)).rank if len(joined) > 1 else ranks.ranks[0]
        if rank not in joined:
            about = (
                f"is the profile of rank {rank}"
                if rank is not None
                else "does not say which rank it is of; add --rank N"
            )
            raise CommandError(f"{file} {about}; there are traces of {ranks_phrase(list(joined))}.")
        data, note = join(joined[rank].data, Path(file))
        joined[rank] = Trace(data)
        _print_note(note if len(joined) == 1 else f"Rank {rank}: {note}")
    return RankTraces(joined.values())


def _is_nothing_left(ranks: RankTraces, chosen: RankTraces, *, ops: bool) -> bool:
    """Return whether filters leave no collective, or no tensor op of traces that have some."""
    if ops:
        return any(trace.ops for trace in ranks) and not any(trace.ops for trace in chosen)
    return not any(trace.events for trace in chosen)


def _print_note(text: str) -> None:
    print(f"commlens: {text}", file=sys.stderr)


def _why_nothing_matches(ranks: RankTraces, chosen: RankTraces, wanted: dict[str, Any]) -> str:
    """Name the first filter that no collective matches, and the values that exist."""
    if any(trace.events for trace in chosen):  # only the tensor ops, for --ops, are missing
        return "No tensor op matches all filters."
    for name, values in wanted.items():
        if not any(trace.filter(**{name: values}).events for trace in ranks):
            existing = sorted(
                {
                    str(value)
                    for trace in ranks
                    for value in trace.counts(by=name)
                    if value is not None
                }
            )
            return f"No collective has {name} {' or '.join(values)}. " + (
                f"Existing values: {some_of(existing, 8)}" if existing else f"None has any {name}."
            )
    return "No collective matches all filters."
