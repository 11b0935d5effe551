"""A launcher that a signal stopped: the line that is printed while it ends the job."""

from __future__ import annotations

from commlens.diagnosis.words.next_steps import outside_cause, outside_step
from commlens.model.sender import Sender
from commlens.text import capital


def stopped_line(signal: str, sender: Sender | None = None, *, parent: int = 0) -> str:
    """Return a line about a launcher that ends its job because it received a signal; empty for the
    signals that a person sends from the job's terminal.

    Args:
        signal: such as ``"SIGTERM"``.
        sender: None if it is not known.
        parent: the pid of the process that started the launcher. It may pass Ctrl-C on.
    """
    by_a_process = sender is not None and not sender.is_kernel and sender.pid != parent
    if signal not in ("SIGHUP", "SIGTERM") and not by_a_process:
        return ""
    origin = f" from {_sender_phrase(sender)}" if sender is not None else ""
    told = [f"the launcher received {signal}{origin} and ends the job.", *_advice(signal, sender)]
    return " ".join(told)


def _sender_phrase(sender: Sender) -> str:
    """``"kill (pid 4242, the job's own user, started by bash, pid 4100)"``."""
    if sender.is_kernel:
        return "the kernel"
    if not sender.pid:
        return "a process outside this container"
    if sender.rank is not None:
        return f"rank {sender.rank} (pid {sender.pid})"
    user = "root" if sender.uid == 0 else f"user {sender.uid}"
    about = [f"pid {sender.pid}", "the job's own user" if sender.is_own_user else user]
    if sender.parent_name:
        about.append(f"started by {sender.parent_name}, pid {sender.parent_pid}")
    return f"{sender.name or 'a process'} ({', '.join(about)})"


def _advice(signal: str, sender: Sender | None) -> list[str]:
    if sender is None or signal == "SIGHUP":
        return [*filter(None, [outside_cause(signal)]), f"{capital(outside_step(signal))}."]
    is_system = not sender.pid or (sender.uid == 0 and not sender.is_own_user)
    if signal == "SIGTERM" and is_system:
        return ["Look at the scheduler's log (preemption, time limit)."]
    return []
