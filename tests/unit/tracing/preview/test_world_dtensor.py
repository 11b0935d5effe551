"""DTensor in a fake world."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.functional import scaled_dot_product_attention

from commlens.tap import tap
from commlens.tracing.preview.world import FakeWorld


class Ops:
    """The names of the collectives issued."""

    sees_fake_tensors = True

    def __init__(self) -> None:
        self.names: list[str] = []

    def begin(self, spec: tap.OpSpec, arguments: object) -> None:
        self.names.append(spec.name)

    def returned(self, token: object, result: object) -> None:
        """Nothing more."""

    def raised(self, token: object, error: BaseException) -> None:
        """Nothing more."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU's own op is used")
@pytest.mark.parametrize("fake_tensors", [False, True])
@pytest.mark.parametrize("placements", [(Shard(0), Shard(1)), (Replicate(), Shard(1))])
def test_attention_by_batch_and_by_heads_needs_no_collective(
    fake_tensors: bool, placements: tuple[Replicate | Shard, ...]
) -> None:
    ops = Ops()
    with FakeWorld(4, 1, fake_tensors=fake_tensors):
        mesh = init_device_mesh("cuda", (2, 2))
        q, k, v = (
            DTensor.from_local(torch.randn(2, 4, 16, 8, requires_grad=True), mesh, placements)
            for _ in range(3)
        )
        tap.attach(ops)
        try:
            out = scaled_dot_product_attention(q, k, v, is_causal=True)
            out.to_local().sum().backward()
        finally:
            tap.detach(ops)
        assert out.placements == placements
    assert ops.names == []
