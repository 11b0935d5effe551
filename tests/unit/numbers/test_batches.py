"""Tensors that are measured together, as on an accelerator."""

from __future__ import annotations

import math

import pytest
import torch
from chosen import long

from commlens.numbers import batches, measuring
from commlens.numbers.batches import Batch, Key, elements_of
from commlens.numbers.measuring import Named, Unread
from commlens.numbers.weights import ROW

SHORT = 1024
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.complex64, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool),
]
SIZES = [1, 3, 64, SHORT, 2 * SHORT + 1, ROW - 1, ROW, ROW + 1, 2 * ROW + 1, 5 * ROW + 7]


def columns() -> torch.Tensor:
    return measuring._columns_of(torch.device("cpu"))


def alone(tensor: torch.Tensor) -> int:
    return Unread([Named("parameter", "x", tensor)]).read()[0].digest


def together(tensors: list[torch.Tensor], line: int) -> list[tuple[int, list[float]]]:
    """Measure tensors of one type as an accelerator does."""
    one = tensors[0]
    dtype = one.dtype if one.dtype in batches.WITH_STATISTICS else None
    key = Key(dtype, min(4, one.element_size()), line)
    return list(Batch(key, [elements_of(each) for each in tensors], columns()).read())


def filled(dtype: torch.dtype, numel: int) -> torch.Tensor:
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (numel * size,), dtype=torch.uint8)
    return raw.view(dtype)


def fitting(dtype: torch.dtype, sizes: list[int], line: int) -> list[torch.Tensor]:
    tensors = [filled(dtype, size) for size in sizes]
    most = ROW if line < ROW else math.inf
    return [each for each in tensors if each.numel() * each.element_size() <= 4 * most]


@pytest.mark.parametrize("line", [SHORT, ROW])
@pytest.mark.parametrize(
    ("words_at_once", "dtype"),
    [
        long(words, dtype, when=words == 2 or (words == 128 and dtype not in DTYPES[:2]))
        for words in (1, 2, 128)
        for dtype in DTYPES
    ],
)
def test_the_hash_does_not_depend_on_what_is_measured_together(
    dtype: torch.dtype, line: int, words_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "_WORDS_AT_ONCE", words_at_once * ROW)
    tensors = fitting(dtype, SIZES, line)
    assert [digest for digest, _ in together(tensors, line)] == [alone(each) for each in tensors]


def test_a_type_of_half_a_word_that_fills_a_row_and_more() -> None:
    """Its last element begins a word of its own, in another row."""
    on_device = torch.empty(2 * ROW + 1, dtype=torch.bfloat16, device="meta")
    assert batches.key_of(on_device).line == ROW
    assert batches.key_of(on_device[1:]).line == SHORT


def test_views(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "_WORDS_AT_ONCE", 2 * ROW)
    base = torch.randn(301, 70)
    for dtype in (torch.float32, torch.bfloat16):
        whole = base.to(dtype)
        views = [whole.t(), whole[1:, 1:], whole[3, 3], whole.view(-1)[1:], whole.view(-1)[::3]]
        assert [digest for digest, _ in together(views, SHORT)] == [alone(each) for each in views]
    several = torch.randn(4 * ROW + 1)
    for view in (several, several[1:], several[2:]):
        assert together([view], ROW)[0][0] == alone(view)


@pytest.mark.parametrize("dtype", batches.WITH_STATISTICS)
def test_statistics(dtype: torch.dtype) -> None:
    tensors = [torch.randn(size).to(dtype) for size in SIZES]
    tensors.append(torch.tensor([1.0, math.nan, math.inf, -math.inf, math.inf]).to(dtype))
    found = [statistics for _, statistics in together(tensors, ROW)]
    for tensor, (norm, total, nans, infs) in zip(tensors[:-1], found, strict=False):
        wide = tensor.double()
        assert norm == pytest.approx(wide.norm().item(), rel=1e-5)
        assert total == pytest.approx(wide.sum().item(), rel=1e-5, abs=1e-5 * norm * 300)
        assert nans == infs == 0
    norm, total, nans, infs = found[-1]
    assert math.isnan(norm)
    assert math.isnan(total)
    assert (nans, infs) == (1, 3)


def test_norms_of_half_precision_do_not_overflow() -> None:
    [(_, statistics)] = together([torch.full((10_000,), 6e4, dtype=torch.float16)], SHORT)
    assert statistics[0] == pytest.approx(6e6, rel=0.01)
