"""``commlens.Trace``: a trace, and what people do with it."""

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
    from commlens.model.trace_changes import Comparison
    from commlens.model.trace_summary import Summary
    from commlens.reports.trace_notebook import Framed

OfBytes = Literal["wire", "input", "output"]


class Trace:
    """The collectives that one rank issued.

    Made by ``with commlens.trace() as trace:``, read with ``Trace.load("x.json")``, cut with :meth:`filter`.

    Args:
        data: what a trace file holds.
    """

    def __init__(self, data: TraceData) -> None:
        self._data = data
        self._kept_of: int | None = None  # number of collectives before filtering

    @property
    def data(self) -> TraceData:
        """Everything, as plain data."""
        return self._data

    @property
    def events(self) -> list[TraceEvent]:
        """The collectives in order of issue."""
        return self.data.events

    @property
    def ops(self) -> list[TracedOp]:
        """The tensor ops, in order; only a trace of depth ``ops`` has some."""
        return self.data.ops

    @property
    def coverage(self) -> Coverage:
        """The self-check: how many collectives were dispatched, recorded, and could not be classified."""
        return self.data.coverage

    @property
    def calls(self) -> int:
        """How many collectives there are; summarised ones count in full."""
        return sum(event.count for event in self.events)

    @property
    def wire_bytes(self) -> int:
        """Bytes on the wire of all of them."""
        return sum(event.wire_bytes * event.count for event in self.events)

    def __repr__(self) -> str:
        return f"<Trace: {self.to_summary().answer.rstrip('.')}>"

    def filter(self, **wanted: Any) -> Trace:
        """The part of the trace that has these values, as a trace.

        ``trace.filter(phase="backward", mesh_dim="tp", module="layers.0")``. Any field of a row may be named
        (:data:`commlens.traces.fields.FIELDS`). A list is a choice of values; a callable is asked with the field's value
        (``wire_bytes=lambda size: size > 1e6``). ``module`` takes a path with or without the root's class name, and means its
        children, too; ``*`` stands for one part. ``step`` takes ``"2:4"`` or a range. Tensor ops are cut by phase and module
        only.

        Raises:
            SelectionError: there is no such field or phase.
        """
        data = self.data
        kept = fields.matching(data, wanted)
        ops = data.ops
        if "phase" in wanted:
            phases = fields.wanted_values("phase", wanted["phase"])
            ops = [op for op in ops if op.phase in phases]
        if "module" in wanted:
            paths = fields.wanted_values("module", wanted["module"])
            ops = [
                op for op in ops if any(fields.path_matches(op.site, path) if isinstance(path, str) else op.site == path for path in paths)
            ]
        part = Trace(msgspec.structs.replace(data, events=kept, ops=ops, coverage=_coverage_of_part(data, kept, wanted)))
        part._kept_of = sum(event.count for event in data.events) if self._kept_of is None else self._kept_of
        return part

    def counts(self, by: str | Sequence[str] = "op") -> dict[Any, int]:
        """How many collectives there are of each value of a field, or of each combination of several.

        ``trace.counts()`` gives ``{"all_gather": 5, "reduce_scatter": 3}``; ``trace.counts(by=("mesh_dim", "op"))`` has
        tuples as keys.

        Raises:
            SelectionError: there is no such field.
        """
        return self._totals(by, lambda event: event.count)

    def bytes(self, by: str | Sequence[str] = "op", of: OfBytes = "wire") -> dict[Any, int]:
        """Bytes of each value of a field: on the wire, or what went in or came out.

        Raises:
            SelectionError: there is no such field, or no such kind of bytes.
        """
        if of not in ("wire", "input", "output"):
            raise SelectionError(f"There are no bytes of {of!r}: ask for 'wire', 'input' or 'output'.")
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
        """One flat dict for each event: ready for ``pandas.DataFrame(rows)`` or ``csv.DictWriter``."""
        return rows(self.data)

    def whys(self) -> list[str]:
        """The reason of each event in a few words, in the same order: whose parameters, which redistribution."""
        return [summarise.why(event) for event in self.events]

    def to_summary(self) -> Summary:
        """What :meth:`summary` prints, as data."""
        return summarise.summarise(self.data, kept_of=self._kept_of)

    def summary(self, file: IO[str] | None = None, *, width: int | None = None, colour: bool | None = None) -> None:
        """Print what the trace comes to: bytes and calls by mesh dimension, phase, op and module, and the costliest reasons.

        Args:
            file: where to; standard output by default.
            width: columns; by default those of the terminal.
            colour: whether to use colour; by default where the file is a terminal that wants it.
        """
        from commlens.reports.trace_terminal import print_summary

        print_summary(self.to_summary(), file, width=width, colour=colour)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from commlens.reports.trace_notebook import summary_html

        return summary_html(self.to_summary())

    def write_html(self, path: str | os.PathLike[str], *, network: Network | str | None = None) -> None:
        """Write the page that ``commlens view -o`` writes: one HTML file that works without a network. A file that is there is replaced.

        Args:
            path: the file.
            network: estimate times for it: a network, or a preset's name such as ``"h100-ib"``.

        Raises:
            OutputError: it could not be written.
            CommandError: there is no such preset.
        """
        from commlens.atomic_write import write_whole

        write_whole(Path(path), _page(self, Path(path).stem, network))

    def show(self, *, height: int = 800, network: Network | str | None = None) -> Framed:
        """The same page inside a notebook's cell.

        Args:
            height: of the cell's frame, in pixels.
            network: as for :meth:`write_html`.
        """
        from commlens.reports.trace_notebook import Framed

        return Framed(_page(self, "trace", network), height)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save as JSON, schema ``commlens.trace/1``; compressed where the name ends with ``.gz``. A file that is there is replaced.

        Raises:
            OutputError: it could not be written.
        """
        from commlens.formats.trace_json import write_trace

        write_trace(self.data, Path(path))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a saved trace, or what CommDebugMode's ``generate_json_dump`` wrote.

        Raises:
            FormatError: the file is neither, or damaged.
        """
        from commlens.formats.trace_json import read_trace

        return Trace(read_trace(Path(path)))

    def compare(self, other: Trace) -> Comparison:
        """What is different in ``other``, in words and as data; false where nothing is."""
        from commlens.traces.diff import compare

        return compare(self.data, other.data)


def _page(trace: Trace, name: str, network: Network | str | None) -> bytes:
    from commlens.reports.trace_page import trace_page
    from commlens.traces.network import preset
    from commlens.traces.ranks import RankTraces

    return trace_page(RankTraces([trace]), name=name, network=preset(network) if isinstance(network, str) else network)


def _coverage_of_part(data: TraceData, kept: list[TraceEvent], wanted: dict[str, Any]) -> Coverage:
    """The whole trace's self-check, with what the part is of it."""
    asked = ", ".join(f"{name}={_short(value)}" for name, value in wanted.items())
    blind = [text for text in data.coverage.blind if not text.startswith(_PART)]
    if asked:
        number = sum(event.count for event in kept)
        blind.append(f"{_PART}{asked}: {number} of {sum(event.count for event in data.events)} collectives.")
    if "step" in wanted:
        names = [event for event in data.events if event.last_step is not None and event.last_step != event.step]
        shown = {id(event) for event in kept}
        left_out = sum(event.count for event in names if id(event) not in shown)
        if left_out:
            blind.append(f"{left_out} summarised collectives cannot be told apart by step and are left out.")
    return msgspec.structs.replace(data.coverage, blind=blind)


_PART = "This is the part with "


def _short(value: Any) -> str:
    if callable(value):
        return "..."
    if isinstance(value, (list, tuple, set, frozenset)):
        return " or ".join(map(_short, value))
    return str(value.value if hasattr(value, "value") else value)
