"""Logs that hold several attempts at a job. The lines are of Slurm 22.05 and torch 2.13."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from commlens import diagnose
from commlens.formats.columns import RankColumns
from commlens.formats.torch_log import read_torch_log
from commlens.model.verdict import Verdict

ELASTIC = "torch/distributed/elastic"


def started(time: str, pid: int) -> str:
    return f"W1130 {time}.229000 {pid} torch/distributed/run.py:874] Setting OMP_NUM_THREADS\n"


def raised(rank: int, error: str) -> str:
    return (
        f"[rank{rank}]: Traceback (most recent call last):\n"
        f'[rank{rank}]:   File "/home/me/train.py", line 8, in <module>\n'
        f"[rank{rank}]: {error}\n"
    )


def failed(time: str, agent: int, pid: int, code: int = 1) -> str:
    return (
        f"E1130 {time}.781000 {agent} {ELASTIC}/multiprocessing/api.py:1002] failed (exitcode:"
        f" {code}) local_rank: 1 (pid: {pid}) of binary: /usr/bin/python\n"
    )


def summary(*workers: tuple[int, int]) -> str:
    """Return torchrun's list of workers that failed: their ranks and pids."""
    listed = "".join(
        f"  time      : 2026-11-30_06:19:49\n  host      : n1\n"
        f"  rank      : {rank} (local_rank: 1)\n  exitcode  : -9 (pid: {pid})  (SIGKILL)\n"
        for rank, pid in workers
    )
    return (
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\ntrain.py FAILED\n"
        f"Failures:\n{listed}"
    )


SUMMARY = summary((1, 12))
ABORTED = "slurmstepd: error: *** JOB 1 ON n1 CANCELLED AT 2026-11-30T06:19:51"
REQUEUED = f"{ABORTED} DUE TO JOB REQUEUE ***\n"
PREEMPTED = f"{ABORTED} DUE TO PREEMPTION ***\n"
LAST_WORDS = (
    f"W1130 06:19:58.181000 11 {ELASTIC}/agent/server/api.py:753] Received 15 death signal\n"
    "Traceback (most recent call last):\n"
    '  File "/venv/torch/distributed/run.py", line 1028, in main\n'
    "torch.distributed.elastic.multiprocessing.api.SignalException: Process 11 got signal: 15\n"
)
KEY = "KeyError: 'weights'"
LOST = "ConnectionResetError: by peer"


def read(text: str) -> list[RankColumns]:
    return read_torch_log(io.BytesIO(text.encode()), "slurm-1.out")


def verdict_on(text: str, tmp_path: Path) -> Verdict:
    log = tmp_path / "slurm-1.out"
    log.write_text(text)
    return diagnose([log])


FIRST = started("06:19:44", 11) + raised(1, LOST) + failed("06:19:49", 11, 12) + SUMMARY
SECOND = started("06:22:43", 21) + raised(0, KEY) + failed("06:22:56", 21, 22)


@pytest.mark.parametrize(
    "log",
    [
        FIRST + REQUEUED + SECOND,
        FIRST + SECOND,  # of a script that starts torchrun again
        started("06:19:44", 11) + PREEMPTED + LAST_WORDS + SECOND,
        PREEMPTED + "[Gloo] Rank 0 is connected to 1 peer ranks.\n" + raised(0, KEY),
        PREEMPTED + "node1:7:7 [0] NCCL INFO NCCL version 2.27.7+cuda12.9\n" + raised(0, KEY),
        FIRST + f"I1130 {ELASTIC} FAILED. 1/1 attempts left; will restart worker group\n" + SECOND,
    ],
)
def test_only_the_last_attempt_counts(log: str, tmp_path: Path) -> None:
    verdict = verdict_on(log, tmp_path)
    assert verdict.summary == "rank 0 raised KeyError: 'weights' at train.py:8 <module>"
    assert verdict.culprits == [0]
    assert all(finding.kind != "undetermined" for finding in verdict.findings)
    assert verdict.looked_at.endswith(f": the last of 2 attempts in {tmp_path}/slurm-1.out")


def test_a_rank_that_two_lists_of_failed_workers_name() -> None:
    """Of a script that starts torchrun again, where nothing else tells that it started."""
    first = raised(1, LOST) + failed("06:19:49", 11, 12) + summary((0, 11), (1, 12))
    second = raised(0, "OSError: disk") + failed("06:22:49", 21, 22) + summary((0, 21), (1, 22))
    third = raised(0, KEY) + failed("06:25:49", 31, 32) + summary((1, 32), (0, 31))
    columns = read(first + second + third)
    assert [(each.rank, each.exception, each.attempt) for each in columns] == [
        (0, KEY, 3),
        (1, "", 3),
    ]
    assert {each.attempt for each in read(first + second)} == {2}
    assert read(first + raised(0, KEY))[0].attempt == 1


def test_lists_of_several_nodes_are_of_one_attempt() -> None:
    one = raised(1, LOST) + failed("06:19:49", 11, 12) + summary((0, 11), (1, 12))
    other = failed("06:29:50", 31, 32) + summary((2, 31), (3, 32))
    columns = read(one + other)
    assert {each.attempt for each in columns} == {1}
    assert [each.rank for each in columns] == [0, 1, 2, 3]


def test_torchrun_starts_its_workers_again_without_a_word() -> None:
    first = raised(1, LOST) + failed("06:25:13", 11, 12)
    second = raised(1, "OSError: disk") + failed("06:25:15", 11, 14)
    third = raised(1, KEY) + failed("06:25:17", 11, 16) + SUMMARY
    [column] = read(first + second + third)
    assert (column.exception, column.attempt) == (KEY, 3)


def test_ft_launcher_says_that_it_starts_workers_again() -> None:
    agent = "[2026-11-30 06:40:53,520] [{}] [ft_launcher28452@vm] "
    ended = agent.format("ERROR") + "failed (exitcode: 1) local_rank: 1 (pid: 28495) of binary: p\n"
    again = agent.format("INFO") + "[default] 1/1 attempts left; will restart worker group\n"
    [column] = read(raised(1, LOST) + ended + again + raised(1, KEY) + ended)
    assert (column.exception, column.attempt) == (KEY, 2)


def test_the_watchdog_speaks_long_after_slurm_ended_an_attempt(tmp_path: Path) -> None:
    timeout = (
        "[rank1]:[E1130 07:30:00.000000000 ProcessGroupNCCL.cpp:632] [PG ID 0 PG GUID 0(default_pg)"
        " Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=8,"
        " OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600012 milliseconds"
        " before timing out.\n"
    )
    assert read(PREEMPTED + timeout)[0].attempt == 2
    assert read(PREEMPTED + timeout.replace("07:30:00", "06:20:10"))[0].attempt == 1
    verdict = verdict_on(PREEMPTED + timeout, tmp_path)
    assert "preempted" not in f"{verdict.summary} {verdict.explanation} {verdict.findings}"


@pytest.mark.parametrize(
    "log",
    [
        # two nodes' logs, one after the other: the second began before the first ended
        FIRST + started("06:19:45", 31) + raised(3, KEY) + failed("06:19:50", 31, 32),
        FIRST + failed("06:19:52", 31, 32),  # of another node
        PREEMPTED + LAST_WORDS,
        FIRST + REQUEUED,
    ],
)
def test_one_attempt(log: str) -> None:
    assert {column.attempt for column in read(log)} == {1}


def test_an_attempt_that_says_nothing_yet(tmp_path: Path) -> None:
    verdict = verdict_on(FIRST + REQUEUED + started("06:22:43", 21), tmp_path)
    assert (verdict.kind, verdict.culprits) == ("undetermined", [])
    assert "the last of 2 attempts" in verdict.looked_at
    verdict = verdict_on(PREEMPTED + "Initializing distributed: GLOBAL_RANK: 0\n", tmp_path)
    assert (verdict.kind, verdict.culprits) == ("undetermined", [])


def test_a_job_that_slurm_starts_again_was_not_cancelled(tmp_path: Path) -> None:
    verdict = verdict_on(FIRST + REQUEUED, tmp_path)
    assert "cancelled" not in f"{verdict.summary} {[each.summary for each in verdict.findings]}"
