"""A trace in a few plain lines, printed after a program's own output."""

from __future__ import annotations

from commlens.model.trace_summary import Summary
from commlens.text import number, size

_ROWS = 6


def short_summary(summary: Summary) -> str:
    """Return the answer, the mesh dimensions, the ops and the latent faults, one line each, and the
    self-check if it failed.
    """
    lines = [summary.answer]
    for title, rows in (("by mesh dimension", summary.by_mesh_dim), ("by op", summary.by_op)):
        if rows:
            shown = ", ".join(
                f"{row.name} {number(row.calls)} ({size(row.wire_bytes)})" for row in rows[:_ROWS]
            )
            lines.append(f"{title}: {shown}{' ...' if len(rows) > _ROWS else ''}")
    lines += [f"latent fault: {sentence}" for sentence in summary.hazards[:_ROWS]]
    if not summary.complete:
        lines.append(summary.coverage)
    return "\n".join(f"commlens: {line}" for line in lines)
