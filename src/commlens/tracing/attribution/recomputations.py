"""The nodes inside which torch's activation checkpointing recomputes a forward, without and with
``use_reentrant``.

Tried on torch 2.6.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

from torch.utils import checkpoint

from commlens.tracing.attribution.module_calls import current_node, current_pass
from commlens.tracing.patches import Patches

_FILE = "torch/utils/checkpoint.py"
_NO_NODE = -2


def recomputes(code: CodeType) -> bool:
    """Check whether a function on the stack recomputes a forward: torch's checkpointing, or a copy,
    as in Megatron or DeepSpeed.
    """
    if code.co_name == "backward":
        return "run_function" in code.co_names
    return code.co_name in ("recompute_fn", "unpack_hook") and code.co_filename.endswith(_FILE)


def follow_recomputations(patches: Patches, running: Callable[[], list[tuple[int, int]]]) -> None:
    """Keep the numbers of the recomputing node and of its backward pass at the end of the calling
    thread's list, while it recomputes.
    """

    def begin() -> None:
        node = current_node()
        running().append((node._sequence_nr() if node is not None else _NO_NODE, current_pass()))

    def end() -> None:
        nodes = running()
        if nodes:  # else the list was replaced meanwhile
            nodes.pop()

    def recompute(original: Any, *args: Any) -> Any:
        begin()
        try:
            return original(*args)
        finally:
            end()

    patches.wrap(checkpoint.CheckpointFunction, "backward", recompute)
    hook = getattr(checkpoint, "_recomputation_hook", None)
    if hook is None:
        return
    enter, leave = hook.__enter__, hook.__exit__

    def __enter__(self: Any) -> Any:
        begin()
        return enter(self)

    def __exit__(self: Any, *args: Any) -> Any:
        end()
        return leave(self, *args)

    patches.set(hook, "__enter__", __enter__)
    patches.set(hook, "__exit__", __exit__)
