"""Write timelines for ui.perfetto.dev and chrome://tracing, in Chrome's trace event JSON (Google's
"Trace Event Format"). Each rank is a process.

Of dumps, each process group has a track. An operation is a slice from its start to its end. Without
a recorded start, it begins when it was issued or when the operation before it on its group ended.
An operation that never ended is drawn to the end of the timeline and marked as unfinished.

Of traces, each issuing thread has a track, with a slice for each issue and each wait, joined by an
arrow; each group has one with the collectives in flight, from issue to the end of the wait. A
collective's fields are the slice's arguments.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from commlens.formats.columns import COMPLETED, RETIRED, STARTED, STATES, RankColumns
from commlens.model.collective import CollectiveArgs, user_frame
from commlens.text import format_ranks, group_label, tensor_phrase

_TRACKS: Final = 100
"""Track numbers reserved for each group. Overlapping operations of one group need several tracks.
"""
_MICROSECOND: Final = 1000  # not a float: Unix times in ns are longer than its digits
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


def _event(phase: str, rank: int, track: int, at_ns: int, **more: Any) -> dict[str, Any]:
    return {"ph": phase, "pid": rank, "tid": track, "ts": at_ns / _MICROSECOND, **more}


def _slice(rank: int, track: int, began_ns: int, ended_ns: int, **more: Any) -> dict[str, Any]:
    """Return a slice; it is open if it ends before it begins."""
    if ended_ns < began_ns:
        return _event("B", rank, track, began_ns, **more)
    return _event("X", rank, track, began_ns, dur=(ended_ns - began_ns) / _MICROSECOND, **more)


def _metadata_event(what: str, rank: int, **args: Any) -> dict[str, Any]:
    """Return the event that says something about a rank's process, or about a track of it."""
    track = {"tid": args.pop("track")} if "track" in args else {}
    return {"ph": "M", "name": what, "pid": rank, **track, "args": args}


def _rank_name(rank: int, host: str = "") -> list[dict[str, Any]]:
    name = f"rank {rank}{f' ({host})' if host else ''}"
    return [
        _metadata_event("process_name", rank, name=name),
        _metadata_event("process_sort_index", rank, sort_index=rank),
    ]


# --- dumps


def to_perfetto(several: Iterable[RankColumns]) -> Iterator[bytes]:
    """Yield the timeline, one piece per rank."""
    yield b'{"displayTimeUnit":"ms","traceEvents":[\n'
    first = True
    for rows in several:
        piece = b",\n".join(map(msgspec.json.encode, _events(rows)))
        if piece:
            yield piece if first else b",\n" + piece
            first = False
    yield b"\n]}\n"


def _events(rows: RankColumns) -> Iterator[dict[str, Any]]:
    rank = rows.rank
    yield from _rank_name(rank, rows.host)
    # by channel: when each of its tracks is free again; -1 after an open slice
    tracks: dict[int, list[int]] = {}
    previous: dict[int, int] = {}  # by channel: when the last operation ended
    for at in range(len(rows)):
        if not rows.created_ns[at]:
            continue
        state, channel = int(rows.state[at]), int(rows.channel[at])
        if rows.coalesced[at] and not rows.closes[at] and state not in (COMPLETED, RETIRED):
            continue  # the entry that closes the group represents it
        began, end = _span(rows, at, previous)
        track, is_new = _track(tracks.setdefault(channel, []), began, end)
        tid = 1 + channel * _TRACKS + track
        if is_new:
            group = rows.channels[channel].group
            name = f"{group_label(group)} [{format_ranks(group.ranks)}] {group.backend}"
            name += f" ({track + 1})" if track else ""
            yield _metadata_event("thread_name", rank, track=tid, name=name)
            yield _metadata_event("thread_sort_index", rank, track=tid, sort_index=tid)
        args = rows.args[int(rows.args_index[at])]
        yield _slice(
            rank,
            tid,
            began,
            end,
            name=f"{args.op} #{int(rows.sequence[at])}" + (" never ended" if end < 0 else ""),
            cat="in flight" if end < 0 else "p2p" if rows.p2p[at] else "collective",
            args=_details(rows, at, args),
        )


def _span(rows: RankColumns, at: int, previous: dict[int, int]) -> tuple[int, int]:
    """Return when an operation began and ended, -1 if never; the end goes to ``previous``, too."""
    created, started, ended = (
        int(rows.created_ns[at]),
        int(rows.started_ns[at]),
        int(rows.completed_ns[at]),
    )
    state, channel = int(rows.state[at]), int(rows.channel[at])
    before = previous.get(channel, 0)
    began = started if started >= created and rows.origin != "commlens" else max(created, before)
    if state == COMPLETED and ended:
        previous[channel] = max(before, ended)
        return min(began, ended), ended
    return began, began if state in (COMPLETED, RETIRED) else -1


def _track(free: list[int], began: int, end: int) -> tuple[int, bool]:
    """Return the first track on which a slice overlaps no other, and whether it is new. Open slices
    share a track: they nest.
    """
    for number, until in enumerate(free):
        if (until >= 0 and until <= began) or (until < 0 and end < 0):
            free[number] = end
            return number, False
    if len(free) >= _TRACKS:
        return _TRACKS - 1, False
    free.append(end)
    return len(free) - 1, True


def _details(rows: RankColumns, at: int, args: CollectiveArgs) -> dict[str, Any]:
    tensors = args.inputs or args.outputs
    frame = user_frame(rows.stack_at(at))
    state = int(rows.state[at])
    details: dict[str, Any] = {
        "group": rows.channels[int(rows.channel[at])].group.name,
        "sequence": int(rows.sequence[at]),
        "state": STATES[state],
        "tensors": (
            ", ".join(map(tensor_phrase, tensors[:4])) + (", ..." if len(tensors) > 4 else "")
        ),
        "recorded as": args.dispatcher_op,
        "issued": int(rows.created_ns[at]),
    }
    if rows.peer[at] >= 0:
        details["peer"] = int(rows.peer[at])
    if args.reduce_op:
        details["reduce op"] = args.reduce_op
    if frame is not None:
        details["line"] = f"{frame.file}:{frame.line} {frame.function}"
    if rows.duration_ns[at] >= 0:
        details["duration on the device, ns"] = int(rows.duration_ns[at])
    if state not in (STARTED, COMPLETED, RETIRED) and rows.origin == "flight-recorder":
        details["note"] = "whether it had started is not recorded"
    return details


# --- traces


def trace_to_perfetto(
    ranks: Iterable[tuple[int, int, list[Mapping[str, Any]]]],
) -> tuple[bytes, int]:
    """Render rows as JSON. Returns it, and the number of collectives left out because they are
    summarised and have no times.

    Of each rank: its number, the start of its trace (Unix ns), and its rows (``Trace.to_rows()``).
    """
    traces = list(ranks)
    origin = min((started for _, started, _ in traces if started), default=0)
    events: list[dict[str, Any]] = []
    arrows = itertools.count(1)
    for rank, started, rows in traces:
        shift = max(0, started - origin) if started else 0
        events += _trace_events(rank, shift, [row for row in rows if row["returned_ns"]], arrows)
    left_out = sum(row["count"] for _, _, rows in traces for row in rows if not row["returned_ns"])
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}), left_out


def _trace_events(
    rank: int, shift: int, rows: Iterable[Mapping[str, Any]], arrows: Iterator[int]
) -> Iterator[dict[str, Any]]:
    """Yield the events of one rank; ``shift`` is the start of its trace after that of the first."""
    yield from _rank_name(rank)
    waits: list[tuple[int, int, int, dict[str, Any]]] = []
    issues: dict[int, list[tuple[int, int]]] = {}
    for row in rows:
        thread, began, returned = row["thread"], row["started_ns"] or 0, row["returned_ns"]
        issues.setdefault(thread, []).append((began, returned))
        arguments = {
            name: value
            for name, value in row.items()
            if value is not None and value != "" and name not in _HIDDEN
        }
        name, at, cat = f"{row['op']} {row['group']}", began + shift, row["phase"]
        end = returned + shift
        yield _slice(rank, thread, at, end, name=name, cat=cat, args=arguments)
        if row["wait_ended_ns"]:
            end = max(end, row["wait_ended_ns"] + shift)
            arrow = next(arrows)
            yield _event("s", rank, thread, at, id=arrow, name="wait", cat=cat)
            span = row["wait_began_ns"] or 0, row["wait_ended_ns"]
            waits.append((thread, *span, {"name": f"wait for {name}", "id": arrow, "cat": cat}))
        flight = {
            "name": name,
            "cat": "in flight",
            "id2": {"local": f"{row['group']}#{row['sequence']}"},
        }
        where = {"module": row["module"], "sequence": row["sequence"]}
        yield _event("b", rank, thread, at, args=where, **flight)
        yield _event("e", rank, thread, end, **flight)
    yield from _wait_events(rank, shift, waits, issues)
    for thread in sorted(issues):
        name = "main thread" if thread == 0 else f"thread {thread}"
        yield _metadata_event("thread_name", rank, track=thread, name=name)


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
        track = thread if number == 0 else 10_000 * number + thread
        if number and not ends:
            yield _metadata_event(
                "thread_name", rank, track=track, name=f"waits for thread {thread}'s"
            )
        ends.append(ended)
        arrow = about.pop("id")
        yield _slice(rank, track, began + shift, ended + shift, **about)
        yield _event("f", rank, track, began + shift, bp="e", id=arrow, **{**about, "name": "wait"})


def _nests(spans: list[tuple[int, int]], began: int, ended: int) -> bool:
    """Check that a slice does not partly overlap any of the thread's issues, which do not overlap
    one another.
    """
    before = bisect.bisect_right(spans, (began, ended)) - 1
    if before >= 0 and spans[before][0] < began < spans[before][1] < ended:
        return False
    last = bisect.bisect_left(spans, (ended, 0)) - 1
    return not (last >= 0 and began < spans[last][0] < ended < spans[last][1])
