"""The dispatch mode that shows the ops of a thread to a listener, on the stack only while needed.

A mode makes every op several times slower, so it is there only while a collective is in flight. It
goes to the bottom of the thread's stack, below the modes of the program, which take themselves from
the top: their order stays as it is.

Tried on torch 2.13.0.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from torch._C import _len_torch_dispatch_stack
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from commlens.tracing.in_flight.operands import OpAccess
from commlens.tracing.leave_to_eager import EagerMode, leave_to_eager

_known: dict[int, OpAccess] = {}


@functools.lru_cache(maxsize=256)
def _runs_its_own_ops(kind: type) -> bool:
    """Return whether a tensor's class issues the ops that touch memory: DTensor's."""
    return kind.__module__.startswith("torch.distributed.")


class _ThreadMode(threading.local):
    running = 0  # ops of this thread that the mode runs: torch takes it from the stack meanwhile
    is_on = False  # as this thread left it


class OpsWatch(EagerMode):
    """Calls ``before_op(access, args, kwargs)`` before every op of the threads where it is on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op, after the listener was called."""
        if types and any(map(_runs_its_own_ops, types)):
            return NotImplemented  # their ops come here next
        access = _known.get(id(func))
        if access is None:
            access = _known[id(func)] = OpAccess(func)
        here = self.here
        here.running += 1
        try:
            self.before_op(access, args, kwargs or {})
            return access.run(*args, **kwargs) if kwargs else access.run(*args)
        finally:
            here.running -= 1

    is_left_to_eager = leave_to_eager(__torch_dispatch__.__code__)

    def __init__(self, before_op: Callable[[OpAccess, Any, Any], None]) -> None:
        super().__init__()
        self.before_op = before_op
        self.here = _ThreadMode()

    def switch(self, wanted: bool) -> bool:
        """Put the mode onto this thread's stack, or take it off, as wanted. Return whether it is so
        now: nothing changes while the mode runs an op, because torch restores the stack afterwards.

        torch also restores the stack at the end of a backward pass.
        """
        if self.here.running:
            return False
        self.here.is_on = wanted
        if not _len_torch_dispatch_stack():
            if wanted:
                _push_mode(self)
            return True
        stack = _get_current_dispatch_mode_stack()
        if (self in stack) is wanted:
            return True
        above: list[Any] = []
        for mode in reversed(stack):
            if getattr(mode, "_mode_key", None) is not None:
                break  # torch keeps these below all others
            above.append(_pop_mode())
        if wanted:
            _push_mode(self)
        for mode in reversed(above):
            if mode is not self:
                _push_mode(mode)
        return True
