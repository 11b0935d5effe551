"""The recording of one process: its black box, its recorder and its watchdog thread, from the
import of torch to the end of the process.

=======================================  ==========================================================
moment                                   what happens
=======================================  ==========================================================
torch is imported in a launcher's rank   ``begin_early``: the box is made, so that it shows even a
                                         rank that never gets to ``init_process_group``
0.05 s later                             the node's watcher is started
``init_process_group`` is called         ``begin``: the box, if there is none yet; the recorder is
                                         attached, so that collectives are recorded
the process ends                         ``at_exit``: the exception that ends it, or the latent
                                         faults, and the final phase are written
it is forked                             ``_after_fork_in_child``: the child records nothing, unless
                                         it becomes a rank itself
=======================================  ==========================================================
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import logging
import multiprocessing.util
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from commlens import config
from commlens.blackbox import job_dirs
from commlens.blackbox import layout as L
from commlens.capture import rank_environment, uncaught
from commlens.capture.init_hooks import safely
from commlens.capture.rank_environment import PlaceInJob
from commlens.native import nccl_profiler
from commlens.text import ranks_phrase

log = logging.getLogger("commlens")
_WATCHER_AFTER_S = 0.05  # from the import of torch: a process may die at any moment
_ACCELERATE_ALONE = " (on CPUs, Accelerate needs ACCELERATE_USE_CPU=true or Accelerator(cpu=True))"


class Recording:
    """The box, the recorder and the watchdog thread of this process, and whether they are open."""

    def __init__(
        self,
        settings: config.Settings,
        make_verifier: Callable[..., Any],
        dump: Callable[[str, Path, config.Settings], Path],
    ) -> None:
        self.settings = settings
        self.make_verifier = make_verifier
        self.dump = dump
        self.pid = os.getpid()  # of the process that opened the box: a fork has another one
        self.lock = threading.Lock()  # held to open the box
        # the box's writer, and what uses it; None: no box is open
        self.writer: Any = None
        self.recorder: Any = None
        self.watchdog: Any = None
        self.setups: Any = None  # records the calls that make groups
        self.job_dir: Path | None = None  # the folder of the job's boxes
        self.attached = False  # the recorder gets the collectives
        self.initialised = False  # a default group was made
        self.given_up = False  # there is no box, or there was one: none is made
        self.watcher_timer: threading.Timer | None = None  # None once the watcher was started
        self.watcher_pid = 0
        self.watcher_replacement: Any = None  # starts a watcher when one has died
        self.exception_seen = False  # the one that ends the process
        self._thread_errors: set[Any] = set()  # places at which exceptions ended threads
        self.expecting: list[str] = []  # labels of `commlens.expect_slow()`, the innermost last
        self.began_late = False  # a process group existed before recording was switched on
        self.before_end: Callable[[], None] | None = None  # of the default group
        self.regions = 0  # nesting of `commlens.verify()`

    @property
    def is_open(self) -> bool:
        """Whether a box is open in this very process, not in the parent that it was forked from."""
        return self.recorder is not None and self.pid == os.getpid()

    @property
    def is_recording(self) -> bool:
        """Whether collectives are recorded in this very process."""
        return self.attached and self.is_open

    # --- the beginning

    def begin_early(self) -> None:
        """Make the box if a launcher made this process a rank of several."""
        place = rank_environment.place_of()
        if place.rank >= 0 and place.world_size > 1 and place.meeting:
            self.open(place, early=True)

    def begin_late(self) -> None:
        """Begin in a process that has a default group already."""
        import torch.distributed as dist

        self.began_late = True
        safely(
            self.begin,
            PlaceInJob(dist.get_rank(), dist.get_world_size(), rank_environment.place_of().meeting),
        )
        if self.is_recording:
            self.recorder.groups.started_again()
            safely(self.note_default_group)
            if self.recorder.verifier is not None:
                safely(self._meet, self.recorder.verifier.meet)

    def begin(self, place: PlaceInJob) -> None:
        """Make the box if there is none, and attach the recorder. Called when
        ``init_process_group`` is.
        """
        # Processes that only pretend to be many ranks, as in a test with torch's fake backend, are
        # recorded only if the program itself has switched recording on.
        if place.is_pretended and config.is_switched_on(os.environ):
            self._pause()
            return
        if self.attached and self.pid == os.getpid():
            return
        self.open(place)
        if not self.is_open:
            return
        from commlens.tap import torch_patches

        self.recorder.on_unreadable_reduce_op = torch_patches.tap_reduce_ops
        if depth := int(bool(self.settings.debug)) + self.regions:
            safely(self._verify, place.rank, depth)
        torch_patches.set_recorder(self.recorder)
        self.recorder.attach()
        self.attached = True
        uncaught.hook(self._record_uncaught)
        safely(uncaught.hook_ray_train, self._record_uncaught)
        self._start_watcher()

    def open(self, place: PlaceInJob, *, early: bool = False) -> None:
        """Make the box, once per process.

        Args:
            place: of the process in its job.
            early: ``init_process_group`` has not been called. Then a child of a rank, such as a
                worker of a data loader, gets no box, and may get one later.
        """
        with self.lock:
            if self.recorder is not None or self.given_up:
                return
            self.pid = os.getpid()  # perhaps forked from a process that was switched on
            if place.rank < 0:
                return  # not known yet; before_new_group will know it
            # The heavy half is imported here, so that a process which never becomes a rank does not
            # pay for it.
            from commlens.capture import job_box

            folder = job_box.folder_of(self.settings, place, early=early)
            if folder is None:
                self.given_up = not early
                if not early:
                    log.warning(
                        "commlens: process %d is not recorded: a rank started it, which has its"
                        " rank or its job. Of such processes, only the stacks are read",
                        self.pid,
                    )
                return
            self.given_up = True  # until everything below has worked
            if not self._make_box(folder, place):
                return
            self._start_watchdog(place.rank)
            self.given_up = False
            self._hook_the_end()
            self.watcher_timer = threading.Timer(_WATCHER_AFTER_S, self._start_watcher)
            self.watcher_timer.daemon = True
            if early:
                self.watcher_timer.start()

    def _make_box(self, folder: str, place: PlaceInJob) -> bool:
        """Make the box and its recorder; return False if there can be no box."""
        from commlens.capture import job_box, native_recorder
        from commlens.capture.setups import Setups

        settings = self.settings
        make_writer, make_recorder = native_recorder.choose(settings.engine)
        box = job_box.make_box(settings, folder, place, make_writer)
        if box is None:
            return False
        self.job_dir, self.writer = box
        if settings.nccl_profiler != "off":
            safely(nccl_profiler.switch_on, settings.nccl_profiler, self.job_dir, os.environ)
        self.watcher_replacement = (
            None if settings.watched else job_box.WatcherReplacement(settings, self.job_dir)
        )
        self.recorder = make_recorder(
            self.writer, cpp_stack=settings.cpp_stack, timing=settings.timing
        )
        self.setups = Setups(self.recorder, place.world_size)
        return True

    def _start_watchdog(self, rank: int) -> None:
        from commlens.capture.watchdog import Watchdog

        prefix = self.settings.dump_pipe
        self.watchdog = Watchdog(
            self.recorder,
            pipe=Path(f"{prefix}{rank}.commlens.pipe") if prefix else None,
            on_pipe=self.dump_now,
            on_tick=self._on_tick,
        )
        self.watchdog.start()

    def _hook_the_end(self) -> None:
        """Install the hooks that close the box, whichever way the process ends, and write the
        exception that ends it.
        """
        os.register_at_fork(after_in_child=self._after_fork_in_child)
        atexit.register(self.at_exit)
        # A child of multiprocessing leaves by os._exit, without atexit handlers.
        multiprocessing.util.Finalize(None, self.at_exit, exitpriority=-1000)
        uncaught.hook(self._record_uncaught)
        safely(uncaught.hook_multiprocessing, self._record_uncaught)
        uncaught.hook_threads(self._record_thread)
        if self.settings.dump_signal:
            safely(self._dump_on_signal, self.settings.dump_signal)

    def _dump_on_signal(self, name: str) -> None:
        """Dump on a signal, ``"SIGUSR2"``, and then do what the signal did before."""
        number = signal.Signals[name]
        previous = signal.getsignal(number)
        if getattr(previous, "recording", None) is self:
            return

        def handler(signum: int, frame: Any) -> None:
            if self.pid == os.getpid():
                threading.Thread(target=self.dump_now, name="commlens-dump", daemon=True).start()
            if callable(previous):
                previous(signum, frame)

        handler.recording = self  # type: ignore[attr-defined]
        signal.signal(number, handler)

    def note_default_group(self) -> None:
        """Write into the box that a default group exists, with its size and timeout."""
        import torch.distributed as dist

        self.initialised = True
        self.writer.word(L.RANK_WORLD, (dist.get_rank() + 1) << 32 | dist.get_world_size())
        self.writer.word(L.TIMEOUT_MS, rank_environment.default_timeout_ms())
        self.writer.word(L.PHASE, L.PHASE_INITIALISED)

    def reopen(self, settings: config.Settings) -> None:
        """Replace the box by one with other settings, before anything is recorded in it, and end
        its watcher.
        """
        if settings == self.settings:
            return
        self.settings = settings
        if self.is_open:
            from commlens.capture import job_box

            if self.watcher_timer is not None:
                self.watcher_timer.cancel()
            job_box.end_watcher(self.watcher_pid, self.job_dir)
            self.watchdog.stop()
            self.recorder.release()
            job_dirs.remove_box(self.writer.path)
            self.recorder = None
            self.begin_early()

    # --- verification

    def enter_verification(self) -> None:
        """Begin to verify, and make a verifier if there is none."""
        if self.recorder.verifier is None:
            import torch.distributed as dist

            self._verify(dist.get_rank(), 0)
        self._meet(self.recorder.verifier.enter)

    def _verify(self, rank: int, depth: int) -> None:
        """Make the verifier of this rank.

        Args:
            rank: of this process.
            depth: how many regions that verify surround what comes next; 0: it verifies only once
                it is entered.
        """
        from commlens.tap import torch_patches

        settings = self.settings
        verifier = self.make_verifier(
            self.job_dir,
            rank,
            timeout_s=functools.lru_cache(maxsize=1)(
                lambda: settings.verify_timeout or rank_environment.default_timeout_ms() / 1000
            ),
            active=depth > 0,
            late=rank_environment.ranks_of_this_node(rank) if self.began_late else (),
            sample=settings.debug == config.SAMPLE,
            make_exchange=self.recorder.make_exchange,
        )
        for _ in range(depth - 1):
            verifier.enter()
        self.recorder.verifier = verifier
        torch_patches.listen()

    def _meet(self, wait: Callable[[], list[int]]) -> None:
        """Begin to verify in the middle of a job. ``wait`` waits for the other ranks, and returns
        those that did not come: nothing can be compared with theirs.
        """
        missing = wait()
        if missing and self.began_late:
            # Collectives are numbered from when recording began, which matches only the ranks that
            # began at the same point.
            self.recorder.verifier.stop()
            log.warning(
                "commlens: collectives are not verified here: %s did not switch verification on at"
                " the same point of the program",
                ranks_phrase(missing),
            )
        elif missing:
            log.warning(
                "commlens: %s did not reach the point where verification begins: no rank is"
                " compared with %s until then",
                ranks_phrase(missing),
                "it" if len(missing) == 1 else "them",
            )

    def _warn_if_nothing_was_verified(self) -> None:
        """Warn, once on a node, that the ranks of a job which was to be verified never met."""
        verifier = self.recorder.verifier
        announced = verifier is not None and verifier.has_announced
        place, local = rank_environment.place_of(), rank_environment.local_rank()
        is_first_of_several = place.world_size > 1 and (
            local == 0 or (local < 0 and place.rank <= 0)
        )
        if (
            self.settings.debug
            and not announced
            and not self.writer.last_index
            and is_first_of_several
        ):
            log.warning(
                "commlens: nothing was verified: this run %s, so each of its %d processes worked"
                " alone%s.",
                "issued no collective" if self.initialised else "made no process group",
                place.world_size,
                _ACCELERATE_ALONE if "accelerate" in sys.modules else "",
            )

    # --- the watcher

    def _on_tick(self, now: int) -> None:
        """Called by the watchdog thread four times a second."""
        self.setups.note_store_wait(now)
        if self.watcher_replacement is not None:
            self.watcher_replacement.look(now)

    def _start_watcher(self) -> None:
        """Start the node's watcher, once: by the timer, or earlier if the process may end soon."""
        timer, self.watcher_timer = self.watcher_timer, None
        if timer is not None and not self.settings.watched and self.is_open:
            from commlens.capture import job_box

            timer.cancel()
            self.watcher_pid = safely(job_box.start_watcher, self.settings, self.job_dir) or 0

    # --- the end

    def report_hazards(self) -> None:
        """Write the program's latent faults into the box, and log those that are new on this node,
        unless the process ends by an exception, which leaves much undone.
        """
        if self.exception_seen or sys.exc_info()[0] is not None:
            return
        if self.job_dir is not None:
            self.recorder.hazards.report(self.job_dir)

    def record_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Write the exception that ends the process into the box."""
        self.exception_seen = True
        uncaught.record_exception(self.writer, kind, error, trace)
        uncaught.hide_our_frames(error)

    def _record_uncaught(self, *exception: Any) -> None:
        if self.is_open:
            safely(self.record_exception, *exception)
            self._start_watcher()  # the timer may still run

    def _record_thread(self, ended: threading.ExceptHookArgs) -> None:
        if self.is_open:
            safely(uncaught.record_thread, self.writer, ended, self._thread_errors)

    def at_exit(self) -> None:
        """Close the box at the end of the process. In a child of multiprocessing, the exception
        that ends it may be under way.
        """
        if self.pid != os.getpid():
            return
        if self.is_open:
            kind, error, trace = sys.exc_info()
            if isinstance(error, SystemExit) and not error.code:
                error = None  # sys.exit(): the process ends as it should
            if kind is not None and error is not None:
                safely(self.record_exception, kind, error, trace)
            if self.initialised:
                safely(self.report_hazards)
            else:
                # The timer may still run, and the other ranks will wait for this one.
                self._start_watcher()
                if self.watcher_replacement is not None and not self.watcher_pid:
                    safely(self.watcher_replacement.start)
            if error is None and not self.exception_seen:
                safely(self._warn_if_nothing_was_verified)
        safely(self.close, L.PHASE_CLOSED_BY_EXCEPTION if self.exception_seen else L.PHASE_CLOSED)

    def _pause(self) -> None:
        """Record nothing until the next ``init_process_group`` with other processes; free the box
        of a process that was no rank yet.
        """
        if self.is_recording:
            self.recorder.detach()
            self.attached = False
        elif self.is_open:
            self.close(L.PHASE_CLOSED)
            job_dirs.remove_box(self.writer.path)
            self.given_up = False

    def close(self, phase: int) -> None:
        """Stop recording and write the final phase into the box."""
        if not self.is_open:
            return
        from commlens.tap import torch_patches

        self.watchdog.stop()
        self.watchdog.tick()
        self.writer.word(L.PHASE, phase if self.initialised else phase + L.PHASE_NEVER_INITIALISED)
        self.recorder.detach()
        torch_patches.set_recorder(None)
        if self.recorder.verifier is not None:
            self.recorder.verifier.close()
        self.recorder.release()
        self.recorder, self.attached = None, False
        self.given_up = True

    def _after_fork_in_child(self) -> None:
        """Detach a forked child, which must write nothing into its parent's box. It is a rank if it
        calls ``init_process_group`` itself.
        """
        from commlens.tap import tap, torch_patches

        tap.detach_all()
        torch_patches.set_recorder(None)
        self.recorder, self.attached, self.initialised, self.given_up = None, False, False, False
        self.lock = threading.Lock()  # another thread of the parent may have had it
        self._thread_errors = set()  # those of the parent are in its own box

    # --- what the user asks for

    def dump_now(self, directory: str | None = None) -> Path | None:
        """Dump this job's boxes on this node; return None, with one line in the log, if that
        fails.
        """
        if self.job_dir is None:
            return None
        try:
            return self.dump(directory or self.settings.dump_dir, self.job_dir, self.settings)
        except Exception as error:
            log.warning("commlens: could not dump: %s: %s", type(error).__name__, error)
            return None

    def name_world(self, name: str) -> None:
        """Write a name for this program into the box, now and into those that are made later."""
        self.settings = dataclasses.replace(self.settings, world=name)
        if self.is_open:
            self.writer.word(L.WORLD, self.writer.add_blob({"k": "text", "text": name}))

    def write_expecting(self) -> None:
        """Write the innermost label of ``expect_slow`` into the box; not in a forked child, whose
        box is its parent's.
        """
        if self.is_open:
            label = self.expecting[-1] if self.expecting else None
            self.writer.word(
                L.EXPECTING,
                self.writer.add_blob({"k": "text", "text": label[:200]}) if label else 0,
            )
