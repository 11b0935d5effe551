"""The wait for DDP's collectives, which its reducer does in C++ at the end of backward.

The engine runs final callbacks in the order in which they were queued. Ours is queued with the
first bucket and the reducer's with the last one, so ours runs just before the reducer waits; there
it queues another one, which runs just after. The reducer waits for all buckets in one go, so the
wait is recorded for the last one, and the others end with it.

Callbacks run at the end of the innermost pass: reentrant checkpointing nests passes, and buckets of
several of them end together. A nested pass in which the reducer does not wait records a wait that
the pass in which it does replaces.

Tried on torch 2.6.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from commlens.tracing.attribution.module_calls import current_pass
from commlens.tracing.raw_event import RawEvent

_now = time.monotonic_ns


class BackwardWaits:
    """The collectives that the reducers of this process will wait for."""

    def __init__(self) -> None:
        # by outermost pass: few, since each is removed when it ends
        self._issued: dict[int, list[RawEvent]] = {}
        # the passes, nested ones too, in which our callback is queued
        self._queued: set[int] = set()

    def issued(self, event: RawEvent, outermost: int) -> None:
        """Note a collective that a reducer has issued, from inside backward, and the pass that no
        other one contains.
        """
        task = current_pass()
        if task < 0:
            return
        events = self._issued.get(outermost)
        if events is None:
            if len(self._issued) > 8:
                # left by backwards that raised, or with all buckets in nested passes
                self._issued.clear()
                self._queued.clear()
            events = self._issued[outermost] = []
        events.append(event)
        if task not in self._queued:
            self._queued.add(task)
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self._wait_begins(engine, task, outermost, events))

    def _wait_begins(self, engine: Any, task: int, outermost: int, events: list[RawEvent]) -> None:
        self._queued.discard(task)
        if task == outermost:
            self._issued.pop(outermost, None)
        began = _now()
        engine.queue_callback(lambda: self._wait_ended(events, began))

    @staticmethod
    def _wait_ended(events: list[RawEvent], began: int) -> None:
        ended = _now()
        for event in events:
            event.wait_began_ns = event.wait_ended_ns = ended
        events[-1].wait_began_ns = began
