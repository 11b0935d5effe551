"""``commlens trace``: trace this process from its start and save the trace however it ends."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from commlens.model.trace import TraceData
from commlens.traces.trace import Trace
from commlens.tracing.patches import Patches
from commlens.tracing.session import LiveTrace

_WORKS_END_S: Final = 0.05

log = logging.getLogger("commlens")


def file_name(rank: int | None) -> str:
    """Return ``trace-rank3.json``; ``trace.json`` for a process without a rank."""
    return "trace.json" if rank is None else f"trace-rank{rank}.json"


class TracedProcess:
    """Traces this process and saves the trace once: at its end, or on SIGTERM.

    Errors are logged in one line and never raised into the program.
    """

    def __init__(self, directory: str, *, steps: str | None, depth: str, script: str) -> None:
        """Prepare. ``script`` is the command line to record in the trace."""
        self.live = LiveTrace(steps=steps, depth=depth)
        self.saved: Path | None = None
        self._directory = Path(directory).absolute()  # the program may change its working directory
        self._script = script
        self._pid = os.getpid()
        self.rank: int | None = None
        """This process's rank, current or former; None without a process group."""
        self._world_size = 1
        # at destroy_process_group: number of collectives and trace
        self._snapshot: tuple[int, TraceData] | None = None
        self._patches = Patches()
        self._saving = threading.Lock()
        self._finishing = False  # the main thread is about to save
        self._die_after_saving = False

    def start(self) -> None:
        """Start tracing."""
        try:
            self._patches.wrap(c10d, "_new_process_group_helper", self._new_group)
            self._patches.wrap(c10d, "destroy_process_group", self._destroy)
            self._patches.replace_aliases()
            self._save_on_sigterm()
            self.live.start()
        except Exception as error:
            self._fail("is not traced", error)

    def finish(self) -> Trace | None:
        """Stop, save and return the trace; None if there is none, or in a forked child."""
        if os.getpid() != self._pid:
            return None
        self._finishing = True
        try:
            self.live.stop()
            return self._save()
        except Exception as error:
            self._fail("could not save its trace", error)
            return None
        finally:
            if self._die_after_saving:
                _die_of_sigterm()

    # --- the file

    def _save(self) -> Trace | None:
        with self._saving:
            if self.saved is not None:
                return None
            trace = Trace(self._data())
            path = self._directory / file_name(self.rank)
            self._directory.mkdir(parents=True, exist_ok=True)
            trace.save(path)
            self.saved = path
            return trace

    def _data(self) -> TraceData:
        """Return the trace, or that of the last destroy_process_group if none follows."""
        self._note_rank()
        if self._snapshot is not None and self._snapshot[0] == self.live.tracer.dispatched:
            data = self._snapshot[1]
            data.steps = self.live.tracer.traced_steps()
        else:
            data = self.live.tracer.data()
        if self.rank is not None:
            data.rank, data.world_size = self.rank, self._world_size
        data.script = self._script
        return data

    def _note_rank(self) -> None:
        if dist.is_initialized():
            self.rank, self._world_size = dist.get_rank(), dist.get_world_size()

    # --- groups, which must be named before they are destroyed

    def _new_group(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        if self.rank is None and isinstance(made[0], dist.ProcessGroup):
            self.rank, self._world_size = made[0].rank(), made[0].size()
        return made

    def _destroy(self, original: Any, group: Any = None) -> Any:
        if os.getpid() == self._pid and (group is None or group is c10d._world.default_pg):
            try:
                self._note_rank()
                self._snapshot = self.live.tracer.dispatched, self.live.tracer.data()
            except Exception as error:
                self._fail("could not note its groups", error)
        # gloo's threads drop the last works, which hold the modes that trace and for this need the
        # GIL; a group that is destroyed joins these threads with the GIL held
        time.sleep(_WORKS_END_S)
        return original(group)

    # --- SIGTERM, with which torchrun ends the other workers after a death

    def _save_on_sigterm(self) -> None:
        """Save the trace on SIGTERM, then die of it. A handler of the program, earlier or later,
        takes precedence.

        A thread saves, woken through the wake-up descriptor, because the main thread may be stuck
        in a collective forever.
        """
        if (
            threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        ):
            return
        reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(reading, True)
        former = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        if former != -1:
            signal.set_wakeup_fd(former)
            os.close(reading)
            os.close(writing)
            return
        signal.signal(signal.SIGTERM, self._on_sigterm)
        threading.Thread(
            target=self._await_sigterm, args=(reading,), name="commlens-trace", daemon=True
        ).start()

    def _await_sigterm(self, reading: int) -> None:
        while data := os.read(reading, 64):
            is_ours = signal.getsignal(signal.SIGTERM) == self._on_sigterm
            # else the main thread saves and dies
            is_mine = not self._finishing or self.saved is not None
            if signal.SIGTERM in data and is_ours and is_mine:
                with contextlib.suppress(Exception):
                    self._save()
                _die_of_sigterm()

    def _on_sigterm(self, number: int, frame: Any) -> None:
        """Wait for the thread that ends the process; a forked child has none."""
        if os.getpid() != self._pid:
            _die_of_sigterm()
        if self._finishing and self.saved is None:
            self._die_after_saving = True
            return
        threading.Event().wait(10)
        _die_of_sigterm()

    def _fail(self, problem: str, error: Exception) -> None:
        log.warning(
            "commlens: process %d %s: %s: %s", self._pid, problem, type(error).__name__, error
        )


def _die_of_sigterm() -> None:
    """Die as if SIGTERM had no handler. Python allows resetting it only in the main thread; libc
    allows it in any.
    """
    sys.stdout.flush()
    ctypes.CDLL(None).signal(int(signal.SIGTERM), 0)
    os.kill(os.getpid(), signal.SIGTERM)
