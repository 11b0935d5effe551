"""What to call an operation: the library function that the user's line called, and that line."""

from __future__ import annotations

import functools
import os
import sysconfig
from typing import Any

from commlens.formats.box_log import kind_of, prefixes_of
from commlens.model.collective import FrameKind

_WRAPPERS = frozenset(
    {"wrapper", "wrapped", "inner", "_fn", "<lambda>", "decorate_context", "__call__", "_wrapped_call_impl", "_call_impl"}
)


def named_operation(frames: list[list[Any]], op: str) -> tuple[str, str]:
    """``("accelerate.utils.operations.broadcast", "train.py:21 in main")`` of a stack, innermost frame first.

    The name is ``torch.distributed.<op>`` where the user's line issued it directly; the line is empty where no frame is the user's.
    """
    below: list[list[Any]] = []
    for file, line, function in (frame[:3] for frame in frames):
        if _kind(file) is FrameKind.USER:
            return _name(below, op), f"{os.path.basename(file)}:{line} in {function}"  # noqa: PTH119
        below.append([file, line, function])
    return _name(below, op), ""


def _name(frames: list[list[Any]], op: str) -> str:
    """Of the outermost library frame that has a name of its own."""
    for file, _, function in reversed(frames):
        kind = _kind(file)
        if kind not in (FrameKind.TORCH, FrameKind.LIBRARY) or function in _WRAPPERS or function.startswith("<"):
            continue
        module = _module(file)
        if not module or module.startswith(("torch.autograd", "torch._dynamo", "torch._ops", "torch._compile", "torch.nn.modules.module")):
            continue
        if module.startswith("torch.distributed.distributed_c10d"):
            return f"torch.distributed.{function}"
        return f"{module}.{function}"
    return f"torch.distributed.{op}"


def _module(file: str) -> str:
    for marker in ("/site-packages/", "/dist-packages/"):
        _, found, inside = file.rpartition(marker)
        if found:
            return inside.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return ""


@functools.lru_cache(maxsize=4096)
def _kind(file: str) -> FrameKind:
    return kind_of(file, _prefixes())


@functools.lru_cache(maxsize=1)
def _prefixes() -> list[tuple[str, FrameKind]]:
    import torch

    paths = sysconfig.get_paths()
    return prefixes_of(
        {
            "prefixes": {
                "commlens": os.path.dirname(os.path.dirname(__file__)),  # noqa: PTH120
                "torch": os.path.dirname(torch.__file__),  # noqa: PTH120
                "python": [paths["stdlib"], paths["platstdlib"]],
            }
        }
    )
