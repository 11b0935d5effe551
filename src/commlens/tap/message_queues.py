"""The message queues in shared memory of vLLM and SGLang: one process writes, the others read every
message. The writer waits while the queue is full, until its slowest reader has read.

A call only notes where its process is. The watchdog thread writes that down once the queues of the
process have been quiet for a moment.
"""

from __future__ import annotations

import functools
import platform
import threading
import time
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

from commlens.tap.hand_made import Membership

_monotonic = time.monotonic_ns


class QueueEnd:
    """One end of a message queue. The writer is member 0 of its processes, its readers follow."""

    def __init__(self, membership: Membership, holds: int) -> None:
        self.membership = membership
        self.holds = holds  # messages
        self.done = 0  # messages that this process has written or read
        self.op = ""  # the call under way
        self.moved_ns = 0
        self.thread = 0
        self.native_thread = 0

    def begins(self, op: str) -> None:
        """A thread begins to write or read a message."""
        self.thread, self.native_thread = threading.get_ident(), threading.get_native_id()
        self.moved_ns, self.op = _monotonic(), op

    def ends(self, messages: int) -> None:
        """The call is over; with 0 messages it raised, as after a timeout."""
        self.done += messages
        self.moved_ns, self.op = _monotonic(), ""


queues: MutableMapping[Any, QueueEnd | None] = weakref.WeakKeyDictionary()
"""By the library's object; None of those that do not use shared memory."""


def queue_of(end: Any) -> QueueEnd | None:
    """Return the state of a ``MessageQueue``; None if it is not as expected."""
    try:
        if end not in queues:
            queues[end] = _state_of(end)
        return queues[end]
    except TypeError:  # an object that cannot be hashed, or has no weak references
        return None


def _state_of(end: Any) -> QueueEnd | None:
    try:
        buffer = end.buffer
        member = 0 if end._is_writer else 1 + end.local_reader_rank
        if buffer is None or not (end._is_writer or end._is_local_reader):
            return None
        store = f"{platform.node()}/{buffer.shared_memory.name}"
        return QueueEnd(Membership(member, 1 + buffer.n_reader, store, 0), buffer.max_chunks)
    except Exception:  # another version: it goes on unseen
        return None


def noting(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a method that notes where the process is, and calls the original ``enqueue`` or
    ``dequeue``.
    """

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        queue = queue_of(self)
        if queue is None:
            return original(self, *args, **kwargs)
        queue.begins(name)
        done = 0
        try:
            result = original(self, *args, **kwargs)
            done = 1
            return result
        finally:
            queue.ends(done)

    return call
