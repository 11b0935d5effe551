"""Write dumps as a timeline for ui.perfetto.dev and chrome://tracing: Chrome's trace event JSON.

Each rank is a process with one track per process group. An operation is a slice from its start to
its end. Without a recorded start, it begins when it was issued or when the operation before it on
its group ended. An operation that never ended is drawn to the end of the timeline and marked as
unfinished.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from commlens.formats.columns import COMPLETED, RETIRED, STARTED, STATES, RankColumns
from commlens.model.collective import CollectiveArgs, user_frame
from commlens.reports.trace_events import name_rank, name_track
from commlens.text import format_ranks, group_label, tensor_phrase

_TRACKS: Final = 100
"""Track numbers reserved for each group. Overlapping operations of one group need several tracks.
"""


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
    yield from name_rank(rank, rows.host)
    # by channel: when each of its tracks is free again; -1 after an open slice
    tracks: dict[int, list[int]] = {}
    previous: dict[int, int] = {}  # by channel: when the last operation ended
    for at in range(len(rows)):
        created, started, ended = (
            int(rows.created_ns[at]),
            int(rows.started_ns[at]),
            int(rows.completed_ns[at]),
        )
        if not created:
            continue
        state, channel = int(rows.state[at]), int(rows.channel[at])
        if rows.coalesced[at] and not rows.closes[at] and state not in (COMPLETED, RETIRED):
            continue  # the entry that closes the group represents it
        began = (
            started
            if started >= created and rows.origin != "commlens"
            else max(created, previous.get(channel, 0))
        )
        if state == COMPLETED and ended:
            began = min(began, ended)
            end = max(ended, began)
            previous[channel] = max(previous.get(channel, 0), end)
        else:
            end = began if state in (COMPLETED, RETIRED) else -1
        track = _track(tracks.setdefault(channel, []), began, end)
        yield from _track_name(rows, channel, track) if track[1] else ()
        args = rows.args[int(rows.args_index[at])]
        event = {
            "name": f"{args.op} #{int(rows.sequence[at])}" + (" never ended" if end < 0 else ""),
            "cat": "in flight" if end < 0 else "p2p" if rows.p2p[at] else "collective",
            "pid": rank,
            "tid": 1 + channel * _TRACKS + track[0],
            "ts": began / 1000,
            "args": _details(rows, at, args),
        }
        yield {"ph": "B", **event} if end < 0 else {"ph": "X", "dur": (end - began) / 1000, **event}


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


def _track_name(rows: RankColumns, index: int, track: tuple[int, bool]) -> Iterator[dict[str, Any]]:
    group = rows.channels[index].group
    name = f"{group_label(group)} [{format_ranks(group.ranks)}] {group.backend}" + (
        f" ({track[0] + 1})" if track[0] else ""
    )
    tid = 1 + index * _TRACKS + track[0]
    yield name_track(rows.rank, tid, name)
    yield {
        "ph": "M",
        "name": "thread_sort_index",
        "pid": rows.rank,
        "tid": tid,
        "args": {"sort_index": tid},
    }


def _details(rows: RankColumns, at: int, args: CollectiveArgs) -> dict[str, Any]:
    tensors = args.inputs or args.outputs
    frame = user_frame(rows.stacks[int(rows.stack[at])]) if rows.stack[at] >= 0 else None
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
