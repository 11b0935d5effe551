"""Ranks that wait for processes that they started, whose calls are not recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from builders import Job, Stay, at, training
from goldens import hold
from judging import judge

from commlens.model.collective import Frame, FrameKind, Stack
from commlens.model.ranklog import HelperProcess, RankLog
from commlens.model.verdict import Verdict

C10D = "/env/site-packages/torch/distributed/distributed_c10d.py"
IN_GATHER: Stack = (
    Frame(C10D, 4030, "gather", FrameKind.TORCH),
    Frame("/env/site-packages/torch/distributed/c10d_logger.py", 83, "wrapper", FrameKind.TORCH),
    Frame(C10D, 3150, "gather_object", FrameKind.TORCH),
    Frame("/env/site-packages/torch/distributed/checkpoint/utils.py", 135, "gather_object"),
)
IDLE: Stack = (Frame("/usr/lib/python3.11/multiprocessing/connection.py", 395, "_recv"),)

FUTURE = "/usr/lib/python3.11/concurrent/futures/_base.py"
WAITING = Stay(57, "wait_for_it", frames=(Frame(FUTURE, 451, "result", FrameKind.PYTHON),))


def logs_with(stacks: Mapping[int, Stack], size: int = 4) -> list[RankLog]:
    """The ranks whose helper is in a collective do not come to the next one; else rank 1."""
    late = [rank for rank, stack in stacks.items() if stack == IN_GATHER]
    stay = replace(WAITING, line=57, function="save") if late else WAITING
    late = late or [1]
    logs = (
        Job(size)
        .run(training(lambda _, rank, i: iter([stay]) if i == 5 and rank in late else None))
        .logs()
    )
    for rank, stack in stacks.items():
        logs[rank].observation.helpers = [HelperProcess(3000 + rank, "abc", stack)]
    return logs


def found(verdict: Verdict) -> tuple[str, list[int], str | None]:
    return verdict.kind, verdict.culprits, verdict.confidence


def test_the_rank_whose_process_is_idle_is_named() -> None:
    verdict = judge(logs_with({0: IN_GATHER, 1: IDLE, 2: IN_GATHER, 3: IN_GATHER}))
    assert found(verdict) == ("missing", [1], "medium")
    assert verdict.victims == [0, 2, 3]
    hold("helpers-awaited/one-is-idle", verdict)


def test_nobody_is_named_if_all_processes_are_in_a_collective() -> None:
    verdict = judge(logs_with({0: IN_GATHER, 2: IN_GATHER}))
    assert found(verdict) == ("missing", [], "low")
    hold("helpers-awaited/all-inside", verdict)


def test_nobody_is_named_if_most_processes_are_idle() -> None:
    assert found(judge(logs_with({0: IN_GATHER, 1: IDLE, 2: IDLE, 3: IDLE})))[1] == []


def test_nobody_is_named_if_the_process_that_does_not_come_is_busy() -> None:
    writing = (Frame("/env/site-packages/torch/serialization.py", 810, "write_record"),)
    verdict = judge(logs_with({0: IN_GATHER, 1: writing, 2: IN_GATHER, 3: IN_GATHER}))
    assert found(verdict) == ("missing", [], "low")
    assert "is in no collective, but at serialization.py:810." in verdict.findings[0].evidence[-1]


@pytest.mark.parametrize("state", ["T", "S"])
def test_a_rank_that_does_not_wait_for_its_process_is_named(state: str) -> None:
    """The processes of all ranks but one stay in a broadcast until they get something to do."""
    stay = Stay(57, "evaluate", frames=WAITING.frames if state == "T" else ())
    logs = Job(4).run(training(at(1, 5, stay))).logs()
    logs[1].observation.proc_state = state
    for rank, log in enumerate(logs):
        log.observation.helpers = [HelperProcess(3000 + rank, "abc", IN_GATHER if rank else IDLE)]
    assert found(judge(logs)) == ("missing", [1], "high")


def test_nobody_is_named_if_not_all_whose_processes_stand_wait_for_theirs() -> None:
    logs = logs_with({0: IN_GATHER, 1: IDLE, 3: IN_GATHER})
    logs[2].observation.helpers = [HelperProcess(3002, "abc", IN_GATHER)]
    assert found(judge(logs)) == ("missing", [], "low")


def test_a_rank_whose_process_is_idle_does_not_wait_for_it() -> None:
    assert found(judge(logs_with(dict.fromkeys(range(4), IDLE)))) == ("missing", [1], "high")


def test_without_a_stack_of_the_process_the_rank_may_wait_for_it() -> None:
    verdict = judge(logs_with({1: ()}))
    assert found(verdict) == ("missing", [1], "low")
    assert "may wait for it" in (verdict.findings[0].would_raise_confidence or "")


@pytest.mark.parametrize("function", ["wrapper", "_store_based_barrier"])
def test_a_stack_of_helpers_of_torch_alone_is_in_no_collective(function: str) -> None:
    stack = (Frame(C10D, 1, function, FrameKind.TORCH), *IDLE)
    assert found(judge(logs_with({1: stack})))[1] == [1]
