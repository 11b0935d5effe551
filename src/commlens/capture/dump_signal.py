"""A signal that makes a rank dump its job."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any


def dump_on_signal(name: str, dump: Callable[[], object]) -> None:
    """Dump on a signal, and then do what the signal did before.

    Args:
        name: ``"SIGUSR2"`` or ``"USR2"``.
        dump: called in a thread of its own.
    """
    number = signal.Signals[name if name.startswith("SIG") else f"SIG{name}"]
    previous = signal.getsignal(number)

    def handler(signum: int, frame: Any) -> None:
        threading.Thread(target=dump, name="commlens-dump", daemon=True).start()
        if callable(previous):
            previous(signum, frame)

    signal.signal(number, handler)
