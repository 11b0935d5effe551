"""Switches recording on and off in this process.

The box opens with the import of torch if a launcher made the process a rank, and collectives are
recorded from its first ``init_process_group`` on. A process without a rank in its environment gets
no box before it calls ``init_process_group``; a rank's children (workers of a data loader, of
inductor) inherit its environment and get none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from commlens import config
from commlens.blackbox import layout as L
from commlens.capture.init_hooks import hook_init, safely
from commlens.capture.recording import Recording
from commlens.capture.torch_events import TorchEvents

_recording: Recording | None = None
_events: TorchEvents | None = None


def recording() -> Recording | None:
    """Return the process's recording; None before :func:`start`."""
    return _recording


def is_started() -> bool:
    """Return whether :func:`start` has been called in this very process, not in the parent that it
    was forked from.
    """
    return _recording is not None and _recording.pid == os.getpid()


def start(
    settings: config.Settings,
    *,
    make_verifier: Callable[..., Any],
    dump: Callable[[str, Path, config.Settings], Path],
) -> None:
    """Open the box of a launcher's rank, and record from the first ``init_process_group`` on; at
    once if it has already run.

    A second call may change the settings before collectives are recorded, and may switch
    verification on afterwards.

    Args:
        settings: the settings.
        make_verifier: makes a :class:`commlens.verification.verifier.Verifier` from the same
            arguments.
        dump: dumps into a directory the job whose boxes are in a folder, with these settings, and
            returns the dump's folder.
    """
    global _recording, _events
    if _recording is not None and _recording.pid == os.getpid():
        if not _recording.is_recording:
            safely(_recording.reopen, settings)
        elif settings.debug and not _recording.settings.debug:
            _recording.settings = dataclasses.replace(
                _recording.settings, debug=settings.debug, verify_timeout=settings.verify_timeout
            )
            enter_verification()
        return
    import torch.distributed as dist

    if settings.box_entries == 0 or not dist.is_available():
        return
    _recording = Recording(settings, make_verifier, dump)
    _events = TorchEvents(_recording)
    hook_init(lambda: _events)
    if dist.is_initialized():
        _recording.begin_late()
    else:
        safely(_recording.begin_early)


def stop() -> None:
    """Stop recording and close the box. The job goes on."""
    if _recording is not None:
        if _recording.is_recording and _recording.recorder.verifier is not None:
            _recording.recorder.verifier.stop()  # the process may go on
        _recording.close(L.PHASE_CLOSED)


def enter_verification() -> None:
    """Verify from here on, as the other ranks do at the same point of the program. Waits for them
    for a limited time.
    """
    if _recording is not None and is_started():
        _recording.regions += 1
        if _recording.is_recording:
            safely(_recording.enter_verification)


def leave_verification() -> None:
    """Undo one :func:`enter_verification`."""
    if _recording is not None and is_started():
        _recording.regions -= 1
        if _recording.is_recording and _recording.recorder.verifier is not None:
            safely(_recording.recorder.verifier.leave)


@contextlib.contextmanager
def expect_slow(label: str) -> Iterator[None]:
    """Announce that the code inside takes long, so that the ranks waiting for it are not reported
    as stuck.

    Args:
        label: what it does, for the report ("checkpoint").
    """
    current = _recording
    if current is None or not current.is_open:
        yield
        return
    current.expecting.append(label)
    safely(current.write_expecting)
    try:
        yield
    finally:
        current.expecting.pop()
        safely(current.write_expecting)
