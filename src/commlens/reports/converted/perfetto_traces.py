"""Write traces as timelines for ui.perfetto.dev and chrome://tracing. Each rank is a process.

Each issuing thread has a track, with a slice for each issue and each wait, joined by an arrow. The
collectives in flight, from issue to the end of the wait, are asynchronous events: the viewer draws
those of one op and group together. A collective's fields are the slice's arguments.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from commlens.reports.converted.perfetto import event, metadata_event, rank_name, slice_event

_LANES: Final = 10_000
"""Threads have smaller numbers: the track of a thread's lane is a multiple of this, plus the
thread. Waits that overlap need several lanes; lane 0 is the thread's own track.
"""
_HIDDEN: Final = (
    "rank",
    "started_ns",
    "returned_ns",
    "wait_began_ns",
    "wait_ended_ns",
    "count",
    "last_step",
    "thread",
)
"""The fields of a trace's row that are no arguments of its slice."""


class _WaitSlice(NamedTuple):
    """A wait, and the number of the arrow that leads to it. Its times are the trace's."""

    thread: int  # that issued the collective
    began_ns: int
    ended_ns: int
    name: str
    arrow: int
    cat: str


def trace_to_perfetto(
    ranks: Iterable[tuple[int, int, list[Mapping[str, Any]]]],
) -> tuple[bytes, int]:
    """Render rows as JSON. Returns it, and the number of collectives left out because they are
    summarised and have no times.

    Of each rank: its number, the start of its trace (Unix ns), and its rows (``Trace.to_rows()``).
    """
    traces = list(ranks)
    first_ns = min((started_ns for _, started_ns, _ in traces if started_ns), default=0)
    events: list[dict[str, Any]] = []
    arrows = itertools.count(1)
    for rank, started_ns, rows in traces:
        shift = max(0, started_ns - first_ns) if started_ns else 0
        events += _rank_events(rank, shift, [row for row in rows if row["returned_ns"]], arrows)
    left_out = sum(row["count"] for _, _, rows in traces for row in rows if not row["returned_ns"])
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}), left_out


def _rank_events(
    rank: int, shift: int, rows: Iterable[Mapping[str, Any]], arrows: Iterator[int]
) -> Iterator[dict[str, Any]]:
    """Yield the events of one rank; ``shift`` is the start of its trace after that of the first."""
    yield from rank_name(rank)
    waits: list[_WaitSlice] = []
    issues: dict[int, list[tuple[int, int]]] = {}
    for row in rows:
        thread, began_ns, returned_ns = row["thread"], row["started_ns"] or 0, row["returned_ns"]
        issues.setdefault(thread, []).append((began_ns, returned_ns))
        arguments = {
            field: value
            for field, value in row.items()
            if value is not None and value != "" and field not in _HIDDEN
        }
        name, cat, at_ns = f"{row['op']} {row['group']}", row["phase"], began_ns + shift
        end_ns = returned_ns + shift
        yield slice_event(rank, thread, at_ns, end_ns, name=name, cat=cat, args=arguments)
        if row["wait_ended_ns"]:
            end_ns = max(end_ns, row["wait_ended_ns"] + shift)
            arrow = next(arrows)
            yield event("s", rank, thread, at_ns, id=arrow, name="wait", cat=cat)
            waits.append(
                _WaitSlice(
                    thread,
                    row["wait_began_ns"] or 0,
                    row["wait_ended_ns"],
                    f"wait for {name}",
                    arrow,
                    cat,
                )
            )
        flight = {
            "name": name,
            "cat": "in flight",
            "id2": {"local": f"{row['group']}#{row['sequence']}"},
        }
        yield event(
            "b",
            rank,
            thread,
            at_ns,
            args={"module": row["module"], "sequence": row["sequence"]},
            **flight,
        )
        yield event("e", rank, thread, end_ns, **flight)
    yield from _wait_events(rank, shift, waits, issues)
    for thread in sorted(issues):
        name = "main thread" if thread == 0 else f"thread {thread}"
        yield metadata_event("thread_name", rank, track=thread, name=name)


def _wait_events(
    rank: int,
    shift: int,
    waits: list[_WaitSlice],
    issues: Mapping[int, list[tuple[int, int]]],
) -> Iterable[dict[str, Any]]:
    """Yield the waits: on the issuing thread's track if they nest there, else (another thread
    waited) on a separate track.
    """
    spans = {thread: sorted(spans) for thread, spans in issues.items()}
    # by thread, of each lane: the ends of the waits that are open there, innermost last
    lanes: dict[int, list[list[int]]] = {}
    for wait in sorted(waits, key=lambda wait: (wait.began_ns, -wait.ended_ns)):
        open_ends = lanes.setdefault(wait.thread, [[]])
        nests = _nests(spans[wait.thread], wait.began_ns, wait.ended_ns)
        lane = _lane(open_ends, wait, first=0 if nests else 1)
        track, at_ns = lane * _LANES + wait.thread, wait.began_ns + shift
        if lane and not open_ends[lane]:
            name = f"waits for thread {wait.thread}'s"
            yield metadata_event("thread_name", rank, track=track, name=name)
        open_ends[lane].append(wait.ended_ns)
        yield slice_event(rank, track, at_ns, wait.ended_ns + shift, name=wait.name, cat=wait.cat)
        yield event("f", rank, track, at_ns, bp="e", id=wait.arrow, name="wait", cat=wait.cat)


def _lane(open_ends: list[list[int]], wait: _WaitSlice, first: int) -> int:
    """Return the first lane, from ``first`` on, in which a wait nests in those that are open; close
    those that have ended.
    """
    lane = first
    while True:
        if lane == len(open_ends):
            open_ends.append([])
        ends = open_ends[lane]
        while ends and ends[-1] <= wait.began_ns:
            ends.pop()
        if not ends or ends[-1] >= wait.ended_ns:
            return lane
        lane += 1


def _nests(spans: list[tuple[int, int]], began: int, ended: int) -> bool:
    """Check that a slice does not partly overlap any of the thread's issues, which do not overlap
    one another.
    """
    before = bisect.bisect_right(spans, (began, ended)) - 1
    if before >= 0 and spans[before][0] < began < spans[before][1] < ended:
        return False
    last = bisect.bisect_left(spans, (ended, 0)) - 1
    return not (last >= 0 and began < spans[last][0] < ended < spans[last][1])
