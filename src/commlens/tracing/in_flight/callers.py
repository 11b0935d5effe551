"""Finds the line of the program that issues a collective or touches a tensor, from the Python
stack.

The files of torch named here are those of 2.6.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import os
from types import CodeType, FrameType
from typing import Final

import torch

from commlens.model.collective import FrameKind, Stack
from commlens.tap.running_frames import frame_of, kind_of_file

_TORCH: Final = os.path.join(os.path.dirname(torch.__file__), "")  # noqa: PTH118, PTH120
_FUNCTIONAL: Final = "distributed/_functional_collectives.py"
_API: Final = frozenset(
    {"distributed/distributed_c10d.py", "distributed/c10d_logger.py", _FUNCTIONAL}
)
_BETWEEN: Final = frozenset(
    {
        "_library/autograd.py",
        "_library/custom_ops.py",
        "_ops.py",
        "overrides.py",
        "utils/_contextlib.py",
        "utils/_device.py",
        "utils/_python_dispatch.py",
    }
)
_FOR_OTHERS: Final = frozenset({"distributed/tensor/_api.py", "distributed/tensor/_dispatch.py"})
"""Parts of torch.distributed that run the program's ops."""
_OWN_OPS: Final = ("distributed/", "nn/parallel/distributed.py")
"""Parts of torch that order their ops after the collectives by themselves."""
_CONTEXTLIB: Final = "/contextlib.py"
_MAX_FRAMES: Final = 16

RawStack = tuple[tuple[CodeType, int], ...]
"""The code of the frames and the offset of its instruction, innermost first."""


def issue_stack(frame: FrameType | None, asynchronous: bool | None) -> RawStack | None:
    """Return the stack of an asynchronous call that the program makes itself; None for any other
    call, such as one of torch's own.

    Args:
        frame: that called the op.
        asynchronous: the op's ``async_op``; None if this torch does not pass it to ops.
    """
    if asynchronous is False:
        return None
    names: set[str] = set()
    walk = frame
    while walk is not None:
        file = walk.f_code.co_filename
        kind = kind_of_file(file)
        inside = file[len(_TORCH) :] if kind is FrameKind.TORCH else ""
        if inside in _API:
            names.add("functional" if inside == _FUNCTIONAL else walk.f_code.co_name)
            if asynchronous is None:
                asynchronous = _async_op_of(walk)
        elif kind in (FrameKind.USER, FrameKind.LIBRARY):
            break
        elif _is_no_part_of_it(kind, file):
            return None
        walk = walk.f_back
    if walk is None or not names or names & {"send", "recv"}:
        return None
    if asynchronous is None:
        asynchronous = bool(names & {"isend", "irecv", "functional"})
    return raw_stack(frame) if asynchronous else None


def is_functional(stack: RawStack) -> bool:
    """Return whether a stack is that of a functional collective."""
    return any(code.co_filename.endswith(_FUNCTIONAL) for code, _ in stack)


def _is_no_part_of_it(kind: FrameKind, file: str) -> bool:
    """Return whether a frame of torch or Python does more than pass on the program's call."""
    return (kind is FrameKind.TORCH and file[len(_TORCH) :] not in _BETWEEN) or (
        kind is FrameKind.PYTHON and not file.endswith(_CONTEXTLIB)
    )


def _async_op_of(frame: FrameType) -> bool | None:
    """Return the ``async_op`` of a call to torch.distributed; None if it has none."""
    values = frame.f_locals
    asynchronous = values.get("async_op", values.get("async_ops"))
    return asynchronous if isinstance(asynchronous, bool) else None


def touch_stack(frame: FrameType | None) -> RawStack | None:
    """Return the stack of an op; None if a part of torch issues it that orders its ops by itself,
    or if no line of the program does.
    """
    walk = frame
    while walk is not None:
        file = walk.f_code.co_filename
        kind = kind_of_file(file)
        if kind in (FrameKind.USER, FrameKind.LIBRARY):
            return raw_stack(frame)
        inside = file[len(_TORCH) :] if kind is FrameKind.TORCH else ""
        if inside.startswith(_OWN_OPS) and inside not in _API | _FOR_OTHERS:
            return None
        walk = walk.f_back
    return None


def raw_stack(frame: FrameType | None) -> RawStack:
    """Return the innermost frames, without those of commlens and of torch's dispatcher."""
    stack: list[tuple[CodeType, int]] = []
    while frame is not None and len(stack) < _MAX_FRAMES:
        code = frame.f_code
        file = code.co_filename
        if kind_of_file(file) is not FrameKind.COMMLENS and file[len(_TORCH) :] not in _BETWEEN:
            stack.append((code, frame.f_lasti))
        frame = frame.f_back
    return tuple(stack)


def stack_of(raw: RawStack) -> Stack:
    """Return the frames with their lines."""
    return tuple(frame_of(code, _line(code, offset)) for code, offset in raw)


def _line(code: CodeType, offset: int) -> int:
    for first, after, line in code.co_lines():
        if first <= offset < after:
            return line or 0
    return code.co_firstlineno
