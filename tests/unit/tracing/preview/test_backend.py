"""The data of a fake world's collectives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist

from commlens.tracing.preview.world import FakeWorld


@pytest.fixture
def second_of_three() -> Iterator[None]:
    with FakeWorld(3, 1):
        dist.init_process_group("gloo")
        yield


@pytest.mark.usefixtures("second_of_three")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_a_rank_gives_stands_for_what_all_give() -> None:
    gathered = torch.empty(6)
    dist.all_gather_into_tensor(gathered, torch.tensor([1.0, 2.0]))
    assert gathered.tolist() == [1, 2, 1, 2, 1, 2]
    reduced = torch.empty(2)
    dist.reduce_scatter_tensor(reduced, torch.arange(6.0).view(1, 6))
    assert reduced.tolist() == [2, 3]
    parts = [torch.empty(1), torch.empty(3), torch.empty(0)]
    dist.all_gather(parts, torch.tensor([7.0, 8.0]))
    assert [part.tolist() for part in parts] == [[8], [7, 8, 7], []]
    scattered = torch.empty(2)
    dist.reduce_scatter(scattered, [torch.zeros(2), torch.ones(2), torch.zeros(2)])
    assert scattered.tolist() == [1, 1]


@pytest.mark.usefixtures("second_of_three")
def test_a_rank_that_gives_nothing_gets_zeros() -> None:
    out = torch.ones(3, 2)
    work = dist.all_to_all_single(out, torch.ones(0, 2), [1, 1, 1], [0, 0, 0], async_op=True)
    assert work is not None and work.wait()
    assert not out.any()


@pytest.mark.usefixtures("second_of_three")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_rank_gathers_into_the_tensor_that_holds_what_it_gives() -> None:
    whole = torch.arange(6.0)
    dist.all_gather_into_tensor(whole, whole[2:4])
    assert whole.tolist() == [2, 3, 2, 3, 2, 3]


@pytest.mark.skipif(torch.__version__ < (2, 7), reason="its fake backend copies nothing here")
def test_afterwards_the_fake_backend_is_as_before() -> None:
    with FakeWorld(2, 0):
        pass
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    try:
        out = torch.empty(4)
        dist.all_to_all_single(out, torch.ones(4))
        assert out.tolist() == [1, 1, 1, 1]
    finally:
        dist.destroy_process_group()
