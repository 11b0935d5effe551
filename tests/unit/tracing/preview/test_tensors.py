"""Tests of src/commlens/tracing/preview/tensors.py."""

import torch

from commlens.tracing.preview.world import FakeWorld


def test_a_fake_number_takes_a_format() -> None:
    with FakeWorld(2, 0, fake_tensors=True):
        assert f"{torch.ones(3).sum():.3f}" == "1.000"


def test_fake_tensors_compare_as_different() -> None:
    with FakeWorld(2, 0, fake_tensors=True) as world:
        x = torch.ones(3)
        assert not torch.equal(x, x)
        assert not torch.allclose(x, x)
    assert len(world.blind) == 1
