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
from commlens.capture.rank_session import Session

_session: Session | None = None


def session() -> Session | None:
    """Return the process's session; None before :func:`start`."""
    return _session


def is_started() -> bool:
    """Return whether :func:`start` has been called in this very process, not in the parent that it
    was forked from.
    """
    return _session is not None and _session.pid == os.getpid()


def start(
    settings: config.Settings,
    *,
    make_verifier: Callable[..., Any],
    dump: Callable[[str, Path, config.Settings], Path],
) -> None:
    """Open the box of a launcher's rank, and record from the first ``init_process_group`` on; at
    once if it has already run.

    A second call may change the settings of a session that has not begun to record, and may switch
    verification on in one that has.

    Args:
        settings: the settings.
        make_verifier: makes a :class:`commlens.verification.verifier.Verifier` from the same
            arguments.
        dump: dumps into a directory the job whose boxes are in a folder, with these settings, and
            returns the dump's folder.
    """
    global _session
    if _session is not None and _session.pid == os.getpid():
        if not _session.is_recording:
            safely(_session.reopen, settings)
        elif settings.debug and not _session.settings.debug:
            _session.settings = dataclasses.replace(
                _session.settings, debug=settings.debug, verify_timeout=settings.verify_timeout
            )
            enter_verification()
        return
    import torch.distributed as dist

    if settings.box_entries == 0 or not dist.is_available():
        return
    _session = Session(settings, make_verifier, dump)
    hook_init(session)
    if dist.is_initialized():
        _session.begin_late()
    else:
        safely(_session.begin_early)


def stop() -> None:
    """Stop recording and close the box. The job goes on."""
    if _session is not None:
        if _session.is_recording and _session.recorder.verifier is not None:
            _session.recorder.verifier.stop()  # the process may go on
        _session.close(L.PHASE_CLOSED)


def enter_verification() -> None:
    """Verify from here on, as the other ranks do at the same point of the program. Waits for them
    for a limited time.
    """
    if _session is not None and is_started():
        _session.regions += 1
        if _session.is_recording:
            safely(_session.enter)


def leave_verification() -> None:
    """Undo one :func:`enter_verification`."""
    if _session is not None and is_started():
        _session.regions -= 1
        if _session.is_recording and _session.recorder.verifier is not None:
            safely(_session.recorder.verifier.leave)


@contextlib.contextmanager
def expect_slow(label: str) -> Iterator[None]:
    """Announce that the code inside takes long, so that the ranks waiting for it are not reported
    as stuck.

    Args:
        label: what it does, for the report ("checkpoint").
    """
    current = _session
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
