"""The collectives that were enqueued on a device: which of them have completed, and which one the
device waits in.

The host runs ahead of the device, so the return of a call says nothing, and no Work is held: it
would keep tensors alive, and polling it queries an event, which breaks the capture of a CUDA graph.
torch's own recorder knows how far each backend is. It is asked when a group has issued nothing for
seconds while one of its ops may be in flight. While the group is busy, it is asked rarely. Then the
answer shows the ops that have completed, and of the others only those that have long been in
flight: the rest may complete long before the next answer. For a backend with completion hooks
(:mod:`commlens.tap.backends`), the entries of its recorder are read, and only while the group is
quiet.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from commlens.blackbox import layout as L
from commlens.capture import torch_progress
from commlens.capture.device_durations import DeviceDurations
from commlens.tap.groups import LiveChannel
from commlens.tap.token import Token

QUIET_NS = 2_000_000_000
ASK_AGAIN_NS = 1_000_000_000
ASK_WHILE_BUSY_NS = 30_000_000_000
LONGEST_QUERY_S = 1.0
_MESSAGES_AT_ONCE = 512
# between two calls of look() by the watchdog thread; the native engine has the same limit
_ADDED_MAX = 16_384
ENDED = -1
"""``known_how`` of a collective that completed or failed, while older ones are in flight."""
_FAILURES = {
    1: "its process group timed out",
    2: "its communicator failed",
    3: "another rank reported an error",
}


class Queue:
    """The collectives of one channel that are not known to be complete, oldest first."""

    def __init__(self, channel: LiveChannel, capacity: int) -> None:
        self.channel = channel
        self.capacity = capacity
        self.tokens: collections.deque[Token] = collections.deque()
        # the newest that was dropped and may be in flight: its record is overwritten
        self.dropped: Token | None = None
        self.newest_ns = 0  # when the newest was issued
        self.asked_ns = 0  # when torch's recorder was last asked
        self.progress_ns = 0  # when one last completed, as far as that is known

    def add(self, token: Token) -> None:
        """Add a collective that was just issued."""
        if len(self.tokens) >= self.capacity:
            self.dropped = self.tokens.popleft()
        self.tokens.append(token)
        self.newest_ns = token.since

    def oldest(self) -> Token | None:
        """Return the oldest collective that is known to be in flight."""
        if self.dropped is not None and self.dropped.waiting:
            return self.dropped
        return self.tokens[0] if self.tokens and self.tokens[0].waiting else None

    def note_progress(self, now: int, *, any_done: bool) -> None:
        """Note an answer. What is found complete in the first one after a busy time completed at an
        unknown moment of that time.
        """
        if any_done:
            self.progress_ns = now if self.asked_ns > self.newest_ns else self.newest_ns
        self.asked_ns = now

    def is_quiet(self, now: int) -> bool:
        """Return whether nothing was issued for so long that it pays to ask, or the last answer
        must be kept up to date.
        """
        return bool(self.tokens) and (now - self.newest_ns >= QUIET_NS or self.oldest() is not None)

    @property
    def has_messages(self) -> bool:
        """Whether the channel carries messages, too: torch's status of its backend then mixes the
        numbers of both.
        """
        return bool(self.channel.pairs)


class DeviceQueues:
    """All queues of a rank. Any thread may call :meth:`add` and those about captures, and only the
    watchdog thread the others.

    Args:
        tracker: marks the tokens' records
            (:class:`commlens.capture.completion.CompletionTracker`).
        timing: the durations that torch measures are read, too.
    """

    def __init__(self, tracker: Any, *, timing: bool = False) -> None:
        self._tracker = tracker
        self._added: collections.deque[Token] = collections.deque(maxlen=_ADDED_MAX)
        self._queues: dict[LiveChannel, Queue] = {}
        self._messages: collections.deque[Token] = collections.deque()
        # those that the backend's completion hook has not reported, oldest first
        self._hooked: list[Token] = []
        # not while a job makes its groups: torch's status is read without its lock
        self._asked_ns = time.monotonic_ns()
        # when asked on a system where a stall may be asked about only once: newest_ns
        self._asked_of: dict[LiveChannel, int] = {}
        self._capturing = False  # a CUDA graph is being captured: nothing may query the device
        self._querying = threading.Lock()
        self._durations = DeviceDurations(tracker.writer) if timing else None

    def add(self, token: Token) -> None:
        """Add a collective whose call has returned. An op whose completion no source shows stays
        unknown.
        """
        self._added.append(token)

    def add_rejected(self, token: Token) -> None:
        """Add a collective that the backend rejected, after torch's hooks made an entry for it."""
        token.backend_number, token.known_how = 1, ENDED
        self._added.append(token)

    def capture_begins(self) -> None:
        """Note that a capture begins, and wait, for a second at most, until the watchdog thread no
        longer queries the device.
        """
        self._capturing = True
        if self._durations is not None:
            self._durations.end()
        if self._querying.acquire(timeout=LONGEST_QUERY_S):
            self._querying.release()

    def capture_ends(self) -> None:
        """Note that the capture has ended."""
        self._capturing = False

    def _sort_in(self, token: Token) -> None:
        """Put a collective where the source of its completion is followed."""
        channel = token.args.channel
        if token.hooked is not None:
            self._hooked.append(token)
        elif token.result is not None:
            self._messages.append(token)
            if self._durations is not None and channel.backend.uid:
                self._durations.add_message(token)
        elif token.backend_number > 0 and (channel.backend.uid or channel.backend.recorder):
            queue = self._queues.get(channel)
            if queue is None:
                queue = self._queues[channel] = Queue(channel, self._tracker.writer.capacity)
            queue.add(token)
            if self._durations is not None and channel.backend.uid:
                self._durations.add(token)

    def look(self, now: int) -> None:
        """Learn what has completed, and ask torch's recorder if that is due."""
        while self._added:
            self._sort_in(self._added.popleft())
        self._look_at_messages()
        self._look_at_hooked(now)
        if self._durations is not None:
            self._durations.look(now, self._querying)
        if not self._take_turn(now):
            return
        self._asked_ns = now
        self._apply_hooked(now)
        counted = [queue for queue in self._queues.values() if queue.channel.backend.uid]
        statuses = torch_progress.statuses() if counted else {}
        mixed: list[Queue] = []
        for queue in counted:
            status = statuses.get(queue.channel.backend.uid)
            if not queue.tokens or status is None or status.enqueued == torch_progress.NEVER:
                # switched off, or nothing is enqueued to torch's watchdog
                # (TORCH_NCCL_BLOCKING_WAIT)
                continue
            if queue.has_messages:
                mixed.append(queue)
            else:
                self._apply_status(queue, status, now)
        if any(queue.is_quiet(now) for queue in mixed):
            with self._querying:
                if not self._capturing:
                    self._apply_entries(mixed, now)

    def oldest(self) -> Token | None:
        """Return the oldest collective that torch's recorder reports as in flight."""
        heads = [queue.oldest() for queue in self._queues.values()]
        # in no order, once more of them were in flight than one look polls
        heads.extend(token for token in self._messages if token.waiting)
        heads.append(next((token for token in self._hooked if token.waiting), None))
        return min(filter(None, heads), key=lambda token: token.index, default=None)

    def waits_since(self, token: Token) -> int:
        """Return since when the device may have waited in a collective: it was issued, and the one
        before had completed.
        """
        if token.hooked is not None:
            return max(token.since, int(token.hooked.progress_ns))
        queue = self._queues.get(token.args.channel)
        return max(
            token.since, queue.progress_ns if queue is not None and token.result is None else 0
        )

    def clear(self) -> None:
        """Forget everything."""
        self._added.clear()
        self._queues.clear()
        self._messages.clear()
        self._hooked.clear()

    # --- when to ask

    def _take_turn(self, now: int) -> bool:
        """Return whether to ask torch's recorder now. Where a stall may be asked about only once,
        it counts as asked about.
        """
        waiting = [queue for queue in self._queues.values() if queue.tokens]
        quiet = [queue for queue in waiting if queue.is_quiet(now)]
        if getattr(torch.version, "hip", None):
            # There each answer also dumps every communicator: once for each stall is enough.
            new = [queue for queue in quiet if self._asked_of.get(queue.channel) != queue.newest_ns]
            self._asked_of.update((queue.channel, queue.newest_ns) for queue in new)
            return bool(new)
        since = now - self._asked_ns
        return (bool(quiet) and since >= ASK_AGAIN_NS) or (
            bool(waiting) and since >= ASK_WHILE_BUSY_NS
        )

    # --- what the answers mean

    def _apply_status(self, queue: Queue, status: torch_progress.Status, now: int) -> None:
        """Learn from the counters of a backend whose numbers are those of collectives alone."""
        queue.note_progress(
            now, any_done=bool(queue.tokens) and queue.tokens[0].backend_number <= status.completed
        )
        while queue.tokens and queue.tokens[0].backend_number <= status.completed:
            self._tracker.done(queue.tokens.popleft(), L.HOW_NATIVE_RECORDER, now)
        if queue.dropped is not None:
            queue.dropped.waiting = queue.dropped.backend_number > status.completed
        is_stuck = bool(queue.tokens) and now - queue.tokens[0].since >= ASK_WHILE_BUSY_NS
        if not (queue.is_quiet(now) or is_stuck):
            return
        for token in queue.tokens:
            if token.backend_number > status.enqueued:
                break  # issued just now, or captured into a CUDA graph
            how = L.HOW_NATIVE_RECORDER
            if status.started != torch_progress.NEVER:
                how = L.HOW_STARTED if token.backend_number <= status.started else L.HOW_ENQUEUED
            self._mark_in_flight(token, how)

    def _apply_entries(self, queues: list[Queue], now: int) -> None:
        """Learn from the list of ops in flight, for backends whose counters mix collectives and
        messages.
        """
        answer = torch_progress.in_flight()
        if answer is None:
            return
        # of our records: torch's recorder has up to two for each
        held = torch_progress.capacity() // 2
        for queue in queues:
            known = answer.get(queue.channel.backend.uid)
            if known is None:
                continue
            left: collections.deque[Token] = collections.deque()
            any_done = False
            for token in queue.tokens:
                number = token.backend_number
                is_active = number in (
                    known.coalesced if token.args.op == "coalesced" else known.alone
                )
                if is_active:
                    self._mark_in_flight(
                        token, L.HOW_STARTED if number in known.started else L.HOW_NATIVE_RECORDER
                    )
                    left.append(token)
                elif self._tracker.writer.last_index - token.index < held:
                    self._tracker.done(token, L.HOW_NATIVE_RECORDER, now)
                    any_done = True
                # else its entry may be overwritten, so its state stays unknown
            queue.tokens, queue.dropped = left, None
            queue.note_progress(now, any_done=any_done)

    def _apply_hooked(self, now: int) -> None:
        """Learn from the recorders that torch's hooks fill."""
        quiet = [
            queue
            for queue in self._queues.values()
            if queue.channel.backend.recorder and queue.is_quiet(now)
        ]
        names = {queue.channel.backend.recorder for queue in quiet}
        recorders = {name: torch_progress.hooked(name) for name in names}
        for queue in quiet:
            entries = recorders[queue.channel.backend.recorder].get(queue.channel.group.name, [])
            is_settled = entries and time.time_ns() - entries[-1].created_ns >= ASK_AGAIN_NS
            if is_settled and not (queue.channel.busy or self._added):
                self._apply_newest(queue, entries, now)

    def _apply_newest(
        self, queue: Queue, entries: list[torch_progress.RecorderEntry], now: int
    ) -> None:
        """Match a group's entries with its collectives from the newest back, as long as the ops are
        the same.
        """
        tokens = list(queue.tokens)[-len(entries) :]
        older, entries = entries[: -len(tokens)], entries[-len(tokens) :]
        if [token.args.op for token in tokens] != [entry.op for entry in entries]:
            tokens, older = [], []  # which entry is whose is not known: their state stays unknown
        open_before = sum(token.known_how != ENDED for token in tokens)
        for token, entry in zip(tokens, entries, strict=False):
            if token.known_how == ENDED:
                continue
            if entry.completed:
                self._tracker.done(token, L.HOW_NATIVE_RECORDER, now)
                token.waiting, token.known_how = False, ENDED
            elif queue.channel.backend.watches:
                self._mark_in_flight(token, L.HOW_NATIVE_RECORDER)
        still_open = [at for at, token in enumerate(tokens) if token.known_how != ENDED]
        queue.tokens = collections.deque(tokens[min(still_open, default=len(tokens)) :])
        if queue.dropped is not None:
            queue.dropped.waiting = bool(older) and not older[-1].completed
        queue.note_progress(now, any_done=len(still_open) < open_before)

    def _mark_in_flight(self, token: Token, how: int) -> None:
        """Note in a collective's record how it is known to be in flight."""
        if token.known_how != how:
            token.waiting = True
            token.known_how = how
            self._tracker.writer.mark_outcome(token.offset, token.index, L.OUTCOME_NONE, how)

    def _look_at_hooked(self, now: int) -> None:
        """Mark the ops that have been in flight for over 2 s: their completion hook, even a second
        late, would have been called by now. The hook itself marks the completed ones.
        """
        still_open: list[Token] = []
        for token in self._hooked:
            if token.hooked.done_ns:
                continue
            is_late = now - token.since >= QUIET_NS and token.args.channel.backend.watches
            if self._tracker.overwritten(token.index):
                token.waiting = is_late
                still_open = [token]  # of those whose records are overwritten, the newest
                continue
            if is_late:
                self._mark_in_flight(token, L.HOW_NATIVE_RECORDER)
                if token.hooked.done_ns:  # meanwhile: what is in flight may have overwritten that
                    self._tracker.done(token, L.HOW_NATIVE_RECORDER, int(token.hooked.done_ns))
                    continue
            still_open.append(token)
        self._hooked = still_open

    def _look_at_messages(self) -> None:
        """Poll the results of messages, which torch's watchdog thread sets without a query of
        ours.
        """
        for _ in range(min(len(self._messages), _MESSAGES_AT_ONCE)):
            token = self._messages.popleft()
            result = token.result() if token.result is not None else None
            if result is None:
                self._mark_in_flight(token, L.HOW_NATIVE_RECORDER)
                self._messages.append(token)
            elif result in _FAILURES:
                error = RuntimeError(_FAILURES[result])
                self._tracker.mark_failed(
                    token.offset, token.index, error, 0, L.HOW_NATIVE_RECORDER
                )
            else:
                self._tracker.done(token, L.HOW_NATIVE_RECORDER, time.monotonic_ns())


def result_reader(work: Any) -> Callable[[], int | None] | None:
    """Return a function that reads how a Work ended: torch's ErrorType, None while it has not; or
    None if no source will show it.

    torch's watchdog thread sets the result. It holds no tensors.
    """
    try:
        future = work.get_future_result()
    except Exception:
        return None

    def read() -> int | None:
        return int(future.value()) if future.done() else None

    return read
