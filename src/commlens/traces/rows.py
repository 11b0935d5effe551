"""The rows of a trace: one flat dict per event, also as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any, Final

from commlens.model.collective import ProcessGroup
from commlens.model.trace import TraceData, TraceEvent
from commlens.text import csv_cell, format_ranks
from commlens.traces import wording


def rows(data: TraceData) -> list[dict[str, Any]]:
    """Return one flat dict per event, all with the same keys; values are strings, numbers, booleans
    or None.
    """
    return [row(data, event) for event in data.events]


def row(data: TraceData, event: TraceEvent) -> dict[str, Any]:
    """Return one event as a flat dict."""
    group, owner, cause, source = data.group_of(event), event.owner, event.cause, event.source
    cause_op, cause_before, cause_after, cause_implicit, cause_mesh = (
        (cause.op, cause.before, cause.after, cause.implicit, cause.mesh) if cause else (None,) * 5
    )
    return {
        "rank": data.rank,
        "sequence": event.sequence,
        "step": event.step,
        "last_step": event.step if event.last_step is None else event.last_step,
        "count": event.count,
        "phase": wording.phase_name(event.phase),
        "op": event.op,
        "api": event.api,
        "mesh_dim": group.mesh_dim,
        "group": wording.label(group),
        "group_name": group.name,
        "group_description": group.description,
        "group_ranks": format_ranks(group.ranks),
        "group_size": len(group.ranks),
        "backend": group.backend,
        "module": event.site,
        "call": event.call,
        "microbatch": event.microbatch,
        "owner_library": owner.library if owner else None,
        "owner": owner.name if owner else None,
        "owner_parameters": ", ".join(owner.parameters) if owner else None,
        "cause_op": cause_op,
        "cause_before": cause_before,
        "cause_after": cause_after,
        "cause_implicit": cause_implicit,
        "cause_mesh": cause_mesh,
        "source": f"{source.file}:{source.line}" if source else None,
        "function": source.function if source else None,
        "through": event.through,
        "dtype": event.dtype or None,
        "input_bytes": event.input_bytes,
        "output_bytes": event.output_bytes,
        "wire_bytes": event.wire_bytes,
        "reduce_op": event.reduce_op,
        "root": event.root,
        "peer": event.peer,
        "tag": event.tag,
        "asynchronous": event.asynchronous,
        "members": event.members,
        "thread": event.thread,
        "started_ns": event.started_ns or None,
        "returned_ns": event.returned_ns or None,
        "wait_began_ns": event.wait_began_ns or None,
        "wait_ended_ns": event.wait_ended_ns or None,
    }


COLUMNS: Final = tuple(
    row(
        TraceData(groups=[ProcessGroup("", ())]),
        TraceEvent(sequence=0, op="", api="", phase=None, group=0),
    )
)
"""The keys of a row, in order."""


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV with a header; None becomes an empty cell. Texts that begin like a formula
    get an apostrophe.
    """
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {name: csv_cell(value) if isinstance(value, str) else value for name, value in row.items()}
        for row in rows
    )
    return out.getvalue()
