"""The waits for the collectives of a trace. An event is found again at its wait by

* the thread, if the collective's call waits itself;
* the Work, if the program waits for it: on CPU backends, whose Works tell when they are done;
* the address of an output, if ``wait_tensor()`` waits for a functional collective;
* a callback of the backward pass, if DDP's reducer waits, which it does in C++.

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

import itertools
import threading
import time
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from commlens.tap import tap, torch_patches
from commlens.tracing.attribution.module_calls import current_pass
from commlens.tracing.raw_event import RawEvent

_POINTERS_LIMIT = 4096  # outputs whose waits are watched
_WORKS_LIMIT = 16  # Works kept alive
_now = time.monotonic_ns


class Waits(tap.WaitSubscriber):
    """Records the waits of threads in the events of their collectives."""

    def __init__(self) -> None:
        self._of_threads: dict[int, RawEvent] = {}
        self._of_works: dict[Any, RawEvent] = {}
        # by Work that is held no longer; the program may still wait for it
        self._of_dropped: weakref.WeakKeyDictionary[Any, RawEvent] = weakref.WeakKeyDictionary()
        self._of_outputs: dict[int, RawEvent] = {}  # by address

    def expect_of_thread(self, event: RawEvent) -> None:
        """Expect that the calling thread waits next for this collective."""
        self._of_threads[threading.get_ident()] = event

    def expect_of_outputs(self, event: RawEvent, addresses: Iterable[int]) -> None:
        """Expect a wait for a tensor at one of these addresses."""
        for address in addresses:
            self._of_outputs[address] = event
        if len(self._of_outputs) > _POINTERS_LIMIT:  # the older half was perhaps never waited for
            self._of_outputs = dict(
                itertools.islice(self._of_outputs.items(), _POINTERS_LIMIT // 2, None)
            )

    def expect_of_work(self, event: RawEvent, work: Any) -> None:
        """Keep a Work, to recognise the wait for it. Drop completed and old Works, because they
        keep tensors alive: each new Work checks the oldest two.
        """
        for held in list(itertools.islice(self._of_works, 2)):
            if len(self._of_works) > _WORKS_LIMIT or torch_patches.work_is_completed(held):
                its_event = self._of_works.pop(held, None)
                if its_event is not None:
                    self._of_dropped[held] = its_event
        self._of_works[work] = event

    def forget(self, event: RawEvent) -> None:
        """Expect no wait for a collective that the backend refused. Another tensor may get the
        address of an output.
        """
        self._of_threads.pop(threading.get_ident(), None)
        for address, other in list(self._of_outputs.items()):
            if other is event:
                self._of_outputs.pop(address, None)

    def forget_all(self) -> None:
        """Expect no waits any more."""
        for expected in (self._of_threads, self._of_works, self._of_dropped, self._of_outputs):
            expected.clear()

    # --- called by torch_patches

    def wait_begins(self, work: Any) -> RawEvent | None:
        """Record that a thread is about to block in ``work.wait()``."""
        event = self._of_threads.pop(threading.get_ident(), None)
        event = event or self._of_works.pop(work, None) or self._of_dropped.pop(work, None)
        return _with_begin(event)

    def tensor_wait_begins(self, tensor: Any) -> RawEvent | None:
        """Record that a thread is about to block in ``wait_tensor(tensor)``."""
        if not self._of_outputs:
            return None
        try:
            return _with_begin(self._of_outputs.pop(tensor.data_ptr(), None))
        except Exception:
            return None  # a tensor without an address

    def wait_ended(self, event: RawEvent, error: BaseException | None) -> None:
        """Record the end of a wait, however it ended."""
        if not event.wait_ended_ns:
            event.wait_ended_ns = _now()


def _with_begin(event: RawEvent | None) -> RawEvent | None:
    """Record that the wait for a collective, if it is known, begins now. Return its event."""
    if event is not None and not event.wait_began_ns:
        event.wait_began_ns = _now()
    return event


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
        if len(self._issued) > 8 and outermost not in self._issued:
            # left by backwards that raised, or with all buckets in nested passes
            self._issued.clear()
            self._queued.clear()
        events = self._issued.setdefault(outermost, [])
        events.append(event)
        if task in self._queued:
            return
        self._queued.add(task)
        engine: Any = torch.autograd.Variable._execution_engine

        def wait_begins() -> None:
            self._queued.discard(task)
            if task == outermost:
                self._issued.pop(outermost, None)
            began = _now()
            engine.queue_callback(lambda: _reducer_waited(events, began))

        engine.queue_callback(wait_begins)


def _reducer_waited(events: list[RawEvent], began: int) -> None:
    ended = _now()
    for event in events:
        event.wait_began_ns = event.wait_ended_ns = ended
    events[-1].wait_began_ns = began
