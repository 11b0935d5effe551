"""Which process sent this one a signal, from a handler in C (``_senders.c``) in front of Python's.

Optional: where it was not built, no sender is known. Only for the launcher, whose signals Python
handles; a rank that SIGTERM ends by default has no handler to stand in front of.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any, Final

from commlens.model.sender import Sender
from commlens.processes.process import read_text
from commlens.text import printable

_FROM_THE_KERNEL: Final = 0x80  # SI_KERNEL of siginfo.h
_FROM_A_PROCESS: Final = (0, -1, -6)  # SI_USER, SI_QUEUE, SI_TKILL

_native: Any = None
try:
    from commlens.processes import _senders  # type: ignore[attr-defined,unused-ignore]
except ImportError:
    pass
else:
    _native = _senders

AVAILABLE: Final[bool] = _native is not None
"""Whether the handler in C was built."""


@contextlib.contextmanager
def senders_remembered(numbers: Collection[int]) -> Iterator[None]:
    """Inside, remember the sender of each of these signals that Python handles, from the moment in
    which its handler is set: a signal may come at once.
    """
    if _native is None:
        yield
        return
    set_handler = signal.signal

    @functools.wraps(set_handler)
    def set_handler_and_listen(number: int, handler: Any) -> Any:
        former = set_handler(number, handler)
        if number in numbers:
            _native.listen(number)
        return former

    for number in numbers:
        _native.listen(number)
    signal.signal = set_handler_and_listen  # type: ignore[assignment]
    try:
        yield
    finally:
        signal.signal = set_handler


def take_sender(number: int) -> Sender | None:
    """Return the sender of the first such signal since the last call; None if it is not known, or
    is this process.
    """
    found = _native.take(number) if _native is not None else None
    if found is None:
        return None
    code, pid, uid, stat = found
    if code == _FROM_THE_KERNEL:
        return Sender(is_kernel=True)
    if code not in _FROM_A_PROCESS or pid == os.getpid():
        return None
    # the end of /proc/PID/stat may be missing
    name, _, fields = stat.decode("utf-8", "replace").partition("(")[2].rpartition(")")
    after = fields.split()
    parent = int(after[1]) if len(after) > 2 and after[1].isdecimal() else 0
    # in a pid namespace, the user of a process outside it may be unknown, too
    sender = Sender(pid=pid, uid=uid, is_own_user=uid == os.getuid(), name=printable(name))
    if parent <= 1:
        return sender
    parent_name = (read_text(f"/proc/{parent}/comm") or "").strip()
    return replace(sender, parent_pid=parent, parent_name=printable(parent_name))
