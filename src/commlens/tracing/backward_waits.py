"""The wait for DDP's collectives, which its reducer does in C++ at the end of backward.

The engine runs final callbacks in the order in which they were queued. Ours is queued with the first bucket and the reducer's with the
last one, so ours runs just before the reducer waits; there it queues another one, which runs just after. The reducer waits for all buckets
in one go, so the wait is recorded for the last one, and the others end with it.

Tried on torch 2.13.0.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from commlens.tracing.raw_event import RawEvent

_graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
_now = time.monotonic_ns


class BackwardWaits:
    """The collectives that the reducers of this process will wait for."""

    def __init__(self) -> None:
        self._issued: dict[int, list[RawEvent]] = {}  # by graph task: few, since each is removed when its backward ends

    def issued(self, event: RawEvent) -> None:
        """Note a collective that a reducer has issued, from inside backward."""
        task = _graph_task()
        if task < 0:
            return
        events = self._issued.get(task)
        if events is None:
            if len(self._issued) > 8:
                self._issued.clear()  # left by backwards that raised
            self._issued[task] = [event]
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self._wait_begins(engine, task))
        else:
            events.append(event)

    def _wait_begins(self, engine: Any, task: int) -> None:
        events = self._issued.pop(task, None)
        if events:
            began = _now()
            engine.queue_callback(lambda: self._wait_ended(events, began))

    @staticmethod
    def _wait_ended(events: list[RawEvent], began: int) -> None:
        ended = _now()
        for event in events:
            event.wait_began_ns = event.wait_ended_ns = ended
        events[-1].wait_began_ns = began
