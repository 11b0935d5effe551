"""A launcher that a signal stopped: whether that is worth a line, and the sender of the signal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from commlens.model.sender import Sender

StoppedBy = Literal["unknown", "system", "process"]
"""The sender of the signal.

``unknown``: nobody saw it, or a terminal that went away. ``system``: probably a scheduler: root, or
a process outside the container. ``process``: any other one, which is named.
"""


@dataclass(frozen=True)
class Stopped:
    """A launcher that ends its job because it received a signal."""

    signal: str  # "SIGTERM"
    sender: Sender | None  # None if it is not known
    by: StoppedBy


def find_stop(signal: str, sender: Sender | None = None, *, parent: int = 0) -> Stopped | None:
    """Find why a launcher ends its job; None for the signals that a person sends from the job's
    terminal.

    Args:
        signal: such as ``"SIGTERM"``.
        sender: None if it is not known.
        parent: the pid of the process that started the launcher. It may pass Ctrl-C on.
    """
    by_a_process = sender is not None and not sender.is_kernel and sender.pid != parent
    if signal not in ("SIGHUP", "SIGTERM") and not by_a_process:
        return None
    if sender is None or signal == "SIGHUP":
        return Stopped(signal, sender, "unknown")
    is_system = not sender.pid or (sender.uid == 0 and not sender.is_own_user)
    return Stopped(signal, sender, "system" if signal == "SIGTERM" and is_system else "process")
