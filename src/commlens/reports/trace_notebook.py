"""A trace in a notebook: small tables of plain HTML without scripts or styles."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from commlens.model.trace_summary import Summary, Total
from commlens.text import number, size

_ROWS = 6
_REASONS = 5


def summary_html(summary: Summary) -> str:
    """Render the summary: breakdowns, the costliest reasons and the self-check. All text from the
    trace is escaped.
    """
    known = summary.bytes_known
    breakdowns = (
        ("mesh dimension", summary.by_mesh_dim),
        ("phase", summary.by_phase),
        ("op", summary.by_op),
    )
    parts = [f"<p><b>{escape(summary.answer)}</b></p>"]
    parts += [
        _table(title, rows, known=known) for title, rows in breakdowns if rows and summary.calls
    ]
    if summary.why:
        items = "".join(
            f"<li>{size(why.wire_bytes) + ': ' if known else ''}{escape(why.sentence)}</li>"
            for why in summary.why[:_REASONS]
        )
        parts.append(f"<p>Why, costliest first:</p><ul>{items}</ul>")
    if summary.hazards:
        items = "".join(f"<li>{escape(sentence)}</li>" for sentence in summary.hazards)
        parts.append(f"<p>Latent faults:</p><ul>{items}</ul>")
    parts.append(f"<p>{escape(' '.join([summary.coverage, *summary.blind]))}</p>")
    return f"<div>{''.join(parts)}</div>"


def _table(title: str, rows: Sequence[Total], *, known: bool) -> str:
    heads = [title, "calls", *["on the wire"] * known]
    lines = [f"<tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>"]
    for row in rows[:_ROWS]:
        values = [escape(row.name), number(row.calls), *[size(row.wire_bytes)] * known]
        lines.append(f"<tr>{''.join(f'<td>{value}</td>' for value in values)}</tr>")
    if len(rows) > _ROWS:
        lines.append(f'<tr><td colspan="{len(heads)}">{len(rows) - _ROWS} more</td></tr>')
    return f"<table>{''.join(lines)}</table>"


class Framed:
    """A page inside a notebook's cell, as ``Trace.show()`` returns it."""

    def __init__(self, page: bytes, height: int) -> None:
        self._page = page
        self._height = height

    def _repr_html_(self) -> str:
        content = escape(self._page.decode(), quote=True)
        # allow-scripts without allow-same-origin: the page can reach neither the notebook nor its
        # server.
        return (
            f'<iframe sandbox="allow-scripts" srcdoc="{content}" style="width: 100%; height:'
            f' {self._height}px; border: 0"></iframe>'
        )

    def __repr__(self) -> str:
        return "<the trace's page: shown in notebooks; Trace.write_html(path) writes it to a file>"
