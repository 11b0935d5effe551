"""Tests of src/commlens/numbers/nan_watch.py: the watch for NaN does not disturb the program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import nn

from commlens.numbers import nan_watch
from commlens.numbers.nan_watch import NanWatch


def unreadable(_tensor: Any) -> None:
    raise RuntimeError("unreadable")


@pytest.fixture
def watch(two_ranks: None) -> Iterator[NanWatch]:
    """A watch, in a group whose collectives do nothing."""
    found = NanWatch()
    found.start()
    yield found
    found.stop()


def test_a_module_may_run_inside_of_vmap(watch: NanWatch) -> None:
    assert torch.func.vmap(nn.Linear(3, 3))(torch.ones(2, 3)).shape == (2, 3)
    assert watch.error is None
    nn.Identity()(torch.tensor([float("nan")]))
    assert watch.event is not None


@pytest.mark.parametrize("look_at", [nn.Identity(), dist.all_reduce])
def test_an_error_ends_the_watch_only(
    watch: NanWatch, monkeypatch: pytest.MonkeyPatch, look_at: Callable[[torch.Tensor], Any]
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(nan_watch, "reason_to_skip", unreadable)
        look_at(torch.ones(2))
    assert str(watch.error) == "unreadable"
    look_at(torch.tensor([float("nan")]))
    assert watch.event is None
