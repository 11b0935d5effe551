"""What the recorder knows of the calling thread: its native id, cached, since a system call costs
more than a look-up; and whether C++ waits in it.
"""

from __future__ import annotations

import os
import threading


class _CurrentThread(threading.local):
    def __init__(self) -> None:
        self.id = threading.get_native_id()
        self.in_cpp_since = 0  # CLOCK_MONOTONIC in ns, when it entered a call that waits in C++
        self.followed_pass = -1  # the backward pass at whose end a callback of the recorder runs


current = _CurrentThread()
"""``current.id`` is the native id of the calling thread."""

os.register_at_fork(after_in_child=lambda: setattr(current, "id", threading.get_native_id()))
