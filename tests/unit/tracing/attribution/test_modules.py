"""The tracker of module calls, where torch or another thread gets in its way."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from commlens.model.trace import Phase
from commlens.tracing.attribution import modules
from commlens.tracing.attribution.modules import ModuleTracker


class _Node:
    """An autograd node that cannot be read."""

    def _sequence_nr(self) -> int:
        raise RuntimeError("broken")


def test_the_end_of_a_pass_that_could_not_be_noted_leaves_the_pass_around_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tracker = ModuleTracker()
    tracker.install()
    try:
        noted = (7, None)
        tracker._thread.nested.append(noted)  # as of reentrant checkpointing
        loss = nn.Linear(2, 1)(torch.ones(1, 2)).sum()
        monkeypatch.setattr(modules, "current_node", _Node)
        loss.backward()
        assert tracker._thread.nested == [noted]
    finally:
        tracker.remove()


def test_a_call_that_a_listener_fails_to_take_ends_like_any_other() -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    tracker = ModuleTracker()
    tracker.install()
    try:
        tracker.on_enter.append(fail)
        nn.Linear(2, 1)(torch.ones(1, 2))
        assert tracker.locate() == (Phase.OUTSIDE, None)
    finally:
        tracker.remove()
