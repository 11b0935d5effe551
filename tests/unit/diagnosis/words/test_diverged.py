"""Words about tensors that ranks must have alike, and do not."""

from __future__ import annotations

import math
import re

import msgspec
import pytest
from goldens import hold
from number_reports import Job

from commlens.diagnosis.words.diverged import (
    no_difference,
    other_ops,
    steps_compared,
    verdict_of,
    words,
)
from commlens.model.cause import Diverged, DivergedTensor, TensorSide
from commlens.model.numbers import (
    CheckId,
    Measure,
    NumbersReport,
    OpLog,
    OpPlace,
    OpRun,
    StepsCompared,
    TensorTable,
)
from commlens.numbers.comparison import EVERY_OP, TensorComparison
from commlens.numbers.differences import RelatedTables

NORM = "layers.4.norm.weight"
MODEL = {
    f"gradient {NORM}": 0.1,
    f"optimizer-state exp_avg of {NORM}": 0.2,
    f"parameter {NORM}": 1.0,
    "hyperparameter lr of group 0": 1e-3,
}


def diverged(*changed: str, size: int = 4, value: float = 7.0) -> Diverged:
    """What is found at step 400 if the last rank has these tensors differently."""
    job = Job(size=size)
    for step in (200, 300):
        assert not job.check(step, {name: step + number for name, number in MODEL.items()})
    values = {name: 400 + number for name, number in MODEL.items()}
    [found] = job.check(400, values, {size - 1: dict.fromkeys(changed, value)})
    return found


def test_the_rank_the_tensor_and_the_steps() -> None:
    said = words(diverged(f"optimizer-state exp_avg of {NORM}", f"parameter {NORM}"))
    assert said.summary == (
        f"rank 3's exp_avg of {NORM} differs from ranks 0-2 (first seen at step 400, equal at step 300)"
    )
    assert (
        said.explanation
        == "1 of 4 tensors differs, and its parameter with it; its gradient is equal."
    )


def test_a_whole_verdict() -> None:
    hold("diverged/parameter", verdict_of(diverged(f"parameter {NORM}")))


def test_an_output_of_a_collective() -> None:
    job = Job(relation="output")
    name = "collective-output all_reduce 7"
    assert not job.check(300, {name: 1.0})
    [found] = job.check(400, {name: 2.0}, {3: {name: 3.0}})
    [tensor] = found.tensors
    named = msgspec.structs.replace(tensor, source="train.py:42")
    hold("diverged/output", verdict_of(msgspec.structs.replace(found, tensors=[named])))


def test_the_first_op() -> None:
    place = OpPlace("layers.0.norm", False, "train.py:126", "allreduce at train.py:117")
    backward = OpPlace("layers.0.norm", True, "train.py:80")

    def log(gradient: int, made_by: str) -> OpLog:
        write = ("parameter", "w", gradient + 1)
        made = OpRun(made_by, (), (gradient,), (gradient,), (), 1)
        return OpLog((place, backward), (made, OpRun("add_", (), (1, gradient), (), (write,), 0)))

    table = TensorTable((0, 1, 2), "equal", (Measure("parameter", "w", 1),))
    reports = {
        rank: NumbersReport(
            rank, CheckId(EVERY_OP, 7), (), ops=log(20, "sum") if rank < 2 else log(30, "mul")
        )
        for rank in range(3)
    }
    part = RelatedTables((0, 1, 2), "equal", dict.fromkeys(range(3), table), agrees=True)
    [found] = TensorComparison().compare(CheckId(EVERY_OP, 7), reports, [part])
    hold("diverged/first-op", verdict_of(found))
    [side, other] = found.ops
    said = other_ops(3, [side, msgspec.structs.replace(other, op=None)])
    assert "ranks 0-1: add_ in layers.0.norm at train.py:126; rank 2: no op" in said


def test_random_numbers() -> None:
    job = Job(relation="learned")
    name = "rng the CPU's generator"
    for step in (1, 2, 3):
        assert not job.check(step, {name: float(step)})
    [found] = job.check(4, {name: 4.0}, {3: {name: 9.0}})
    said = words(found)
    assert said.summary == (
        "rank 3's state of the CPU's generator differs from ranks 0-2 (first seen at step 4,"
        " equal at step 3)"
    )
    assert said.next_step.startswith("look for code that draws random numbers on some")


def test_two_replicas() -> None:
    said = words(diverged(f"parameter {NORM}", size=2))
    assert said.summary == (
        f"{NORM} differs between rank 0 and rank 1 (first seen at step 400, equal at step 300)"
    )
    assert said.would_raise_confidence == "The ranks differ, and no majority of them agrees."


def test_two_pairs_of_replicas() -> None:
    odd = {rank: {f"gradient {NORM}": 5.0} for rank in (1, 3)}
    [found] = Job().check(1, MODEL, odd, groups=[(0, 1), (2, 3)])
    assert words(found).summary == (
        f"gradient of {NORM} differs between rank 0 and rank 1 and between rank 2 and rank 3"
        " at step 1"
    )


def test_a_learning_rate() -> None:
    said = words(diverged("hyperparameter lr of group 0", value=0.25))
    assert "lr of group 0 is 400.001 on ranks 0-2 and 0.25 on rank 3." in said.explanation
    assert said.evidence[0].endswith(", value 0.25.")


def test_a_learning_rate_in_single_precision() -> None:
    said = words(diverged("hyperparameter lr of group 0", value=0.00999999978))
    assert "and 0.01 on rank 3." in said.explanation
    assert said.evidence[0].endswith(", value 0.01.")


def test_a_learning_rate_of_zero() -> None:
    said = words(diverged("hyperparameter lr of group 0", value=0.0))
    assert "lr of group 0 is 400.001 on ranks 0-2 and 0 on rank 3." in said.explanation
    assert said.evidence[0].endswith(", value 0.")


def test_a_parameter_that_one_rank_has_alone() -> None:
    [found] = Job().check(
        1, MODEL, without={rank: [f"parameter {NORM}"] for rank in (0, 1, 2)}, wait_s=1.0
    )
    assert words(found).summary.startswith(f"only rank 3 has {NORM}")


def test_a_bit() -> None:
    sides = [TensorSide([0, 1, 2], "0" * 16, 1.0), TensorSide([3], "1" * 16, 1.0)]
    found = diverged(f"parameter {NORM}")
    found.departure = "one-bit"
    found.tensors = [DivergedTensor("parameter", NORM, sides, element=12345, bit=30)]
    assert "bit 30 of element 12345" in words(found).explanation
    assert words(found).next_step.startswith("test the memory of rank 3")


def test_one_element_that_a_program_may_have_written_is_not_blamed_on_hardware() -> None:
    sides = [TensorSide([0, 1, 2], "0" * 16, 1.0), TensorSide([3], "1" * 16, 1.0)]
    found = diverged(f"parameter {NORM}")
    found.departure = "one-element"
    found.tensors = [DivergedTensor("parameter", NORM, sides, element=37)]
    assert words(found).explanation.endswith("Only element 37 differs, in more than one bit.")
    said = f"{words(found).explanation} {words(found).next_step}"
    assert not {"hardware", "machine", "flipped", "memory"} & set(re.findall(r"\w+", said))
    assert words(found).next_step.startswith(
        f"look for code that writes to single elements of {NORM} on rank 3 only"
    )


def test_nan_everywhere() -> None:
    job = Job()
    job.check(300, MODEL)
    nan = {rank: {f"parameter {NORM}": math.nan} for rank in range(4)}
    [found] = job.check(400, MODEL, nan)
    assert (
        words(found).summary
        == f"{NORM} of all ranks has NaN (first seen at step 400, not at step 300)"
    )
    assert "--check-numbers=nan" in words(found).next_step
    assert words(found).would_raise_confidence == ("All ranks have it, so none of them is blamed.")


def test_zeros() -> None:
    said = words(diverged(f"gradient {NORM}", value=0.0))
    assert re.search(r"rank 3 hash \w+, norm 0, mean 0\.", said.evidence[0])


def test_the_same_value_on_all_ranks() -> None:
    [found] = Job(relation="different").check(
        1, {"value ids": 1.0}, source="commlens.must_differ() of ids"
    )
    assert words(found).summary == "ranks 0-3 have the same ids in commlens.must_differ() of ids"
    assert words(found).would_raise_confidence == (
        "Nothing tells which of these ranks should have other data."
    )


def test_a_call_of_the_program() -> None:
    [found] = Job().check(
        2, MODEL, {1: {f"parameter {NORM}": 3.0}}, source="commlens.check_numbers()", wait_s=1.0
    )
    assert words(found).summary.endswith(
        "differs from ranks 0,2-3 in commlens.check_numbers(), call 2"
    )


def test_a_first_call_has_no_earlier_one() -> None:
    odd = {rank: {"value loss": float(rank)} for rank in (1, 2, 3)}
    [found] = Job().check(1, {"value loss": 9.0}, odd, source="commlens.must_agree() of loss")
    said = words(found)
    assert said.summary.endswith("in commlens.must_agree() of loss")
    assert said.next_step == "look at what it is computed from on each of these ranks"
    assert said.would_raise_confidence == "The ranks differ, and no majority of them agrees."


@pytest.mark.parametrize("tensors", [0, 1, 292])
def test_no_difference(tensors: int) -> None:
    verdict = no_difference(4, tensors)
    assert not verdict.is_fault
    assert ("nothing to compare" in verdict.summary) == (tensors == 0)


@pytest.mark.parametrize(
    ("steps", "differs_at", "said"),
    [
        ([1], 0, "after step 1: no difference was found"),
        ([1, 10, 30], 0, "after steps 1, 10, 30: no difference was found"),
        ([1, 10, 100, 200, 300, 400, 500], 10, "300, 400, 500: a difference was found at step 10"),
        ([1, *range(100, 5001, 100)], 0, "after steps 1, 100, 200, 300, 400, 500, ..., 5000: no"),
    ],
)
def test_the_steps_that_were_compared(steps: list[int], differs_at: int, said: str) -> None:
    done = StepsCompared()
    for step in steps:
        done.add(step, 4, 292, step == differs_at)
    assert steps_compared(done).startswith("compared 292 tensors on 4 ranks after step")
    assert said in steps_compared(done)
    stages = StepsCompared()
    for step in (1, 1, 10, 10):  # of a pipeline, each with its own check
        stages.add(step, 2, 50, False)
    assert steps_compared(stages).startswith("compared 100 tensors on 4 ranks after steps 1, 10:")
    nothing = StepsCompared()
    nothing.add(1, 2, 0, differs=False)
    assert steps_compared(nothing).startswith("compared no tensor that several ranks hold on 2")


def test_the_verdict_has_the_cause_as_data() -> None:
    verdict = verdict_of(diverged(f"parameter {NORM}"))
    assert (verdict.kind, verdict.why, verdict.culprits) == ("diverged", "parameter", [3])
    assert isinstance(verdict.cause, Diverged)
    assert verdict.is_fault
