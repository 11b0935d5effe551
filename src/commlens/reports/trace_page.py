"""The HTML pages of traces: one trace (or several ranks'), two side by side, and a viewer that waits for a file.

A page carries a head in one line of JSON and, after it, the traces as their files hold them. The browser reads those, as it reads a file
that is dropped on the viewer: what the page shows is worked out there and nowhere else. web/src/trace/ is its source.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from commlens.formats.trace_json import encode
from commlens.model.network import Network
from commlens.model.trace import TraceData
from commlens.model.trace_changes import Comparison
from commlens.reports.page import render_page
from commlens.text import ranks_phrase
from commlens.traces.diff_ranks import compare_ranks
from commlens.traces.network import collective_seconds
from commlens.traces.ranks import RankTraces
from commlens.traces.summarise import answer

MOST_CLASSES: Final = 8
"""Of ranks that issued different things: so many classes are in a page, one trace of each."""

VIEWER_FILE: Final = "commlens-viewer.html"


def trace_page(
    ranks: RankTraces, *, name: str, names: Sequence[str] = (), notes: Sequence[str] = (), network: Network | None = None
) -> bytes:
    """The page of a trace.

    Args:
        ranks: one trace, or one of each rank: then one of each class of ranks that issued the same is in the page.
        name: what the trace is called, for the title.
        names: what each rank's trace is called, in the order of the ranks; ``name`` where there is one only.
        notes: sentences about what was read.
        network: times are estimated for it.
    """
    all_classes = ranks.classes() if len(ranks) > 1 else [ranks.ranks]
    classes = all_classes[:MOST_CLASSES]
    shown = [ranks[members[0]] for members in classes]
    called = dict(zip(ranks.ranks, names or [name] * len(ranks), strict=True))
    head: dict[str, Any] = {"kind": "trace", "names": [called[members[0]] for members in classes], "notes": [*notes]}
    text = answer(shown[0].data)
    if len(ranks) > 1:
        head["ranks"] = {
            "answer": ranks.answer(),
            "differences": ranks.differences(),
            "classes": [_class_name(members) for members in classes],
        }
        text = f"{ranks.answer()}\n{text}"
        if len(all_classes) > MOST_CLASSES:
            head["notes"].append(f"There are {len(all_classes)} classes of ranks; one of each of the {MOST_CLASSES} largest is here.")
    if network is not None:
        head["estimates"] = [{"network": network.name, "seconds": _seconds(trace.data, network)} for trace in shown]
    return _page(f"{name}: commlens trace", head, [trace.data for trace in shown], text)


def compare_page(before: RankTraces, after: RankTraces, comparison: Comparison, *, names: tuple[str, str]) -> bytes:
    """The page of a comparison. Of several ranks, the side-by-side view is of the first that changed, or the first there is.

    Args:
        before: one run.
        after: the other one.
        comparison: what ``compare_ranks`` said of them.
        names: what they are called.
    """
    notes = []
    both = [rank for rank in before.ranks if rank in after.by_rank]
    if len(before) == len(after) == 1:
        one, other = next(iter(before)).data, next(iter(after)).data
    else:
        changed = next((change.ranks[0] for change in comparison.changes if change.ranks), None)
        shown = changed if changed is not None else both[0] if both else None
        one = before[before.ranks[0] if shown is None else shown].data
        other = after[after.ranks[0] if shown is None else shown].data
        if shown is not None:
            notes.append(f"The changes are those of {ranks_phrase(both)}; side by side stands rank {shown}.")
            alone = compare_ranks(RankTraces([before[shown]]), RankTraces([after[shown]]))
            comparison = msgspec.structs.replace(comparison, per_step=alone.per_step)
    head = {"kind": "compare", "names": [*names], "notes": notes, "comparison": comparison}
    return _page(f"{names[0]} and {names[1]}: commlens compare", head, [one, other], str(comparison))


def viewer_page() -> bytes:
    """The page that takes a file that is dropped on it."""
    return render_page("trace", title="commlens trace viewer", text="This page needs JavaScript: drop a trace on it, and it is shown.")


def _page(title: str, head: dict[str, Any], traces: Sequence[TraceData], text: str) -> bytes:
    content = b"\n".join([msgspec.json.encode(head), *(encode(data) for data in traces)])
    return render_page("trace", title=title, data=msgspec.Raw(content), text=text)


def _class_name(members: Sequence[int]) -> str:
    if len(members) == 1:
        return f"rank {members[0]}"
    return f"rank {members[0]}, like all of {ranks_phrase(members)}"


def _seconds(data: TraceData, network: Network) -> list[float]:
    return [
        collective_seconds(event.op, data.group_of(event).ranks, event.wire_bytes, network, rank=data.rank, peer=event.peer)
        for event in data.events
    ]
