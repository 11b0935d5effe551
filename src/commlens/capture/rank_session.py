"""One process's recording: its black box, the recorder, and what torch's calls that make and
destroy groups mean for them.
"""

from __future__ import annotations

import atexit
import functools
import logging
import multiprocessing.util
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from commlens import config
from commlens.blackbox import layout as L
from commlens.capture import dump_signal, rank_environment, uncaught
from commlens.capture.init_hooks import After, safely
from commlens.capture.rank_environment import Place
from commlens.text import ranks_phrase

log = logging.getLogger("commlens")
_ACCELERATE_ALONE = " (on CPUs, Accelerate needs ACCELERATE_USE_CPU=true or Accelerator(cpu=True))"
_WATCH_AFTER_S = 0.05  # from the import of torch: a process may die at any moment


class Session:
    """Recording in this process, and the listener of the hooks in ``torch.distributed``."""

    def __init__(
        self,
        settings: config.Settings,
        make_verifier: Callable[..., Any],
        dump: Callable[[str, Path, config.Settings], Path],
    ) -> None:
        self.settings = settings
        self.make_verifier = make_verifier
        self.dump = dump
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.writer: Any = None
        self.recorder: Any = None
        self.watchdog: Any = None
        self.setups: Any = None
        self.watcher: Any = None  # makes sure that there is one
        self.attached = False
        self.initialised = False
        self.watch_later: threading.Timer | None = None
        self.watcher_pid = 0
        self.job_dir: Path | None = None
        self.given_up = False
        self.exception_seen = False
        self.expecting: list[str] = []
        self.began_late = False  # a process group existed before recording was switched on
        self.regions = 0  # nesting of `commlens.verify()`

    @property
    def is_open(self) -> bool:
        """Whether a box is open in this very process, not in the parent that it was forked from."""
        return self.recorder is not None and self.pid == os.getpid()

    @property
    def is_recording(self) -> bool:
        """Whether collectives are recorded in this very process."""
        return self.attached and self.is_open

    def open(self, place: Place, *, early: bool = False) -> None:
        """Make the box, once per process.

        Args:
            place: of the process in its job.
            early: ``init_process_group`` has not been called, so a rank's child is no rank.
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

            settings = self.settings
            folder = job_box.folder_of(settings, place, early=early)
            if folder is None:
                self.given_up = not early
                if not early:
                    log.warning(
                        "commlens: process %d is not recorded: a rank started it, and has its rank"
                        " or its job",
                        self.pid,
                    )
                return
            self.given_up = True  # until everything below has worked
            from commlens.capture import engine
            from commlens.capture.setups import Setups
            from commlens.capture.watchdog import Watchdog

            made = engine.choose(settings.engine)
            box = job_box.make_box(settings, folder, place, made.box_writer)
            if box is None:
                return
            self.job_dir, self.writer = box
            self.watcher = (
                job_box.WatcherReplacement(settings, self.job_dir) if not settings.watched else None
            )
            self.recorder = made.recorder(
                self.writer, cpp_stack=settings.cpp_stack, timing=settings.timing
            )
            self.setups = Setups(self.recorder, place.world_size)
            pipe = (
                Path(f"{settings.dump_pipe}{place.rank}.commlens.pipe")
                if settings.dump_pipe
                else None
            )
            self.watchdog = Watchdog(
                self.recorder, pipe=pipe, on_pipe=self.dump_now, on_tick=self._on_tick
            )
            self.watchdog.start()
            self.given_up = False
            os.register_at_fork(after_in_child=self._after_fork_in_child)
            atexit.register(self.at_exit)
            # A child of multiprocessing leaves by os._exit, without atexit handlers.
            multiprocessing.util.Finalize(None, self.at_exit, exitpriority=-1000)
            uncaught.hook(self._record_uncaught)
            safely(uncaught.hook_multiprocessing, self._record_uncaught)
            if settings.dump_signal:
                safely(dump_signal.dump_on_signal, settings.dump_signal, self.dump_now)
            self.watch_later = threading.Timer(_WATCH_AFTER_S, self._watch)
            self.watch_later.daemon = True
            if early:
                self.watch_later.start()

    def begin(self, place: Place) -> None:
        """Make the box if there is none, and attach the recorder. Called when
        ``init_process_group`` is.
        """
        # not asked for by the program itself
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
        self._watch()

    def _pause(self) -> None:
        """Record nothing until the next ``init_process_group`` with other processes; free the box
        of a process that was no rank yet.
        """
        if self.is_recording:
            self.recorder.detach()
            self.attached = False
        elif self.is_open:
            self.close(L.PHASE_CLOSED)
            self.writer.path.unlink(missing_ok=True)
            self.given_up = False

    def _on_tick(self, now: int) -> None:
        """Called by the watchdog thread four times a second."""
        self.setups.note_store_wait(now)
        if self.watcher is not None:
            self.watcher.look(now)

    def _watch(self) -> None:
        """Start the node's watcher, once."""
        timer, self.watch_later = self.watch_later, None
        if timer is not None and not self.settings.watched and self.is_open:
            from commlens.capture import job_box

            timer.cancel()
            self.watcher_pid = safely(job_box.start_watcher, self.settings, self.job_dir) or 0

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
            Place(dist.get_rank(), dist.get_world_size(), rank_environment.place_of().meeting),
        )
        if self.is_recording:
            self.recorder.groups.started_again()
            safely(self._initialised)
            if self.recorder.verifier is not None:
                safely(self._meet, self.recorder.verifier.meet)

    # --- what the hooks call

    def before_init(self, place: Place) -> After:
        """``init_process_group`` was called."""
        if not place.is_pretended:
            self._warn_of_twin(place)
        self.begin(place)
        if not self.is_recording:
            return None
        self.setups.init_began(place.world_size, place.backend, place.meeting or None)
        return self._after_init

    def _warn_of_twin(self, place: Place) -> None:
        from commlens.capture import job_box

        if twin := safely(job_box.twin_of, self.settings, place):
            log.warning("commlens: %s.", twin)

    def _after_init(self, raised: bool, _: Any) -> None:
        self.setups.init_ended(raised)
        if not raised:
            self._initialised()
            if self.recorder.verifier is not None and self.settings.debug:
                safely(self.recorder.verifier.link)

    def _initialised(self) -> None:
        """There is a default group."""
        import torch.distributed as dist

        self.initialised = True
        self.writer.word(L.RANK_WORLD, (dist.get_rank() + 1) << 32 | dist.get_world_size())
        self.writer.word(L.TIMEOUT_MS, rank_environment.default_timeout_ms())
        self.writer.word(L.PHASE, L.PHASE_INITIALISED)

    def before_new_group(
        self,
        group_rank: int,
        group_size: int,
        ranks: Sequence[int],
        backend: str,
        name: str,
        description: str,
    ) -> After:
        """A group is about to be made. For a program that goes past ``init_process_group``, this is
        where recording begins.
        """
        import torch.distributed as dist

        is_default = not dist.is_initialized()
        if is_default:
            safely(
                self.begin,
                rank_environment.place_of(
                    (), {"rank": group_rank, "world_size": group_size, "backend": backend}
                ),
            )
        if not self.is_recording:
            return None
        if is_default:
            # Calls of init_process_group do not show this: one may be refused, and init_device_mesh
            # may have imported its name before commlens was switched on.
            self.recorder.groups.started_again()
            if self.recorder.verifier is not None:
                self.recorder.verifier.group_destroyed()
            self.setups.init_began(group_size, backend, None)
        else:
            self.setups.group_began(name, ranks, backend, description)
        from commlens.capture import connections

        if not is_default:
            safely(self.recorder.hazards.group_made, ranks)
        is_member = is_default or dist.get_rank() in ranks
        before = safely(connections.sockets) if is_member else None

        def after(raised: bool, made: Any) -> None:
            (self.setups.init_ended if is_default else self.setups.ended)(raised)
            if is_member and not raised:
                if is_default:
                    self.initialised = True
                    self.writer.word(L.PHASE, L.PHASE_INITIALISED)
                if before is not None:
                    connections.note(made[0], before)

        return after

    def before_mesh(self, shape: Any, names: Any) -> After:
        """``init_device_mesh`` was called."""
        import torch.distributed as dist

        if not self.is_recording:
            return None
        self.setups.mesh_began(shape, names, dist.get_world_size() if dist.is_initialized() else 0)
        return lambda *_: self.setups.mesh_ended()

    def before_split(self, parent: Any, split_ranks: Any) -> After:
        """``split_group`` was called."""
        import torch.distributed as dist

        if not self.is_recording:
            return None
        self.setups.split_began(
            dist.get_process_group_ranks(parent or dist.group.WORLD), split_ranks
        )
        return lambda raised, _: self.setups.ended(raised)

    def before_store_wait(self, op: str, keys: Sequence[str]) -> After:
        """A thread is about to wait for keys in a store."""
        if not self.is_open or not self.setups.store_wait_began(op, keys):
            return None
        return lambda *_: self.setups.store_wait_ended()

    def before_store_write(self, keys: Sequence[str]) -> After:
        """A thread writes keys into a store."""
        if self.is_recording:
            self.setups.keys_written(keys)
        return None

    def before_destroy(self, is_last: bool) -> Callable[[], None] | None:
        """``destroy_process_group`` was called, for all groups if ``is_last``. Returns the
        verifier's last check, which may raise a refusal.
        """
        if not self.is_recording:
            return None
        from commlens.tap import torch_patches

        verifier = self.recorder.verifier
        if is_last:
            safely(self._report_hazards)
        safely(self.recorder.sweep)
        safely(self.recorder.groups.before_destroy)
        # gloo's thread may be waiting for the GIL to free the last op's tensors, and torch 2.6
        # joins that thread with the GIL held: a deadlock of its own (4 of 24 bare runs), to which
        # the sweep would add.
        time.sleep(0.2 if torch_patches.torch_version() < (2, 7) else 0.01)
        return verifier.before_end if verifier is not None else None

    def after_destroy(self) -> None:
        """``destroy_process_group`` returned: after the last group, nobody waits for this
        process.
        """
        import torch.distributed as dist

        if self.is_recording and not dist.is_initialized():
            self.writer.word(L.PHASE, L.PHASE_LEFT)

    def _report_hazards(self) -> None:
        """Write the program's latent faults into the box, and log those that are new on this node,
        unless it ends by an exception, which leaves much undone.
        """
        if self.exception_seen or sys.exc_info()[0] is not None:
            return
        if self.job_dir is not None:
            self.recorder.hazards.report(self.job_dir)

    # --- verification

    def _verify(self, rank: int, depth: int) -> None:
        """Give the recorder a verifier. With depth 0, it verifies only after it is entered."""
        from commlens.tap import torch_patches

        settings, recorder = self.settings, self.recorder
        timeout_s = functools.lru_cache(maxsize=1)(
            lambda: settings.verify_timeout or rank_environment.default_timeout_ms() / 1000
        )
        late = rank_environment.ranks_of_this_node(rank) if self.began_late else ()
        verifier = self.make_verifier(
            self.job_dir,
            rank,
            timeout_s=timeout_s,
            active=depth > 0,
            late=late,
            sample=settings.debug == config.SAMPLE,
            make_exchange=recorder.make_exchange,
        )
        for _ in range(depth - 1):
            verifier.enter()
        recorder.verifier = verifier
        torch_patches.listen()

    def enter(self) -> None:
        """Begin to verify, and make a verifier if there is none."""
        if self.recorder.verifier is None:
            import torch.distributed as dist

            self._verify(dist.get_rank(), 0)
        self._meet(self.recorder.verifier.enter)

    def _meet(self, wait: Callable[[], list[int]]) -> None:
        """Begin to verify in the middle of a job, and name the ranks that did not: nothing can be
        compared with theirs.
        """
        missing = wait()
        if missing and self.began_late:
            # Collectives are numbered from when recording began, which matches only the ranks that
            # began at the same point.
            self.recorder.verifier.stop()
        if missing:
            log.warning("commlens: %s", _unverified(missing, began_late=self.began_late))

    # --- the end

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
            self._watch()  # if it was too soon

    def at_exit(self) -> None:
        """Close the box at the end of the process. In a child of multiprocessing, the exception
        that ends it may be under way.
        """
        if self.pid == os.getpid():
            kind, error, trace = sys.exc_info()
            if isinstance(error, SystemExit) and not error.code:
                error = None
            if self.is_open and kind is not None and error is not None:
                safely(self.record_exception, kind, error, trace)
            if self.initialised and self.is_open:
                safely(self._report_hazards)
            if not self.initialised and self.is_open:
                self._watch()  # if it was too soon: the other ranks will wait for this one
                if self.watcher is not None and not self.watcher_pid:
                    safely(self.watcher.start)
            if self.is_open and error is None and not self.exception_seen:
                safely(self._warn_if_nothing_was_verified)
            safely(
                self.close, L.PHASE_CLOSED_BY_EXCEPTION if self.exception_seen else L.PHASE_CLOSED
            )

    def _warn_if_nothing_was_verified(self) -> None:
        """Say, once on a node, that the ranks of a job which was to be verified never met."""
        verifier, place = self.recorder.verifier, rank_environment.place_of()
        local = rank_environment.local_rank()
        if (
            not self.settings.debug
            or place.world_size < 2
            or (verifier is not None and verifier.has_announced)
            or self._issued() > 0
            or local > 0
            or (local < 0 and place.rank > 0)
        ):
            return
        log.warning(
            "commlens: nothing was verified: this run %s, so each of its %d processes worked"
            " alone%s.",
            "issued no collective" if self.initialised else "made no process group",
            place.world_size,
            _ACCELERATE_ALONE if "accelerate" in sys.modules else "",
        )

    def _issued(self) -> int:
        """Return the number of collectives recorded so far."""
        with self.writer.path.open("rb") as box:
            box.seek(L.NEXT_INDEX)
            count: int = L.LIVE_WORD.unpack(box.read(L.LIVE_WORD.size))[0]
        return count

    def _after_fork_in_child(self) -> None:
        """Detach a forked child, which must write nothing into its parent's box. It is a rank if it
        calls ``init_process_group`` itself.
        """
        from commlens.tap import tap, torch_patches

        tap.detach_all()
        torch_patches.set_recorder(None)
        self.recorder, self.attached, self.initialised, self.given_up = None, False, False, False
        self.lock = threading.Lock()  # another thread of the parent may have had it

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

    def reopen(self, settings: config.Settings) -> None:
        """Make the box anew with other settings, before anything was recorded in it, and its
        watcher too.
        """
        if settings == self.settings:
            return
        self.settings = settings
        if self.is_open:
            from commlens.capture import job_box

            if self.watch_later is not None:
                self.watch_later.cancel()
            job_box.end_watcher(self.watcher_pid, self.job_dir)
            self.watchdog.stop()
            self.recorder.release()
            self.writer.path.unlink(missing_ok=True)
            self.recorder = None
            self.begin_early()

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


def _unverified(missing: list[int], *, began_late: bool) -> str:
    ranks = ranks_phrase(missing)
    if began_late:
        return (
            f"collectives are not verified here: {ranks} did not switch verification on at the same"
            " point of the program"
        )
    them = "it" if len(missing) == 1 else "them"
    return (
        f"{ranks} did not reach the point where verification begins: no rank is compared with"
        f" {them} until then"
    )
