"""The HTML pages of traces: one run, two traces side by side, and a viewer for files dropped on it.

A page contains one line of JSON, the head, followed by the traces in their file format. The browser
reads both, the same way as a dropped file, and computes everything that the page shows. Its source
is web/src/trace/.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from commlens.formats.trace_json import encode
from commlens.model.trace import TraceData
from commlens.model.trace_changes import TraceComparison
from commlens.reports.page import render_page

VIEWER_FILE: Final = "commlens-viewer.html"


class RankClasses(msgspec.Struct):
    """How the ranks of a run differ. A class is a set of ranks that issued the same collectives."""

    answer: str
    differences: list[str]
    classes: list[str]  # one name per trace of the page


class TimeEstimate(msgspec.Struct):
    """The estimated time of each collective of a trace on a network."""

    network: str
    seconds: list[float]


def trace_page(
    traces: Sequence[TraceData],
    *,
    name: str,
    text: str,
    names: Sequence[str],
    notes: Sequence[str],
    ranks: RankClasses | None,
    estimates: Sequence[TimeEstimate] | None,
) -> bytes:
    """Render the page of a trace, or of one trace for each class of ranks. ``text`` is shown where
    no script runs.
    """
    about = {"ranks": ranks, "estimates": estimates}
    head = {
        "kind": "trace",
        "names": names,
        "notes": notes,
        **{key: value for key, value in about.items() if value is not None},
    }
    return _page(f"{name}: commlens trace", head, traces, text)


def compare_page(
    traces: tuple[TraceData, TraceData],
    comparison: TraceComparison,
    *,
    names: tuple[str, str],
    notes: Sequence[str],
) -> bytes:
    """Render the page of a comparison, with two traces side by side. The notes are about their
    selection.
    """
    head = {"kind": "compare", "names": names, "notes": notes, "comparison": comparison}
    return _page(f"{names[0]} and {names[1]}: commlens compare", head, traces, str(comparison))


def viewer_page() -> bytes:
    """Render the empty viewer, which shows a trace dropped on it."""
    return render_page(
        "trace",
        title="commlens trace viewer",
        text="This page needs JavaScript to show a trace that you drop on it.",
    )


def _page(title: str, head: dict[str, Any], traces: Sequence[TraceData], text: str) -> bytes:
    content = b"\n".join([msgspec.json.encode(head), *(encode(data) for data in traces)])
    return render_page("trace", title=title, data=msgspec.Raw(content), text=text)
