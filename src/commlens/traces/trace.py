"""``commlens.Trace``: read, filter, summarise, compare and save a trace."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import msgspec

from commlens.errors import SelectionError
from commlens.model.trace import Coverage, TraceData, TracedOp, TraceEvent
from commlens.traces import fields, summarise
from commlens.traces.rows import rows

if TYPE_CHECKING:
    from commlens.model.network import Network
    from commlens.model.trace_changes import TraceComparison
    from commlens.model.trace_summary import Summary
    from commlens.reports.trace_notebook import Framed

OfBytes = Literal["wire", "input", "output"]


class Trace:
    """The collectives that one rank issued.

    Created by ``with commlens.trace() as trace:``, read with ``Trace.load("x.json")``, narrowed
    with :meth:`filter`.

    Args:
        data: the content of a trace file.
    """

    def __init__(self, data: TraceData) -> None:
        self._data = data
        self._unfiltered: int | None = None  # number of collectives before filtering
        self._filtered_by = ""  # the sentence about the filter, in coverage.blind

    @property
    def data(self) -> TraceData:
        """The whole trace as plain data."""
        return self._data

    @property
    def events(self) -> list[TraceEvent]:
        """The collectives in order of issue."""
        return self.data.events

    @property
    def ops(self) -> list[TracedOp]:
        """The tensor ops, in order; empty unless the trace has depth ``ops``."""
        return self.data.ops

    @property
    def coverage(self) -> Coverage:
        """The self-check: how many collectives were dispatched, recorded, and could not be
        classified.
        """
        return self.data.coverage

    @property
    def calls(self) -> int:
        """The number of collectives; summarised ones count in full."""
        return sum(event.count for event in self.events)

    @property
    def wire_bytes(self) -> int:
        """The bytes on the wire of all collectives."""
        return sum(event.wire_bytes * event.count for event in self.events)

    def __repr__(self) -> str:
        return f"<Trace: {self.to_summary().answer.rstrip('.')}>"

    def filter(self, **wanted: Any) -> Trace:
        """Return the events with the given values, as a trace.

        ``trace.filter(phase="backward", mesh_dim="tp", module="layers.0")``. Takes every field of
        :data:`commlens.traces.fields.FIELDS`. A list matches any of its values; a callable receives
        the field's value (``wire_bytes=lambda size: size > 1e6``). ``module`` takes a path with or
        without the root's class name and includes children; ``*`` matches one part of the path.
        ``step`` takes ``"2:4"`` or a range. Tensor ops are filtered only by phase and module.

        Raises:
            SelectionError: unknown field or phase.
        """
        data = self.data
        kept = fields.matching(data, wanted)
        ops = data.ops
        if "phase" in wanted:
            phases = fields.wanted_values("phase", wanted["phase"])
            ops = [op for op in ops if op.phase in phases]
        if "module" in wanted:
            paths = fields.values_in(data, "module", wanted["module"])
            ops = [
                op
                for op in ops
                if any(
                    fields.path_matches(op.site, path) if isinstance(path, str) else op.site == path
                    for path in paths
                )
            ]
        filtered_by = _filtered_by(data, kept, wanted) if wanted else self._filtered_by
        blind = [text for text in data.coverage.blind if text != self._filtered_by]
        blind += [filtered_by] if filtered_by else []
        blind += _left_out(data, kept) if "step" in wanted else []
        coverage = msgspec.structs.replace(data.coverage, blind=blind)
        part = Trace(msgspec.structs.replace(data, events=kept, ops=ops, coverage=coverage))
        part._filtered_by = filtered_by
        part._unfiltered = self.calls if self._unfiltered is None else self._unfiltered
        return part

    def counts(self, by: str | Sequence[str] = "op") -> dict[Any, int]:
        """Count collectives by the values of a field, or of several.

        ``trace.counts()`` returns ``{"all_gather": 5, "reduce_scatter": 3}``; the keys of
        ``trace.counts(by=("mesh_dim", "op"))`` are tuples.

        Raises:
            SelectionError: unknown field.
        """
        return self._totals(by, lambda event: event.count)

    def bytes(self, by: str | Sequence[str] = "op", of: OfBytes = "wire") -> dict[Any, int]:
        """Sum bytes by the values of a field: on the wire, of the inputs, or of the outputs.

        Raises:
            SelectionError: unknown field or kind of bytes.
        """
        if of not in ("wire", "input", "output"):
            raise SelectionError(f"Unknown kind of bytes {of!r}: use 'wire', 'input' or 'output'.")
        name = f"{of}_bytes"
        return self._totals(by, lambda event: getattr(event, name) * event.count)

    def _totals(self, by: str | Sequence[str], amount: Any) -> dict[Any, int]:
        data = self.data
        alone = isinstance(by, str)
        getters = [fields.field(name).get for name in ([by] if isinstance(by, str) else by)]
        totals: dict[Any, int] = {}
        for event in data.events:
            group = data.group_of(event)
            values = tuple(get(group, event) for get in getters)
            key = values[0] if alone else values
            totals[key] = totals.get(key, 0) + amount(event)
        return totals

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one flat dict per event, ready for ``pandas.DataFrame(rows)`` or
        ``csv.DictWriter``.
        """
        return rows(self.data)

    def whys(self) -> list[str]:
        """Return the reason of each event, in order: the parameters that it carries, the
        redistribution that it does.
        """
        return [summarise.why(event) for event in self.events]

    def to_summary(self, *, network: Network | str | None = None) -> Summary:
        """Return the content of :meth:`summary` as data."""
        from commlens.traces.network import preset

        return summarise.summarise(
            self.data,
            unfiltered=self._unfiltered,
            network=preset(network) if isinstance(network, str) else network,
        )

    def summary(
        self,
        file: IO[str] | None = None,
        *,
        width: int | None = None,
        colour: bool | None = None,
        network: Network | str | None = None,
    ) -> None:
        """Print calls, bytes and times by mesh dimension, phase, op and module, the costliest
        reasons and the slowest calls.

        Args:
            file: standard output by default.
            width: columns; the terminal's by default.
            colour: use colour; by default only on a terminal that supports it.
            network: a network, or a preset's name, to estimate times for: beside the measured ones,
                or as a table if there are none.
        """
        from commlens.reports.trace_terminal import print_estimate, print_summary

        summary = self.to_summary(network=network)
        print_summary(summary, file, width=width, colour=colour)
        if summary.estimate is not None and not (summary.times and summary.times.timed):
            print_estimate(summary.estimate, file, width=width, colour=colour)

    def _repr_html_(self) -> str:
        from commlens.reports.trace_notebook import summary_html

        return summary_html(self.to_summary())

    def write_html(
        self, path: str | os.PathLike[str], *, network: Network | str | None = None
    ) -> None:
        """Write the page of ``commlens view -o``: one HTML file that works offline. An existing
        file is replaced.

        Args:
            path: the file.
            network: a network to estimate times for, or a preset's name such as ``"h100-ib"``.

        Raises:
            OutputError: the file could not be written.
            CommandError: unknown preset.
        """
        from commlens.atomic_write import write_whole

        write_whole(Path(path), _page(self.data, Path(path).stem, network))

    def show(self, *, height: int = 800, network: Network | str | None = None) -> Framed:
        """Return the same page for a notebook's cell.

        Args:
            height: height of the cell's frame, in pixels.
            network: as for :meth:`write_html`.
        """
        from commlens.reports.trace_notebook import Framed

        return Framed(_page(self.data, "trace", network), height)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save as JSON, schema ``commlens.trace/1``; compressed if the name ends with ``.gz``. An
        existing file is replaced.

        Raises:
            OutputError: the file could not be written.
        """
        from commlens.formats.trace_json import write_trace

        write_trace(self.data, Path(path))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a saved trace, or the JSON of CommDebugMode's ``generate_json_dump``.

        Raises:
            FormatError: the file is neither, or it is damaged.
        """
        from commlens.formats.trace_json import read_trace

        return Trace(read_trace(Path(path)))

    def compare(self, other: Trace) -> TraceComparison:
        """Return how ``other`` differs from this trace; false if nothing changed."""
        from commlens.traces.diff import compare
        from commlens.traces.time_changes import add_times

        comparison = compare(self.data, other.data)
        add_times(comparison, [self.data], [other.data])
        return comparison


def _page(data: TraceData, name: str, network: Network | str | None) -> bytes:
    from commlens.traces.page import page_of

    return page_of([data], name=name, network=network)


def _filtered_by(data: TraceData, kept: list[TraceEvent], wanted: dict[str, Any]) -> str:
    """Return such a sentence as ``Filtered by mesh_dim=tp: 6 of 14 collectives.``"""
    filters = ", ".join(f"{name}={_short(value)}" for name, value in wanted.items())
    number = sum(event.count for event in kept)
    total = sum(event.count for event in data.events)
    return f"Filtered by {filters}: {number} of {total} collectives."


def _left_out(data: TraceData, kept: list[TraceEvent]) -> list[str]:
    """Return a sentence about the summarised collectives that are in no single step; none if there
    are none.
    """
    shown = {id(event) for event in kept}
    several_steps = (
        event
        for event in data.events
        if event.last_step is not None and event.last_step != event.step
    )
    left_out = sum(event.count for event in several_steps if id(event) not in shown)
    if not left_out:
        return []
    return [f"{left_out} summarised collectives cannot be assigned to a step and are left out."]


def _short(value: Any) -> str:
    if callable(value):
        return "..."
    if isinstance(value, (list, tuple, set, frozenset)):
        return " or ".join(map(_short, value))
    return str(value.value if hasattr(value, "value") else value)
