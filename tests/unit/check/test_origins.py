"""Tests of src/commlens/check/origins.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce as functional_all_reduce

from commlens.check.origins import UNKNOWN, Origins, ValueOrigin, alike_in, joined
from commlens.tracing.preview.world import FakeWorld

WORLD = (0, 1, 2, 3)
ALIKE = ValueOrigin(frozenset({WORLD}))
RECEIVED = ValueOrigin(received=True)


class Asked:
    """What was read, and which shapes depended on values."""

    def __init__(self) -> None:
        self.read: list[ValueOrigin | None] = []
        self.shaped: list[ValueOrigin] = []
        self.origins = Origins(self.read.append, self.shaped.append)


@pytest.fixture
def asked() -> Iterator[Asked]:
    """Play rank 1 of 4."""
    found = Asked()
    with FakeWorld(4, 1), found.origins:
        dist.init_process_group("gloo")
        yield found


def test_a_rank_knows_what_it_computes_alone(asked: Asked) -> None:
    x = torch.rand(3, requires_grad=True)
    (x * 2).sum().backward()
    assert x.grad is not None
    x.grad.sum().item()
    x[x > 0.5].sum().item()
    assert asked.read == [None, None]
    assert asked.shaped == []


def test_little_is_kept_of_tensors_that_are_gone(asked: Asked) -> None:
    x = torch.ones(3)
    dist.all_reduce(x)
    for _ in range(3000):
        x + 1
    assert len(asked.origins._origins) < 1000


def test_what_a_collective_wrote_is_not_known(asked: Asked) -> None:
    x = torch.ones(3)
    dist.all_reduce(x)
    (x * 2).mean().item()
    assert asked.read == [ALIKE]


def test_it_is_alike_only_if_all_of_it_is(asked: Asked) -> None:
    x, received = torch.ones(3), torch.ones(3)
    dist.all_reduce(x)
    dist.recv(received, 0)
    assert asked.origins.of(x + 1) == ALIKE
    assert asked.origins.of(x + torch.rand(3)) == UNKNOWN
    assert asked.origins.of(received) == asked.origins.of(received + x) == RECEIVED
    assert asked.origins.of(torch.rand(3)) is None


def test_optimizers_and_lists_pass_it_on(asked: Asked) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    dist.all_reduce(parameter.grad)
    torch.optim.Adam([parameter], foreach=True).step()
    assert asked.origins.of(parameter) is not None


def test_a_tensor_that_is_overwritten_is_known_again(asked: Asked) -> None:
    x, y = torch.ones(3), torch.ones(4)
    dist.all_reduce(x)
    dist.all_reduce(y)
    x.zero_()
    y.copy_(torch.rand(4))
    assert asked.origins.of(x) is None
    assert asked.origins.of(y) is None
    dist.all_reduce(x)
    x[0].zero_()
    assert asked.origins.of(x) is not None


def test_the_sender_knows_what_it_sends(asked: Asked) -> None:
    x = torch.ones(3)
    dist.send(x, 2)
    dist.reduce(x, 0)
    assert asked.origins.of(x) is None
    dist.broadcast(x, 1)
    assert asked.origins.of(x * 2) == ValueOrigin(frozenset({WORLD}), known=True)
    assert asked.origins.of(x * torch.rand(3)) is None
    dist.broadcast(x, 0)
    assert asked.origins.of(x) == ALIKE


def test_calls_are_counted_in_each_group(asked: Asked) -> None:
    pair = dist.new_group([0, 1])
    for group in (None, pair, pair):
        dist.all_reduce(torch.ones(3), group=group)
    assert asked.origins.calls == 3
    assert asked.origins.calls_in([WORLD]) == 1
    assert asked.origins.calls_in([WORLD, (0, 1)]) == 3


def test_groups_of_a_mesh_span_the_world_together(asked: Asked) -> None:
    row, column = dist.new_group([0, 1]), dist.new_group([1, 3])
    x = torch.ones(3)
    dist.all_reduce(x, group=row)
    one = asked.origins.of(x)
    x = functional_all_reduce(x, "sum", column)
    x.sum().item()
    assert one == ValueOrigin(frozenset({(0, 1)}))
    assert not alike_in(one, 4)
    both = ValueOrigin(frozenset({(0, 1), (1, 3)}))
    assert asked.read == [both]
    assert alike_in(both, 4)


@pytest.mark.parametrize(
    ("groups", "world_size", "spans"),
    [
        ([(0, 1), (0, 2), (0, 4)], 8, True),
        ([(0, 1, 2, 3), (0, 2, 4, 6)], 8, True),  # dp_cp and cp_tp of a 2x2x2 mesh
        ([(0, 1), (0, 1, 2)], 6, False),  # they meet in two ranks, so they are no dimensions
        ([(0, 1), (0, 1, 2), (0, 3)], 6, True),
        ([(0, 1, 2), (0, 1, 3), (0, 4)], 5, True),  # they reach every rank, dimensions or not
        ([(0, 1), (0, 2), (0, 3)], 6, False),
        ([(0, 1)], 4, False),
        ([(0, 1, 2, 3), (0, 1)], 4, True),
        ([], 1, False),
    ],
)
def test_groups_that_reach_every_rank(
    groups: list[tuple[int, ...]], world_size: int, spans: bool
) -> None:
    assert alike_in(ValueOrigin(frozenset(groups)), world_size) is spans


def test_a_reduce_scatter_ends_that_ranks_have_the_same(asked: Asked) -> None:
    x, part = torch.ones(4), torch.ones(1)
    dist.all_reduce(x)
    dist.reduce_scatter(part, list(x.split(1)))
    assert asked.origins.of(part) == UNKNOWN


def test_shapes_that_depend_on_values_are_reported(asked: Asked) -> None:
    x = torch.ones(3)
    dist.all_reduce(x)
    x[x > 0]
    x.nonzero()
    assert asked.shaped == [ALIKE] * 2


def test_values_of_fake_tensors_are_never_known() -> None:
    asked = Asked()
    with FakeWorld(4, 1, fake_tensors=True), asked.origins:
        dist.init_process_group("gloo")
        torch.ones(3).sum().item()
        torch.tensor(3).item()
    assert asked.read == [UNKNOWN, None]


def test_values_join() -> None:
    known = ValueOrigin(frozenset({WORLD}), known=True)
    row = ValueOrigin(frozenset({WORLD, (0, 1)}))
    assert joined([]) is None
    assert joined([None, known]) is None
    assert joined([known, known]) == known
    assert joined([known, row]) == ALIKE
    assert joined([None, row]) == UNKNOWN
    assert joined([row, UNKNOWN]) == UNKNOWN
