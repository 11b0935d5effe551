"""Which ranks hold copies, in a model of Megatron's modules. Megatron is not installed here, so its
state is a stand-in whose functions have the same names, and a group is its ranks.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from torch import nn

from commlens.numbers.replicas import find_copies

TENSOR, DATA, EXPERTS = (2, 3), (0, 2, 4, 6), (2, 6)


class Block(nn.Module):
    """A norm that all tensor parallel ranks have, a shard, and an expert."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.shard, self.expert = (nn.Linear(2, 2, bias=False) for _ in range(3))
        self.shard.weight.tensor_model_parallel = True  # type: ignore[assignment]
        self.expert.weight.allreduce = False  # type: ignore[assignment]


@pytest.fixture
def block(monkeypatch: pytest.MonkeyPatch) -> Block:
    state = SimpleNamespace(
        model_parallel_is_initialized=lambda: True,
        get_tensor_model_parallel_group=lambda: TENSOR,
        get_data_parallel_group=lambda with_context_parallel: DATA,
        get_expert_data_parallel_group=lambda check_initialized: EXPERTS,
    )
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    monkeypatch.setattr(Block, "__module__", "megatron.core.transformer.block")
    return Block()


def test_each_parameter_has_the_groups_that_megatron_reduces_it_over(block: Block) -> None:
    copies = find_copies(block, tuple)
    assert copies[id(block.norm.weight)] == (DATA, TENSOR)
    assert copies[id(block.shard.weight)] == (DATA,)
    assert copies[id(block.expert.weight)] == (EXPERTS,)


def test_a_model_with_groups_of_its_own_is_left_alone(block: Block) -> None:
    block.norm.tp_group = (4, 5)  # type: ignore[assignment]
    assert find_copies(block, tuple) == {}
    block.norm.tp_group = TENSOR  # type: ignore[assignment]
    assert find_copies(block, tuple)


def test_a_model_without_megatrons_modules_is_left_alone(block: Block) -> None:
    assert find_copies(nn.Sequential(nn.Linear(2, 2)), tuple) == {}
