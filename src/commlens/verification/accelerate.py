"""A replacement for the check in Accelerate's own debug mode.

Accelerate (tried with 1.15.0) gathers all ranks' shapes over the user's process group before each
of its operations. If all ranks verify, commlens compares the arguments on the boards instead: it
sends nothing, no other op can be mistaken for the check, and the message names a rank that does not
arrive.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from commlens.verification.arguments import describe, pack
from commlens.verification.operation import next_call, verifier_of


def replace_check() -> None:
    """Replace Accelerate's check from now on, if Accelerate has been imported."""
    operations = sys.modules.get("accelerate.utils.operations")
    original = getattr(operations, "gather_object", None)
    if operations is None or original is None or hasattr(original, "__commlens__"):
        return

    @functools.wraps(original)
    def gather_object(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        if (
            caller.f_code.co_name == "wrapper"
            and caller.f_globals is operations.__dict__
            and _compare(caller)
        ):
            return args[0]  # as if all other ranks had gathered the same
        return original(*args, **kwargs)

    gather_object.__commlens__ = True  # type: ignore[attr-defined]
    operations.gather_object = gather_object  # type: ignore[attr-defined]


def _compare(caller: Any) -> bool:
    """Compare an argument across all ranks; return False if Accelerate must."""
    function, given = caller.f_locals.get("function"), caller.f_locals.get("tensor")
    distributed = sys.modules.get("torch.distributed")
    if function is None or distributed is None or not distributed.is_initialized():
        return False
    world = distributed.group.WORLD
    verifier, group = verifier_of(world)
    if verifier is None or not verifier.is_active or not verifier.all_verify(group):
        return False
    path = "" if hasattr(given, "shape") else "tensor"
    name = f"{function.__module__}.{function.__qualname__}"
    with next_call(world) as number:
        verifier.before_call(
            name,
            group,
            number,
            lambda: pack(describe({path: given}, lambda _: False)),
            caller.f_back,
        )
    return True
