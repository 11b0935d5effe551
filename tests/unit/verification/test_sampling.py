"""Which collectives are verified of those that are sampled."""

from __future__ import annotations

from typing import Any

from commlens.verification.sampling import EVERY, CallSampler


def test_samples_are_every_16th_and_the_first_of_each_place() -> None:
    args: Any = object()
    other: Any = object()

    def checked(sampler: CallSampler, args: Any, stack: int, numbers: range) -> list[int]:
        return [number for number in numbers if not sampler.skips(args, stack, number)]

    sampler = CallSampler()
    assert checked(sampler, args, 5, range(1, 50)) == [1, EVERY, 2 * EVERY, 3 * EVERY]
    assert checked(sampler, args, 5, range(50, 60)) == []
    assert checked(sampler, args, 6, range(60, 63)) == [60]
    assert checked(sampler, other, 6, range(63, 66)) == [63, 64]
