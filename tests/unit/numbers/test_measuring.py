"""Hashes and statistics of tensors."""

from __future__ import annotations

import math

import pytest
import torch

from commlens.model.numbers import Measure
from commlens.numbers import measuring
from commlens.numbers.measuring import Named, Unread, reason_to_skip
from commlens.numbers.weights import MASK, ROW, column_weights, lone_word, row_weights


def measure(*tensors: torch.Tensor) -> list[Measure]:
    return Unread([Named("parameter", "x", tensor) for tensor in tensors]).read()


def digest(tensor: torch.Tensor) -> int:
    return measure(tensor)[0].digest


@pytest.mark.parametrize("size", [1, 7, ROW, ROW + 1, 3 * ROW + 5])
def test_the_hash_is_the_weighed_sum_of_words(size: int) -> None:
    words = torch.randint(-(2**31), 2**31 - 1, (size,), dtype=torch.int32)
    columns, rows = column_weights(), row_weights(4)
    expected = sum(
        word * columns[at % ROW] * rows[at // ROW] for at, word in enumerate(words.tolist())
    )
    assert digest(words) == expected & MASK


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.complex64,
        torch.int64,
        torch.int16,
        torch.uint8,
    ],
)
def test_any_changed_element_changes_the_hash(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 12).to(dtype)
    digests = {digest(tensor)}
    for index in range(11):
        changed = tensor.clone()
        changed[index] = torch.tensor(20).to(dtype)
        digests.add(digest(changed))
    assert len(digests) == 12


def test_the_order_of_elements_changes_the_hash() -> None:
    tensor = torch.randn(100)
    assert digest(tensor) != digest(tensor.flip(0))


def test_views_hash_like_copies() -> None:
    tensor = torch.randn(9, 7, dtype=torch.bfloat16)
    for view in (tensor.t(), tensor[1:, 1:], tensor[3, 3], tensor[1:]):
        assert digest(view) == digest(view.clone(memory_format=torch.contiguous_format))


def test_the_flipped_bit_is_found_from_the_hashes_alone() -> None:
    tensor = torch.randn(3 * ROW)
    flipped = tensor.clone()
    flipped.view(torch.int32)[2 * ROW + 5] ^= 1 << 30
    found = lone_word(digest(tensor) - digest(flipped) & MASK, tensor.numel())
    assert found is not None
    assert (found.position, found.bit) == (2 * ROW + 5, 30)


def test_statistics() -> None:
    [plain, broken, whole] = measure(
        torch.tensor([3.0, 4.0]),
        torch.tensor([1.0, math.nan, math.inf, -math.inf]),
        torch.tensor([1, 2]),
    )
    assert (plain.norm, plain.mean, plain.nans, plain.infs) == (5.0, 3.5, 0, 0)
    assert (broken.nans, broken.infs) == (1, 2)
    assert (whole.norm, whole.items, whole.dtype) == (0.0, 2, "int64")


def test_norms_of_half_precision_do_not_overflow() -> None:
    [found] = measure(torch.full((10_000,), 6e4, dtype=torch.float16))
    assert found.norm == pytest.approx(6e6, rel=0.01)
    assert not found.infs


def test_the_tensor_may_change_at_once() -> None:
    tensor = torch.ones(10)
    before = digest(tensor)
    unread = Unread([Named("parameter", "x", tensor)])
    tensor.zero_()
    assert unread.read()[0].digest == before


def test_tensors_are_measured_device_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer on a GPU keeps its step count on the CPU: torch stacks no such scalars."""
    expected = [digest(torch.full((2,), size)) for size in (1, 2, 3)]
    begun = []
    real = measuring._UnreadPart

    def begin(device: torch.device, tensors: dict[int, torch.Tensor]) -> measuring._UnreadPart:
        assert {each.device for each in tensors.values()} == {device}
        begun.append(device.type)
        some = {index: torch.full((2,), len(each)) for index, each in tensors.items()}
        return real(torch.device("cpu"), some)

    monkeypatch.setattr(measuring, "_UnreadPart", begin)
    devices = ["meta", "cpu", "meta"]
    named = [
        Named("parameter", name, torch.empty(size, device=device))
        for size, (name, device) in enumerate(zip("abc", devices, strict=True), start=1)
    ]
    found = Unread(named).read()
    assert begun == ["meta", "cpu"]
    assert [each.name for each in found] == ["a", "b", "c"]
    assert [each.digest for each in found] == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_numbers_of_the_cpu() -> None:
    tensors = [torch.randn(2 * ROW + 5), torch.tensor(3.0), torch.arange(7)]
    on_gpu = measure(tensors[0].cuda(), tensors[1], tensors[2].cuda())
    on_cpu = measure(*tensors)
    assert [each.digest for each in on_gpu] == [each.digest for each in on_cpu]
    for one, other in zip(on_gpu, on_cpu, strict=True):
        assert (one.norm, one.mean) == pytest.approx((other.norm, other.mean), rel=1e-3, abs=1e-4)


def test_tensors_that_cannot_be_compared() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(3)
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    assert reason_to_skip(torch.ones(3)) is None
    assert reason_to_skip("x") == "no tensor"
    assert reason_to_skip(torch.ones(3).to_sparse()) == "sparse"
    assert reason_to_skip(torch.ones(3, device="meta")) == "fake"
    assert reason_to_skip(fake) == "fake"
    assert reason_to_skip(torch.ones(0)) == "empty"
    assert reason_to_skip(freed) == "freed"
