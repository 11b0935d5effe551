"""Traces on a terminal: summary, collectives, ops, comparisons, differences between ranks, and
estimates of time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import IO, Any

from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from commlens.model.network import Estimate
from commlens.model.trace import TracedOp
from commlens.model.trace_changes import TraceComparison
from commlens.model.trace_summary import ModuleTotal, Summary, Total
from commlens.model.trace_times import Times
from commlens.model.wire_bytes import RULE_IN_SHORT
from commlens.reports.console import bullet, console, print_parts
from commlens.text import count, number, sentence, short_duration, size

_MAX_MODULES = 30
_MAX_CHANGES = 40
_ABOUT_TIMES = {
    "record": (
        "Time is from the issue to the end of the wait, so it includes waiting for ranks that"
        " arrive later; waited is the part in which the issuing thread was blocked."
    ),
    "backend": (
        "Time is the collective's own, as the backend measured it; it includes waiting for ranks"
        " that arrive later."
    ),
    "profile": (
        "Time is the collective's own, as the profiler measured it, and includes waiting for ranks"
        " that arrive later; waited is the part in which nothing else ran."
    ),
}


def print_summary(
    summary: Summary,
    file: IO[str] | None = None,
    *,
    width: int | None = None,
    colour: bool | None = None,
) -> None:
    """Print a summary. The other arguments are those of
    :func:`commlens.reports.console.console`.
    """
    print_parts(_summary(summary), file, width, colour)


def print_comparison(comparison: TraceComparison) -> None:
    """Print the changes between two traces."""
    parts: list[RenderableType] = [
        Text(comparison.answer, style="bold yellow" if comparison else "bold green")
    ]
    if comparison:
        parts += [
            "",
            *(bullet(sentence(change.sentence)) for change in comparison.changes[:_MAX_CHANGES]),
        ]
        if len(comparison.changes) > _MAX_CHANGES:
            parts.append(
                bullet(
                    f"{len(comparison.changes) - _MAX_CHANGES} more changes; --json lists all of"
                    " them."
                )
            )
    if comparison.time:
        parts += ["", Text(comparison.time, style="yellow" if comparison.times else "dim")]
    if comparison.notes:
        parts += ["", *(Text(note, style="dim") for note in comparison.notes)]
    print_parts(parts)


def print_differences(sentences: Sequence[str], answer: str) -> None:
    """Print how ranks differ: the answer, then one line per difference."""
    parts: list[RenderableType] = [Text(answer, style="bold yellow" if sentences else "bold green")]
    parts += [bullet(sentence(text)) for text in sentences]
    print_parts(parts)


def print_events(
    rows: Sequence[Mapping[str, Any]],
    whys: Sequence[str],
    *,
    with_rank: bool = False,
    file: IO[str] | None = None,
    width: int | None = None,
) -> None:
    """Print every collective, in order: the result of ``Trace.to_rows()`` with the reason of each
    row.
    """
    steps = any(row["step"] or row["last_step"] for row in rows)
    counted = any(row["count"] > 1 for row in rows)
    carrying = any(row["dtype"] for row in rows)
    table = data_table()
    for name in ["rank"] * with_rank + ["#"] + ["calls"] * counted + ["step"] * steps:
        table.add_column(name, justify="right", no_wrap=True)
    for name in ["op", "on", *["carries"] * carrying]:
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    table.add_column("where and why", overflow="fold", ratio=1)
    for row, why in zip(rows, whys, strict=True):
        span = (
            f"{row['step']}-{row['last_step']}"
            if row["last_step"] != row["step"]
            else str(row["step"])
        )
        numbers = [
            *[str(row["rank"])] * with_rank,
            str(row["sequence"]),
            *[number(row["count"])] * counted,
            *[span] * steps,
        ]
        ranks = f" [{row['group_ranks']}]" if row["group_ranks"] else ""
        texts = [_op_of(row), f"{row['group']}{ranks}", *[_payload(row)] * carrying]
        where = Text(f"{row['phase']} of {row['module']}" if row["module"] else str(row["phase"]))
        where.append("" if row["microbatch"] is None else f" (microbatch {row['microbatch']})")
        for about in (why, _line(row)):
            where.append(f", {about}" if about else "", style="dim")
        table.add_row(*numbers, *map(Text, texts), where)
    print_parts([table if rows else Text("No collectives.")], file, width, None)


def print_ops(ops: Sequence[TracedOp]) -> None:
    """Print tensor ops in order, with input shapes and, for DTensor ops, placements."""
    if not ops:
        print_parts([Text("No tensor ops: only a trace with depth ops has them.")])
        return
    table = data_table()
    table.add_column("op", no_wrap=True, overflow="ellipsis")
    table.add_column("where", overflow="fold", ratio=1)
    table.add_column("inputs", overflow="fold", ratio=1)
    for op in ops:
        phase = "unclassified" if op.phase is None else op.phase.value
        shapes = [f"[{', '.join(map(str, shape))}]" for shape in op.input_shapes]
        # If all inputs are DTensors, each shape has placements.
        inputs = [" ".join(pair) for pair in zip(shapes, op.input_placements, strict=False)]
        inputs += shapes[len(inputs) :] or list(op.input_placements[len(inputs) :])
        table.add_row(
            Text(op.name),
            Text(f"{phase} of {op.site}" if op.site else phase),
            Text(", ".join(inputs)),
        )
    print_parts([table])


def _op_of(row: Mapping[str, Any]) -> str:
    towards = {"send": "to", "recv": "from"}.get(row["op"])
    return (
        f"{row['op']} {towards} {row['peer']}"
        if towards and row["peer"] is not None
        else str(row["op"])
    )


def _payload(row: Mapping[str, Any]) -> str:
    most = max(row["input_bytes"], row["output_bytes"])
    return " ".join(
        part for part in (row["dtype"], size(most) if most else None, row["reduce_op"]) if part
    )


def _line(row: Mapping[str, Any]) -> str:
    line = row["source"].rsplit("/", 1)[-1] if row["source"] else ""
    through = f"({row['through']})" if row["through"] else ""
    return f"at {line} {through}".strip() if line else through


def _summary(summary: Summary) -> list[RenderableType]:
    parts: list[RenderableType] = [Text(summary.answer, style="bold")]
    times = summary.times
    timed = times is not None and times.timed > 0
    if times is not None:
        parts.append(Text(times.answer, style="" if timed else "dim"))
    if summary.calls:
        parts += _collectives(summary, timed=timed)
    if summary.hazards:
        parts += ["", Text("latent faults", style="bold")]
        parts += [Text(f"  {text}") for text in summary.hazards]
    parts.append("")
    parts.append(Text(summary.coverage, style="dim" if summary.complete else "yellow"))
    parts += [Text(sentence(text), style="dim") for text in summary.blind]
    if summary.bytes_known and summary.calls:
        parts.append(Text(f"Bytes are bytes on the wire: {RULE_IN_SHORT}.", style="dim"))
    if times is not None and timed:
        parts.append(Text(_ABOUT_TIMES[times.source], style="dim"))
    return parts


def _collectives(summary: Summary, *, timed: bool) -> list[RenderableType]:
    """Return the tables of what was issued where and why, and of the times."""
    known = summary.bytes_known
    parts: list[RenderableType] = []
    for title, rows in (
        ("mesh dimension", summary.by_mesh_dim),
        ("phase", summary.by_phase),
        ("op", summary.by_op),
    ):
        if rows:
            parts += ["", _breakdown(title, rows, summary.wire_bytes, known=known, timed=timed)]
    if summary.by_module:
        parts += ["", _modules(summary.by_module, known=known, timed=timed)]
    if len(summary.by_module) > _MAX_MODULES:
        parts.append(
            Text(
                f"  {len(summary.by_module) - _MAX_MODULES} more modules; --module PATH"
                " shows some of them, --json all",
                "dim",
            )
        )
    if timed and any(
        ">=" in cell for row in [*summary.by_phase, *summary.by_op] for cell in _time_cells(row)
    ):
        parts.append(Text("  >=: for some of the calls it is unknown.", "dim"))
    if summary.why:
        parts += [
            "",
            Text("why, costliest first" if known else "why", style="bold"),
            _reasons(summary, known=known),
        ]
    if summary.times is not None and timed:
        parts += ["", *_times(summary.times)]
    return parts


def data_table(*columns: str, numbers: int = 0) -> Table:
    """Return an empty table whose last ``numbers`` columns are right-aligned."""
    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False, header_style="bold"
    )
    for place, name in enumerate(columns):
        numeric = place >= len(columns) - numbers
        table.add_column(
            name, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold"
        )
    return table


def _breakdown(title: str, rows: list[Total], total: int, *, known: bool, timed: bool) -> Table:
    with_ranks = any(row.group_size for row in rows)
    columns = [
        *["ranks"] * with_ranks,
        "calls",
        *["bytes", "share"] * known,
        *["time", "waited"] * timed,
    ]
    table = data_table(title, *columns, numbers=len(columns))
    for row in rows:
        ranks = [str(row.group_size) if row.group_size else "various"] * with_ranks
        carried = [size(row.wire_bytes), f"{row.wire_bytes / total:.0%}" if total else ""] * known
        table.add_row(
            Text(row.name), *ranks, number(row.calls), *carried, *_time_cells(row) * timed
        )
    return table


def _time_cells(row: Total | ModuleTotal) -> list[str]:
    """Return the time and the part waited, with ``>=`` if they are unknown for some of the
    calls.
    """
    return [
        f"{'>=' if calls < row.calls else ''}{short_duration(ns)}" if ns is not None else "unknown"
        for ns, calls in ((row.time_ns, row.timed), (row.waited_ns, row.wait_known))
    ]


def _modules(rows: list[ModuleTotal], *, known: bool, timed: bool) -> Table:
    columns = [
        *["own", "bytes"][: 1 + known],
        *["in all", "bytes"][: 1 + known],
        *["time", "waited"] * timed,
    ]
    table = data_table("module", *columns, numbers=len(columns))
    above: list[str] = []
    for row in rows[:_MAX_MODULES]:
        above = above[: row.depth]
        # A folded parent may cover other numbers than its child, so compare lengths of paths, not
        # text.
        parts = row.path.split(".")
        start = len(above[-1].split(".")) if above else 0
        above.append(row.path)
        own = (
            [number(row.own_calls), *[size(row.own_bytes)] * known]
            if row.own_calls
            else ["", *[""] * known]
        )
        name = Text("  " * row.depth + ".".join(parts[start:]))
        if above[:-1] and above[-2].split(".") != parts[:start]:
            name.append(f" (of {'.'.join(parts[max(0, start - 2) : start])})", style="dim")
        if row.other_paths:
            name.append(
                f" (also {', '.join(_short_sibling(path, row.path) for path in row.other_paths)})",
                style="dim",
            )
        table.add_row(
            name,
            *own,
            number(row.calls),
            *[size(row.wire_bytes)] * known,
            *_time_cells(row) * timed,
        )
    return table


def _short_sibling(path: str, other: str) -> str:
    """Shorten a path that has the same parent as another."""
    parent, _, name = path.rpartition(".")
    return name if parent == other.rpartition(".")[0] else path


def _times(times: Times) -> list[RenderableType]:
    parts: list[RenderableType] = []
    if times.slowest:
        slowest = Table.grid(padding=(0, 1))
        slowest.add_column(justify="right", no_wrap=True)
        slowest.add_column(overflow="fold")
        for call in times.slowest:
            waited = (
                f", waited {short_duration(call.waited_ns)}"
                if call.waited_ns is not None and call.waited_ns < 0.95 * call.time_ns
                else ""
            )
            slowest.add_row(short_duration(call.time_ns), Text(f"{call.sentence}{waited}"))
        parts += [Text("slowest", style="bold"), Padding(slowest, (0, 0, 0, 2))]
    if times.bandwidth:
        estimated = any(row.estimated_ns is not None for row in times.bandwidth)
        columns = ["calls", "median", *["estimate"] * estimated, "algorithm", "bus"]
        table = data_table("bandwidth", *columns, numbers=len(columns))
        for row in times.bandwidth:
            name = f"{row.op} {size(row.data_bytes)} on {row.group}"
            least = ">=" if row.at_least else ""
            estimate = [short_duration(row.estimated_ns or 0)] * estimated
            rates = [f"{least}{size(each)}/s" for each in (row.algorithm, row.bus)]
            table.add_row(
                Text(name), number(row.calls), short_duration(row.median_ns), *estimate, *rates
            )
        parts += ["", table]
        if any(row.at_least for row in times.bandwidth):
            parts.append(
                Text(
                    "  >=: other work ran before the wait, so the collective may have ended"
                    " earlier.",
                    "dim",
                )
            )
    return parts


def _reasons(summary: Summary, *, known: bool) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    if known:
        table.add_column(justify="right", no_wrap=True)
        table.add_column(justify="right", no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for why in summary.why:
        share = f"{why.wire_bytes / summary.wire_bytes:.0%}" if summary.wire_bytes else ""
        table.add_row(*[size(why.wire_bytes), share] * known, Text(why.sentence))
    return Padding(table, (0, 0, 0, 2))


def print_estimate(
    estimate: Estimate,
    file: IO[str] | None = None,
    *,
    width: int | None = None,
    colour: bool | None = None,
) -> None:
    """Print an estimate as a table by mesh dimension."""
    net = estimate.network
    out = console(file, width, colour)
    out.print()
    out.print(Text(f"Estimated time per step on {net.name}, not a measurement", style="bold"))
    table = data_table(
        "mesh dimension", "ranks", "nodes", "calls", "bytes", "time", "share", numbers=6
    )
    for part in estimate.parts:
        share = f"{part.seconds / estimate.seconds:.0%}" if estimate.seconds else ""
        calls, carried = part.calls / estimate.steps, part.wire_bytes / estimate.steps
        table.add_row(
            Text(part.name),
            str(part.ranks),
            str(part.nodes),
            number(round(calls, 1)),
            size(carried),
            short_duration(1e9 * part.seconds / estimate.steps),
            share,
        )
    if estimate.parts:
        out.print(table)
    scope = "the step" if estimate.steps == 1 else f"an average step (of {estimate.steps})"
    answer = (
        f"All collectives of {scope}, one after another:"
        f" {short_duration(1e9 * estimate.seconds_per_step)}."
    )
    out.print(Text(answer, style="bold"))
    setup = estimate.setup
    if setup.calls:
        amount = (
            f"{count(setup.calls, 'collective')}, {size(setup.wire_bytes)},"
            f" {short_duration(1e9 * setup.seconds)}"
        )
        out.print(Text(f"Setup before the first forward, once: {amount}."))
    out.print(
        Text(
            f"Line rates: {_rate(net.intra_bandwidth)} inside a node of {net.ranks_per_node},"
            f" {_rate(net.inter_bandwidth)} per rank between nodes;"
            f" {short_duration(1e9 * net.intra_latency)} and"
            f" {short_duration(1e9 * net.inter_latency)} per hop. Overlap and congestion are"
            " ignored.",
            style="dim",
        )
    )
    if net.source:
        out.print(Text(f"{net.source}.", style="dim"))


def _rate(value: float) -> str:
    return f"{value / 1e9:.4g} GB/s"
