"""Write dumps as timelines for ui.perfetto.dev and chrome://tracing, in Chrome's trace event JSON
(Google's "Trace Event Format"). Each rank is a process, each process group a track.

An operation is a slice from its start to its end. Without a recorded start, it begins when it was
issued or when the operation before it on its group ended. An operation that never ended is drawn to
the end of the timeline and marked as unfinished.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from commlens.formats.columns import COMPLETED, RETIRED, STARTED, STATES, RankColumns
from commlens.model.collective import CollectiveArgs, user_frame
from commlens.text import format_ranks, group_label, tensor_phrase

_TRACKS: Final = 100
"""Track numbers reserved for each group. Overlapping operations of one group need several tracks.
"""
_MICROSECOND: Final = 1000  # not 1000.0: that would round the Unix time in ns to a float first


def event(phase: str, rank: int, track: int, at_ns: int, **more: Any) -> dict[str, Any]:
    """Return an event on a track of a rank's process."""
    return {"ph": phase, "pid": rank, "tid": track, "ts": at_ns / _MICROSECOND, **more}


def slice_event(
    rank: int, track: int, began_ns: int, ended_ns: int | None, **more: Any
) -> dict[str, Any]:
    """Return a slice, which is open if it never ended."""
    if ended_ns is None:
        return event("B", rank, track, began_ns, **more)
    return event("X", rank, track, began_ns, dur=(ended_ns - began_ns) / _MICROSECOND, **more)


def metadata_event(what: str, rank: int, **args: Any) -> dict[str, Any]:
    """Return the event that says something about a rank's process, or about a track of it."""
    track = {"tid": args.pop("track")} if "track" in args else {}
    return {"ph": "M", "name": what, "pid": rank, **track, "args": args}


def rank_name(rank: int, host: str = "") -> list[dict[str, Any]]:
    """Return the events that name a rank's process and sort it by rank."""
    return [
        metadata_event("process_name", rank, name=f"rank {rank}{f' ({host})' if host else ''}"),
        metadata_event("process_sort_index", rank, sort_index=rank),
    ]


def to_perfetto(several: Iterable[RankColumns]) -> Iterator[bytes]:
    """Yield the timeline, one piece per rank."""
    yield b'{"displayTimeUnit":"ms","traceEvents":[\n'
    pieces = (b",\n".join(map(msgspec.json.encode, _events(rows))) for rows in several)
    for number, piece in enumerate(filter(None, pieces)):
        yield b",\n" + piece if number else piece
    yield b"\n]}\n"


def _events(rows: RankColumns) -> Iterator[dict[str, Any]]:
    rank = rows.rank
    yield from rank_name(rank, rows.host)
    # by channel: when each of its tracks is free again; None: an open slice is there
    tracks: dict[int, list[int | None]] = {}
    previous: dict[int, int] = {}  # by channel: when the last operation ended
    for row in range(len(rows)):
        if not rows.created_ns[row]:
            continue
        state, channel = int(rows.state[row]), int(rows.channel[row])
        if rows.coalesced[row] and not rows.closes[row] and state not in (COMPLETED, RETIRED):
            continue  # the entry that closes the group represents it
        began_ns, ended_ns = _span(rows, row, previous)
        number, is_new = _track(tracks.setdefault(channel, []), began_ns, ended_ns)
        track = 1 + channel * _TRACKS + number
        if is_new:
            group = rows.channels[channel].group
            name = f"{group_label(group)} [{format_ranks(group.ranks)}] {group.backend}"
            name += f" ({number + 1})" if number else ""
            yield metadata_event("thread_name", rank, track=track, name=name)
            yield metadata_event("thread_sort_index", rank, track=track, sort_index=track)
        args = rows.args[int(rows.args_index[row])]
        never = " never ended" if ended_ns is None else ""
        yield slice_event(
            rank,
            track,
            began_ns,
            ended_ns,
            name=f"{args.op} #{int(rows.sequence[row])}{never}",
            cat="in flight" if never else "p2p" if rows.p2p[row] else "collective",
            args=_details(rows, row, args),
        )


def _span(rows: RankColumns, row: int, previous: dict[int, int]) -> tuple[int, int | None]:
    """Return when an operation began and ended; None if it never ended. One whose end has no time
    gets no length. The end goes to ``previous``, too.
    """
    created, started, ended = (
        int(rows.created_ns[row]),
        int(rows.started_ns[row]),
        int(rows.completed_ns[row]),
    )
    state, channel = int(rows.state[row]), int(rows.channel[row])
    before = previous.get(channel, 0)
    began = started if started >= created and rows.origin != "commlens" else max(created, before)
    if state == COMPLETED and ended:
        previous[channel] = max(before, ended)
        return min(began, ended), ended
    return began, began if state in (COMPLETED, RETIRED) else None


def _track(free: list[int | None], began_ns: int, ended_ns: int | None) -> tuple[int, bool]:
    """Return the first track on which a slice overlaps no other, and whether it is new. Open slices
    share a track: they nest.
    """
    for number, until in enumerate(free):
        is_free = until <= began_ns if until is not None else ended_ns is None
        if is_free:
            free[number] = ended_ns
            return number, False
    if len(free) >= _TRACKS:
        return _TRACKS - 1, False
    free.append(ended_ns)
    return len(free) - 1, True


def _details(rows: RankColumns, row: int, args: CollectiveArgs) -> dict[str, Any]:
    tensors = args.inputs or args.outputs
    frame = user_frame(rows.stack_at(row))
    state = int(rows.state[row])
    start_unknown = state not in (STARTED, COMPLETED, RETIRED) and rows.origin == "flight-recorder"
    details = {
        "group": rows.channels[int(rows.channel[row])].group.name,
        "sequence": int(rows.sequence[row]),
        "state": STATES[state],
        "tensors": (
            ", ".join(map(tensor_phrase, tensors[:4])) + (", ..." if len(tensors) > 4 else "")
        ),
        "recorded as": args.dispatcher_op,
        "issued": int(rows.created_ns[row]),
        "peer": int(rows.peer[row]) if rows.peer[row] >= 0 else None,
        "reduce op": args.reduce_op or None,
        "line": f"{frame.file}:{frame.line} {frame.function}" if frame is not None else None,
        "duration on the device, ns": (
            int(rows.duration_ns[row]) if rows.duration_ns[row] >= 0 else None
        ),
        "note": "whether it had started is not recorded" if start_unknown else None,
    }
    return {name: value for name, value in details.items() if value is not None}
