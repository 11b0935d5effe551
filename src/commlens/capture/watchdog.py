"""The watchdog thread of a rank: heartbeat, completion, the oldest collective in flight, and the
stacks of all threads.

It runs four times a second and costs a few tens of microseconds each time. It writes everything it
learns into the black box, so that a reader outside needs no help from this process.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from commlens.blackbox import layout as L
from commlens.capture import connections, rank_environment, stacks
from commlens.capture.recorder import Recorder
from commlens.tap import torch_patches
from commlens.tap.token import CallVerifier, Token

log = logging.getLogger("commlens")

TICK_S = 0.25
STACKS_EVERY_NS = 1_000_000_000
QUIET_NS = 500_000_000  # without a new record, after which stacks are read
REPORT_REFUSAL_AFTER_NS = 1_000_000_000
NEWEST_RECORDS = 512
_monotonic = time.monotonic_ns


class Watchdog:
    """A daemon thread that keeps a recorder's box up to date."""

    def __init__(
        self,
        recorder: Recorder,
        *,
        pipe: Path | None = None,
        on_pipe: Callable[[], object] = lambda: None,
        on_tick: Callable[[int], object] = lambda now: None,
    ) -> None:
        self._recorder = recorder
        self._on_tick = on_tick
        self._pipe = pipe
        self._on_pipe = on_pipe
        self._pipe_descriptor = -1
        self._stop = threading.Event()
        self._failed = False
        self._last_index = -1
        self._idle_since = _monotonic()
        self._stacks_at = 0
        self._main_hash = 0
        self._timeout_ms = 0  # as written into the box; 0: that of the default group
        self._refused_since = 0
        self._reported = ""
        # the newest record and the number of refusals when refused groups were last looked for
        self._looked_at = (0, 0)
        self._aborted: weakref.WeakSet[Any] = weakref.WeakSet()  # groups
        self._thread = threading.Thread(target=self._run, name="commlens-watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._open_pipe()
        self._thread.start()

    def stop(self, timeout: float = 1.0) -> None:
        """Stop the thread; wait for it at most ``timeout`` seconds."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout)
        if self._pipe_descriptor >= 0 and self._pipe is not None:
            self._pipe.unlink(missing_ok=True)
            if not self._thread.is_alive():  # else it may be about to read
                os.close(self._pipe_descriptor)
                self._pipe_descriptor = -1

    def _run(self) -> None:
        while not self._stop.wait(TICK_S):
            try:
                self.tick()
            except Exception as error:
                if not self._failed:
                    self._failed = True
                    log.warning(
                        "commlens: the watchdog thread goes on after an error: %s: %s",
                        type(error).__name__,
                        error,
                    )

    def tick(self) -> None:
        """Do one round of the work."""
        recorder, writer = self._recorder, self._recorder.writer
        now = _monotonic()
        writer.heartbeat()
        oldest = recorder.sweep()
        recorder.decode_reduce_ops()
        self._on_tick(now)
        recorder.device_queues.look(now)
        recorder.library_calls.note_libraries()
        recorder.library_calls.note_queues(now)
        self._write_oldest(oldest)
        if writer.last_index != self._last_index:
            self._last_index = writer.last_index
            self._idle_since = now
            writer.word(L.MAIN_STACK_SINCE, 0)
            self._main_hash = 0
        elif now - self._idle_since >= QUIET_NS and now - self._stacks_at >= STACKS_EVERY_NS:
            self._write_stacks(now)
        if self._pipe_descriptor >= 0:
            self._read_pipe()
        if recorder.verifier is not None:
            waits = list(torch_patches.waits_in_cpp.values())
            # the C++ code that waits for it has issued it itself
            if oldest is not None and waits and oldest.since >= min(waits):
                recorder.verifier.check_wait_in_cpp(oldest.args, now - oldest.since)
            is_waiting = (oldest or recorder.device_queues.oldest()) is not None
            self._follow_refusal(recorder.verifier, now, is_waiting=is_waiting)

    def _follow_refusal(self, verifier: CallVerifier, now: int, *, is_waiting: bool) -> None:
        """Wake a thread that waits in the backend's C++ for a collective that another rank refused;
        log the refusal if none raises it.
        """
        refusal = verifier.unraised_refusal()
        if refusal is None:
            self._refused_since = 0
            return
        if not self._refused_since:
            self._refused_since = now
            return
        looked_at = (self._recorder.writer.last_index, verifier.posted_refusals)
        if is_waiting and looked_at != self._looked_at:
            self._looked_at = looked_at
            self._abort_refused_groups(verifier)
        if now - self._refused_since > REPORT_REFUSAL_AFTER_NS and refusal != self._reported:
            self._reported = refusal
            log.error(
                "commlens: refused by other ranks; this one has not reached its next collective or"
                " wait, where it raises this:\n%s",
                refusal,
            )

    def _abort_refused_groups(self, verifier: CallVerifier) -> None:
        """Abort each group in which a thread waits for a refused collective, once; in a thread of
        its own, since NCCL's abort may block.
        """
        # These need msgspec, which recording does without.
        from commlens.blackbox.reader import OpenBox
        from commlens.model.collective import State

        with OpenBox(self._recorder.writer.path) as box:
            in_flight = [
                op for op in box.log(newest=NEWEST_RECORDS).collectives if op.state is State.ISSUED
            ]
        for process_group in verifier.refused_groups(in_flight):
            if process_group not in self._aborted:
                self._aborted.add(process_group)
                threading.Thread(
                    target=connections.abort,
                    args=(process_group,),
                    name="commlens-abort",
                    daemon=True,
                ).start()

    def _write_oldest(self, oldest: Token | None) -> None:
        """Write the oldest call in flight: of a library's call and a collective, the older one. The
        collective is the oldest that a thread may wait for or, if there is none, the oldest on a
        device.
        """
        writer, queues = self._recorder.writer, self._recorder.device_queues
        call, on_device = self._recorder.library_calls.oldest(), queues.oldest()
        collective = oldest or on_device
        since = index = expires = timeout_ms = 0
        if call is not None and (collective is None or call.since < collective.since):
            since, index, expires = call.since, call.index, L.NEVER
        elif oldest is not None:
            since, index = oldest.since, oldest.index
        elif on_device is not None:
            since, index = queues.waits_since(on_device), on_device.index
            timeout_ms = on_device.args.channel.backend.timeout_ms
            # torch's watchdog counts from the call
            expires = on_device.since + timeout_ms * 1_000_000 if timeout_ms else 0
        if timeout_ms != self._timeout_ms:
            self._timeout_ms = timeout_ms
            writer.word(L.TIMEOUT_MS, timeout_ms or rank_environment.default_timeout_ms())
        writer.word(L.EXPIRES, expires)
        writer.word(L.OLDEST_SINCE, since)
        writer.word(L.OLDEST_INDEX, index)

    def _write_stacks(self, now: int) -> None:
        self._stacks_at = now
        writer = self._recorder.writer
        threads, main_hash = stacks.all_threads(writer.last_thread)
        writer.write_evidence(threads, now)
        if main_hash != self._main_hash:
            self._main_hash = main_hash
            writer.word(L.MAIN_STACK_SINCE, now)

    # --- a named pipe, like that of torch's recorder: any byte makes a dump

    def _open_pipe(self) -> None:
        if self._pipe is None:
            return
        try:
            self._pipe.unlink(missing_ok=True)
            os.mkfifo(self._pipe, 0o600)
            self._pipe_descriptor = os.open(self._pipe, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            log.warning("commlens: no dump on demand through %s: %s", self._pipe, error)

    def _read_pipe(self) -> None:
        try:
            received = os.read(self._pipe_descriptor, 4096)
        except BlockingIOError:
            return
        if received:
            self._on_pipe()
