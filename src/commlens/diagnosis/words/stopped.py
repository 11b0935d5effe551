"""A launcher that a signal stopped: the line that is printed while it ends the job."""

from __future__ import annotations

from commlens.diagnosis.causes.stopped import Stopped
from commlens.diagnosis.words.next_steps import outside_cause, outside_step
from commlens.model.sender import Sender
from commlens.text import capital, rank_phrase


def stopped_line(stop: Stopped) -> str:
    """Return a line about a launcher that ends its job because it received a signal."""
    origin = f" from {_sender_phrase(stop.sender)}" if stop.sender is not None else ""
    return " ".join(
        [f"the launcher received {stop.signal}{origin} and ends the job.", *_advice(stop)]
    )


def _sender_phrase(sender: Sender) -> str:
    """``"kill (pid 4242, the job's own user, started by bash, pid 4100)"``."""
    if sender.is_kernel:
        return "the kernel"
    if not sender.pid:
        return "a process outside this container"
    if sender.rank is not None:
        return f"{rank_phrase(sender.rank)} (pid {sender.pid})"
    user = "root" if sender.uid == 0 else f"user {sender.uid}"
    about = [f"pid {sender.pid}", "the job's own user" if sender.is_own_user else user]
    if sender.parent_name:
        about.append(f"started by {sender.parent_name}, pid {sender.parent_pid}")
    return f"{sender.name or 'a process'} ({', '.join(about)})"


def _advice(stop: Stopped) -> list[str]:
    match stop.by:
        case "unknown":
            cause, step = outside_cause(stop.signal), outside_step(stop.signal)
            return [*filter(None, [cause]), f"{capital(step)}."]
        case "system":
            return ["Look at the scheduler's log (preemption, time limit)."]
        case "process":
            return []
