"""Sleep until another process writes a word of shared memory: Linux's futex, through its system call. Standard library only.

Without it (another processor, a sandbox that forbids the call), ``wait`` sleeps for a moment, so that its caller polls.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys
import time
from typing import Any, Final

_NUMBERS: Final = {"x86_64": 202, "aarch64": 98, "arm64": 98, "riscv64": 98, "loongarch64": 98, "ppc64le": 221, "s390x": 238}
_WAIT, _WAKE = 0, 1  # without FUTEX_PRIVATE: the word is shared by processes
_POLL_S: Final = 50e-6
_EVERYBODY: Final = 1 << 30


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Futexes:
    """The words of a shared, writable map, as futexes. A word is 8 bytes, of which the lower half counts.

    Args:
        mapped: the map. It must live as long as this.
    """

    def __init__(self, mapped: mmap.mmap) -> None:
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self._upper = 4 if sys.byteorder == "big" else 0
        self._call = _system_call()
        self._number = _NUMBERS.get(platform.machine(), 0)
        self.works = self._number != 0 and self._try()

    def wait(self, word: int, expected: int, timeout_ns: int) -> None:
        """Sleep until somebody wakes the word's sleepers; not at all where the word is no longer ``expected``, at most for the timeout."""
        if not self.works:
            time.sleep(min(_POLL_S, timeout_ns / 1e9))
            return
        timeout = _Timespec(timeout_ns // 1_000_000_000, timeout_ns % 1_000_000_000)
        # Whatever ended it, its caller looks for itself.
        self._call(
            self._number, self._base + word * 8 + self._upper, _WAIT, ctypes.c_uint32(expected & 0xFFFFFFFF), ctypes.byref(timeout), None, 0
        )

    def wake(self, word: int) -> None:
        """Wake all who sleep on it."""
        if self.works:
            self._call(self._number, self._base + word * 8 + self._upper, _WAKE, _EVERYBODY, None, None, 0)

    def _try(self) -> bool:
        """Whether the system lets us: waking nobody is free."""
        return bool(self._call(self._number, self._base, _WAKE, 1, None, None, 0) >= 0)


def _system_call() -> Any:
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    call.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32)
    return call
