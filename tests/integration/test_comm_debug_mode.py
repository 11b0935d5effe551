"""CommDebugMode: next to PyTorch's own where that is right, and by itself where it is not."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from chosen import long
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode as TorchCommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from commlens import CommDebugMode
from conftest import REPOSITORY, SOURCE

EXAMPLES = REPOSITORY / "examples"
sys.path.insert(0, str(EXAMPLES))
from models import Transformer, parallel_mlp, parallel_transformer  # noqa: E402

sys.path.remove(str(EXAMPLES))

PYTORCH_TESTS = os.environ.get("COMMLENS_PYTORCH_TESTS")  # before any test clears the environment
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
WORLD = 4
functional = torch.ops.c10d_functional
c10d = torch.ops.c10d
# torch's own warnings
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error:.*commlens.*"),
]

MLP_TABLE = """\
Global
  FORWARD PASS
    *c10d_functional.all_reduce: 1
    MLPModule
      FORWARD PASS
        *c10d_functional.all_reduce: 1
        MLPModule.net1
        MLPModule.relu
        MLPModule.net2
          FORWARD PASS
            *c10d_functional.all_reduce: 1
"""
NET1_AT_NOISE_1 = """\
        MLPModule.net1
        *module type: class 'torch.nn.modules.linear.Linear'
        *Parameter List
         *weight: (Shard(dim=0),)
         *bias: (Shard(dim=0),)
          FORWARD PASS
            **aten.addmm.default
              shape: [torch.Size([16]), torch.Size([8, 10]), torch.Size([10, 16])]
              sharding: [(Shard(dim=0),), (Replicate(),), (Shard(dim=1),)]
              device mesh: DeviceMesh((4,), 'cpu', stride=(1,))
"""


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    try:
        yield init_device_mesh("cpu", (WORLD,))
    finally:
        dist.destroy_process_group()


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def table(mode: Any, noise_level: int) -> str:
    return plain(mode.generate_comm_debug_tracing_table(noise_level))


def document(mode: Any, tmp_path: Path, noise_level: int) -> Any:
    file = tmp_path / f"{type(mode).__module__}.json"
    mode.generate_json_dump(str(file), noise_level)
    return json.loads(file.read_text())


def counts(mode: Any) -> dict[str, int]:
    return {str(packet): count for packet, count in mode.get_comm_counts().items() if count}


def by_module(mode: CommDebugMode) -> dict[str, dict[str, dict[str, int]]]:
    return {
        fqn: {
            which: {str(packet): n for packet, n in found.items()}
            for which, found in passes.items()
            if found
        }
        for fqn, passes in mode.comm_module_counts.items()
    }


def listed(mode: CommDebugMode) -> list[str]:
    return [
        str(op["name"])
        for ops in mode.comm_module_operation_counts.values()
        for op in ops["operations_list"]
    ]


def mlp_step(mesh: DeviceMesh) -> Callable[[], None]:
    torch.manual_seed(0)
    model, x = parallel_mlp(mesh), torch.rand(8, 10)
    return lambda: model(x).sum().backward()


def transformer_forward(mesh: DeviceMesh) -> Callable[[], None]:
    torch.manual_seed(0)
    model, tokens = parallel_transformer(mesh), torch.randint(0, 8, (8, 8))
    return lambda: model(tokens)


def transformer_step(mesh: DeviceMesh) -> Callable[[], None]:
    torch.manual_seed(0)
    model, tokens = parallel_transformer(mesh), torch.randint(0, 8, (8, 8))
    return lambda: model(tokens).sum().backward()


def under(mode: Any, step: Callable[[], object]) -> Any:
    with mode:
        step()
    return mode


# --- next to PyTorch's


def test_the_table_has_the_causes_where_asked_for(mesh: DeviceMesh, tmp_path: Path) -> None:
    model, x = parallel_mlp(mesh), torch.rand(8, 10)
    one, other = (distribute_tensor(torch.rand(8, 8), mesh, [Shard(0)]) for _ in range(2))
    mode = CommDebugMode()
    with mode:
        model(x)
        one @ other
    text = plain(mode.generate_comm_debug_tracing_table(0, causes=True))
    (tmp_path / "x.txt").touch()
    mode.log_comm_debug_tracing_table_to_file(str(tmp_path / "x.txt"), 0, causes=True)
    assert (tmp_path / "x.txt").read_text() == text
    reduced = "      1 × DTensor Partial(sum) -> Replicate() (explicit)"
    gathered = "      1 × DTensor Shard(0) -> Replicate(), to run mm (implicit)"
    assert [line for line in text.splitlines() if line in (reduced, gathered)] == [
        reduced,
        gathered,
    ], "of Global"
    assert text.count("DTensor Partial(sum)") == 3, "also of the modules around"
    whys = mode.trace().whys()
    assert all(any(line.partition(" × ")[2] in why for why in whys) for line in (reduced, gathered))
    without = [line for line in text.splitlines() if " × " not in line]
    assert table(mode, 0).splitlines() == without
    with mode:
        pass
    assert "DTensor" not in mode.generate_comm_debug_tracing_table(0, causes=True)


def test_the_table_of_the_tensor_parallel_mlp(mesh):
    assert table(under(CommDebugMode(), mlp_step(mesh)), 0) == MLP_TABLE


@pytest.mark.skipif(TORCH < (2, 13), reason="meshes print otherwise")
def test_a_module_at_noise_level_1(mesh):
    assert NET1_AT_NOISE_1 in table(under(CommDebugMode(), mlp_step(mesh)), 1)


@pytest.mark.parametrize("make", [mlp_step, transformer_forward, transformer_step])
def test_counts_are_pytorchs(mesh, make):
    steps = make(mesh), make(mesh)  # held, since ours does not keep their models alive
    theirs, ours = under(TorchCommDebugMode(), steps[0]), under(CommDebugMode(), steps[1])
    assert counts(ours) == counts(theirs)
    assert ours.get_total_counts() == theirs.get_total_counts()
    # as theirs from 2.9 on
    assert repr(ours) == f"CommDebugMode(get_total_counts()={theirs.get_total_counts()})"
    assert ours.comm_module_counts == theirs.comm_module_counts
    assert ours.get_sharding_info() == theirs.get_sharding_info()
    assert list(ours.get_parameter_info()) == list(theirs.get_parameter_info())
    ours_tracker, theirs_tracker = ours.advanced_module_tracker, theirs.advanced_module_tracker
    assert ours_tracker.module_helper_dict == theirs_tracker.module_helper_dict
    assert ours_tracker.module_parents_dict == theirs_tracker.module_parents_dict
    assert ours_tracker.parent_dict == theirs_tracker.parent_dict
    assert theirs.comm_registry <= ours.comm_registry | {
        torch.ops._c10d_functional_autograd.all_to_all_single
    }


@pytest.mark.parametrize("noise_level", [0, 1])
@pytest.mark.parametrize("make", [mlp_step, transformer_forward, transformer_step])
def test_tables_and_json_are_pytorchs(mesh, tmp_path, make, noise_level):
    theirs, ours = under(TorchCommDebugMode(), make(mesh)), under(CommDebugMode(), make(mesh))
    assert ours.generate_comm_debug_tracing_table(
        noise_level
    ) == theirs.generate_comm_debug_tracing_table(noise_level)
    assert document(ours, tmp_path, noise_level) == document(theirs, tmp_path, noise_level)


@pytest.mark.parametrize("make", [mlp_step, transformer_forward])
def test_at_noise_level_2_only_the_waits_are_added(mesh, tmp_path, make):
    theirs, ours = under(TorchCommDebugMode(), make(mesh)), under(CommDebugMode(), make(mesh))
    wait = "**_c10d_functional.wait_tensor.default"
    lines = [line for line in table(ours, 2).splitlines() if wait not in line]
    assert lines == [line for line in table(theirs, 2).splitlines() if wait not in line]
    assert sum(wait in line for line in table(ours, 2).splitlines()) == ours.get_total_counts()


class Witness(TorchDispatchMode):
    """Nothing but the names of the ops that pass."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if AsyncCollectiveTensor in types and DTensor not in types:
            return NotImplemented
        self.names.append(str(func))
        return NotImplemented if DTensor in types else func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [mlp_step, transformer_step])
def test_at_noise_level_3_everything_is_listed_and_nothing_of_our_own_doing(mesh, make):
    make(mesh)()  # caches
    witness, ours = under(Witness(), make(mesh)), under(CommDebugMode(), make(mesh))
    lines = [line.strip() for line in table(ours, 3).splitlines()]
    assert sorted(line.removeprefix("**") for line in lines if line.startswith("**")) == sorted(
        witness.names
    )
    assert sorted(listed(ours)) == sorted(witness.names)


def test_what_dtensor_tries_on_fake_tensors_is_not_listed(mesh):
    # shapes that no other test has: nothing is known of them yet
    x = distribute_tensor(torch.rand(12, 28), mesh, [Shard(0)])

    def step() -> None:
        torch.cat([x @ x.t(), x @ x.t()], 1)

    first, second = under(CommDebugMode(), step), under(CommDebugMode(), step)
    assert listed(first) == listed(second)


def test_files_hold_what_the_table_says(mesh, tmp_path, monkeypatch):
    ours = under(CommDebugMode(), mlp_step(mesh))
    monkeypatch.chdir(tmp_path)
    ours.log_comm_debug_tracing_table_to_file()
    assert Path("comm_mode_log.txt").read_text() == table(ours, 3)
    ours.generate_json_dump()
    assert json.loads(Path("comm_mode_log.json").read_text())["fqn"] == "Global"
    ours.log_comm_debug_tracing_table_to_file("zero.txt", noise_level=0)
    assert Path("zero.txt").read_text() == MLP_TABLE


def test_the_tracker_prints_as_pytorchs(mesh, capsys):
    step = mlp_step(mesh)
    theirs, ours = under(TorchCommDebugMode(), mlp_step(mesh)), under(CommDebugMode(), step)
    theirs.advanced_module_tracker.print_sharding_info()
    expected = capsys.readouterr().out
    ours.advanced_module_tracker.print_sharding_info()
    assert capsys.readouterr().out == expected
    ours.advanced_module_tracker.print_paramater_info()
    assert "'MLPModule.net1': {'weight': DTensor" in capsys.readouterr().out


def test_where_a_thread_is_right_now(mesh):
    mode, seen = CommDebugMode(), []

    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            tracker = mode.advanced_module_tracker
            seen.append((tracker.name, tracker.is_bw, tracker.activation_checkpointing))
            return x.sin()

    model = nn.Sequential(Inner())
    with mode:
        checkpoint(model, torch.rand(3, requires_grad=True), use_reentrant=False).sum().backward()
        assert (mode.advanced_module_tracker.name, mode.advanced_module_tracker.is_bw) == (
            "Global",
            False,
        )
    assert seen == [("Sequential.0", False, False), ("Sequential.0", True, True)]


# --- the ops that communicate


def plain_calls(x: torch.Tensor) -> dict[Any, Callable[[], object]]:
    whole, parts = x.new_empty(WORLD * 4), [torch.empty_like(x) for _ in range(WORLD)]
    return {
        c10d.allreduce_: lambda: dist.all_reduce(x),
        c10d._allgather_base_: lambda: dist.all_gather_into_tensor(whole, x),
        c10d._reduce_scatter_base_: lambda: dist.reduce_scatter_tensor(x, whole),
        c10d.broadcast_: lambda: dist.broadcast(x, 0),
        c10d.gather_: lambda: dist.gather(x, parts, 0),
        c10d.reduce_: lambda: dist.reduce(x, 0),
        c10d.scatter_: lambda: dist.scatter(x, parts, 0),
        c10d.allgather_: lambda: dist.all_gather(parts, x),
        c10d.allgather_coalesced_: lambda: dist.all_gather_coalesced(
            [[torch.empty_like(x)] for _ in range(WORLD)], [x]
        ),
        c10d.allreduce_coalesced_: lambda: dist.all_reduce_coalesced([x]),
        c10d.reduce_scatter_: lambda: dist.reduce_scatter(x, parts),
        c10d.alltoall_: lambda: dist.all_to_all(parts, [torch.empty_like(x) for _ in range(WORLD)]),
        c10d.alltoall_base_: lambda: dist.all_to_all_single(x, x),
        c10d.barrier: lambda: dist.barrier(),
        c10d.send: lambda: dist.send(x, 1),
        c10d.recv_: lambda: dist.recv(x, 1),
        functional.all_reduce: lambda: funcol.all_reduce(x, "sum", dist.group.WORLD) + 1,
        functional.all_gather_into_tensor: (
            lambda: funcol.all_gather_tensor(x, 0, dist.group.WORLD) + 1
        ),
        functional.reduce_scatter_tensor: (
            lambda: funcol.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD) + 1
        ),
        functional.all_reduce_coalesced: lambda: [
            y + 1 for y in funcol.all_reduce_coalesced([x, x], "sum", dist.group.WORLD)
        ],
        functional.all_to_all_single: (
            lambda: funcol.all_to_all_single(x, None, None, dist.group.WORLD) + 1
        ),
        functional.broadcast: lambda: funcol.broadcast(x, 0, dist.group.WORLD) + 1,
    }


BLIND = {c10d.barrier, c10d.send, c10d.recv_}


@pytest.mark.parametrize("packet", list(plain_calls(torch.ones(4))), ids=str)
def test_every_kind_of_collective_has_its_key(mesh, packet):
    call = plain_calls(torch.ones(4))[packet]
    mode = CommDebugMode()
    assert under(mode, call).get_comm_counts() == {packet: 1}
    assert mode.comm_module_counts == {"Global": {"forward": {packet: 1}, "backward": {}}}
    assert (under(TorchCommDebugMode(), call).get_total_counts() == 0) == (packet in BLIND)


def test_coalesced_ones_are_one(mesh):
    x, whole = torch.ones(4), torch.empty(4 * WORLD)
    with CommDebugMode() as mode, dist._coalescing_manager(dist.group.WORLD):
        dist.all_gather_into_tensor(whole, x)
    assert mode.get_comm_counts() == {c10d.allgather_into_tensor_coalesced_: 1}


def test_forms_in_place_count_with_their_op(mesh):
    x, out, name = torch.ones(4), torch.empty(4 * WORLD), dist.group.WORLD.group_name
    native = torch.ops._c10d_functional
    with CommDebugMode() as mode:
        native.all_reduce_(x, "sum", name)
        native.broadcast_(x, 0, name)
        native.all_reduce_coalesced_([x], "sum", name)
        native.all_gather_into_tensor_out(x, WORLD, name, out=out)
    assert mode.get_comm_counts() == {
        functional.all_reduce: 1,
        functional.broadcast: 1,
        functional.all_reduce_coalesced: 1,
        functional.all_gather_into_tensor: 1,
    }


def test_collectives_of_other_threads_count(mesh):
    def work() -> None:
        dist.all_reduce(torch.ones(4))
        _ = funcol.all_reduce(torch.ones(4), "sum", dist.group.WORLD) + 1

    with CommDebugMode() as mode:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert mode.get_comm_counts() == {c10d.allreduce_: 1, functional.all_reduce: 1}


def test_dtensor_redistributions(mesh):
    x = distribute_tensor(torch.rand(8, 8), mesh, [Shard(0)])

    def step() -> None:
        x.redistribute(mesh, [Replicate()]).to_local()
        x.redistribute(mesh, [Shard(1)]).to_local()
        _ = (x.sum() + 1).full_tensor()

    assert counts(under(CommDebugMode(), step)) == counts(under(TorchCommDebugMode(), step)) != {}


@pytest.mark.parametrize("inside", [True, False], ids=["fake mode inside", "fake mode outside"])
def test_fake_tensors_count_as_they_would(mesh, inside):
    from torch._subclasses.fake_tensor import FakeTensorMode

    def step() -> None:
        x = torch.rand(4, 8)
        _ = funcol.all_reduce(x, "sum", dist.group.WORLD) + 1
        if TORCH >= (2, 13):  # DTensor cannot be inside a fake mode before
            d = DTensor.from_local(x, mesh, [Shard(0)], run_check=False)
            _ = d @ d.t()

    found = []
    for mode in (TorchCommDebugMode(), CommDebugMode()):
        first, second = (mode, FakeTensorMode()) if inside else (FakeTensorMode(), mode)
        with first, second:
            step()
        found.append(mode)
    assert counts(found[1]) == counts(found[0])
    assert "_c10d_functional.all_reduce.default" in listed(found[1])
    assert not any(name.startswith("prim.") for name in listed(found[1]))


def test_without_a_process_group_modules_and_ops_are_shown():
    assert not dist.is_initialized()
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with CommDebugMode() as mode:
        for _ in range(10):
            model(torch.ones(1, 2))
    assert listed(mode).count("aten.addmm.default") == 10
    assert mode.get_total_counts() == 0
    assert all(
        not module._forward_hooks and not module._forward_pre_hooks for module in model.modules()
    )


# --- where PyTorch's is wrong


def test_a_module_called_often_is_one_row(mesh, tmp_path):
    step, mode = mlp_step(mesh), CommDebugMode()
    with mode:
        for _ in range(3):
            step()
    assert table(mode, 0) == MLP_TABLE.replace(": 1", ": 3")
    assert mode.advanced_module_tracker.parent_dict["MLPModule"] == [
        "MLPModule.net1",
        "MLPModule.relu",
        "MLPModule.net2",
    ]


def test_json_grows_with_the_events_and_not_faster(mesh, tmp_path):
    def size(steps: int) -> int:
        step, mode = transformer_step(mesh), CommDebugMode()
        with mode:
            for _ in range(steps):
                step()
        mode.generate_json_dump(str(tmp_path / "dump.json"), 3)
        return (tmp_path / "dump.json").stat().st_size

    once, often = size(1), size(3)
    assert often < 3.2 * once


def test_a_deep_model_is_no_trouble(mesh, tmp_path):
    model: nn.Module = nn.Identity()
    for _ in range(100):
        model = nn.Sequential(model)
    with CommDebugMode() as mode:
        model(torch.ones(1))
    assert len(table(mode, 0).splitlines()) == 102
    mode.generate_json_dump(str(tmp_path / "deep.json"))


def test_a_submodule_first_called_in_a_later_call_stands_under_its_parent(mesh):
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.calls = nn.Linear(2, 2), nn.Linear(2, 2), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.two(x) if self.calls > 1 else self.one(x)

    model = nn.Sequential(Late(), nn.ReLU())
    with CommDebugMode() as mode:
        model(model(torch.ones(1, 2)))
    order = [
        "Global",
        "Sequential",
        "Sequential.0",
        "Sequential.0.one",
        "Sequential.0.two",
        "Sequential.1",
    ]
    assert [line.strip() for line in table(mode, 0).splitlines()] == order


def test_forward_and_backward_in_two_contexts(mesh):
    expected = by_module(under(CommDebugMode(), transformer_step(mesh)))
    model, tokens = parallel_transformer(mesh), torch.randint(0, 8, (8, 8))
    for second in (CommDebugMode(), None):
        first = CommDebugMode()
        with first:
            loss = model(tokens).sum()
        forward = by_module(first)
        with second or first as mode:
            loss.backward()
        backward = by_module(mode)
        for which, found in (("forward", forward), ("backward", backward)):
            assert {m: p[which] for m, p in found.items() if which in p} == {
                m: p[which] for m, p in expected.items() if which in p
            }


class InPlace(nn.Module):
    """Changes a child's output in place, and answers with a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.first(x)
        y += 1
        y.relu_()
        y = funcol.all_reduce(y, "sum", dist.group.WORLD) * 1
        return {"loss": self.second(y).sum(), "y": y}


def test_outputs_changed_in_place_and_dictionaries(mesh):
    with CommDebugMode() as mode:
        InPlace()(torch.rand(2, 4))["loss"].backward()
    assert by_module(mode)["InPlace"]["forward"] == {"c10d_functional.all_reduce": 1}
    assert not set(by_module(mode)) & {"InPlace.first", "InPlace.second"}
    ops = mode.comm_module_operation_counts
    assert [
        str(op["name"]) for op in ops["InPlace.first"]["operations_list"] if not op["is_bw"]
    ] == ["aten.t.default", "aten.addmm.default"]


def test_gradients_of_an_input(mesh):
    x, model = torch.rand(2, 4, requires_grad=True), nn.Linear(4, 4)
    with CommDebugMode():
        (gradient,) = torch.autograd.grad(model(x).sum(), x)
    assert gradient.shape == x.shape


def test_nothing_changes_for_the_model(mesh):
    def step() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Transformer()
        loss = model(torch.randint(0, 8, (8, 8))).square().sum()
        loss.backward()
        return [
            loss,
            *(parameter.grad for parameter in model.parameters() if parameter.grad is not None),
        ]

    expected = step()
    with CommDebugMode():
        found = step()
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.skipif(TORCH < (2, 13), reason="FSDP2 does not run on CPU in torch 2.6")
def test_fsdp2_blocks_and_the_optimizer(mesh):
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    with CommDebugMode() as mode:
        model(torch.rand(4, 16)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    found = by_module(mode)
    for number in range(3):
        block = found[f"FSDPSequential.{number}"]
        assert block["forward"] == {"c10d._allgather_base_": 1}
        assert block["backward"] == {"c10d._allgather_base_": 1, "c10d._reduce_scatter_base_": 1}
    assert found["FSDPSequential"]["backward"] == {
        "c10d._allgather_base_": 3,
        "c10d._reduce_scatter_base_": 3,
    }
    # the norm's
    assert found["Global"]["forward"] == {
        "c10d._allgather_base_": 3,
        "c10d_functional.all_reduce": 1,
    }
    lines = table(mode, 1).splitlines()
    begin = lines.index("  OPTIMIZER")
    assert lines[begin + 1].strip().startswith("**aten.") or "foreach" in table(mode, 2)


def test_ddp_is_one_place(tmp_path):
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
        with CommDebugMode() as mode:
            model(torch.rand(2, 8)).sum().backward()
    finally:
        dist.destroy_process_group()
    found = by_module(mode)
    assert {fqn for fqn, passes in found.items() if "backward" in passes} == {
        "Global",
        "DistributedDataParallel",
    }
    assert found["DistributedDataParallel"]["backward"] == {"c10d.allreduce_": 1}


def test_collectives_of_an_optimizer_have_their_heading(mesh):
    class Averaging(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    dist.all_reduce(parameter.grad)
            return super().step(closure)

    model = nn.Linear(4, 4)
    optimizer = Averaging(model.parameters(), lr=0.1)
    with CommDebugMode() as mode:
        model(torch.rand(2, 4)).sum().backward()
        optimizer.step()
    assert table(mode, 0) == "Global\n  OPTIMIZER\n    *c10d.allreduce_: 2\n    Linear\n"
    assert mode.get_total_counts() == 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_has_its_heading(mesh, tmp_path, reentrant):
    class Communicating(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return funcol.all_reduce(x, "sum", dist.group.WORLD) * x.sin()

    model = Communicating()
    with CommDebugMode() as mode:
        checkpoint(
            model, torch.rand(3, requires_grad=True), use_reentrant=reentrant
        ).sum().backward()
    found = by_module(mode)["Communicating"]
    assert found["forward"] == found["checkpointing"] == {"c10d_functional.all_reduce": 1}
    assert "      ACTIVATION CHECKPOINTING\n        *c10d_functional.all_reduce: 1\n" in table(
        mode, 0
    )
    module = document(mode, tmp_path, 3)["children"][0]
    assert module["collectives_checkpointing"] == [["c10d_functional.all_reduce", 1]]
    again = [op["name"] for op in module["operations_checkpointing"]]
    assert "aten.sin.default" in again and "aten.cos.default" not in again
    assert "aten.cos.default" in [op["name"] for op in module["operations_backward"]]


@pytest.mark.parametrize("reentrant", [True, False])
def test_functions_that_run_again_are_told_from_backward(mesh, reentrant):
    with CommDebugMode() as mode:
        checkpoint(
            lambda x: x.sin().exp(), torch.rand(3, requires_grad=True), use_reentrant=reentrant
        ).sum().backward()
    ops = mode.comm_module_operation_counts["Global"]["operations_list"]
    again = {str(op["name"]) for op in ops if op["is_activation_checkpointing"]}
    assert {"aten.sin.default", "aten.exp.default"} <= again
    assert "aten.cos.default" in {str(op["name"]) for op in ops if op["is_bw"]} - again


def test_everything_is_cleared_on_entering_again(mesh):
    mode, step = CommDebugMode(), mlp_step(mesh)
    under(mode, step)
    with mode:
        assert mode.comm_module_counts == {"Global": {"forward": {}, "backward": {}}}
        assert mode.get_total_counts() == 0
        assert mode.get_parameter_info() == {} and mode.get_sharding_info() == {}
        assert list(mode.advanced_module_tracker.module_helper_dict) == ["Global"]
        assert mode.comm_module_operation_counts == {}
    assert table(under(mode, step), 0) == MLP_TABLE


def test_contexts_inside_one_another(mesh):
    outer, inner, x = CommDebugMode(), CommDebugMode(), torch.ones(4)
    with outer:
        dist.all_reduce(x)
        with inner:
            dist.all_reduce(x)
            _ = funcol.all_reduce(x, "sum", dist.group.WORLD) + 1
        assert outer.get_comm_counts() == {c10d.allreduce_: 2, functional.all_reduce: 1}
        assert listed(outer).count("aten.add.Tensor") == listed(inner).count("aten.add.Tensor") == 1
        with outer:  # entered again: begins anew, and goes on until the outermost block ends
            dist.all_reduce(x)
        dist.all_reduce(x)
    dist.all_reduce(x)
    assert outer.get_comm_counts() == {c10d.allreduce_: 2}
    assert [(event.op, event.sequence) for event in outer.trace().events] == [
        ("all_reduce", 1),
        ("all_reduce", 2),
    ]
    assert inner.get_comm_counts() == {c10d.allreduce_: 1, functional.all_reduce: 1}


def test_entering_again_ends_the_setup(mesh):
    mode, layer = CommDebugMode(), nn.Linear(4, 4)
    with mode:
        for _ in range(2):
            dist.broadcast(torch.ones(4), 0)
        layer(torch.ones(4))
        assert mode.trace().data.setup_until == 2
        with mode:
            dist.broadcast(torch.ones(4), 0)
            layer(torch.ones(4))
    assert mode.trace().data.setup_until == 0


def test_an_exception_leaves_nothing_behind(mesh):
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError

    call = nn.Module.__call__
    mode = CommDebugMode()
    with contextlib.suppress(ValueError), mode:
        Failing()(torch.ones(1))
    assert torch._C._len_torch_dispatch_stack() == 0
    assert nn.Module.__call__ is call
    with mode:
        with contextlib.suppress(ValueError):
            nn.Sequential(Failing())(torch.ones(1))
        dist.all_reduce(torch.ones(1))
    assert by_module(mode) == {"Global": {"forward": {"c10d.allreduce_": 1}}}


def test_models_are_not_kept_alive(mesh):
    mode, model, x = CommDebugMode(), parallel_mlp(mesh), torch.rand(8, 10)
    with mode:
        model(x).sum().backward()
    mode.generate_comm_debug_tracing_table()
    assert list(mode.get_parameter_info()) == ["MLPModule.net1", "MLPModule.net2"]
    watched = [weakref.ref(thing) for thing in (model, model.net1.weight, x)]
    del model, x
    gc.collect()
    assert [reference() for reference in watched] == [None] * 3
    described = mode.get_parameter_info()["MLPModule.net1"]["weight"]
    assert (described.shape, described.dtype, described.placements) == (
        (16, 10),
        "float32",
        "(Shard(dim=0),)",
    )
    assert len(mode.get_sharding_info()) == 4
    assert table(mode, 0) == MLP_TABLE


@pytest.mark.parametrize("base", [TorchCommDebugMode, CommDebugMode], ids=["torch", "ours"])
def test_subclasses_see_every_op(mesh, base):
    class Subclass(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.seen.append(str(func))
            return super().__torch_dispatch__(func, types, args, kwargs)

    mode = Subclass()
    first, second = (distribute_tensor(torch.ones(8, 8), mesh, [Shard(dim)]) for dim in (1, 0))
    with mode:
        (first @ second).redistribute(mesh, [Replicate()])
    assert counts(mode) == {"c10d_functional.all_reduce": 1}
    assert {"aten.mm.default", "_c10d_functional.all_reduce.default"} <= set(mode.seen)
    assert (
        next(name for name in mode.seen if name.startswith("_c10d"))
        == "_c10d_functional.all_reduce.default"
    )


def test_user_hooks_are_called_in_their_modules(mesh):
    def called(mode: Any) -> list[tuple[Any, ...]]:
        tracker, log = mode.advanced_module_tracker, []

        def hook(name: str) -> Callable[..., None]:
            return lambda module, *rest: log.append(
                (name, tracker.get_known_fqn(module), sorted(tracker.parents), len(rest))
            )

        tracker.register_user_hooks(
            hook("before"), hook("after"), hook("before backward"), hook("after backward")
        )
        with pytest.raises(AssertionError, match="clear_user_hooks"):
            tracker.register_user_hooks(pre_fw_hook=hook("twice"))
        model = parallel_mlp(mesh)
        with mode:
            model(torch.rand(8, 10)).sum().backward()
        assert tracker.get_known_fqn(nn.Linear(1, 1)) is None
        tracker.clear_user_hooks()
        before = len(log)
        with mode:
            model(torch.rand(8, 10))
        assert len(log) == before
        return log

    theirs, ours = called(TorchCommDebugMode()), called(CommDebugMode())
    # torch's never calls that one
    assert sorted(map(str, theirs)) == sorted(str(each) for each in ours if each[0] != "before")
    assert [name for kind, name, _, _ in ours if kind == "before"] == [
        "MLPModule",
        "MLPModule.net1",
        "MLPModule.relu",
        "MLPModule.net2",
    ]
    mode = CommDebugMode()
    assert mode.advanced_module_tracker.parents == {"Global"}


def test_a_hook_of_a_gradient_runs_in_its_parameters_module(mesh):
    """Also in the first module, whose input needs no gradient."""

    def seen(mode: Any) -> list[tuple[Any, ...]]:
        tracker, log = mode.advanced_module_tracker, []
        model = parallel_mlp(mesh)
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda _, name=name: log.append(
                    (name, tracker.name, sorted(tracker.parents), tracker.is_bw)
                )
            )
        with mode:
            model(torch.rand(8, 10)).sum().backward()
        return sorted(log)

    ours = seen(CommDebugMode())
    assert ours == seen(TorchCommDebugMode())
    assert ours[0] == (
        "net1.bias",
        "MLPModule.net1",
        ["Global", "MLPModule", "MLPModule.net1"],
        True,
    )


class Averaged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(self.linear(x), "sum", dist.group.WORLD) + 1


@pytest.mark.parametrize("backend", ["aot_eager", long("inductor")])
def test_torch_compile_stays_on_and_its_collectives_count(mesh, backend):
    if backend == "inductor" and TORCH < (2, 13):
        pytest.skip("slow to build there")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, x = Averaged(), torch.rand(4, 8)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with CommDebugMode() as mode:
        compiled(x)
        compiled(x)
    assert mode.get_comm_counts() == {functional.all_reduce: 2}
    assert by_module(mode)["Averaged"]["forward"] == {"c10d_functional.all_reduce": 2}
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs > 0
    compiled(x)
    if TORCH >= (2, 13):  # 2.6 guards on the stack of modes
        assert graphs == torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


# --- PyTorch's own tests, and the example


@pytest.mark.timeout(230)  # four processes for each of its tests, which all import torch
@pytest.mark.parametrize("name", ["test_comm_mode.py", "test_comm_mode_features.py"])
def test_pytorchs_own_tests_pass_with_ours(tmp_path, name):
    file = Path(PYTORCH_TESTS or "", name)
    if not PYTORCH_TESTS or not file.exists():
        pytest.skip(f"COMMLENS_PYTORCH_TESTS does not name a folder with PyTorch's {name}")
    text = file.read_text(encoding="utf-8")
    patched = text.replace(
        "from torch.distributed.tensor.debug import CommDebugMode",
        "from commlens import CommDebugMode",
    )
    assert "from commlens import CommDebugMode" in patched
    (tmp_path / name).write_text(patched, encoding="utf-8")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, name],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=220,
    )
    if "ImportError: cannot import name" in done.stderr:
        pytest.skip(f"{name} is of another torch than {torch.__version__}")
    assert done.returncode == 0, done.stdout + done.stderr


def example(*arguments: str, launcher: tuple[str, ...] = (), folder: Path) -> str:
    # as in a fresh clone
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, *launcher, str(EXAMPLES / "comm_debug_mode.py"), *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return plain(done.stdout)


@pytest.mark.skipif(TORCH < (2, 13), reason="meshes print otherwise")
@pytest.mark.parametrize("models", [["mlp"], long(["mlp", "transformer", "checkpointed"])])
def test_the_example_shows_everything(tmp_path, models):
    shown = example(*(["--model", "mlp"] if models == ["mlp"] else []), folder=tmp_path)
    assert MLP_TABLE in shown
    assert NET1_AT_NOISE_1.replace("(4,)", "(tp=4)") in shown
    assert ("ACTIVATION CHECKPOINTING" in shown) == ("checkpointed" in models)
    for model in models:
        for level in range(4):
            assert (tmp_path / "comm-debug-mode" / f"{model}-{level}.txt").read_text() in shown
            assert (
                json.loads((tmp_path / "comm-debug-mode" / f"{model}-{level}.json").read_text())[
                    "fqn"
                ]
                == "Global"
            )


@pytest.mark.long
def test_the_example_on_gloo(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    shown = example("--model", "mlp", "--noise-level", "0", launcher=launcher, folder=tmp_path)
    assert MLP_TABLE in shown
