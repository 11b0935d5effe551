"""What the tests of numbers share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """A default group of two ranks whose collectives do nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()
