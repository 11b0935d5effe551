"""The stack that called ``backward()``, seen from a thread of autograd: on the CPU, autograd uses
one where passes are nested more than 60 deep.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from commlens.tap import backward_caller

IN_THE_CALLER, ELSEWHERE = 0, 61


class Nested(torch.autograd.Function):  # type: ignore[misc]
    """Calls ``innermost`` in a pass that is as many levels deep."""

    @staticmethod
    def forward(ctx: Any, x: Any, levels: int, innermost: Callable[[], None]) -> Any:
        ctx.levels, ctx.innermost = levels, innermost
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            nested(ctx.levels, ctx.innermost)
        return grad, None, None


def nested(levels: int, innermost: Callable[[], None]) -> None:
    if levels == 0:
        innermost()
        return
    x = torch.ones(1, requires_grad=True)
    Nested.apply(x, levels - 1, innermost).backward()


def seen_in_pass(levels: int) -> list[tuple[bool, int, list[list[Any]]]]:
    """Return for two hooks of one pass whether they ran in another thread, and what was known."""
    here, seen = threading.get_ident(), []

    def hook(grad: Any) -> None:
        number = backward_caller.number()
        elsewhere = threading.get_ident() != here
        seen.append((elsewhere, number, backward_caller.frames(number)))

    def call_backward() -> None:
        x = torch.ones(1, requires_grad=True)
        middle = x * 2
        end = middle * 2
        middle.register_hook(hook)
        end.register_hook(hook)
        end.backward()

    nested(levels, call_backward)
    return seen


def names(frames: list[list[Any]]) -> list[str]:
    return [name for _, _, name in frames]


def test_outside_of_a_pass_there_is_no_caller() -> None:
    assert backward_caller.this_thread.made_by_python
    assert backward_caller.number() == 0
    assert backward_caller.frames(0) == []


def test_a_pass_in_the_calling_thread_has_its_own_frames() -> None:
    assert seen_in_pass(IN_THE_CALLER) == [(False, 0, [])] * 2


def test_in_autograds_thread_the_caller_is_found() -> None:
    (elsewhere, number, frames), again = seen_in_pass(ELSEWHERE)
    assert elsewhere and number > 0
    assert again == (elsewhere, number, frames)
    assert names(frames)[0] == "_engine_run_backward"
    assert next(frame for frame in frames if frame[0] == __file__)[2] == "call_backward"


def test_the_same_stack_has_the_same_number() -> None:
    numbers = {seen_in_pass(ELSEWHERE)[0][1] for _ in range(2)}
    assert len(numbers) == 1


def test_the_oldest_stacks_are_forgotten_when_there_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backward_caller, "_LIMIT", 1)
    _, former, _ = seen_in_pass(ELSEWHERE)[0]
    _, number, frames = seen_in_pass(ELSEWHERE)[0]
    assert number > former and backward_caller.frames(former) == []
    assert names(frames)[0] == "_engine_run_backward"


def test_of_two_passes_at_once_none_is_found() -> None:
    inside, over = threading.Event(), threading.Event()

    def hold(grad: Any) -> None:
        inside.set()
        over.wait(30)

    def call_backward() -> None:
        x = torch.ones(1, requires_grad=True)
        y = x * 2
        y.register_hook(hold)
        y.backward()

    thread = threading.Thread(target=call_backward)
    thread.start()
    try:
        assert inside.wait(30)
        assert seen_in_pass(ELSEWHERE) == [(True, 0, [])] * 2
    finally:
        over.set()
        thread.join(30)
