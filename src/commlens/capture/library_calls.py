"""The records of calls of libraries that communicate past torch's dispatcher."""

from __future__ import annotations

import sys
import time
from typing import Any

from commlens.blackbox import layout as L
from commlens.capture.thread_id import current
from commlens.tap import libraries, message_queues
from commlens.tap.libraries import LibraryCall, LibraryGroup
from commlens.tap.message_queues import QueueEnd
from commlens.text import format_ranks

_QUIET_NS = 500_000_000
_BLOBS_MAX = 1024
_monotonic = time.monotonic_ns


class CallUnderWay:
    """A call that has not returned: what the watchdog thread needs of a collective in flight."""

    def __init__(self, index: int, offset: int, since: int, *, waits: bool) -> None:
        self.index = index
        self.offset = offset
        self.since = since
        self.waits = waits


class LibraryCalls:
    """Writes a record for each call, like that of a collective: on a channel of the group whose
    device type is the library.
    """

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self._writer = recorder.writer
        self._under_way: dict[int, CallUnderWay] = {}  # by index
        self._blobs: dict[Any, int] = {}
        self._states: dict[str, str] = {}  # those in the box
        self._states_at = 0
        self._noted: list[tuple[Any, int, str, int]] = []  # of the queues, as in the box

    def begin(self, call: LibraryCall, number: int, name: str, frame: Any) -> CallUnderWay:
        """Write the record of a call that begins."""
        recorder, writer = self._recorder, self._writer
        group, tensor = call.group, call.tensor
        live = None if group.process_group is None else recorder.groups.find(group.process_group())
        root, peer = call.root, call.peer
        if live is not None:
            root = live.global_rank(root) if root >= 0 else root
            peer = live.global_rank(peer) if peer >= 0 else peer
        form = name, getattr(tensor, "shape", None), getattr(tensor, "dtype", None), root
        group_at = self._blob(group, lambda: _group_blob(group, live))
        asked_at = self._blob(form, lambda: _asked_blob(call, name, root))
        stack, index, now = recorder.stacks.position(frame), writer.next_index(), _monotonic()
        flags = L.FLAG_ENTERED | recorder.capture_flag
        offset = writer.announce(
            (
                index,
                now,
                group_at,
                asked_at,
                stack,
                0,
                number,
                recorder.steps,
                0,
                0,
                current.id,
                flags,
                peer,
                0,
            )
        )
        begun = self._under_way[index] = CallUnderWay(index, offset, now, waits=call.waits)
        return begun

    def end(self, begun: CallUnderWay, error: BaseException | None) -> None:
        """Note how a call ended: one that only enqueues may go on for long on its device."""
        writer = self._writer
        self._under_way.pop(begun.index, None)
        if error is not None:
            self._recorder.mark_failed(begun.offset, begun.index, error, 0, L.HOW_RETURN)
            return
        now = _monotonic()
        writer.mark(begun.offset, L.RETURNED, begun.index, now)
        if begun.waits:
            writer.mark(begun.offset, L.DONE, begun.index, now)
            outcome = L.OUTCOME_COMPLETED, L.HOW_RETURN
        else:
            outcome = L.OUTCOME_UNKNOWN, L.HOW_UNKNOWN
        writer.mark_outcome(begun.offset, begun.index, *outcome)

    def oldest(self) -> CallUnderWay | None:
        """Return the oldest call that has not returned."""
        return min(list(self._under_way.values()), key=lambda each: each.since, default=None)

    def note_libraries(self) -> None:
        """Write into the box which libraries are recorded, if that has changed."""
        if libraries.states != self._states or 0 < self._states_at <= self._writer.side_floor:
            self._states = dict(libraries.states)
            self._states_at = self._writer.add_blob({"k": "adapters", "found": self._states})
            self._writer.word(L.ADAPTERS, self._states_at)

    def note_queues(self, now: int) -> None:
        """Write into the box where this process is in its message queues, once one of them has been
        quiet for a moment, and since when it waits to write into a full one.
        """
        try:
            ends = [queue for queue in list(message_queues.queues.values()) if queue is not None]
        except RuntimeError:  # a thread has made a queue meanwhile: the next look finds it
            return
        quiet = [end for end in ends if 0 < end.moved_ns <= now - _QUIET_NS]
        state = [(end.membership, end.done, end.op, end.moved_ns) for end in quiet]
        if state == self._noted:
            return
        self._noted = state
        waits = [end.moved_ns for end in quiet if end.op == "enqueue"]
        if quiet:
            # of one that moves, no call lasts
            found = [self._end_blob(end, end.op if end in quiet else "") for end in ends]
            self._writer.word(L.QUEUES, self._writer.add_blob({"k": "queues", "found": found}))
        self._writer.word(L.QUEUE_SINCE, min(waits, default=0))

    def _end_blob(self, end: QueueEnd, op: str) -> dict[str, Any]:
        frame = sys._current_frames().get(end.thread) if op else None
        return {
            "hand": end.membership._asdict(),
            "op": op,
            "done": end.done,
            "holds": end.holds,
            "since": end.moved_ns,
            "thread": end.native_thread,
            "stack": 0 if frame is None else self._recorder.stacks.position(frame),
        }

    def _blob(self, key: Any, content: Any) -> int:
        """Return the position of a blob, which is written once, and again when it is too old."""
        position = self._blobs.get(key, 0)
        if position <= self._writer.side_floor:
            if len(self._blobs) >= _BLOBS_MAX:  # calls with ever new shapes
                self._blobs.clear()
            position = self._blobs[key] = self._writer.add_blob(content())
        return position


def _group_blob(group: LibraryGroup, live: Any) -> dict[str, Any]:
    about = {"k": "group", "name": "", "ranks": "", "device": group.library, "ahead": True}
    if live is None:
        name = group.made.store.rpartition("/")[2] if group.made is not None else ""
        return about | {"name": name, "hand": group.made and group.made._asdict()}
    return about | {
        "name": live.name,
        "desc": live.description,
        "ranks": format_ranks(live.ranks),
        "mesh_dim": live.mesh_dim,
        "inc": live.incarnation,
        "hand": live.hand_made and live.hand_made._asdict(),
    }


def _asked_blob(call: LibraryCall, name: str, root: int) -> dict[str, Any]:
    tensor = _tensor_of(call.tensor)
    return {
        "k": "asked",
        "op": call.op,
        "dop": name,
        "in": [] if tensor is None else [tensor],
        "out": [],
        "root": root if root >= 0 else None,
    }


def _tensor_of(tensor: Any) -> list[Any] | None:
    """Return a tensor's shape and dtype, whichever library it is of."""
    if not hasattr(tensor, "shape") or not hasattr(tensor, "dtype"):
        return None
    return [list(tensor.shape), str(tensor.dtype).removeprefix("torch."), "cpu"]
