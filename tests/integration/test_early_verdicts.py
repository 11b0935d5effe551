"""With the default settings a fault that is certain is reported within seconds, and a healthy job
that pauses is left alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from chosen import long
from harness import Harness, JobResult
from more_scenarios import find

from commlens.commands.demo import differences
from commlens.config import Settings
from commlens.model.verdict import Verdict

PAUSING = Path(__file__).with_name("pausing_job.py")
WITHIN_S = 15.0
FILE_LOCK = """
import fcntl, sys, time
from datetime import timedelta
import torch, torch.distributed as dist

def main():
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    file = open(sys.argv[1], "w")
    for step in range(10):
        if dist.get_rank() == 1 and step == 8:
            fcntl.flock(file, fcntl.LOCK_EX)
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 0 and step == 8:
            fcntl.flock(file, fcntl.LOCK_EX)
        optimizer.step()

main()
"""


OWN_LOCK = """
import threading
from datetime import timedelta
import torch, torch.distributed as dist

lock = threading.Lock()

def report(rank, step):
    if rank == 1 and step == 8:
        with lock:
            print("never")

def main():
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    for step in range(10):
        dist.all_reduce(torch.ones(1))
        with lock:
            report(dist.get_rank(), step)

main()
"""


def seconds_to_verdict(result: JobResult) -> float:
    """From the beginning of the oldest wait in the dump."""
    ops = [op for log in result.logs() for op in (*log.collectives, *log.setups) if op.in_flight]
    [first, *_] = [at for at, what in result.said if isinstance(what, Verdict)]
    return first - min(op.announced_ns for op in ops) / 1e9


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name",
    [
        "swap-two-groups",  # a cycle, in a place that is known
        long("recv-without-send"),
        long("new-group-order"),  # a mismatch, before the first step
        long("unanswered-key"),
    ],
)
def test_a_fault_that_is_certain_is_reported_soon(jobs: Harness, tmp_path: Path, name: str) -> None:
    scenario = find(name)
    result = jobs.run_job(scenario, 4, tmp_path, settings=Settings())
    print(result)
    [verdict, *_] = result.verdicts
    assert verdict.certain
    assert differences(verdict, scenario.truth(4)) == []
    assert seconds_to_verdict(result) < WITHIN_S
    assert result.seconds < 2 * WITHIN_S, "The job was not aborted."


@pytest.mark.timeout(120)
def test_a_lock_that_a_waiting_rank_holds_is_certain(jobs: Harness, tmp_path: Path) -> None:
    program = tmp_path / "lock.py"
    program.write_text(FILE_LOCK)
    result = jobs.run_job(
        find("healthy-plain"),
        2,
        tmp_path,
        settings=Settings(),
        arguments=[str(program), str(tmp_path / "file")],
    )
    print(result)
    [verdict, *_] = result.verdicts
    assert (verdict.kind, verdict.culprits, verdict.certain) == ("missing", [0], True)
    evidence = " ".join(verdict.findings[0].evidence)
    assert "neither can go on" in evidence
    assert "This all_reduce usually completes in " in evidence
    [learned] = [each for log in result.logs() if (each := log.observation.usual_wait)]
    assert learned.times >= 3 and learned.limit_s >= 5.0, "The dump holds what was learned."
    assert seconds_to_verdict(result) < WITHIN_S


@pytest.mark.timeout(120)
def test_a_lock_that_a_thread_takes_twice_is_certain(jobs: Harness, tmp_path: Path) -> None:
    program = tmp_path / "lock.py"
    program.write_text(OWN_LOCK)
    result = jobs.run_job(
        find("healthy-plain"), 2, tmp_path, settings=Settings(), arguments=[str(program)]
    )
    print(result)
    [verdict, *_] = result.verdicts
    assert (verdict.kind, verdict.culprits, verdict.certain) == ("missing", [1], True)
    assert verdict.cause.locked_out == [1]
    assert seconds_to_verdict(result) < WITHIN_S


def run_healthy(jobs: Harness, folder: Path, pauses: str, *, timeout_s: float) -> JobResult:
    """Run a healthy job with these pauses, and return what was said; it must end well."""
    result = jobs.run_job(
        find("healthy-plain"),
        4,
        folder,
        settings=Settings(),
        timeout_s=timeout_s,
        arguments=[str(PAUSING), *pauses.split()],
    )
    print(result)
    assert set(result.exits.values()) == {0}, "The job was ended."
    return result


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "pauses",
    [
        "stopped:1:12",
        long("asleep:2:9 reading:1:9 evaluation:0:9 checkpoint:0:9"),
        long("garbage:3:9 compilation:2:9 asleep:0:20"),
        long("lock:1:10 thread:2:10 slow-disk:3:10 download:0:10"),
    ],
)
def test_a_healthy_job_that_pauses_gets_no_verdict(
    jobs: Harness, tmp_path: Path, pauses: str
) -> None:
    result = run_healthy(jobs, tmp_path, pauses, timeout_s=200)
    assert not [verdict for verdict in result.verdicts if verdict.is_fault]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("pause", [long("loader:1:17"), long("asleep:2:17")])
def test_a_rank_that_waits_for_something_outside_of_the_job_is_not_mentioned(
    jobs: Harness, tmp_path: Path, pause: str
) -> None:
    result = run_healthy(jobs, tmp_path, pause, timeout_s=100)
    assert result.said == []
