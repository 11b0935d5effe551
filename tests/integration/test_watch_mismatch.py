"""Ranks that disagree while the job runs, under `commlens launch`, with the detached watcher, and
watched from here: real processes, real gloo.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from chosen import long
from harness import Harness, JobResult, shown
from launching import Bench
from zygote_client import Zygote

from commlens.config import Settings
from commlens.model.verdict import Verdict

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(120)

PROGRAM = """
import os, sys, time
import torch, torch.distributed as dist

def average(step, rank, how):
    odd = rank == 1 and step >= 5
    if how == "max" and odd:
        dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX)
    elif how == "transposed" and odd:
        dist.all_reduce(torch.ones(3, 2))
    elif how == "transposed":
        dist.all_reduce(torch.ones(2, 3))
    elif how == "partial":
        dist.broadcast(torch.ones(1, 5) if not odd else torch.ones(1, 2, 5), 0)
    else:
        dist.all_reduce(torch.ones(4))

def first(step):
    dist.all_reduce(torch.ones(7))

def second(step):
    dist.all_reduce(torch.ones(7))

def main():
    how, steps = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    in_step = how not in ("skipped", "swapped")
    # Steps are counted where they matter only: an optimizer imports torch._dynamo, which takes as long as torch itself.
    optimizer = None if in_step else torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
    for step in range(steps):
        if not in_step and rank == 1 and step == 30:
            if how == "swapped":
                second(step)
                first(step)
            else:
                second(step)
        elif not in_step:
            first(step)
            second(step)
        else:
            average(step, rank, how)
        if step == 5:
            os.write(1, b"odd step done\\n")
        if step % 10 == 0 and in_step:
            dist.barrier()
        if optimizer is not None:
            optimizer.step()
        time.sleep(0.02)
    if how == "skipped" and rank == 1:
        first(step)
    dist.barrier()
    os.write(1, f"training ends {time.time()}\\n".encode())
    time.sleep(0.3)
    dist.destroy_process_group()

main()
"""


@pytest.fixture
def bench(tmp_path: Path, zygote: Zygote) -> Iterator[Bench]:
    made = Bench(tmp_path, zygote)
    made.script.write_text(PROGRAM)
    yield made
    made.close()


def verdicts(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("VERDICT")]


def test_a_reduce_op_mismatch_is_reported_once_while_the_job_runs(bench: Bench) -> None:
    program = bench.launch("train.py", "max", "60")
    odd = program.until("odd step done")
    told = program.until("VERDICT", stream="err")
    over = program.until("training ends")
    assert told < over, "while the job runs"
    assert told - odd < 1.0, "the rank's watchdog reads reduce ops four times a second"
    assert program.end() == 0, "the job is left alone"
    assert len(verdicts(program.err)) == 1, program.report()
    assert (
        "disagree in all_reduce" in program.error or "the reduce op of all_reduce" in program.error
    )
    text = " ".join(program.error.split())
    assert "mismatch/reduce-op, first in all_reduce #" in text
    assert text.endswith("55 times in all."), program.report()
    assert sum("dump saved in" in line for line in program.err) == 1
    assert bench.dumped == ["rank0", "rank1"]
    assert bench.boxes_left == []


@pytest.mark.long
def test_abort_ends_the_job(bench: Bench) -> None:
    program = bench.launch("--abort-on", "mismatch", "train.py", "transposed", "600")
    odd = program.until("odd step done")
    told = program.until("VERDICT", stream="err")
    assert told - odd < 0.6, "shapes need no watchdog"
    assert program.end() != 0
    _, ending, rest = program.error.partition(
        "commlens: ending the job, because abort_on includes mismatch."
    )
    assert ending and "Traceback" not in rest and "ChildFailedError" not in rest, (
        "torchrun's report is left out"
    )
    assert not any("training ends" in line for line in program.out)
    assert len(verdicts(program.err)) == 1, program.report()
    assert bench.boxes_left == []


@pytest.mark.long
def test_the_detached_watcher_reports_it_too(bench: Bench) -> None:
    # longer than the watcher may take to start
    program = bench.torchrun("train.py", "partial", "150", COMMLENS="1")
    told = program.until("VERDICT", stream="err")
    assert told < program.until("training ends")
    assert program.end() == 0
    assert len(verdicts(program.err)) == 1, program.report()
    assert "float32[1,2,5]" in program.error


@pytest.mark.parametrize("how", ["skipped", long("swapped")])
def test_ranks_out_of_step_are_warned_of_and_never_ended(
    jobs: Harness, tmp_path: Path, how: str
) -> None:
    result = jobs.run_program(
        PROGRAM, 2, tmp_path, settings=Settings(abort_on="stall,mismatch"), arguments=[how, "250"]
    )
    assert set(result.exits.values()) == {0}, result
    [(told, verdict)] = [(at, what) for at, what in result.said if isinstance(what, Verdict)]
    assert told < min(ends_of_training(result)), result
    assert "rank 1" in verdict.summary
    assert "It is a warning." in " ".join(shown(verdict).split())
    assert not any("ending the job" in line for line in result.lines)


def ends_of_training(result: JobResult) -> list[float]:
    """When each rank said that training ends."""
    return [
        float(at) for at in re.findall(r"training ends (\S+)", "".join(result.outputs.values()))
    ]


def test_a_refusal_of_strict_verification_is_reported_once_by_its_cause(
    jobs: Harness, tmp_path: Path
) -> None:
    result = jobs.run_program(
        PROGRAM, 2, tmp_path, settings=Settings(debug=True), arguments=["transposed", "20"]
    )
    assert 0 not in result.exits.values(), result
    [verdict] = result.verdicts
    assert "all_reduce #" in verdict.summary, result
    text = " ".join(shown(verdict).split())
    assert "float32[2,3]" in text
    assert "Strict verification refused all_reduce #" in text, result
    assert "before it was issued: ranks 0-1 raised DistributedOperationException." in text
