"""Where a signal came from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sender:
    """The sender of a signal, as the kernel reports it."""

    is_kernel: bool = False  # the kernel itself: Ctrl-C, or a terminal that went away
    pid: int = 0  # 0: the kernel, or a process that this container cannot see
    uid: int = 0
    is_own_user: bool = False  # the user that the job runs as
    name: str = ""  # of its program; empty: the process ended too soon, or is hidden
    parent_pid: int = 0  # of the process that started it; 0: unknown, or init
    parent_name: str = ""
    rank: int | None = None  # of the job
