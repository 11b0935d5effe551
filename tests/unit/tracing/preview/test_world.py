"""Tests of src/commlens/tracing/preview/world.py."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_param

from commlens.tracing.preview.world import FakeWorld


@pytest.mark.parametrize(("rows", "ranks"), [(3, 8), (8, 8), (17, 8), (1, 64)])
def test_fsdp_parts_a_parameter_as_torch_does(rows: int, ranks: int) -> None:
    parameter = torch.randn(rows, 2)
    theirs = _fsdp_common._chunk_with_empty(parameter, ranks, dim=0)
    with FakeWorld(ranks, ranks - 1):
        dist.init_process_group("gloo")
        chunk = _fsdp_param._chunk_with_empty
        assert chunk is not _fsdp_common._chunk_with_empty
        ours = chunk(parameter, ranks, 0)
        assert fully_shard(torch.nn.Linear(2, rows)).weight.to_local().numel() == ours[-1].numel()
    assert _fsdp_param._chunk_with_empty is _fsdp_common._chunk_with_empty
    assert [each.shape for each in ours] == [each.shape for each in theirs]


def test_a_group_made_by_hand_connects_to_no_rank() -> None:
    with FakeWorld(3, 1):
        dist.init_process_group("gloo")
        store, rank, size = next(dist.rendezvous("tcp://127.0.0.1:29513", 1, 2))
        group = dist.ProcessGroup(store, rank, size)
        backend = dist.ProcessGroupGloo(store, rank, size, timeout=timedelta(seconds=5))
        backend._set_sequence_number_for_group()
        kind = dist.ProcessGroup.BackendType.GLOO
        group._set_default_backend(kind)
        group._register_backend(torch.device("cpu"), kind, backend)
        x = torch.ones(2)
        group.allreduce([x]).wait()
        assert (group.rank(), group.size(), x.tolist()) == (1, 2, [1.0, 1.0])
        assert (store.host, store.port) == ("127.0.0.1", 29513)
        assert dist.TCPStore("127.0.0.1", 0, 2, True).port > 0
    assert "__new__" not in vars(dist.ProcessGroupGloo)
