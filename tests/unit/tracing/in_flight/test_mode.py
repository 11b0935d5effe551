"""The mode that is on a thread's stack only for a while."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from commlens.tracing.in_flight.mode import OpsWatch


class Passing(TorchDispatchMode):
    """A mode of the program."""

    def __init__(self, name: str, seen: list[str]) -> None:
        super().__init__()
        self.name, self.seen = name, seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(self.name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def seen() -> list[str]:
    return []


@pytest.fixture
def mode(seen: list[str]) -> Iterator[OpsWatch]:
    made = OpsWatch(lambda access, args, kwargs: seen.append(str(access.op)))
    yield made
    made.switch(False)


def test_the_modes_of_the_program_keep_their_order(mode: OpsWatch, seen: list[str]) -> None:
    tensor = torch.ones(1)
    with Passing("outer", seen) as outer:
        with Passing("inner", seen) as inner:
            assert mode.switch(True) and mode.switch(True)
            assert _get_current_dispatch_mode_stack() == [mode, outer, inner]
            tensor.neg()
        assert _get_current_dispatch_mode_stack() == [mode, outer]
        assert mode.switch(False)
        assert _get_current_dispatch_mode_stack() == [outer]
    assert _get_current_dispatch_mode_stack() == []
    assert seen == ["inner", "outer", "aten.neg.default"]


def test_it_stays_above_fake_tensors(mode: OpsWatch, seen: list[str]) -> None:
    with FakeTensorMode() as fake:
        mode.switch(True)
        assert _get_current_dispatch_mode_stack() == [fake, mode]
        assert torch.ones(3).neg().shape == (3,)
        mode.switch(False)
        assert _get_current_dispatch_mode_stack() == [fake]
    assert seen == ["aten.ones.default", "aten.neg.default"]


def test_inside_an_op_it_stays(mode: OpsWatch) -> None:
    settled = []
    mode.before_op = lambda *_: settled.append(mode.switch(False))
    mode.switch(True)
    torch.ones(1)
    assert settled == [False]
    assert _get_current_dispatch_mode_stack() == [mode]


def test_a_backward_pass_takes_it_away(mode: OpsWatch) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.register_hook(lambda _: mode.switch(True) and None)
    parameter.sum().backward()
    assert _get_current_dispatch_mode_stack() == []
