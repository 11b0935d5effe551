"""Tensors that part from those of the other ranks, in real gloo jobs: the rank, the tensor, the
step and the cause are named, and nothing is said of healthy jobs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import number_calls
from chosen import chosen, long
from forked_calls import OnRanks
from number_faults import AT, EVERY
from test_verify_strict import launch
from zygote_client import Zygote

from commlens.scenarios.registry import without_fsdp2

TIMEOUT_S = 900
FOUND_AT = AT + AT % EVERY

# case, why, departure, tensor
FAULTS = [
    ("ddp-bit", "parameter", "one-bit", "1.norm.weight"),
    ("ddp-state", "optimizer-state", "one-element", "exp_avg of 1.norm.weight"),
    ("ddp-lr", "optimizer-state", "other-hyperparameters", "lr of group 0"),
    ("ddp-reduction", "optimizer-state", "unclear", "exp_avg of 1.norm.weight"),
    ("ddp-resume", "optimizer-state", "unclear", "exp_avg of 0.norm.weight"),
    ("ddp-buffer", "buffer", "not-updated", "0.seen"),
    ("hsdp-bit", "parameter", "one-bit", "1.norm.weight"),
    ("fsdp-lr", "optimizer-state", "other-hyperparameters", "lr of group 0"),
    ("hsdp-lr", "optimizer-state", "other-hyperparameters", "lr of group 0"),
    ("2d-lr", "optimizer-state", "other-hyperparameters", "lr of group 0"),
    ("2d-buffer", "buffer", "not-updated", "0.seen"),
    ("tp-bit", "gradient", "other-gradients", "0.right.bias"),
    ("plain-bit", "parameter", "one-bit", "1.norm.weight"),
]
HEALTHY = ["ddp-none", "fsdp-none", "hsdp-none", "tp-none", "2d-none", "plain-none"]
USUAL = ("ddp-bit", "hsdp-bit")

pytestmark = pytest.mark.timeout(TIMEOUT_S + 20)


@pytest.fixture(scope="module")
def launched(
    request: pytest.FixtureRequest, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """Run the jobs of all chosen tests. One process imports torch for all of them."""
    out = tmp_path_factory.mktemp("numbers")
    jobs = dict.fromkeys(job for row in chosen(request, "job", "unchecked") for job in row if job)
    return out, launch(zygote, out, "number_faults", *jobs, environ={}, timeout_s=TIMEOUT_S)


def reported(launched: tuple[Path, str], job: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The verdicts of rank 0, and all that it logged."""
    out, printed = launched
    if job.startswith(("fsdp", "hsdp", "2d")) and (why := without_fsdp2()):
        pytest.skip(why)
    path = out / job / "0.json"
    assert path.exists(), printed + "".join(
        each.read_text() for each in sorted((out / job).glob("*.out"))
    )
    written = json.loads(path.read_text())
    return [json.loads(each) for each in written["verdicts"]], written["lines"]


def last_line(launched: tuple[Path, str], job: str) -> str:
    """What rank 0 said of the steps that were compared."""
    [line] = json.loads((launched[0] / job / "0.json").read_text())["last"]
    return line


@pytest.mark.parametrize(
    ("job", "why", "departure", "tensor"),
    [long(f"{case}:4", *expected, when=case not in USUAL, id=case) for case, *expected in FAULTS]
    + [pytest.param("ddp-bit:4@", "parameter", "one-bit", "1.norm.weight", id="by-the-store")],
)
def test_the_rank_the_tensor_and_the_step(
    launched: tuple[Path, str], job: str, why: str, departure: str, tensor: str
) -> None:
    verdicts, _ = reported(launched, job)
    assert [(each["kind"], each["why"]) for each in verdicts] == [("diverged", why)]
    cause = verdicts[0]["cause"]
    is_tie = job == "hsdp-bit:4"  # two replicas have no majority
    assert verdicts[0]["culprits"] == ([] if is_tie else [3])
    assert cause["ranks"] == ([1, 3] if is_tie else [0, 1, 2, 3])
    assert (cause["departure"], cause["tensors"][0]["name"]) == (departure, tensor)
    assert (cause["step"], cause["equal_at"]) == (FOUND_AT, FOUND_AT - EVERY)


@pytest.mark.parametrize("job", [long("ddp-order:4")])
def test_parameters_in_another_order(launched: tuple[Path, str], job: str) -> None:
    verdicts, _ = reported(launched, job)
    cause = verdicts[0]["cause"]
    assert (cause["departure"], verdicts[0]["culprits"], cause["step"]) == ("other-order", [3], 1)


@pytest.mark.parametrize("job", [long("fsdp-calls:4")])
def test_modules_in_another_order(launched: tuple[Path, str], job: str) -> None:
    [verdict], lines = reported(launched, job)
    assert (verdict["cause"]["departure"], verdict["culprits"]) == ("other-order", [3])
    assert "rank 3 runs modules in another order, from 0 on" in lines[0]


@pytest.mark.parametrize("job", [long("ddp-same-batch:4"), long("fsdp-same-batch:4")])
def test_the_same_batch_on_two_ranks(launched: tuple[Path, str], job: str) -> None:
    [verdict], _ = reported(launched, job)
    assert (verdict["why"], verdict["culprits"]) == ("same-batch", [])
    assert verdict["cause"]["tensors"][0]["sides"][0]["ranks"] == [0, 1]


@pytest.mark.parametrize("job", [long("ddp-nan:4")])
def test_nan_that_has_reached_all_ranks(launched: tuple[Path, str], job: str) -> None:
    [verdict], _ = reported(launched, job)
    assert (verdict["why"], verdict["cause"]["step"]) == ("nan", FOUND_AT)


@pytest.mark.parametrize("job", ["ddp-nan-first:4"])
def test_the_rank_and_the_module_where_nan_came_up(launched: tuple[Path, str], job: str) -> None:
    [verdict], _ = reported(launched, job)
    assert (verdict["why"], verdict["culprits"]) == ("nan", [3])
    assert (verdict["cause"]["step"], verdict["cause"]["module"]) == (AT, "0.norm")


@pytest.mark.parametrize(
    "job", [long(f"{case}:4", when=case not in USUAL, id=case) for case in HEALTHY]
)
def test_nothing_is_said_of_a_healthy_job(launched: tuple[Path, str], job: str) -> None:
    assert reported(launched, job) == ([], [])
    steps = " on 4 ranks after steps 1, 2, 4, 6, 8, 10: no difference was found"
    assert last_line(launched, job).endswith(steps)


@pytest.mark.parametrize("job", ["ddp-late:4"])
def test_a_fault_after_the_last_check_is_found_at_the_end(
    launched: tuple[Path, str], job: str
) -> None:
    [verdict], _ = reported(launched, job)
    assert (verdict["culprits"], verdict["cause"]["departure"]) == ([3], "one-bit")
    assert (verdict["cause"]["step"], verdict["cause"]["equal_at"]) == (11, 10)
    assert last_line(launched, job).endswith("8, 10, 11: a difference was found at step 11")


@pytest.mark.parametrize("job", [long("ddp-loaded:4")])
def test_what_one_rank_loads_after_the_last_step_is_no_fault(
    launched: tuple[Path, str], job: str
) -> None:
    assert reported(launched, job) == ([], [])
    assert last_line(launched, job).endswith("8, 10, 11: no difference was found")


@pytest.mark.parametrize(("job", "unchecked"), [("ddp-none:2", "ddp-none-unchecked:2")])
def test_results_are_the_same_with_and_without(
    launched: tuple[Path, str], job: str, unchecked: str
) -> None:
    with_checks, without = (
        json.loads((launched[0] / each / "1.json").read_text())["bits"] for each in (job, unchecked)
    )
    assert with_checks == without
    assert reported(launched, job) == ([], [])


# --- checks that a program asks for itself


def test_a_model_is_compared_where_the_program_says_so(on_ranks: OnRanks) -> None:
    for result in on_ranks(number_calls.compare_model, None, world_size=3):
        assert result["before"] == "healthy"
        assert result["after"] == ("diverged", "parameter", [2])
        assert result["tensor"] == ("0.weight", 5, 9)
        assert result["again"] == "diverged"
        assert "rank 2's 0.weight differs from ranks 0-1" in " ".join(result["raised"].split())


def test_ranks_with_other_models(on_ranks: OnRanks) -> None:
    for result in on_ranks(number_calls.compare_sets, None, world_size=3):
        assert (result["departure"], result["culprits"]) == ("other-tensors", [0])
        assert result["own"] == [([0], ["1.bias", "1.weight"])]


def test_a_rank_that_does_not_come_is_named_and_the_job_goes_on(on_ranks: OnRanks) -> None:
    results = on_ranks(number_calls.leave_one_out, None, world_size=3)
    assert results[1] == ("", [])
    for kind, missing in (results[0], results[2]):
        assert kind == "healthy"
        assert "rank 1 did not call" in missing[0]


def test_one_clear_error_for_what_cannot_be_compared(on_ranks: OnRanks) -> None:
    results = on_ranks(number_calls.give_nonsense, None, world_size=3)
    for errors in results:
        assert "'value', which is str" in errors[0]
        assert "'nothing', which is a tensor that is empty" in errors[1]
        assert "group=torch.distributed.group.WORLD" in errors[2]
    assert "a group that rank 0 is not in" in results[0][3]


def test_values_that_only_the_program_knows(on_ranks: OnRanks) -> None:
    lines = on_ranks(number_calls.compare_values, None, world_size=3)
    assert ["ranks 0-1 have the same batch in" in line for line in lines[0]] == [True]
    assert ["loss differs between rank 1 and rank 2" in line for line in lines[1]] == [True]
    assert lines[2] == []


def test_tensor_parallel_ranks_whose_random_numbers_part(on_ranks: OnRanks) -> None:
    lines = on_ranks(number_calls.draw_on_one_rank, None, world_size=3)
    [line] = lines[0]
    assert (
        "rank 2's state of the CPU's generator differs from ranks 0-1 (first seen at step 5" in line
    )
    assert lines[1] == lines[2] == []


def test_the_ranks_of_tensor_parallel(on_ranks: OnRanks) -> None:
    for rank, found in enumerate(
        on_ranks(number_calls.find_tensor_parallel_ranks, None, world_size=4)
    ):
        pair = (rank // 2 * 2, rank // 2 * 2 + 1)
        assert found == {"alone": (0, 1, 2, 3), "in FSDP2": pair, "FSDP2": (), "HSDP": ()}
