"""The name and the line of an operation in a refusal. One process, on the fake backend."""

from __future__ import annotations

import json

import pytest
from zygote_client import Zygote

pytest.importorskip("torch")

PROGRAM = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
import torch.distributed._functional_collectives as functional
from commlens.tap import tap
from commlens.verification.call_site import call_site

NAMES = {}

class Listener:
    def begin(self, spec, arguments):
        NAMES.setdefault(case, []).append(call_site(sys._getframe(1).f_back, spec.name))
    def returned(self, token, result): pass
    def raised(self, token, error): pass

def ddp():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    global case
    case = "ddp backward"
    try:
        model(torch.ones(2, 2)).sum().backward()
    except RuntimeError:
        pass  # the fake backend gives the reducer no result

def fsdp():
    from torch.distributed.fsdp import fully_shard
    model = torch.nn.Linear(4, 4)
    fully_shard(model, mesh=mesh)
    model(torch.ones(2, 4))

def direct():
    dist.all_reduce(torch.ones(2))

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
mesh = init_device_mesh("cpu", (2,))
sharded = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)])
tap.attach(Listener())
for case, run in {
    "direct": direct,
    "objects": lambda: dist.all_gather_object([None, None], 1),
    "functional": lambda: functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD) + 1,
    "distribute": lambda: distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]),
    "redistribute": lambda: sharded.redistribute(mesh, [Replicate()]),
    "full tensor": lambda: sharded.full_tensor(),
    "op": lambda: torch.linalg.vector_norm(sharded) < 3,
    "ddp": ddp,
    "fsdp": fsdp,
}.items():
    try:
        run()
    except AttributeError:
        pass  # fully_shard of torch 2.6 asks for streams
print(json.dumps(NAMES))
"""

EXPECTED = {
    "direct": "torch.distributed.all_reduce",
    "objects": "torch.distributed.all_gather_object",
    "functional": "torch.distributed._functional_collectives.all_reduce",
    "distribute": "torch.distributed.tensor.distribute_tensor",
    "redistribute": "torch.distributed.tensor.DTensor.redistribute",
    "full tensor": "torch.distributed.tensor.DTensor.full_tensor",
    "op": "aten.lt.Scalar of DTensors",
    "ddp": "torch.nn.parallel.DistributedDataParallel",
    "ddp backward": "torch.nn.parallel.DistributedDataParallel (backward)",
    "fsdp": "torch.distributed.fsdp.fully_shard (forward)",
}


@pytest.fixture(scope="module")
def names(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[str]]]:
    script = tmp_path_factory.mktemp("names") / "train.py"
    script.write_text(PROGRAM)
    printed = zygote.run(str(script), folder=script.parent, timeout_s=100)
    found: dict[str, list[list[str]]] = json.loads(printed.splitlines()[-1])
    return found


@pytest.mark.parametrize("case", EXPECTED)
def test_the_name_is_the_librarys_and_the_line_is_the_users(
    names: dict[str, list[list[str]]], case: str
):
    assert names[case], "nothing was issued"
    for name, where in names[case]:
        assert name == EXPECTED[case]
        assert where.startswith("train.py:") and where.split(" in ")[1] in (
            "<lambda>",
            "direct",
            "ddp",
            "fsdp",
        )


def test_a_cpp_thread_has_no_line():
    from commlens.verification.call_site import call_site

    assert call_site(None, "all_reduce") == (
        "torch.nn.parallel.DistributedDataParallel (backward)",
        "",
    )
    assert call_site(None, "broadcast") == ("torch.distributed.broadcast", "")
