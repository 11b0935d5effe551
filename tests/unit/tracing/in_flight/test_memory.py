"""Which tensors share bytes."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from commlens.tracing.in_flight.memory import memory_of, storage_key

WHOLE = torch.zeros(4, 6)
LONG = torch.zeros(25)


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        (WHOLE, WHOLE[1], True),
        (WHOLE[:2], WHOLE[2:], False),
        (WHOLE[:2], WHOLE[1:], True),
        (WHOLE[:, 0], WHOLE[:, 1], False),  # their bytes alternate
        (WHOLE[:, :2], WHOLE[:, 1:], True),
        (WHOLE[:, ::2], WHOLE[2, 1::2], False),
        (WHOLE.t(), WHOLE[3, 5:], True),
        (WHOLE[0].view(torch.uint8)[:4], WHOLE[0, 1:], False),
        (WHOLE[0].view(torch.uint8)[:5], WHOLE[0, 1:], True),
        (WHOLE, torch.zeros(4, 6), False),
        # an expanded view has as many elements as the bytes that it spans, and gaps between them
        (WHOLE.view(-1)[:9:4].expand(3, 3), WHOLE.view(-1)[1:8:4], False),
        (WHOLE.view(-1)[:9:4].expand(3, 3), WHOLE.view(-1)[4:5], True),
        (LONG.as_strided((5, 5), (3, 3)), LONG[1:2], False),
    ],
)
def test_only_common_bytes_are_shared(one: object, other: object, shared: bool) -> None:
    first, second = memory_of(one), memory_of(other)
    assert first is not None and second is not None
    assert first.shares_bytes_with(second) is shared
    assert second.shares_bytes_with(first) is shared


def test_views_with_gaps_too_large_to_compare_share_nothing() -> None:
    large = torch.empty(1 << 23)
    one, other = memory_of(large[::2]), memory_of(large[::4])
    assert one is not None and other is not None and not one.shares_bytes_with(other)


def test_a_block_contains_what_lies_inside() -> None:
    block, inside, across = memory_of(WHOLE[1]), memory_of(WHOLE[1, 2:4]), memory_of(WHOLE[:2, 5])
    assert block is not None and inside is not None and across is not None
    assert block.contains(inside) and not inside.contains(block) and not block.contains(across)


def test_an_expanded_view_does_not_contain_what_lies_in_its_gaps() -> None:
    expanded, between = memory_of(WHOLE[0, ::4].expand(3, 2)), memory_of(WHOLE[0, 1:3])
    assert expanded is not None and between is not None and not expanded.contains(between)
    row, repeated = memory_of(WHOLE[0]), memory_of(WHOLE[0].expand(3, 6))
    assert row is not None and repeated is not None and repeated.contains(row)


def test_it_does_not_keep_a_tensor_alive() -> None:
    tensor = torch.ones(1000)
    memory = memory_of(tensor)
    assert memory is not None and not memory.is_freed
    assert memory.key == storage_key(tensor) == storage_key(tensor[5:])
    del tensor
    assert memory.is_freed
    # A new tensor may get the same bytes, but never the same storage.
    assert all(storage_key(torch.ones(1000)) != memory.key for _ in range(100))


def test_empty_and_sparse_tensors_have_none() -> None:
    assert memory_of(torch.ones(0)) is None
    assert memory_of(torch.eye(3).to_sparse()) is None
