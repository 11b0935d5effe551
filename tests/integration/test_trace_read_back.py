"""What people do with a trace, on real ones: of one process on the fake backend, and of two ranks
on gloo.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Harness

import commlens
from commlens import commands
from commlens.traces.diff_ranks import compare_ranks
from commlens.traces.files import read_ranks

PROGRAM = """
import os, sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode as TorchCommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
import commlens
from commlens.testing import assert_collectives, assert_matches_golden

out, backend, size, rank = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(os.environ["RANK"])
if backend == "fake":
    from torch.testing._internal.distributed.fake_pg import FakeStore
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
else:
    dist.init_process_group("gloo", init_method=f"file://{out}/meet", rank=rank, world_size=size)

class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1, self.net2 = nn.Linear(10, 16), nn.Linear(16, 10)
    def forward(self, x):
        return self.net2(self.net1(x).relu())

mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
dist.new_group([rank], group_desc="unused", use_local_synchronization=True)
torch.manual_seed(0)
model = parallelize_module(MLP(), mesh, {"net1": ColwiseParallel(), "net2": RowwiseParallel()})

def step():
    model(torch.rand(8, 10)).sum().backward()

with commlens.trace() as trace:
    step()
    assert_collectives(trace, {("tp", "all_reduce"): 1}, by=("mesh_dim", "op"), module="net2", phase="forward")
    dist.all_reduce(torch.ones(100))
    if backend == "gloo":
        if rank == 0:
            dist.send(torch.ones(3), 1)
        else:
            dist.recv(torch.ones(3), 0)
    dist.barrier()
assert_collectives(trace, none_on="unused", bytes_at_most=10_000)
assert_matches_golden(trace.filter(phase="forward"), f"{out}/golden-{rank}.json", update=True)
assert_matches_golden(trace.filter(phase="forward"), f"{out}/golden-{rank}.json")
trace.save(f"{out}/traces/trace-rank{rank}.json.gz")
theirs, ours = TorchCommDebugMode(), commlens.CommDebugMode()
for name, mode in (("theirs", theirs), ("ours", ours)):
    with mode:
        step()
    mode.generate_json_dump(f"{out}/{name}-{rank}.json", noise_level=1)
assert_collectives(ours, {"all_reduce": 1}, module="net2")
assert ours.trace().wire_bytes == trace.filter(phase="forward").wire_bytes
try:
    assert_collectives(trace, {"all_reduce": 1})
except AssertionError as error:
    print(error)
dist.destroy_process_group()
"""


def run(jobs: Harness, out: Path, backend: str, size: int, ranks: int) -> str:
    """Run the program on some ranks of a world. Return what rank 0 printed."""
    arguments = [str(out), backend, str(size)]
    result = jobs.run_program(PROGRAM, ranks, out, recorded=False, arguments=arguments)
    assert set(result.exits.values()) == {0}, result
    return result.outputs[0]


@pytest.mark.timeout(120)
def test_a_trace_of_a_tensor_parallel_mlp_is_read(jobs, tmp_path, capsys):
    output = run(jobs, tmp_path, "fake", 4, 1)
    path = tmp_path / "traces" / "trace-rank0.json.gz"
    assert "- all_reduce: expected 1, found 2:" in output and "train.py:" in output
    trace = commlens.Trace.load(path)
    assert trace.counts(by=("phase", "op")) == {
        ("forward", "all_reduce"): 1,
        ("outside", "all_reduce"): 1,
        ("outside", "barrier"): 1,
    }
    assert trace.coverage.dispatched == trace.coverage.recorded == 3
    why, *_ = trace.filter(phase="forward").to_summary().why
    assert why.sentence.startswith(
        "1 all_reduce on tp (4 ranks): forward of MLP.net2, DTensor Partial(sum) -> Replicate()"
        " (explicit), at"
    )
    golden = (tmp_path / "golden-0.json").read_text()
    assert str(tmp_path) not in golden and len(golden) < 1500
    for name in ("theirs", "ours"):
        assert commands.main(["view", str(tmp_path / f"{name}-0.json")]) == 0
        assert "1 all_reduce on unknown: forward of MLP.net2" in capsys.readouterr().out
    assert (
        commands.main(["compare", str(tmp_path / "theirs-0.json"), str(tmp_path / "ours-0.json")])
        == 0
    )


@pytest.mark.timeout(120)
def test_two_ranks_side_by_side(jobs, tmp_path, capsys):
    run(jobs, tmp_path, "gloo", 2, 2)
    ranks, _ = read_ranks([tmp_path / "traces"])
    assert (
        ranks.answer() == "All 2 ranks issued the same collectives." and ranks.differences() == []
    )
    assert not compare_ranks(ranks, ranks)
    assert commands.main(["view", str(tmp_path / "traces")]) == 0
    assert capsys.readouterr().out.startswith(
        "All 2 ranks issued the same collectives.\n\n4 collectives"
    )
    assert (
        commands.main(["compare", str(tmp_path / "golden-0.json"), str(tmp_path / "golden-1.json")])
        == 0
    )
