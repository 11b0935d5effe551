"""Tests of src/commlens/check/followed_numbers.py."""

from __future__ import annotations

import copy
import json
import math
import pickle
import statistics

import pytest
import torch

from commlens.check.followed_numbers import FOLLOWED, follow, follow_through_math
from commlens.tracing.patches import Patches


class Asked:
    """A provenance that keeps what it was asked, and gives one answer to all if it has one."""

    def __init__(self, answer: bool | None = None) -> None:
        self.answer = answer
        self.outcomes: list[bool] = []
        self.lost: list[float] = []

    def decide(self, outcome: bool) -> bool:
        self.outcomes.append(outcome)
        return outcome if self.answer is None else self.answer

    def escape(self, value: float) -> None:
        self.lost.append(value)

    def join(self, other: Asked) -> Asked:
        return self


def test_a_followed_number_is_a_number() -> None:
    number, whole = follow(2.5, Asked()), follow(7, Asked())
    assert isinstance(number, float)
    assert isinstance(whole, int)
    assert f"{number:.2f} {whole:03d} {number}" == "2.50 007 2.5"
    assert json.dumps([number, whole]) == "[2.5, 7]"
    assert torch.full((2,), number).tolist() == [2.5, 2.5]
    assert torch.zeros(whole).shape == (7,)
    assert list(range(whole)) == list(range(7))


def test_showing_a_number_decides_nothing() -> None:
    reader = Asked()
    number = follow(2.5, reader)
    str(f"{number:.3e} {number!r}")
    json.dumps({"loss": number})
    assert reader.outcomes == []
    assert reader.lost == []


def test_comparisons_and_truth_are_reported() -> None:
    reader = Asked()
    number = follow(2.5, reader)
    assert number > 2
    assert not number < 2
    assert number <= 3
    assert number != 0.0
    assert max(1.0, number) == 2.5
    assert bool(number)
    assert reader.outcomes == [True, False, True, True, True, True, True]


def test_the_reader_may_answer() -> None:
    assert not follow(2.5, Asked(answer=False)) > 1
    assert follow(0, Asked(answer=True))


@pytest.mark.parametrize("value", [2.5, 7])
def test_what_is_computed_is_followed(value: float) -> None:
    number = follow(value, Asked())
    results = [number + 1, 1 + number, number * 2.0, -number, abs(number), number / 3, 3 - number]
    results += [number**2, number % 2, *divmod(number, 2), sum([number, number])]
    assert all(type(each) in FOLLOWED for each in results)
    assert results[0] - 1 == value


def test_a_conversion_loses_the_number() -> None:
    reader = Asked()
    number = follow(2.5, reader)
    assert (int(number), round(number), math.floor(number)) == (2, 2, 2)
    assert [type(float(each)) for each in (number, follow(3, reader))] == [float, float]
    assert len(reader.lost) == 5


def test_what_only_shows_a_number_does_not_lose_it() -> None:
    reader = Asked()
    number = follow(2.5, reader)
    assert f"{number:.1f} {number} {number!r}" == "2.5 2.5 2.5"
    assert torch.ones(1).mul(number).item() + follow(3, reader) * 0.5 == 4.0
    assert not reader.lost


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")  # since 2.15
def test_math_asks_for_the_truth_too() -> None:
    patches, reader = Patches(), Asked()
    with_patches = follow(1.0, reader)
    follow_through_math(patches)
    try:
        assert not math.isnan(with_patches)
        assert type(math.exp(with_patches)) in FOLLOWED
        assert math.isnan(math.nan)
        assert type(math.fabs(with_patches)) in FOLLOWED
        assert not math.isclose(with_patches, 2.0, rel_tol=0.1)
        assert math.floor(2.5) == 2 and math.fsum([0.5, 0.5]) == 1

        def asks(x: float) -> bool:
            return math.isnan(x)

        assert not torch.jit.script(asks)(1.0)
    finally:
        patches.restore()
    assert reader.outcomes == [False, False]


def test_the_type_of_a_number_makes_plain_ones() -> None:
    number = follow(2.5, Asked())
    assert statistics.mean([number, 1.5]) == 2
    assert type(type(number)("3.5")) is float
    assert type(type(follow(7, Asked()))("11", 2)) is int
    assert not number.is_integer() and number.provenance.lost[-1:] == [2.5]


def test_copies_are_followed_and_pickles_are_plain() -> None:
    number = follow(2.5, Asked())
    assert copy.deepcopy({"best": number})["best"] is number
    assert type(pickle.loads(pickle.dumps(number))) is float
    assert type(pickle.loads(pickle.dumps(follow(7, Asked())))) is int
