"""A trace as Chrome trace event JSON, for ui.perfetto.dev and chrome://tracing.

Each rank is a process and each issuing thread a track, with a slice for each issue and each wait,
joined by an arrow. Each group has a track of its own with the collectives in flight, from issue to
the end of the wait. A collective's fields are the slice's arguments. The format is Google's "Trace
Event Format".
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from commlens.reports.trace_events import name_rank, name_track

_HIDDEN = (
    "rank",
    "started_ns",
    "returned_ns",
    "wait_began_ns",
    "wait_ended_ns",
    "count",
    "last_step",
    "thread",
)
_MICROSECOND = 1000.0


def to_perfetto(ranks: Iterable[tuple[int, int, list[Mapping[str, Any]]]]) -> tuple[bytes, int]:
    """Render rows as JSON. Returns it, and the number of collectives left out because they are
    summarised and have no times.

    Of each rank: its number, the start of its trace (Unix ns), and its rows (``Trace.to_rows()``).
    """
    traces = list(ranks)
    origin = min((started for _, started, _ in traces if started), default=0)
    events: list[dict[str, Any]] = []
    left_out = 0
    arrow = 0
    for rank, started, rows in traces:
        shift = max(0, started - origin) if started else 0
        events += name_rank(rank)
        waits: list[tuple[int, int, int, dict[str, Any]]] = []
        issues: dict[int, list[tuple[int, int]]] = {}
        for row in rows:
            began, returned = row["started_ns"] or 0, row["returned_ns"] or 0
            if not returned:
                left_out += row["count"]
                continue
            thread = row["thread"]
            issues.setdefault(thread, []).append((began, returned))
            arguments = {
                name: value
                for name, value in row.items()
                if value is not None and value != "" and name not in _HIDDEN
            }
            name = f"{row['op']} {row['group']}"
            at = (began + shift) / _MICROSECOND
            common = {"cat": row["phase"], "pid": rank}
            events.append(
                {
                    "ph": "X",
                    "name": name,
                    "tid": thread,
                    "ts": at,
                    "dur": (returned - began) / _MICROSECOND,
                    "args": arguments,
                    **common,
                }
            )
            end = returned
            if row["wait_ended_ns"]:
                end = max(end, row["wait_ended_ns"])
                arrow += 1
                events.append(
                    {"ph": "s", "id": arrow, "name": "wait", "tid": thread, "ts": at, **common}
                )
                waits.append(
                    (
                        thread,
                        row["wait_began_ns"] or 0,
                        row["wait_ended_ns"],
                        {"name": f"wait for {name}", "id": arrow, **common},
                    )
                )
            flight = {
                "name": name,
                "cat": "in flight",
                "pid": rank,
                "id2": {"local": f"{row['group']}#{row['sequence']}"},
            }
            events.append(
                {
                    "ph": "b",
                    "ts": at,
                    "tid": thread,
                    "args": {"module": row["module"], "sequence": row["sequence"]},
                    **flight,
                }
            )
            events.append({"ph": "e", "ts": (end + shift) / _MICROSECOND, "tid": thread, **flight})
        events += _wait_events(rank, shift, waits, issues)
        for thread in sorted(issues):
            name = "main thread" if thread == 0 else f"thread {thread}"
            events.append(name_track(rank, thread, name))
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}), left_out


def _wait_events(
    rank: int,
    shift: int,
    waits: list[tuple[int, int, int, dict[str, Any]]],
    issues: Mapping[int, list[tuple[int, int]]],
) -> Iterable[dict[str, Any]]:
    """Yield the waits: on the issuing thread's track if they nest there, else (another thread
    waited) on a separate track.
    """
    spans = {thread: sorted(spans) for thread, spans in issues.items()}
    # thread -> per lane, the ends of the open waits, innermost last
    lanes: dict[int, list[list[int]]] = {}
    for thread, began, ended, about in sorted(waits, key=lambda wait: (wait[1], -wait[2])):
        open_ends = lanes.setdefault(thread, [[]])
        number = 0 if _nests(spans[thread], began, ended) else 1
        while True:
            if number == len(open_ends):
                open_ends.append([])
            ends = open_ends[number]
            while ends and ends[-1] <= began:
                ends.pop()
            if not ends or ends[-1] >= ended:
                break
            number += 1
        if number and not ends:
            yield name_track(rank, _lane(thread, number), f"waits for thread {thread}'s")
        ends.append(ended)
        at = (began + shift) / _MICROSECOND
        arrow = about.pop("id")
        yield {
            "ph": "X",
            "tid": _lane(thread, number),
            "ts": at,
            "dur": (ended - began) / _MICROSECOND,
            **about,
        }
        yield {
            "ph": "f",
            "bp": "e",
            "id": arrow,
            "tid": _lane(thread, number),
            "ts": at,
            **{**about, "name": "wait"},
        }


def _lane(thread: int, number: int) -> int:
    return thread if number == 0 else 10_000 * number + thread


def _nests(spans: list[tuple[int, int]], began: int, ended: int) -> bool:
    """Check that a slice does not partly overlap any of the thread's issues, which do not overlap
    one another.
    """
    before = bisect.bisect_right(spans, (began, ended)) - 1
    if before >= 0 and spans[before][0] < began < spans[before][1] < ended:
        return False
    last = bisect.bisect_left(spans, (ended, 0)) - 1
    return not (last >= 0 and began < spans[last][0] < ended < spans[last][1])
