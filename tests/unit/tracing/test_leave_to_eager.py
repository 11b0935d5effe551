"""Functions that torch.compile leaves alone."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from commlens.tracing.leave_to_eager import leave_to_eager


def test_dynamo_compiles_nothing_of_it() -> None:
    compiled: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    def left_alone(tensor: Any) -> Any:
        return tensor + 1

    def usual(tensor: Any) -> Any:
        return tensor + 1

    if not leave_to_eager(left_alone.__code__):
        pytest.skip("this torch cannot")
    assert torch.compile(left_alone, backend=backend)(torch.ones(1)).item() == 2
    assert not compiled
    torch.compile(usual, backend=backend)(torch.ones(1))
    assert compiled
