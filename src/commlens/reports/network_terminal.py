"""A time estimate on a terminal."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING

from rich.text import Text

from commlens.reports.console import console
from commlens.reports.trace_terminal import data_table
from commlens.text import count, number, short_duration, size

if TYPE_CHECKING:
    from commlens.model.network import Estimate


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
