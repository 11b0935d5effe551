"""The native id of the calling thread, cached: a system call costs more than a look-up."""

from __future__ import annotations

import os
import threading


class _CurrentThread(threading.local):
    def __init__(self) -> None:
        self.id = threading.get_native_id()


current = _CurrentThread()
"""``current.id`` is the native id of the calling thread."""

os.register_at_fork(after_in_child=lambda: setattr(current, "id", threading.get_native_id()))
