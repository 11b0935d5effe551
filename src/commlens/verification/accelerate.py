"""Replace the check of Accelerate's own debug mode with commlens's, at its cost and with its message.

Accelerate (tried with 1.15.0) gathers all ranks' shapes over the user's process group before each of its operations. If all ranks
verify, their arguments are compared on the boards instead: nothing is sent, no other op can be mistaken for the check, and a rank
that does not arrive is named.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from commlens.verification.arguments import describe, pack
from commlens.verification.operation import next_call, verifier_of

_MODULE = "accelerate.utils.operations"


def take_over() -> None:
    """Replace the check from now on, if Accelerate has been imported."""
    operations = sys.modules.get(_MODULE)
    original = getattr(operations, "gather_object", None)
    if operations is None or original is None or hasattr(original, "__commlens__"):
        return

    @functools.wraps(original)
    def gather_object(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        if caller.f_code.co_name == "wrapper" and caller.f_globals is operations.__dict__ and _compared(caller):
            return args[0]  # as if all other ranks had gathered the same
        return original(*args, **kwargs)

    gather_object.__commlens__ = True  # type: ignore[attr-defined]
    operations.gather_object = gather_object  # type: ignore[attr-defined]


def _compared(caller: Any) -> bool:
    """Return whether an operation's argument was compared with all ranks'; False leaves the check to Accelerate."""
    function, given = caller.f_locals.get("function"), caller.f_locals.get("tensor")
    distributed = sys.modules.get("torch.distributed")
    if function is None or distributed is None or not distributed.is_initialized():
        return False
    among = distributed.group.WORLD
    verifier, group = verifier_of(among)
    if verifier is None or not verifier.is_active or not verifier.all_verify(group):
        return False
    path = "" if hasattr(given, "shape") else "tensor"
    name = f"{function.__module__}.{function.__qualname__}"
    with next_call(among) as number:
        verifier.before_call(name, group, number, lambda: pack(describe({path: given}, lambda _: False)), caller.f_back)
    return True
