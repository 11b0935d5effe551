"""Whose line issues a collective or touches a tensor."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from commlens.tracing.in_flight.callers import (
    is_functional,
    issue_stack,
    stack_of,
    touch_stack,
)

TORCH = Path(torch.__file__).parent
C10D = "distributed/distributed_c10d.py"
FUNCTIONAL = "distributed/_functional_collectives.py"


def frame_in(*files: str, **values: Any) -> Any:
    """Return the frame of a function in the first of torch's files, called by one in the next, and
    by the user at last.

    Args:
        files: each with the function's name: "distributed/distributed_c10d.py:all_reduce".
        values: local variables of the first.
    """
    call: Any = functools.partial(sys._getframe, 0)
    for place in files:
        file, _, name = place.partition(":")
        source = f"def {name}(**values):\n    async_op = values.get('async_op')\n    return call()"
        namespace = {"call": call}
        exec(compile(source, str(TORCH / file), "exec"), namespace)
        call = functools.partial(namespace[name], **values)
    scope = {"call": call}
    exec(compile("def step():\n    return call()", "/home/me/train.py", "exec"), scope)
    return scope["step"]()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("files", "told", "is_issued"),
    [
        ([f"{C10D}:all_reduce"], True, True),
        ([f"{C10D}:all_reduce"], False, False),
        ([f"{C10D}:isend"], None, True),
        ([f"{C10D}:send"], None, False),
        ([f"{FUNCTIONAL}:all_gather"], None, True),
        ([f"{C10D}:all_reduce", "distributed/fsdp/_collectives.py:reduce"], True, False),
        ([f"{C10D}:all_reduce", "overrides.py:handle_torch_function"], True, True),
        (["nn/functional.py:linear"], True, False),
    ],
)
def test_only_calls_of_the_program_are_issued_by_it(
    files: list[str], told: bool | None, is_issued: bool
) -> None:
    stack = issue_stack(frame_in(*files), told)
    assert (stack is not None) is is_issued
    if stack is not None:
        assert is_functional(stack) is (FUNCTIONAL in files[0])
        lines = [(frame.where, frame.function) for frame in stack_of(stack)]
        assert ("train.py:2", "step") in lines


@pytest.mark.parametrize("asynchronous", [True, False])
def test_an_old_torch_is_asked_what_its_caller_told(asynchronous: bool) -> None:
    frame = frame_in(f"{C10D}:all_reduce", async_op=asynchronous)
    assert (issue_stack(frame, None) is not None) is asynchronous


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("optim/sgd.py:step", True),
        ("distributed/tensor/_dispatch.py:dispatch", True),
        ("distributed/fsdp/_collectives.py:copy_in", False),
        ("nn/parallel/distributed.py:forward", False),
    ],
)
def test_torch_orders_its_own_ops(file: str, counts: bool) -> None:
    assert (touch_stack(frame_in(file)) is not None) is counts
    assert touch_stack(None) is None
