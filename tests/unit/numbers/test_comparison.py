"""What ranks have differently: the ranks to blame, the step, the cause that fits."""

from __future__ import annotations

import math

import pytest
from number_reports import Job

from commlens.model.cause import Diverged

MODEL = {
    "parameter a": 1.0,
    "gradient a": 0.1,
    "optimizer-state exp_avg of a": 0.2,
    "parameter b": 2.0,
    "gradient b": 0.3,
    "hyperparameter lr of group 0": 1e-3,
}


def later(step: int) -> dict[str, float]:
    """The model after some steps."""
    return {
        name: value + (step if not name.startswith("hyper") else 0) for name, value in MODEL.items()
    }


def only(found: list[Diverged]) -> Diverged:
    assert len(found) == 1
    return found[0]


def test_nothing_is_found_where_all_agree() -> None:
    job = Job()
    assert [job.check(step, later(step)) for step in (1, 100, 200)] == [[], [], []]


def test_the_odd_rank_the_tensor_and_the_step() -> None:
    job = Job()
    assert not job.check(1, later(1))
    assert not job.check(100, later(100))
    found = only(job.check(200, later(200), {3: {"parameter a": 7.0}}))
    assert (found.kind, found.why, found.culprits, found.victims) == (
        "diverged",
        "parameter",
        [3],
        [0, 1, 2],
    )
    assert (found.step, found.equal_at) == (200, 100)
    assert (found.differing, found.compared) == (1, 6)
    assert found.equal_kinds == ["gradient", "optimizer-state"]
    assert (found.blamed_by, found.confidence, found.certain) == ("majority", "high", True)
    assert found.doubt is None
    assert found.tensors[0].name == "a"
    assert [side.ranks for side in found.tensors[0].sides] == [[0, 1, 2], [3]]


def test_a_difference_is_found_once() -> None:
    job = Job()
    assert job.check(1, later(1), {3: {"parameter a": 7.0}})
    assert not job.check(2, later(2), {3: {"parameter a": 8.0}})


def test_a_check_for_which_ranks_wait_finds_it_again() -> None:
    job = Job()
    odd = {3: {"parameter a": 7.0}}
    assert job.check(1, later(1), odd)
    assert job.check(1, later(1), odd, source="check_numbers", wait_s=1.0)


@pytest.mark.parametrize(
    ("changed", "why", "departure", "unequal"),
    [
        (
            ["hyperparameter lr of group 0", "parameter a", "parameter b"],
            "optimizer-state",
            "other-hyperparameters",
            [],
        ),
        (
            ["gradient a", "optimizer-state exp_avg of a", "parameter a"],
            "gradient",
            "other-gradients",
            ["optimizer-state", "parameter"],
        ),
        (
            ["optimizer-state exp_avg of a", "parameter a"],
            "optimizer-state",
            "unclear",
            ["parameter"],
        ),
    ],
)
def test_the_first_kind_that_differs_is_the_cause(
    changed: list[str], why: str, departure: str, unequal: list[str]
) -> None:
    job = Job()
    job.check(1, later(1))
    found = only(job.check(2, later(2), {1: dict.fromkeys(changed, 50.0)}))
    assert (found.why, found.departure, found.culprits) == (why, departure, [1])
    assert found.unequal_kinds == unequal


def test_the_checks_before_are_told() -> None:
    job = Job()
    for step in range(1, 30):
        assert not job.check(step, later(step))
    found = only(job.check(30, later(30), {3: {"parameter a": 7.0, "parameter b": 8.0}}))
    assert [(each.step, each.differing) for each in found.history] == [
        *((step, 0) for step in range(11, 30)),
        (30, 2),
    ]


def test_the_output_of_a_collective_is_the_cause_of_all_that_follows() -> None:
    job = Job(relation="output")
    output = "collective-output all_reduce 1"
    assert not job.check(1, {output: 1.0, **later(1)})
    odd = dict.fromkeys([output, "gradient a", "parameter a"], 50.0)
    found = only(job.check(2, {output: 2.0, **later(2)}, {1: odd}))
    assert (found.why, found.departure) == ("collective-output", "other-outputs")
    assert (found.culprits, found.equal_at) == ([1], 1)


def test_different_from_the_first_check_on() -> None:
    found = only(Job().check(1, later(1), {2: {"parameter a": 5.0, "parameter b": 6.0}}))
    assert (found.departure, found.equal_at, found.culprits) == ("not-broadcast", None, [2])


def test_a_tensor_that_one_rank_does_not_update() -> None:
    job = Job()
    job.check(1, later(1))
    found = only(job.check(2, later(2), {0: {"parameter a": later(1)["parameter a"]}}))
    assert (found.departure, found.culprits) == ("not-updated", [0])


def test_two_ranks_have_no_majority() -> None:
    job = Job(size=2)
    job.check(1, later(1))
    found = only(job.check(2, later(2), {1: {"parameter a": 9.0}}))
    assert (found.culprits, found.blamed_by, found.confidence) == ([], "undecided", "low")
    assert found.doubt == "no-majority"
    assert found.certain


def test_of_two_ranks_the_one_that_stands_still_is_to_blame() -> None:
    job = Job(size=2)
    job.check(1, later(1))
    found = only(job.check(2, later(2), {1: {"parameter a": later(1)["parameter a"]}}))
    assert (found.culprits, found.blamed_by, found.confidence) == ([1], "routine", "medium")
    assert found.doubt == "others-changed"


def test_of_two_learning_rates_the_old_one_may_be_right() -> None:
    job = Job(size=2)
    job.check(1, later(1))
    found = only(job.check(2, later(2), {1: {"hyperparameter lr of group 0": 1.0}}))
    assert (found.culprits, found.departure) == ([], "other-hyperparameters")


def test_overlapping_groups_decide_together() -> None:
    # tensor parallel in pairs, data parallel across them
    groups = [(0, 1), (2, 3), (0, 2), (1, 3)]
    found = only(Job().check(1, later(1), {2: {"parameter a": 9.0}}, groups=groups))
    assert (found.culprits, found.ranks) == ([2], [0, 1, 2, 3])


def test_shards_are_compared_with_their_replicas_only() -> None:
    groups = [(0, 2), (1, 3)]
    shards = {1: {"parameter a": 5.0}, 3: {"parameter a": 5.0}}
    assert not Job().check(1, later(1), shards, groups=groups)
    found = only(Job().check(1, later(1), {1: {"parameter a": 5.0}}, groups=groups))
    assert (found.culprits, found.ranks) == ([], [1, 3])


def test_parameters_in_another_order() -> None:
    order = {3: list(reversed(MODEL))}
    found = only(Job().check(1, later(1), {3: {"parameter a": 9.0}}, order=order))
    assert (found.departure, found.culprits) == ("other-order", [3])


def test_ranks_with_other_tensors() -> None:
    without = {rank: ["parameter b"] for rank in (0, 1, 2)}
    found = only(Job().check(1, MODEL, without=without, source="check", wait_s=1.0))
    assert (found.departure, found.culprits) == ("other-tensors", [3])
    assert [(own.ranks, own.names) for own in found.only_on] == [([3], ["b"])]


def test_optimizers_of_parts_of_a_model_are_compared_where_they_overlap() -> None:
    assert not Job().check(1, MODEL, without={0: ["parameter a"], 1: ["parameter b"]})


def test_tolerance_allows_for_rounding() -> None:
    odd = {3: {"parameter a": 1.0 + 1e-7}}
    assert Job().check(1, MODEL, odd)
    assert not Job().check(1, MODEL, odd, tolerance=1e-6)
    assert Job().check(1, MODEL, {3: {"parameter a": 1.1}}, tolerance=1e-6)


def test_rounding_is_told_from_other_differences() -> None:
    job = Job()
    job.check(1, later(1))
    close = {3: {name: value * (1 + 1e-6) for name, value in later(2).items() if " a" in name[-2:]}}
    close[3].pop("gradient a")
    close[3].pop("optimizer-state exp_avg of a")
    found = only(job.check(2, later(2), close))
    assert found.departure == "rounding"


def test_the_bits_of_nan_mean_nothing_but_nan_is_found() -> None:
    job = Job()
    job.check(1, later(1))
    nan = {rank: {"parameter a": math.nan} for rank in range(4)}
    found = only(job.check(2, later(2), nan))
    assert (found.why, found.departure, found.culprits) == ("nan", "not-finite", [])
    assert (found.step, found.equal_at) == (2, 1)


def test_nan_on_one_rank_names_it() -> None:
    found = only(Job().check(2, MODEL, {1: {"parameter b": math.nan}}))
    assert (found.why, found.culprits, found.tensors[0].name) == ("nan", [1], "b")


# --- tensors of which nothing tells that they are replicas


def test_what_has_agreed_while_it_changed_must_agree() -> None:
    job = Job(relation="learned")
    for step in (1, 2, 3):
        assert not job.check(step, later(step))
    found = only(job.check(4, later(4), {3: {"parameter a": 9.0}}))
    assert (found.culprits, found.confidence, found.certain) == ([3], "medium", False)
    assert found.doubt == "inferred"
    assert found.equal_at == 3


def test_random_numbers_that_were_in_step() -> None:
    job = Job(relation="learned")
    generator = "rng the CPU's generator"
    for step in (1, 2, 3):
        assert not job.check(step, {generator: float(step), **later(step)})
    found = only(job.check(4, {generator: 4.0, **later(4)}, {3: {generator: 9.0}}))
    assert (found.why, found.departure, found.culprits) == ("rng", "other-random-numbers", [3])
    assert [(each.step, each.differing) for each in found.history][-2:] == [(3, 0), (4, 1)]
    assert (found.certain, found.equal_at) == (False, 3)
    assert not job.check(5, {generator: 5.0, **later(5)}, {3: {generator: 10.0}})


def test_random_numbers_that_never_were_in_step() -> None:
    job = Job(relation="learned")
    generator = "rng the CPU's generator"
    for step in range(1, 6):
        own = {rank: {generator: 10.0 * step + rank} for rank in range(4)}
        assert not job.check(step, {generator: 0.0}, own)


def test_what_has_agreed_once_may_part() -> None:
    job = Job(relation="learned")
    job.check(1, later(1))
    assert not job.check(2, later(2), {3: {"parameter a": 9.0}})
    assert not job.check(3, later(3), {3: {"parameter a": 10.0}})


def test_what_never_changed_may_part() -> None:
    job = Job(relation="learned")
    for step in range(5):
        job.check(step, MODEL)
    assert not job.check(6, MODEL, {3: {"parameter a": 9.0}})


def test_ranks_with_models_of_their_own() -> None:
    job = Job(relation="learned")
    for step in range(1, 9):
        own = {rank: {name: value + rank for name, value in MODEL.items()} for rank in range(4)}
        assert not job.check(step, later(step), own)


def test_presumed_replicas_that_drift_by_rounding() -> None:
    odd = {3: {"parameter a": 1.0 + 1e-7}}
    found = only(Job(relation="presumed").check(1, MODEL, odd))
    assert (found.culprits, found.confidence) == ([3], "medium")


def test_presumed_replicas_with_another_learning_rate() -> None:
    job = Job(relation="presumed")
    job.check(1, later(1))
    odd = {3: {"hyperparameter lr of group 0": 0.5, "gradient a": 9.0, "parameter a": 8.0}}
    found = only(job.check(2, later(2), odd))
    assert (found.departure, found.culprits) == ("other-hyperparameters", [3])


def test_presumed_replicas_that_never_were() -> None:
    job = Job(relation="presumed")
    for step in (1, 2, 3):
        assert not job.check(step, later(step), {3: {"parameter a": 90.0 + step}})


# --- what must differ


def test_the_same_batch_twice() -> None:
    job = Job(relation="different")

    def batches(step: int, same: bool) -> list[Diverged]:
        read = {rank: {"batch input 0": 100.0 * step + rank} for rank in range(4)}
        if same:
            read[1] = read[0]
        return job.check(step, {}, read, source="batch")

    assert not batches(1, same=True)  # may be chance
    found = only(batches(2, same=True))
    assert (found.why, found.departure, found.culprits) == ("same-batch", "same-data", [])
    assert [side.ranks for side in found.tensors[0].sides] == [[0, 1]]
    assert not batches(3, same=True)


def test_other_batches_and_benchmarks_are_no_fault() -> None:
    job = Job(relation="different")
    for step in (1, 2, 3):
        assert not job.check(step, {"batch input 0": 1.0}, source="batch")  # always the same
    job = Job(relation="different")
    for step in (1, 2, 3):
        read = {rank: {"batch input 0": 100.0 * step + rank} for rank in range(4)}
        assert not job.check(step, {}, read, source="batch")


def test_values_that_must_differ() -> None:
    values = {rank: {"value ids": float(rank // 2)} for rank in range(4)}
    found = only(Job(relation="different").check(1, {}, values, source="must_differ of ids"))
    assert (found.why, found.victims) == ("value", [0, 1, 2, 3])
