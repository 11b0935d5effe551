"""Latent faults of a program that ends well: told once at its end, on real gloo ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from chosen import NATIVE_FIRST
from harness import Harness
from more_scenarios import find

pytest.importorskip("torch")

import commlens
from commlens.config import Settings
from commlens.text import hazard_phrase
from commlens.traces.trace import Trace

pytestmark = pytest.mark.timeout(150)

FAULTY = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, ones = dist.get_rank(), torch.ones(4)
first = dist.new_group([0])
for _ in range(3):
    dist.all_reduce(torch.ones(4), async_op=True)  # line 6
kept = dist.broadcast(ones, 0, async_op=True)  # line 7
message = dist.isend(ones, 1) if rank == 0 else dist.recv(ones, 0)  # line 8
dist.all_reduce(ones, group=first)  # line 9
for _ in range(20):
    dist.new_group([0, 1])  # line 11
dist.barrier()
dist.destroy_process_group()
"""

TOUCHING = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, ones, more = dist.get_rank(), torch.ones(4), torch.ones(4, 2)
for _ in range(3):
    work = dist.all_reduce(more[:2], async_op=True)  # line 5
    more[2:].add_(1)
    more.sum()  # line 7
    more[1].add_(1)  # line 8
    work.wait()
if rank == 0:
    message = dist.isend(ones, 1)  # line 11
    ones.sum()
    ones[1:].zero_()  # line 13
else:
    message = dist.irecv(ones, 0)
message.wait()
first = dist.all_reduce(ones, async_op=True)  # line 17
second = dist.all_reduce(ones, async_op=True)  # line 18
first.wait(), second.wait()
weight, works = torch.nn.Parameter(torch.ones(3)), []
def share(parameter):
    works.append(dist.all_reduce(parameter.grad, async_op=True))  # line 22
weight.register_post_accumulate_grad_hook(share)
(weight * 2).sum().backward()
torch.optim.SGD([weight], 0.1).step()  # line 25
works[0].wait()
dist.destroy_process_group()
"""
TOUCHES = {
    "train.py:7 <module> reads the output of all_reduce at train.py:5 <module>",
    "train.py:8 <module> writes to the output of all_reduce at train.py:5 <module>",
    "train.py:13 <module> writes to the input of isend at train.py:11 <module>",
    "all_reduce at train.py:18 <module> writes to the output of all_reduce at train.py:17 <module>",
    "train.py:25 <module> reads the output of all_reduce at train.py:22 share",
}

LEGAL = """
import torch, torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
dist.init_process_group("gloo")
rank, ones = dist.get_rank(), torch.ones(4)
for _ in range(3):
    works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(4)]
    dist.barrier()  # polls them: what was found done is waited for all the same
    for work in works:
        work.wait()
    dist.all_reduce(torch.ones(4), async_op=True).get_future().wait()
    polled = dist.all_reduce(torch.ones(4), async_op=True)
    while not polled.is_completed():
        pass
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, ones, 1 - rank), dist.P2POp(dist.irecv, torch.ones(4), 1 - rank)]
    ):
        work.wait()
    functional.all_reduce(ones, "sum", dist.group.WORLD) + 1
model = DistributedDataParallel(torch.nn.Linear(4, 4))
for _ in range(3):
    model(ones).sum().backward()
model.register_comm_hook(None, default_hooks.allreduce_hook)
for _ in range(3):
    model(ones).sum().backward()
if rank == 0:
    dist.all_reduce(ones, group=dist.new_group([0]))
else:
    dist.new_group([0])
dist.destroy_process_group()
"""


def told(output: str) -> list[str]:
    return [
        line
        for line in output.splitlines()
        if re.match(r"commlens: .* at train.py|commlens: train.py", line)
    ]


def touches(output: str) -> set[str]:
    """What is said about touched buffers, without the details."""
    found = re.findall(r"^commlens: (.*) before the wait for it", output, re.MULTILINE)
    assert len(set(found)) == len(found)
    return set(found)


@dataclass
class Recorded:
    """Runs programs on two ranks that an engine records."""

    jobs: Harness
    folder: Path
    engine: dict[str, str]

    def output(self, program: str, *, debug: bool = False) -> str:
        result = self.jobs.run_program(
            program.lstrip(),
            2,
            self.folder,
            settings=Settings(debug=debug),
            environment=self.engine,
        )
        assert set(result.exits.values()) == {0}, result
        return "".join(result.outputs.values())


@pytest.fixture
def recorded(jobs: Harness, tmp_path: Path, engine_environment: dict[str, str]) -> Recorded:
    return Recorded(jobs, tmp_path, engine_environment)


@NATIVE_FIRST
def test_each_is_told_once(recorded: Recorded) -> None:
    output = recorded.output(FAULTY)
    lines = told(output)
    assert len(lines) == 5, output
    for start in (
        "all_reduce at train.py:6 <module> is asynchronous, and 3 Works of it were never waited",
        "broadcast at train.py:7 <module> is asynchronous, and 1 Work of it was never waited",
        "isend at train.py:8 <module> is asynchronous, and 1 Work of it was never waited",
        "all_reduce at train.py:9 <module> was called 1 time with a group that the rank is not in",
        "train.py:11 <module> made 20 groups of ranks [0, 1] that were never destroyed",
    ):
        assert sum(start in line for line in lines) == 1, (start, lines)


@NATIVE_FIRST
@pytest.mark.parametrize("debug", [False, True])
def test_there_is_none_in_a_legal_program(recorded: Recorded, debug: bool) -> None:
    assert told(recorded.output(LEGAL, debug=debug)) == []


@NATIVE_FIRST
def test_verification_finds_what_touches_a_buffer_before_the_wait(recorded: Recorded) -> None:
    assert touches(recorded.output(TOUCHING, debug=True)) == TOUCHES


def test_a_trace_with_ops_has_them(tmp_path: Path, jobs: Harness) -> None:
    program, traces = tmp_path / "train.py", tmp_path / "traces"
    program.write_text(TOUCHING.lstrip())
    command = ["-m", "commlens", "trace", "--depth", "ops", "--output", str(traces), str(program)]
    ended = jobs.run_job(find("healthy-plain"), 2, tmp_path, recorded=False, arguments=command)
    assert set(ended.exits.values()) == {0}, ended
    data = Trace.load(traces / "trace-rank0.json").data
    assert {
        phrase.partition(" before the wait")[0] for phrase in map(hazard_phrase, data.hazards)
    } == TOUCHES
    assert all(f"latent fault: {each}" in ended.outputs[0] for each in TOUCHES)


@pytest.mark.parametrize("fake_tensors", [False, True])
def test_a_preview_has_them(fake_tensors: bool) -> None:
    def program() -> None:
        exec(compile(TOUCHING.lstrip(), "train.py", "exec"), {})

    data = commlens.preview(program, world_size=2, fake_tensors=fake_tensors).data
    assert {
        phrase.partition(" before the wait")[0] for phrase in map(hazard_phrase, data.hazards)
    } == TOUCHES
