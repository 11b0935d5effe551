"""Which collectives and messages on a device have completed, and in which one the device waits.

The host runs ahead of the device: the return of a call says nothing about the op. The recorder
holds no Work of such an op, because it would keep tensors alive, and polls none, because that
queries a CUDA event, which breaks the capture of a CUDA graph. What torch knows is read instead, by
the watchdog thread (``DeviceQueues.look``). The source depends on the op's backend:

===============================================  ===================================================
op                                               source
===============================================  ===================================================
collective, torch's recorder numbers the ops     counters: see the example
the same on a group that also carries messages   list of the ops in flight, since messages count too
collective, backend with completion hooks        the hook itself marks what completed; what it has
                                                 not reported after 2 s is in flight
the same, engine without C++ tokens              entries that torch's hooks wrote, matched from the
                                                 newest back
send, recv                                       the result that torch's watchdog sets in its Work
===============================================  ===================================================

For example, the collectives 7, 8 and 9 of a group are not known to be complete. torch's counters
say ``Status(enqueued=9, started=8, completed=7)``. Then 7 is done, the device waits in 8, and 9 is
enqueued behind it.

torch's recorder is read about once a second for a group that has issued nothing for 2 s while one
of its ops may be in flight, and twice a minute while the group is busy. An answer of a busy time
shows the completed ops, but of the others only those that are over 30 s old are marked as in
flight: the rest may complete long before the next answer.
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
_ENDED = -1
"""``known_how`` of a collective that completed or failed, while older ones are in flight."""
# torch's ErrorType of a Work; 0 is success
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
        # The newest collective that had to leave `tokens` because its record in the ring buffer is
        # overwritten. Nothing can be written about it any more, but the device may still wait in
        # it: each answer of torch's recorder sets its `waiting`.
        self.dropped: Token | None = None
        self.newest_ns = 0  # when the newest was issued
        self.answered_ns = 0  # when torch's recorder last answered
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
        """Note an answer, and whether it showed that an op is complete. The op completed at some
        moment since the answer before. If the group has issued ops meanwhile, count it as completed
        when the newest was issued; else the answer before was a second ago: count it as just now.
        """
        if any_done:
            self.progress_ns = now if self.answered_ns > self.newest_ns else self.newest_ns
        self.answered_ns = now

    def is_quiet(self, now: int) -> bool:
        """Return whether it pays to ask about the group: it has issued nothing for 2 s, or the last
        answer named an op in flight, which must not be reported any longer than it is true.
        """
        return bool(self.tokens) and (now - self.newest_ns >= QUIET_NS or self.oldest() is not None)


class DeviceQueues:
    """The device ops of a rank that are not known to be complete.

    Any thread may call the methods whose names begin with ``add`` and ``capture``. Only the
    watchdog thread may call the others.

    Args:
        tracker: writes into the tokens' records how they ended
            (:class:`commlens.capture.completion.CompletionTracker`).
        timing: read the durations that torch measures, too.
    """

    def __init__(self, tracker: Any, *, timing: bool = False) -> None:
        self._tracker = tracker
        self._added: collections.deque[Token] = collections.deque(maxlen=_ADDED_MAX)
        self._queues: dict[LiveChannel, Queue] = {}
        # sends and recvs without a result, in no order
        self._messages: collections.deque[Token] = collections.deque()
        # what the backend's completion hook has not reported, oldest first
        self._hooked: list[Token] = []
        # When torch's recorder was last asked. Not 0: the first question would come while the job
        # makes its groups, and torch's status is read without its lock.
        self._asked_ns = time.monotonic_ns()
        # on ROCm: `newest_ns` of each group when it was asked about
        self._asked_of: dict[LiveChannel, int] = {}
        self._capturing = False  # a CUDA graph is being captured: nothing may query the device
        self._querying = threading.Lock()
        self._durations = DeviceDurations(tracker.writer) if timing else None

    def add(self, token: Token) -> None:
        """Add an op whose call has returned. If no source shows how it ends, it stays unknown."""
        self._added.append(token)

    def add_rejected(self, token: Token) -> None:
        """Add a collective that the backend rejected after torch's hooks made an entry for it. It
        has ended, but its entry stays "scheduled", and must find its token.
        """
        token.backend_number, token.known_how = 1, _ENDED  # any number: hooks do not use it
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

    def look(self, now: int) -> None:
        """Learn what has completed, and ask torch's recorder if that is due."""
        while self._added:
            self._sort_in(self._added.popleft())
        self._poll_messages()
        self._mark_unreported(now)
        if self._durations is not None:
            self._durations.look(now, self._querying)
        if not self._take_turn(now):
            return
        self._asked_ns = now
        self._apply_hook_entries(now)
        counted = [queue for queue in self._queues.values() if queue.channel.backend.uid]
        statuses = torch_progress.statuses() if counted else {}
        mixed: list[Queue] = []  # of groups that carry messages, too
        for queue in counted:
            status = statuses.get(queue.channel.backend.uid)
            if not queue.tokens or status is None or status.enqueued == torch_progress.NEVER:
                # The recorder is switched off, or torch's watchdog knows of no op, as with
                # TORCH_NCCL_BLOCKING_WAIT.
                continue
            if queue.channel.pairs:
                mixed.append(queue)
            else:
                self._apply_status(queue, status, now)
        if any(queue.is_quiet(now) for queue in mixed):
            with self._querying:
                if not self._capturing:
                    self._apply_active_entries(mixed, now)

    def oldest(self) -> Token | None:
        """Return the oldest op that is known to be in flight."""
        heads = [queue.oldest() for queue in self._queues.values()]
        heads.extend(token for token in self._messages if token.waiting)
        heads.append(next((token for token in self._hooked if token.waiting), None))
        return min(filter(None, heads), key=lambda token: token.index, default=None)

    def waits_since(self, token: Token) -> int:
        """Return since when the device may have waited in an op: it was issued, and the one before
        it had completed. Messages run beside the collectives, so they wait since they were issued.
        """
        if token.hooked is not None:
            return max(token.since, int(token.hooked.progress_ns))
        queue = self._queues.get(token.args.channel) if token.result is None else None
        return max(token.since, queue.progress_ns if queue is not None else 0)

    def clear(self) -> None:
        """Forget everything."""
        self._added.clear()
        self._queues.clear()
        self._messages.clear()
        self._hooked.clear()

    # --- the steps of a look

    def _sort_in(self, token: Token) -> None:
        """Put an op into the list of the source that will show how it ends."""
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

    def _take_turn(self, now: int) -> bool:
        """Return whether to ask torch's recorder now. On ROCm, also note which groups are asked
        about: there each answer dumps every communicator as well, so once for each stall is enough.
        """
        waiting = [queue for queue in self._queues.values() if queue.tokens]
        quiet = [queue for queue in waiting if queue.is_quiet(now)]
        if getattr(torch.version, "hip", None):
            new = [queue for queue in quiet if self._asked_of.get(queue.channel) != queue.newest_ns]
            self._asked_of.update((queue.channel, queue.newest_ns) for queue in new)
            return bool(new)
        since = now - self._asked_ns
        return (bool(quiet) and since >= ASK_AGAIN_NS) or (
            bool(waiting) and since >= ASK_WHILE_BUSY_NS
        )

    # --- what torch's recorder answers

    def _apply_status(self, queue: Queue, status: torch_progress.Status, now: int) -> None:
        """Learn from the counters of a backend, which number the collectives alone."""
        queue.note_progress(now, any_done=queue.tokens[0].backend_number <= status.completed)
        while queue.tokens and queue.tokens[0].backend_number <= status.completed:
            self._tracker.done(queue.tokens.popleft(), L.HOW_NATIVE_RECORDER, now)
        if queue.dropped is not None:
            queue.dropped.waiting = queue.dropped.backend_number > status.completed
        is_stuck = bool(queue.tokens) and now - queue.tokens[0].since >= ASK_WHILE_BUSY_NS
        if not (queue.is_quiet(now) or is_stuck):
            return
        for token in queue.tokens:
            if token.backend_number > status.enqueued:
                break  # issued just now, or never enqueued: captured into a CUDA graph
            how = L.HOW_NATIVE_RECORDER
            if status.started != torch_progress.NEVER:  # with TORCH_NCCL_ENABLE_TIMING
                how = L.HOW_STARTED if token.backend_number <= status.started else L.HOW_ENQUEUED
            self._mark_in_flight(token, how)

    def _apply_active_entries(self, queues: list[Queue], now: int) -> None:
        """Learn from the list of ops in flight, for backends whose counters mix collectives and
        messages.
        """
        answer = torch_progress.in_flight()
        if answer is None:
            return
        # For so many of our newest records torch's recorder still has an entry: it makes up to two
        # entries for a record.
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
                # else its entry may be overwritten, and its state stays unknown
            queue.tokens, queue.dropped = left, None
            queue.note_progress(now, any_done=any_done)

    def _apply_hook_entries(self, now: int) -> None:
        """Learn from the recorders that torch's hooks fill, of groups that issue nothing now: the
        newest entry may be that of a call that has not returned, whose token is not here yet.
        """
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
                self._match_newest(queue, entries, now)

    def _match_newest(
        self, queue: Queue, entries: list[torch_progress.RecorderEntry], now: int
    ) -> None:
        """Match the entries of a group's recorder with its collectives, from the newest back.

        Entries have no number that a token has, but the newest entry is of the newest collective::

            tokens               all_gather   all_reduce
            entries   broadcast  all_gather   all_reduce     (oldest first)

        Tokens whose entries are overwritten leave the queue: their state stays unknown. Entries
        that are older than all tokens are of collectives that are complete, or that had to leave
        the queue; the newest of these is :attr:`Queue.dropped`.
        """
        tokens = queue.tokens
        while len(tokens) > len(entries):
            tokens.popleft()
        older, entries = entries[: -len(tokens)], entries[-len(tokens) :]
        if [token.args.op for token in tokens] != [entry.op for entry in entries]:
            # which entry is whose is not known: the states of all stay unknown
            tokens.clear()
            older = []
        any_done = False
        for token, entry in zip(tokens, entries, strict=False):
            if token.known_how == _ENDED:
                continue
            if entry.completed:
                self._tracker.done(token, L.HOW_NATIVE_RECORDER, now)
                token.waiting, token.known_how = False, _ENDED
                any_done = True
            elif queue.channel.backend.watches:
                self._mark_in_flight(token, L.HOW_NATIVE_RECORDER)
        while tokens and tokens[0].known_how == _ENDED:
            tokens.popleft()
        if queue.dropped is not None:
            queue.dropped.waiting = bool(older) and not older[-1].completed
        queue.note_progress(now, any_done=any_done)

    def _mark_in_flight(self, token: Token, how: int) -> None:
        """Note in a collective's record how it is known to be in flight."""
        if token.known_how != how:
            token.waiting = True
            token.known_how = how
            self._tracker.writer.mark_outcome(token.offset, token.index, L.OUTCOME_NONE, how)

    # --- what needs no question

    def _mark_unreported(self, now: int) -> None:
        """Mark as in flight what the completion hook has not reported for 2 s: the hook comes up to
        a second late. The hook itself, in C++, marks what is complete, and sets ``done_ns``.
        """
        still_open: list[Token] = []
        for token in self._hooked:
            if token.hooked.done_ns:
                continue
            is_late = now - token.since >= QUIET_NS and token.args.channel.backend.watches
            if self._tracker.overwritten(token.index):
                token.waiting = is_late
                still_open = [token]  # instead of older ones, which are overwritten as well
                continue
            if is_late:
                self._mark_in_flight(token, L.HOW_NATIVE_RECORDER)
                if token.hooked.done_ns:
                    # The hook came meanwhile: the mark above may have overwritten its own.
                    self._tracker.done(token, L.HOW_NATIVE_RECORDER, int(token.hooked.done_ns))
                    continue
            still_open.append(token)
        self._hooked = still_open

    def _poll_messages(self) -> None:
        """Read the results of some messages, and put those without one at the end: so each is read
        in turn. torch's watchdog thread sets them, so that reading queries no device.
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
    """Return a function that reads how a Work ended: torch's ErrorType, or None while it has not.
    Return None if the Work has no such result.

    torch's watchdog thread sets the result. The function holds no tensors.
    """
    try:
        future = work.get_future_result()
    except Exception:
        return None

    def read() -> int | None:
        return int(future.value()) if future.done() else None

    return read
