"""How the recorder learns that a collective is done: its call returns, a thread waits for it, or
polling finds it complete.

Between the return of the backend's call and the end of the collective, its token is in one place:

=================  ===================================================  ============================
place              of which collectives                                 it leaves
=================  ===================================================  ============================
``synchronous``    the call waits right away: ``all_reduce(x)`` on CPU  as the wait ends
``in_flight``      the call returned a Work, which is held here         as a wait ends, or a poll
                                                                        finds it complete
``weakly_held``    gloo's send, recv and reduce_scatter, whose Work     as a wait ends, or the
                   does not say whether it is done: only a weak         program drops the Work
                   reference is held, so that its tensors can be freed
``device_queues``  enqueued on a device: no Work is held                as torch's recorder shows
=================  ===================================================  ============================
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from commlens.blackbox import layout as L
from commlens.blackbox.writer import BoxWriter
from commlens.capture.device_queues import DeviceQueues, result_reader
from commlens.capture.hazards import Unwaited
from commlens.capture.thread_id import current
from commlens.model.ops import GRAPH_REPLAY, POINT_TO_POINT
from commlens.tap.groups import LiveChannel, numbers
from commlens.tap.token import CallVerifier, Token

log = logging.getLogger("commlens")

_HOLD_WEAKLY_AFTER_NS = 200_000_000
_HELD_LIMIT = 512
_monotonic = time.monotonic_ns
# as they are before torch_patches notes that a program calls them
_is_completed = Work.is_completed
_get_future = Work.get_future
_current_pass = torch._C._current_graph_task_id  # -1: none


class CompletionTracker:
    """The recorder's collectives in flight, and the records of how they end."""

    def __init__(self, writer: BoxWriter, *, timing: bool = False) -> None:
        self.writer = writer
        self.timing = timing
        # by thread: the call that issued it waits for it right away
        self.synchronous: dict[int, Token] = {}
        # Work (its one Python object) to token; removed as soon as it is done
        self.in_flight: dict[Any, Token] = {}
        # by record index: in flight, its Work held by a weak reference only
        self.weakly_held: dict[int, Token] = {}
        # by thread, with timing: the message on a device that it issued last, to learn whether it
        # waits for it at once. The watchdog thread empties it.
        self.newest_message: dict[int, tuple[Any, Token]] = {}
        self.by_pointer: dict[int, Token] = {}  # address of an output to token, for wait_tensor
        # by thread: what C++ may wait for
        self.issued_for_cpp: dict[int, list[Token]] = defaultdict(list)
        self.device_queues = DeviceQueues(self, timing=timing)
        self.graphs = Graphs(writer)
        self.capture_flag = 0  # of the records of what is captured into a CUDA graph now
        self.unwaited = Unwaited()
        self.verifier: CallVerifier | None = None
        self.lost = 0  # records lost to an error of commlens
        self._logged = False

    # --- the backend's call returned

    def returned_work(self, token: Token, work: Any) -> None:
        """Note that the backend's call returned.

        Args:
            token: the collective's.
            work: its Work; None if the call waited for the collective itself.
        """
        now = _monotonic()
        self.writer.mark(token.offset, L.RETURNED, token.index, now)
        if token.args.channel.runs_ahead:
            self._enqueued(token, work)
        elif work is None:
            self.done(token, L.HOW_RETURN, now)
        else:
            if not token.args.meets and token.stack:
                self.unwaited.issued(work, token.stack)
            self._hold(token, work)

    def _enqueued(self, token: Token, work: Any) -> None:
        """Let torch's recorder say when the device is done: no Work is held, and none is polled."""
        self.writer.mark_outcome(token.offset, token.index, L.OUTCOME_UNKNOWN, L.HOW_UNKNOWN)
        if self.capture_flag:
            self.graphs.captured(token.args.channel)
            return
        is_message = not token.number or token.args.op in POINT_TO_POINT
        if self.timing and is_message:
            self.newest_message[current.id] = work, token
        elif self.newest_message:
            self.newest_message.pop(current.id, None)
        if not is_message:
            token.backend_number = token.args.channel.backend_number()
        elif work is not None and token.args.channel.backend.tells_results:
            token.result = result_reader(work)
        self.device_queues.add(token)

    def _hold(self, token: Token, work: Any) -> None:
        """Hold a Work until its collective is done."""
        in_flight = self.in_flight
        if in_flight:
            # Amortised: each new collective polls the oldest one, so that no Work (and no tensor)
            # is held for long.
            try:
                oldest, oldest_token = next(iter(in_flight.items()))
            except (RuntimeError, StopIteration):  # another thread has just removed it
                pass
            else:
                if not oldest_token.args.wait_only and _is_completed(oldest):
                    self._completed(oldest, oldest_token, L.HOW_POLL)
                elif len(in_flight) >= _HELD_LIMIT:
                    self._evict(oldest, oldest_token)
        in_flight[work] = token
        for pointer in token.pointers:
            self.by_pointer[pointer] = token
        task = _current_pass()
        if (task >= 0 or current.in_cpp_since) and not token.args.wait_only:
            self._follow_cpp(token, task)

    def _evict(self, work: Any, token: Token) -> None:
        """Drop the oldest Work when too many are held: its state cannot be learned any more, unless
        a thread waits for it.
        """
        if token.args.wait_only:
            self._hold_weakly(work, token)
        elif self.in_flight.pop(work, None) is not None:
            token.unknown = True
            self._forget_pointers(token)
            self.writer.mark_outcome(token.offset, token.index, L.OUTCOME_UNKNOWN, L.HOW_UNKNOWN)

    def _hold_weakly(self, work: Any, token: Token) -> None:
        """Replace the reference to a Work by a weak one."""
        token.work_ref = weakref.ref(work)
        self.weakly_held[token.index] = token
        if self.in_flight.pop(work, None) is None:  # its wait has just ended
            self.weakly_held.pop(token.index, None)

    def _completed(self, work: Any, token: Token, how: int) -> None:
        """Record that a Work is complete, with its error if it has one."""
        if self.in_flight.pop(work, None) is not None:
            self._forget_pointers(token)
            error = error_of(work)
            if error is None:
                self.done(token, how, _monotonic())
            else:
                self.mark_failed(token.offset, token.index, error, 0, how)

    def _forget_pointers(self, token: Token) -> None:
        for pointer in token.pointers:
            if self.by_pointer.get(pointer) is token:
                del self.by_pointer[pointer]

    def done(self, token: Token, how: int, now: int) -> None:
        """Record that a collective completed: ``how`` it was learned, and when."""
        if self.timing and how == L.HOW_RETURN:
            self._time(token, now)
        self.writer.mark(token.offset, L.DONE, token.index, now)
        self.writer.mark_outcome(token.offset, token.index, L.OUTCOME_COMPLETED, how)

    def _time(self, token: Token, now: int) -> None:
        """Record the duration. Only for collectives whose end was seen as it happened, not for
        those found done by polling.
        """
        self.writer.mark_value(
            token.offset, L.DURATION, token.index, (now - token.since) // L.TICK_NS
        )

    def mark_failed(
        self, offset: int, index: int, error: BaseException, thread: int, how: int
    ) -> None:
        """Record that a collective ended with an error.

        Args:
            offset: of its record's slot.
            index: of its record.
            error: the error.
            thread: native id of the thread that waited for it; 0 for none.
            how: how the end was learned, one of the ``HOW_`` constants.
        """
        writer = self.writer
        text = f"{type(error).__name__}: {error}"[:2000]
        writer.mark_value(offset, L.FAILURE, index, writer.add_blob({"k": "text", "text": text}))
        writer.mark(offset, L.DONE, index, _monotonic())
        writer.mark_outcome(offset, index, L.OUTCOME_FAILED, how, thread)

    # --- a thread waits

    def wait_begins(self, work: Any) -> Token | None:
        """Note that a thread is about to block in ``work.wait()``."""
        try:
            self.unwaited.open.pop(id(work), None)
            if self.newest_message:
                self._mark_device_wait(work)
            token = self.in_flight.get(work)
            if token is None and self.synchronous:
                token = self.synchronous.get(current.id)
            if token is None and self.weakly_held:
                token = next(
                    (t for t in list(self.weakly_held.values()) if t.work_ref() is work), None
                )
            if token is not None:
                self._mark_wait(token)
        except Exception as error:
            self._failed(error)
            return None
        if self.verifier is not None:
            self._verify_wait(self.verifier, token)
        return token

    def _mark_device_wait(self, work: Any) -> None:
        """Note that a thread waits for the message that it has just issued: so does its device,
        while the call returns at once.
        """
        newest, token = self.newest_message.pop(current.id, (None, None))
        if token is not None and newest is work:
            now = _monotonic()
            self.writer.mark(token.offset, L.WAIT_BEGAN, token.index, now)
            self.writer.mark(token.offset, L.WAIT_ENDED, token.index, now)

    def _mark_wait(self, token: Token) -> None:
        """Record that this thread begins to wait."""
        token.waiting = True
        self.writer.wait_began(
            token.offset, token.index, _monotonic(), current.id, token.args.synchronous
        )

    def _verify_wait(self, verifier: CallVerifier, token: Token | None) -> None:
        """Let the verifier compare before the wait; a refusal ends it."""
        try:
            verifier.before_wait(token.index if token is not None else 0)
        except BaseException as error:
            if token is not None:
                self._after_wait(token, error)
            raise

    def error_to_raise(self, error: BaseException) -> BaseException:
        """Return the exception to raise for a backend's error: a peer's refusal, if there is one,
        since it names the cause.
        """
        refusal = self.verifier.refusal_for(error) if self.verifier is not None else None
        if refusal is None:
            return error
        refusal.__cause__ = error
        return refusal

    def wait_ended(self, work: Any, token: Token, error: BaseException | None) -> None:
        """Note that the wait for ``work`` ended."""
        if token.args.synchronous:
            self.synchronous.pop(token.thread, None)
        else:
            self.in_flight.pop(work, None)
        if error is None and token.args.flags & L.FLAG_ANY_SOURCE:
            self._note_source(token, work)
        self._after_wait(token, error)

    def _note_source(self, token: Token, work: Any) -> None:
        """Record whose message a receive from any source took."""
        try:
            source = work._source_rank()
            if source >= 0:
                self.writer.mark_value(token.offset, L.SOURCE, token.index, source + 1)
        except Exception as error:  # a backend that does not tell: the source stays unknown
            log.debug("commlens: a receive's source is unknown: %s", error)

    def _after_wait(self, token: Token, error: BaseException | None) -> None:
        """Record how a wait ended, and forget its token."""
        try:
            if self.weakly_held:
                self.weakly_held.pop(token.index, None)
            if token.pointers:
                self._forget_pointers(token)
            if error is None:
                now = _monotonic()
                self.writer.wait_completed(token.offset, token.index, now, current.id)
                if self.timing:
                    self._time(token, now)
            else:
                self.mark_failed(token.offset, token.index, error, current.id, L.HOW_WAIT)
        except Exception as ours:
            self._failed(ours)

    def tensor_wait_begins(self, tensor: Any) -> tuple[Any, Token | None] | None:
        """Note that a thread is about to block in ``wait_tensor(tensor)``."""
        try:
            token = self.by_pointer.get(tensor.data_ptr()) if self.by_pointer else None
            if token is None and self.verifier is None:
                return None
            if token is not None:
                self._mark_wait(token)
            work = next(
                (work for work, other in list(self.in_flight.items()) if other is token), None
            )
        except Exception as error:
            self._failed(error)
            return None
        if self.verifier is not None:
            self._verify_wait(self.verifier, token)
        return work, token

    def tensor_wait_ended(
        self, held: tuple[Any, Token | None], error: BaseException | None
    ) -> None:
        """Note that this wait ended."""
        work, token = held
        if error is not None and self.verifier is not None:
            refusal = self.error_to_raise(error)
            if refusal is not error:
                raise refusal
        if token is None:
            return
        if work is not None:
            self.in_flight.pop(work, None)
        self._after_wait(token, error)

    def used_without_wait(self, work: Any) -> None:
        """Note that the program asked for the state or the future of a Work: it need not wait."""
        self.unwaited.open.pop(id(work), None)

    def unwaited_works(self) -> Counter[int]:
        """Return how many Works of asynchronous calls were never waited for, by stack."""
        return self.unwaited.found()

    # --- C++ waits: DDP's reducer at the end of a backward pass, and its broadcast of buffers
    #
    # The engine runs final callbacks in the order in which they were queued. Ours is queued with
    # the pass's first collective and the reducer's with its last one, so ours runs just before the
    # reducer waits; there it queues another one, which runs just after.

    def _follow_cpp(self, token: Token, task: int) -> None:
        """Note a collective for which C++ may wait, issued in the backward pass ``task``; -1: in a
        call that waits for what it issues.
        """
        issued = self.issued_for_cpp[token.thread]
        issued.append(token)
        del issued[:-_HELD_LIMIT]
        if task < 0 or task == current.followed_pass:
            return
        current.followed_pass = task
        engine: Any = torch.autograd.Variable._execution_engine

        def begins() -> None:
            current.followed_pass = -1
            began = _monotonic()
            engine.queue_callback(lambda: self.waited_in_cpp(began))

        engine.queue_callback(begins)

    def cpp_waits(self) -> None:
        """Note that this thread enters a call that waits for the collectives that it issues."""
        current.in_cpp_since = _monotonic()

    def waited_in_cpp(self, began: int = 0) -> None:
        """Note that this thread has waited in C++ since a moment, or since it entered such a call:
        what it issued and is complete was waited for, unless Python did so.
        """
        began, current.in_cpp_since, now = began or current.in_cpp_since, 0, _monotonic()
        try:
            held = {token.index: work for work, token in list(self.in_flight.items())}
            left = []
            for token in self.issued_for_cpp.pop(current.id, ()):
                work = held.get(token.index)
                if work is not None and not _is_over(work):
                    left.append(token)
                elif not token.waiting:
                    if work is not None:
                        self._completed(work, token, L.HOW_POLL)
                    self.writer.mark(token.offset, L.WAIT_ENDED, token.index, now)
                    self.writer.mark(
                        token.offset, L.WAIT_BEGAN, token.index, max(began, token.since)
                    )
            if left:
                self.issued_for_cpp[current.id] = left
        except Exception as error:
            self._failed(error)

    # --- polling, from the watchdog thread

    def sweep(self) -> Token | None:
        """Poll the collectives in flight and return the oldest one that is not done.

        A Work that cannot say whether it is done (gloo's reduce_scatter, send and recv) is held
        only until the next sweep, because it would keep tensors alive. A weak reference replaces
        it, which lives as long as the user's own handle. Once the user drops that handle without a
        wait, the state cannot be learned any more.
        """
        left: list[Token] = []
        now = _monotonic()
        self.newest_message.clear()  # it would keep tensors alive
        for work, token in list(self.in_flight.items()):
            if token.args.wait_only:
                if now - token.since > _HOLD_WEAKLY_AFTER_NS:
                    self._hold_weakly(work, token)
            elif _is_completed(work):
                self._completed(work, token, L.HOW_POLL)
                continue
            left.append(token)
        work = None  # the loop's variable must not keep the last one alive
        for thread, token in list(self.synchronous.items()):
            if token.waiting:
                left.append(token)
            elif (
                now - token.since > _HOLD_WEAKLY_AFTER_NS
                and self.synchronous.pop(thread, None) is token
            ):
                # its caller never waited, so its end cannot be learned
                self.writer.mark_outcome(
                    token.offset, token.index, L.OUTCOME_UNKNOWN, L.HOW_UNKNOWN
                )
        for index, token in list(self.weakly_held.items()):
            if self.overwritten(index):
                self.weakly_held.pop(index, None)
                self._forget_pointers(token)
            elif token.waiting:
                left.append(token)
            elif token.work_ref() is None and not token.unknown:
                token.unknown = True
                self.writer.mark_outcome(
                    token.offset, token.index, L.OUTCOME_UNKNOWN, L.HOW_UNKNOWN
                )
            elif not token.unknown:
                left.append(token)
        return min(left, key=lambda token: token.index, default=None)

    def overwritten(self, index: int) -> bool:
        """Return whether a newer record has taken the slot of this one."""
        return index + self.writer.capacity <= self.writer.last_index

    def release(self) -> None:
        """Drop every Work."""
        self.synchronous.clear()
        self.in_flight.clear()
        self.weakly_held.clear()
        self.by_pointer.clear()
        self.newest_message.clear()
        self.device_queues.clear()

    def _failed(self, error: Exception) -> None:
        """Count an error of commlens, and log the first one."""
        self.lost += 1
        try:
            self.writer.word(L.LOST, self.lost)
        finally:
            if not self._logged:
                self._logged = True
                log.warning(
                    "commlens could not record a collective and goes on without it: %s: %s",
                    type(error).__name__,
                    error,
                )


def _is_over(work: Any) -> bool:
    """Return whether a Work is complete, also if a thread that waits for its future has learned so
    just before the Work says it.
    """
    try:
        return bool(_is_completed(work) or _get_future(work).done())
    except Exception:  # it has no future to ask
        return False


def error_of(work: Any) -> Exception | None:
    """Return the error of a Work whose ``is_completed()`` is true, as it also is after a failure;
    None if it succeeded or has no future.
    """
    try:
        future = _get_future(work)
    except Exception:
        return None
    try:
        if future.done():
            future.value()
    except Exception as error:
        return error
    return None


# --- the collectives in CUDA graphs: captured once, and replayed without passing the tap

GRAPH_DEVICE = "graph"
"""The device type of a group's channel on which replays are counted."""


class Graphs:
    """The collectives that each graph contains, and the records of its replays: one record for each
    channel that the graph communicates on.
    """

    def __init__(self, writer: BoxWriter) -> None:
        self._writer = writer
        # how many collectives of each channel the capture that runs now has seen
        self._being_captured: Counter[LiveChannel] = Counter()
        # by graph: how many collectives of each channel it contains
        self._contents: weakref.WeakKeyDictionary[Any, Counter[LiveChannel]] = (
            weakref.WeakKeyDictionary()
        )
        # the sequence numbers of the replays' records, by channel
        self._numbers: defaultdict[LiveChannel, Callable[[], int]] = defaultdict(numbers)
        # positions of the blobs that the records refer to, by channel and number of collectives
        self._blobs: dict[tuple[LiveChannel, int], tuple[int, int]] = {}

    def captured(self, channel: LiveChannel) -> None:
        """Note that a collective was captured."""
        self._being_captured[channel] += 1

    def ends(self, graph: Any) -> None:
        """Note that the capture of a graph has ended."""
        if self._being_captured:
            self._contents[graph], self._being_captured = self._being_captured, Counter()

    def replayed(self, graph: Any, now: int, thread: int, step: int, stack: int) -> None:
        """Write the records of one replay."""
        for channel, count in self._contents.get(graph, {}).items():
            group, asked = self._blobs_of(channel, count)
            record = L.Record(
                self._writer.next_index(),
                now,
                group,
                asked,
                stack,
                sequence_number=self._numbers[channel](),
                step=step,
                thread=thread,
                flags=L.FLAG_ENTERED,
            )
            offset = self._writer.announce(record)
            self._writer.mark(offset, L.RETURNED, record.record_index, now)
            self._writer.mark_outcome(offset, record.record_index, L.OUTCOME_UNKNOWN, L.HOW_UNKNOWN)

    def _blobs_of(self, channel: LiveChannel, count: int) -> tuple[int, int]:
        """Return the positions of two blobs: of the channel's group, and of a replay of so many
        collectives.
        """
        known = self._blobs.get((channel, count), (0, 0))
        if min(known) <= self._writer.side_floor:  # not written yet, or overwritten
            asked = {
                "k": "asked",
                "op": GRAPH_REPLAY,
                "dop": f"{GRAPH_REPLAY} of {count}",
                "in": [],
                "out": [],
            }
            group = {**channel.describe(), "device": GRAPH_DEVICE, "ahead": True}
            known = self._blobs[channel, count] = (
                self._writer.add_blob(group),
                self._writer.add_blob(asked),
            )
        return known
