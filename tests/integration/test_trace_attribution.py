"""Where and why: each collective of small programs has the site, phase, owner and cause that its
program gives it.

On the fake backend (or one gloo rank) in this process. ``Talk`` is a collective that backward
issues again, so that most tests can look at both passes.
"""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from chosen import long
from launching import fsdp2_runs_on_cpu
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives as functional
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import commlens
from commlens.model.trace import Phase, TraceEvent
from commlens.testing import assert_collectives
from commlens.tracing import trace_events
from commlens.tracing.attribution import stacks
from commlens.tracing.event_log import EventLog

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own

FORWARD, BACKWARD, RECOMPUTATION = Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTATION
WIDTH = 8
TIMES = ("started_ns", "returned_ns", "wait_began_ns", "wait_ended_ns")
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


@pytest.fixture
def fake() -> Iterator[None]:
    """Rank 0 of a fake world of 8."""
    torch.manual_seed(0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.fixture
def gloo() -> Iterator[None]:
    """The only rank of a real gloo group: works complete, and DDP runs."""
    torch.manual_seed(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Talk(torch.autograd.Function):
    """All-reduce in forward, and once more in backward."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Talker(nn.Module):
    """A layer that talks after it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Talk.apply(self.layer(x))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(WIDTH, 16)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(16, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net2(self.relu(self.net1(x)))


class Stack(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLP() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def batch() -> torch.Tensor:
    return torch.randn(2, WIDTH)


def run(model: nn.Module, *inputs: torch.Tensor) -> commlens.Trace:
    """A traced forward and backward pass."""
    with commlens.trace() as trace:
        model(*(inputs or (batch(),))).sum().backward()
    assert trace.coverage.recorded == trace.coverage.dispatched
    return trace


def sites(trace: commlens.Trace) -> list[tuple[Phase | None, str | None]]:
    return [(event.phase, event.site) for event in trace.events]


def calls(trace: commlens.Trace) -> list[tuple[Phase | None, str | None, int]]:
    return [(event.phase, event.site, event.call) for event in trace.events]


def only(trace: commlens.Trace) -> TraceEvent:
    assert len(trace.events) == 1, trace.events
    return trace.events[0]


def line_of(function: Callable[..., object], text: str) -> int:
    """Number of the first line of a function's source that holds ``text``."""
    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if text in line)


# --- optimizers in backward


def test_an_optimizer_inside_backward_is_the_optimizer(fake: None) -> None:
    model = Stack(2)
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}
    for optimizer in optimizers.values():
        optimizer.register_step_pre_hook(lambda *_: dist.all_reduce(torch.ones(3)))
    for parameter, optimizer in optimizers.items():
        parameter.register_post_accumulate_grad_hook(
            lambda _, optimizer=optimizer: optimizer.step()
        )
    model.layers[0].register_full_backward_hook(lambda *_: dist.all_reduce(torch.ones(5)))
    comm_mode = commlens.CommDebugMode()
    with commlens.trace(depth="ops") as trace, comm_mode:
        for _ in range(2):
            model(batch().requires_grad_()).sum().backward()
    number = len(optimizers)
    assert trace.counts(by=("phase", "step")) == {
        ("optimizer", 0): number,
        ("backward", 0): 1,
        ("optimizer", 1): number,
        ("backward", 1): 1,
    }
    assert trace.data.steps == 2
    assert {event.site for event in trace.filter(phase="optimizer").events} == {None}
    assert comm_mode.comm_module_counts["Global"]["optimizer"] == {
        torch.ops.c10d.allreduce_: 2 * number
    }
    assert (
        sum(op.name == "aten.add_.Tensor" for op in trace.ops if op.phase is Phase.OPTIMIZER)
        == 2 * number
    )


def test_collectives_in_hooks_of_gradients_belong_to_the_parameters_module(fake: None) -> None:
    model = Stack(1)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda parameter: dist.all_reduce(parameter.grad)
        )
    trace = run(model)
    assert sorted(sites(trace)) == [
        (BACKWARD, f"Stack.layers.0.{name}") for name in ("net1", "net1", "net2", "net2")
    ]
    assert trace.coverage.unclassified == 0


def test_a_backward_inside_an_optimizer_is_backward(fake: None) -> None:
    model = Talker()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch()).sum()
        loss.backward()
        dist.all_reduce(loss.detach())
        return loss

    with commlens.trace() as trace:
        optimizer.step(closure)
    assert sites(trace) == [(FORWARD, "Talker"), (BACKWARD, "Talker"), (Phase.OPTIMIZER, None)]


# --- fake tensors


def _every_kind_of_collective(mesh: DeviceMesh) -> None:
    model = parallelize_module(
        MLP(), mesh["tp"], {"net1": ColwiseParallel(), "net2": RowwiseParallel()}
    )
    model(batch()).sum().backward()
    tensor = torch.ones(8)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    dist.broadcast(tensor, 3)
    dist.all_gather_into_tensor(torch.ones(64), tensor)
    functional.all_gather_tensor(tensor, 0, dist.group.WORLD).sum()
    functional.reduce_scatter_tensor(tensor, "avg", 0, mesh["tp"].get_group()).sum()
    functional.all_to_all_single(tensor, None, None, dist.group.WORLD).sum()


@pytest.mark.skipif(TORCH < (2, 9), reason="torch 2.6 cannot scatter fake tensors")
@pytest.mark.parametrize("depth", ["collectives", "ops"])
def test_collectives_on_fake_tensors_are_those_on_real_ones(fake: None, depth: str) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))

    def traced() -> list[tuple[object, ...]]:
        with commlens.trace(depth=depth) as trace, commlens.trace():
            _every_kind_of_collective(mesh)
        assert trace.coverage.recorded == trace.coverage.dispatched > 0
        return [
            (
                e.op,
                e.api,
                e.phase,
                e.site,
                e.dtype,
                e.input_bytes,
                e.output_bytes,
                e.wire_bytes,
                e.reduce_op,
                e.root,
                e.cause,
                e.source,
                trace.data.group_of(e).ranks,
            )
            for e in trace.events
        ]

    real = traced()
    untouched = FakeTensorMode.dispatch
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert traced() == real
    assert FakeTensorMode.dispatch is untouched


# --- modules


class Between(nn.Module):
    """A parent that talks before, between and after its children."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Talker()
        self.b = Talker()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Talk.apply(x)
        x = self.a(x)
        x = Talk.apply(x)
        x = self.b(x)
        return Talk.apply(x)


def test_parent_before_between_and_after_its_children(fake: None) -> None:
    trace = run(Between(), batch().requires_grad_())
    order = ["Between", "Between.a", "Between", "Between.b", "Between"]
    assert sites(trace) == [(FORWARD, site) for site in order] + [
        (BACKWARD, site) for site in reversed(order)
    ]


def test_sequence_numbers_and_threads_count_from_the_first_one(fake: None) -> None:
    trace = run(Between())
    assert [event.sequence for event in trace.events] == list(range(1, len(trace.events) + 1))
    assert {event.thread for event in trace.events} == {0}


def _checkpointed(model: nn.Sequential) -> nn.Module:
    for name, child in list(model.named_children()):
        setattr(model, name, checkpoint_wrapper(child))
    return model


def test_a_module_that_is_recomputed_counts_once_in_each_step(fake: None) -> None:
    for implementation in CheckpointImpl:
        model = nn.Sequential(checkpoint_wrapper(Between(), checkpoint_impl=implementation))
        with commlens.trace() as trace:
            for _ in range(3):
                model(batch().requires_grad_()).sum().backward()
        [wrapped] = [module for module in trace.data.modules if module.path == "Sequential.0"]
        assert wrapped.calls == 3, implementation


@pytest.mark.parametrize(
    "wrap",
    [
        _checkpointed,
        lambda model: checkpoint_wrapper(checkpoint_wrapper(model)),
        lambda model: offload_wrapper(model),
        nn.DataParallel,
        lambda model: DistributedDataParallel(model, bucket_cap_mb=10),
        lambda model: nn.DataParallel(DistributedDataParallel(_checkpointed(model))),
    ],
    ids=["each checkpointed", "twice", "offloaded", "DataParallel", "DDP", "all"],
)
def test_wrappers_have_no_part_in_paths(gloo: None, wrap: Callable[[nn.Module], nn.Module]) -> None:
    def model() -> nn.Sequential:
        return nn.Sequential(nn.Sequential(Talker(), nn.Linear(WIDTH, WIDTH)), Between())

    plain, wrapped = run(model()), run(wrap(model()))
    talks = wrapped.filter(op="all_reduce", owner=None)  # without those of DDP
    for phase in ("forward", "backward"):
        assert sites(talks.filter(phase=phase)) == sites(plain.filter(phase=phase))
    assert {module.path: module.type for module in plain.data.modules}.items() <= {
        module.path: module.type for module in wrapped.data.modules
    }.items()
    assert len({module.path for module in wrapped.data.modules}) == len(wrapped.data.modules)
    assert wrapped.coverage.unclassified == 0
    # which stops once it has what backward needs
    again = sites(talks.filter(phase="recomputation"))
    assert {site for _, site in again} <= {site for _, site in sites(plain.filter(phase="forward"))}
    assert talks.filter(module="0.0", phase="forward").calls == 1


def test_siblings_in_a_module_list(fake: None) -> None:
    model = nn.Sequential(Talker(), nn.ModuleList([Talker()])[0], Talker())
    order = ["Sequential.0", "Sequential.1", "Sequential.2"]
    assert sites(run(model)) == [(FORWARD, site) for site in order] + [
        (BACKWARD, site) for site in reversed(order)
    ]


class DictOutput(nn.Module):
    """A child whose outputs are in a dict, a list and a dataclass-like object: what module hooks
    cannot follow.
    """

    class Child(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> dict[str, object]:
            return {"hidden": Talk.apply(self.layer(x)), "more": [x]}

    def __init__(self) -> None:
        super().__init__()
        self.child = self.Child()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.child(x)["hidden"])


def test_dict_outputs(fake: None) -> None:
    assert sites(run(DictOutput())) == [
        (FORWARD, "DictOutput.child"),
        (BACKWARD, "DictOutput.child"),
    ]


class InPlace(nn.Module):
    """A parent that changes its child's output in place."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Talker()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.child(x)
        y.add_(1).relu_()
        return self.head(y)


def test_outputs_that_are_changed_in_place(fake: None) -> None:
    assert sites(run(InPlace())) == [(FORWARD, "InPlace.child"), (BACKWARD, "InPlace.child")]


class Sharing(nn.Module):
    """One layer with two parents."""

    class Parent(nn.Module):
        def __init__(self, shared: nn.Module) -> None:
            super().__init__()
            self.shared = shared

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Talk.apply(self.shared(x))

    def __init__(self) -> None:
        super().__init__()
        shared = Talker()
        self.a = self.Parent(shared)
        self.b = self.Parent(shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def test_shared_modules(fake: None) -> None:
    """The parent through which it was called is told, so it has a row for each."""
    trace = run(Sharing())
    order = ["Sharing.a.shared", "Sharing.a", "Sharing.b.shared", "Sharing.b"]
    assert calls(trace) == [(FORWARD, site, 1) for site in order] + [
        (BACKWARD, site, 1) for site in reversed(order)
    ]
    rows = {module.path: module for module in trace.data.modules}
    for name in ("a", "b"):
        row = rows[f"Sharing.{name}.shared"]
        assert (row.calls, trace.data.modules[row.parent or 0].path) == (1, f"Sharing.{name}")


def test_a_module_with_two_names_has_both(fake: None) -> None:
    """Nothing tells which name its parent called it by, so it has one row, which either name finds."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = self.second = Talker()
            self.once = Talker()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.once(self.second(self.first(x)))

    trace = run(Tied())
    rows = {module.path: (module.calls, module.other_paths) for module in trace.data.modules}
    assert rows["Tied.first"] == (2, ("Tied.second",))
    assert rows["Tied.first.layer"] == (2, ("Tied.second.layer",))
    assert rows["Tied.once"] == (1, ())
    assert [trace.filter(module=name).calls for name in ("first", "second", "once", "Tied")] == [
        4,
        4,
        2,
        6,
    ]
    assert_collectives(trace, {"all_reduce": 2}, module="second", phase="forward")
    with pytest.raises(commlens.SelectionError, match="no module 'third'"):
        assert_collectives(trace, {"all_reduce": 4}, module="third")
    assert {
        row.path: row.other_paths for row in trace.to_summary().by_module if row.other_paths
    } == {"Tied.first": ["Tied.second"]}
    printed = io.StringIO()
    trace.summary(printed)
    assert "first (also second)" in printed.getvalue()


def test_a_shared_module_that_is_recomputed_has_the_right_parent(fake: None) -> None:
    class Checkpointing(Sharing.Parent):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(checkpoint(self.shared, x, use_reentrant=True))

    model = Sharing()
    model.b = Checkpointing(model.a.shared)
    trace = run(model, batch().requires_grad_())
    recomputed = [(RECOMPUTATION, "Sharing.b.shared"), (BACKWARD, "Sharing.b.shared")]
    assert sites(trace)[-4:] == [
        *recomputed,
        (BACKWARD, "Sharing.a"),
        (BACKWARD, "Sharing.a.shared"),
    ]


def test_two_models_of_one_class(fake: None) -> None:
    first, second = Talker(), Talker()
    with commlens.trace() as trace:
        (first(batch()).sum() + second(batch()).sum()).backward()
    assert sites(trace) == [
        (FORWARD, "Talker"),
        (FORWARD, "Talker#2"),
        (BACKWARD, "Talker#2"),
        (BACKWARD, "Talker"),
    ]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = Talker()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.child(self.child(x))


def test_modules_called_twice(fake: None) -> None:
    trace = run(Twice())
    child = "Twice.child"
    assert calls(trace) == [
        (FORWARD, child, 1),
        (FORWARD, child, 2),
        (BACKWARD, child, 2),
        (BACKWARD, child, 1),
    ]


def test_micro_batches_whose_backward_comes_later(fake: None) -> None:
    model = Talker()
    with commlens.trace() as trace:
        losses = [model(batch()).sum() for _ in range(3)]
        for loss in losses:
            loss.backward()
    assert calls(trace) == [
        (phase, "Talker", number) for phase in (FORWARD, BACKWARD) for number in (1, 2, 3)
    ]


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        if depth:
            x = self(x, depth - 1)
        return Talk.apply(self.layer(x))


def test_recursion(fake: None) -> None:
    trace = run(Recursive())
    assert calls(trace) == [(FORWARD, "Recursive", n) for n in (3, 2, 1)] + [
        (BACKWARD, "Recursive", n) for n in (1, 2, 3)
    ]


class Fragile(nn.Module):
    """A child that fails half-way, and a parent that goes on without it."""

    class Child(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Talker()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.inner(x)
            raise ValueError("half-way")

    def __init__(self) -> None:
        super().__init__()
        self.child = self.Child()
        self.after = Talker()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with suppress(ValueError):
            self.child(x)
        return self.after(Talk.apply(x))


def test_exceptions_caught_half_way(fake: None) -> None:
    trace = run(Fragile(), batch().requires_grad_())
    assert sites(trace) == [
        (FORWARD, "Fragile.child.inner"),
        (FORWARD, "Fragile"),
        (FORWARD, "Fragile.after"),
        (BACKWARD, "Fragile.after"),
        (BACKWARD, "Fragile"),
    ]


def test_an_exception_that_leaves_the_outermost_module(fake: None) -> None:
    fragile = Fragile.Child()
    with commlens.trace() as trace:
        with pytest.raises(ValueError, match="half-way"):
            fragile(batch())
        dist.all_reduce(torch.ones(1))
    assert sites(trace) == [(FORWARD, "Child.inner"), (Phase.OUTSIDE, None)]


def test_generators_and_threads_do_not_mix_module_stacks(fake: None) -> None:
    model, other = Talker(), nn.Sequential(Talker())
    arrived, go_on = threading.Event(), threading.Event()

    class Paused(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            arrived.set()
            assert go_on.wait(10)
            dist.all_reduce(x)
            return x

    with commlens.trace() as trace:
        thread = threading.Thread(target=Paused(), args=(batch(),))
        thread.start()
        assert arrived.wait(10)
        model(batch())
        go_on.set()
        thread.join()
        other(batch())
    assert sites(trace) == [(FORWARD, "Talker"), (FORWARD, "Paused"), (FORWARD, "Sequential.0")]
    assert [event.thread for event in trace.events] == [0, 1, 0]


# --- contexts


def test_nested_contexts(fake: None) -> None:
    model = Talker()
    with commlens.trace() as outer:
        model(batch()).sum().backward()
        with commlens.trace() as inner:
            model(batch()).sum().backward()
        model(batch()).sum().backward()
    assert calls(inner) == [(FORWARD, "Talker", 1), (BACKWARD, "Talker", 1)]
    assert calls(outer) == [
        (phase, "Talker", number) for number in (1, 2, 3) for phase in (FORWARD, BACKWARD)
    ]


def test_a_live_trace_can_be_copied_and_pickled(fake: None) -> None:
    with commlens.trace() as trace:
        dist.all_reduce(torch.ones(4))
        copies = [copy.copy(trace), copy.deepcopy(trace), pickle.loads(pickle.dumps(trace))]
        dist.all_reduce(torch.ones(4))
    assert trace.calls == 2
    assert [each.calls for each in copies[1:]] == [1, 1]
    assert all(each.counts()["all_reduce"] >= 1 for each in copies)


def test_a_context_entered_again_goes_on(fake: None) -> None:
    model, trace = Talker(), commlens.trace()
    with trace:
        loss = model(batch()).sum()
    dist.all_reduce(torch.ones(1))  # not traced
    with trace:
        loss.backward()
    with trace, trace:
        model(batch())
    assert calls(trace) == [(FORWARD, "Talker", 1), (BACKWARD, "Talker", 1), (FORWARD, "Talker", 2)]


def test_forward_and_backward_in_different_contexts(fake: None) -> None:
    """The second trace never saw the modules: it says where it can only if it knows."""
    model = Between()
    with commlens.trace() as first:
        loss = model(batch()).sum()
    with commlens.trace() as second:
        loss.backward()
    assert [event.phase for event in first.events] == [FORWARD] * 5
    assert [event.phase for event in second.events] == [BACKWARD] * 4
    right = ["Between", "Between.b", "Between", "Between.a"]
    assert all(event.site in (None, site) for event, site in zip(second.events, right, strict=True))
    assert second.coverage.unclassified == sum(event.site is None for event in second.events)


def test_the_context_may_begin_inside_a_module(fake: None) -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = Talker()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with commlens.trace() as self.trace:
                return self.child(x)

    model = Inside()
    model(batch()).sum().backward()
    event = only(model.trace)
    assert event.phase is FORWARD
    assert event.site is not None
    assert event.site.split(".")[-1] in ("child", "Talker")


def test_backward_in_another_thread(fake: None) -> None:
    model = Between()
    with commlens.trace() as trace:
        loss = model(batch()).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    right = ["Between", "Between.b", "Between", "Between.a"]
    assert sites(trace)[5:] == [(BACKWARD, site) for site in right]
    assert [event.thread for event in trace.events] == [0] * 5 + [1] * 4


def test_autograd_grad_on_a_leaf(fake: None) -> None:
    x = batch().requires_grad_()
    model = Talker()
    with commlens.trace() as trace:
        (gradient,) = torch.autograd.grad(model(x).sum(), [x])
    assert sites(trace) == [(FORWARD, "Talker"), (BACKWARD, "Talker")]
    assert gradient.shape == x.shape


def test_a_backward_inside_a_forward(fake: None) -> None:
    """A module that takes a gradient as part of its forward, as physics-informed models do."""

    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = Talker()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.energy(x).square().sum(), [x], create_graph=True)
            dist.all_reduce(force.detach())
            return force

    with commlens.trace() as trace:
        Force()(batch())
    assert sites(trace) == [
        (FORWARD, "Force.energy"),
        (BACKWARD, "Force.energy"),
        (FORWARD, "Force"),
    ]


# --- checkpointing


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation(fake: None, reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.talker = Talker()
            self.head = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(
                checkpoint(lambda y: torch.tanh(self.talker(y)), x, use_reentrant=reentrant)
            )

    trace = run(Checkpointed(), batch().requires_grad_())
    talker = "Checkpointed.talker"
    assert sites(trace) == [(FORWARD, talker), (RECOMPUTATION, talker), (BACKWARD, talker)]


class Checkpointed(nn.Module):
    def __init__(self, child: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.child = child
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.child, x, use_reentrant=self.reentrant)


class Checkpointing(Checkpointed):
    """Communicates in a checkpointed function, both directly and in a child."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, x, use_reentrant=self.reentrant)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        group = dist.group.WORLD
        y = torch.tanh(self.child(torch.tanh(Talk.apply(torch.tanh(x)))))
        y = functional.reduce_scatter_tensor_autograd(
            functional.all_gather_tensor_autograd(y, 0, group), "sum", 0, group
        )
        return torch.tanh(y * functional.all_reduce(y.detach(), "sum", group))


def _tensor_parallel() -> nn.Module:
    plan = {
        "net1": ColwiseParallel(input_layouts=Shard(0)),
        "net2": RowwiseParallel(output_layouts=Shard(0)),
    }
    return parallelize_module(MLP(), init_device_mesh("cpu", (8,), mesh_dim_names=("tp",)), plan)


@pytest.mark.parametrize(
    "own_thread", [False, True], ids=["one thread", "backward on a thread of its own"]
)
@pytest.mark.parametrize("child", [Talker, _tensor_parallel])
def test_both_kinds_of_checkpointing_tell_the_same(
    fake: None, child: Callable[[], nn.Module], own_thread: bool
) -> None:
    """Accelerators run backward on a thread of its own. Autograd counts nodes per thread, so
    recomputed nodes share forward's numbers.
    """
    results = []
    for reentrant in (False, True):
        model = nn.Sequential(
            Talker(), *(Checkpointing(child(), reentrant=reentrant) for _ in range(3))
        )
        with commlens.trace() as trace, ThreadPoolExecutor(1) as thread:
            for _ in range(2):
                loss = model(batch()).sum()
                thread.submit(loss.backward).result() if own_thread else loss.backward()
        results.append(sites(trace))
        first, second = results[-1][: len(trace.events) // 2], results[-1][len(trace.events) // 2 :]
        assert first == second
        for number in (1, 2, 3):
            passed = [
                (phase, site)
                for phase, site in first
                if site is not None and site.startswith(f"Sequential.{number}")
            ]
            forward = [site for phase, site in passed if phase is FORWARD]
            number_of = len(forward)
            assert [phase for phase, _ in passed[: 2 * number_of]] == [FORWARD] * number_of + [
                RECOMPUTATION
            ] * number_of
            assert {phase for phase, _ in passed[2 * number_of :]} == {BACKWARD}
            assert [site for phase, site in passed if phase is RECOMPUTATION] == forward
            assert {site for phase, site in passed if phase is BACKWARD} == set(forward)
    assert results[0] == results[1]


class OwnCheckpoint(torch.autograd.Function):
    """As Megatron and DeepSpeed have it."""

    @staticmethod
    def forward(
        ctx: Any, run_function: Callable[..., torch.Tensor], x: torch.Tensor
    ) -> torch.Tensor:
        ctx.run_function = run_function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run_function(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor | None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.run_function(x)
        torch.autograd.backward(output, gradient)
        return None, x.grad


def test_checkpointing_of_other_libraries(fake: None) -> None:
    class Checkpointing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = Talker()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return OwnCheckpoint.apply(self.body, x)

        def body(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(Talk.apply(torch.tanh(self.child(x))))

    order = ["Checkpointing.child", "Checkpointing"]
    trace = run(Checkpointing(), batch().requires_grad_())
    assert sites(trace) == [
        *((phase, site) for phase in (FORWARD, RECOMPUTATION) for site in order),
        *((BACKWARD, site) for site in reversed(order)),
    ]


@pytest.mark.parametrize("depth", [1, 2], ids=["once", "within another"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_ops_of_a_recomputation_are_where_its_collectives_are(
    fake: None, reentrant: bool, depth: int
) -> None:
    """Also those that run without gradients, as a custom function's forward does."""
    model: nn.Module = Checkpointing(Talker(), reentrant=reentrant)
    for _ in range(depth - 1):
        model = Checkpointing(model, reentrant=reentrant)
    with commlens.trace(depth="ops") as trace:
        model(batch().requires_grad_()).sum().backward()
    issuing = (
        "c10d.allreduce_",
        "_c10d_functional.all_gather_into",
        "_c10d_functional.reduce_scatter",
        "_c10d_functional.all_reduce",
    )
    assert [(op.phase, op.site) for op in trace.ops if op.name.startswith(issuing)] == sites(trace)
    assert {phase for phase, _ in sites(trace)} == {FORWARD, RECOMPUTATION, BACKWARD}


def test_checkpointing_within_checkpointing(fake: None) -> None:
    inner = Checkpointing(Talker(), reentrant=True)
    trace = run(Checkpointing(inner, reentrant=True), batch().requires_grad_())
    assert {site for _, site in sites(trace)} == {
        "Checkpointing",
        "Checkpointing.child",
        "Checkpointing.child.child",
    }
    once = sites(trace.filter(phase="forward"))
    assert [site for _, site in sites(trace.filter(phase="backward"))] == [
        *["Checkpointing"] * 2,
        *["Checkpointing.child"] * 2,
        "Checkpointing.child.child",
        *["Checkpointing.child"],
        "Checkpointing",
    ]
    again = [site for _, site in sites(trace.filter(phase="recomputation"))]
    assert len(again) == len(once) + 5  # the inner one's function runs again by itself


def test_a_backward_inside_a_checkpointed_forward(fake: None) -> None:
    """Its collectives are those of the module that takes the gradient, although the whole is
    recomputed.
    """

    class Force(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                y = x.detach().requires_grad_()
                (force,) = torch.autograd.grad(Talk.apply(y.square()).sum(), [y])
            return x * force

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.force = Force()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(checkpoint(self.force, x, use_reentrant=True))

    assert sites(run(Outer(), batch().requires_grad_())) == [
        (FORWARD, "Outer.force"),
        (BACKWARD, "Outer.force"),
        (RECOMPUTATION, "Outer.force"),
        (BACKWARD, "Outer.force"),
    ]


# --- libraries


def sharded_stack(**options: object) -> Stack:
    model, mesh = Stack(), init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def tail(path: str | None) -> str:
    """``"layers.1"`` of ``"Stack.layers.1"``."""
    return ".".join((path or "").split(".")[-2:])


def fsdp_events(trace: commlens.Trace) -> list[tuple[str, str, str]]:
    """Op, whose parameters, and where it was issued."""
    assert all(
        event.owner is not None and event.owner.library == "FSDP2" for event in trace.events
    ), trace.events
    return [
        (event.op, tail(event.owner.name), tail(event.site))
        for event in trace.events
        if event.owner is not None
    ]


@pytest.mark.skipif(not fsdp2_runs_on_cpu(), reason="FSDP2 does not run on CPU")
def test_fsdp2_blocks(fake: None) -> None:
    """Forward gathers where it needs; backward prefetches the block before, inside the one that is
    running.
    """
    model = sharded_stack()
    x = batch().requires_grad_()
    with commlens.trace() as trace:
        loss = model(x).sum()
    assert fsdp_events(trace) == [("all_gather", f"layers.{i}", f"layers.{i}") for i in range(3)]
    assert {event.phase for event in trace.events} == {FORWARD}
    with trace:
        loss.backward()
    backward = trace.events[3:]
    assert {event.phase for event in backward} == {BACKWARD}
    assert [
        (event.op, tail(event.owner.name), tail(event.site))
        for event in backward
        if event.owner is not None
    ] == [
        ("all_gather", "layers.2", "layers.2"),
        ("all_gather", "layers.1", "layers.2"),
        ("reduce_scatter", "layers.2", "layers.2"),
        ("all_gather", "layers.0", "layers.1"),
        ("reduce_scatter", "layers.1", "layers.1"),
        ("reduce_scatter", "layers.0", "layers.0"),
    ]
    assert trace.coverage.unclassified == 0


@pytest.mark.skipif(not fsdp2_runs_on_cpu(), reason="FSDP2 does not run on CPU")
def test_fsdp2_prefetch_in_forward(fake: None) -> None:
    model = sharded_stack()
    model.layers[0].set_modules_to_forward_prefetch([model.layers[1]])
    with commlens.trace() as trace, torch.no_grad():
        model(batch())
    assert fsdp_events(trace) == [
        ("all_gather", "layers.0", "layers.0"),
        ("all_gather", "layers.1", "layers.0"),
        ("all_gather", "layers.2", "layers.2"),
    ]


@pytest.mark.skipif(not fsdp2_runs_on_cpu(), reason="FSDP2 does not run on CPU")
def test_fsdp2_whose_input_needs_no_gradient(fake: None) -> None:
    """The first block's gradients are reduced at the very end of backward, where no node of a
    module runs.
    """
    trace = run(sharded_stack())
    assert [event.op for event in trace.events].count("reduce_scatter") == 3
    last = trace.events[-1]
    assert last.phase is BACKWARD
    assert last.owner is not None
    assert tail(last.owner.name) == "layers.0"
    assert last.site is not None
    assert trace.coverage.unclassified == 0


@pytest.mark.skipif(not fsdp2_runs_on_cpu(), reason="FSDP2 does not run on CPU")
def test_fsdp2_with_tensor_parallelism_and_checkpointing(fake: None) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    model = Stack(3)
    for number in range(3):
        block = nn.Sequential(MLP(), MLP())
        for part in block:
            parallelize_module(
                part, mesh["tp"], {"net1": ColwiseParallel(), "net2": RowwiseParallel()}
            )
        model.layers[number] = fully_shard(checkpoint_wrapper(block), mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    trace = run(model, batch().requires_grad_())
    assert trace.counts(by=("phase", "mesh_dim", "op")) == {
        ("forward", "dp", "all_gather"): 3,
        ("forward", "tp", "all_reduce"): 6,
        ("backward", "dp", "all_gather"): 3,
        ("recomputation", "tp", "all_reduce"): 3,  # nothing saved needs the second part's
        ("backward", "tp", "all_reduce"): 6,
        ("backward", "dp", "reduce_scatter"): 3,
    }
    # bytes of a block on one rank of tp
    parameters = 4 * 2 * (16 * WIDTH // 4 + 16 // 4 + WIDTH * 16 // 4 + WIDTH)
    assert trace.bytes(by=("mesh_dim", "op")) == {
        ("dp", "all_gather"): 6 * parameters // 2,
        ("dp", "reduce_scatter"): 3 * parameters // 2,
        ("tp", "all_reduce"): 15 * batch().nbytes * 2 * 3 // 4,
    }
    recomputed = [
        (event.site or "").partition(".")[2] for event in trace.filter(phase="recomputation").events
    ]
    assert recomputed == [f"layers.{number}.0.net2" for number in (2, 1, 0)]
    assert trace.coverage.unclassified == 0


def parameter_bytes(model: nn.Module, names: tuple[str, ...]) -> int:
    sizes = {
        name: parameter.numel() * parameter.element_size()
        for name, parameter in model.named_parameters()
    }
    return sum(sizes[name] for name in names)


DDP_OPTIONS = {
    "plain": {},
    "static graph": {"static_graph": True},
    "bucket views": {"gradient_as_bucket_view": True},
    "unused parameters": {"find_unused_parameters": True},
    "all": {"static_graph": True, "gradient_as_bucket_view": True},
    "hook in Python": {"hook": allreduce_hook},
}


@pytest.mark.parametrize("options", DDP_OPTIONS.values(), ids=DDP_OPTIONS)
def test_ddp_buckets(gloo: None, options: dict[str, Any]) -> None:
    """Every gradient is in one bucket, and a bucket's parameters have its bytes: in every step, as
    buckets are rebuilt after the first.
    """
    inner = Stack()
    hook = options.get("hook")
    model = DistributedDataParallel(
        inner, bucket_cap_mb=0.001, **{k: v for k, v in options.items() if k != "hook"}
    )
    if hook is not None:
        model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with commlens.trace() as trace:
        for _ in range(3):
            model(batch()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    several = False
    for step in range(3):
        reduced = [
            e
            for e in trace.events
            if e.step == step and e.op == "all_reduce" and e.dtype == "float32"
        ]
        assert reduced
        several = several or len(reduced) > 1
        names: list[str] = []
        for event in reduced:
            assert event.owner is not None, f"step {step}: {event}"
            assert event.owner.library == "DDP"
            assert event.owner.parameters
            assert event.input_bytes == parameter_bytes(inner, event.owner.parameters), (
                f"step {step}: {event}"
            )
            assert event.site == "Stack"
            assert event.phase is BACKWARD
            names += event.owner.parameters
        assert sorted(names) == sorted(name for name, _ in inner.named_parameters()), f"step {step}"
    assert several
    assert trace.coverage.unclassified == 0


def test_ddp_buffers_are_broadcast_in_forward(gloo: None) -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
    with commlens.trace() as trace:
        for _ in range(2):
            model(batch()).sum().backward()
    broadcasts = [event for event in trace.events if event.op == "broadcast"]
    assert broadcasts
    assert {(event.phase, event.site) for event in broadcasts} == {(FORWARD, "Sequential")}


def test_the_wait_for_ddps_buckets_at_the_end_of_backward(gloo: None) -> None:
    model = DistributedDataParallel(Stack(3), bucket_cap_mb=0.0001)
    model(batch()).sum().backward()  # after it, the buckets are rebuilt
    with commlens.trace() as trace:
        for _ in range(2):
            model(batch()).sum().backward()
    buckets = [
        event for event in trace.events if event.op == "all_reduce" and event.owner is not None
    ]
    assert len(buckets) > 2
    assert all(event.wait_ended_ns >= event.wait_began_ns >= event.returned_ns for event in buckets)
    ends = [event.wait_ended_ns for event in buckets]
    assert len(set(ends)) == 2 and ends == sorted(ends)  # one for each backward
    last = [
        max(
            (event for event in buckets if event.wait_ended_ns == end),
            key=lambda event: event.sequence,
        )
        for end in set(ends)
    ]
    assert all((event.wait_ended_ns > event.wait_began_ns) is (event in last) for event in buckets)


@pytest.mark.parametrize("reentrant", [True, False])
def test_ddps_buckets_end_together_under_checkpointing(gloo: None, reentrant: bool) -> None:
    """Reentrant checkpointing issues them in passes of their own; the reducer waits in the pass of
    the last one.
    """
    model = nn.Sequential(*(Checkpointed(MLP(), reentrant=reentrant) for _ in range(3)))
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.0001)
    wrapped(batch().requires_grad_()).sum().backward()
    with commlens.trace() as trace:
        for _ in range(2):
            wrapped(batch().requires_grad_()).sum().backward()
    buckets = [
        event for event in trace.events if event.op == "all_reduce" and event.owner is not None
    ]
    assert len(buckets) > 4
    half = len(buckets) // 2
    for own in (buckets[:half], buckets[half:]):
        assert len({event.wait_ended_ns for event in own}) == 1
        assert [event.wait_ended_ns > event.wait_began_ns for event in own] == [False] * (
            half - 1
        ) + [True]
        assert own[-1].wait_began_ns >= own[-1].returned_ns


def test_a_backward_that_raises_leaves_no_wait(gloo: None) -> None:
    broken, model = [DistributedDataParallel(Stack(3), bucket_cap_mb=0.0001) for _ in range(2)]

    broken(batch()).sum().backward()  # after it, the buckets are rebuilt

    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("no")

    with commlens.trace() as trace:
        next(iter(broken.parameters())).register_hook(fail)  # one of the last to get its gradient
        with pytest.raises(RuntimeError, match="no"):
            broken(batch()).sum().backward()
        model(batch()).sum().backward()
    reduced = [event for event in trace.events if event.op == "all_reduce"]
    waited = {
        site: [bool(event.wait_ended_ns) for event in reduced if event.site == site]
        for site in (reduced[0].site, reduced[-1].site)
    }
    assert list(map(set, waited.values())) == [{False}, {True}]


@pytest.fixture
def frames_read_natively(native_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stacks are read by the native engine, as where it is built."""
    monkeypatch.setenv("COMMLENS_NATIVE_DIR", str(native_cache))
    monkeypatch.setattr(stacks, "_stack_key", None)
    monkeypatch.setattr(stacks, "_local_values", None)
    stacks.use_native_engine.cache_clear()
    stacks.use_native_engine()
    if stacks._stack_key is None:
        pytest.skip("the native engine does not read the frames of this Python")
    yield
    stacks.use_native_engine.cache_clear()


@pytest.mark.skipif(not fsdp2_runs_on_cpu(), reason="FSDP2 does not run on CPU")
@pytest.mark.launches
def test_the_native_engine_reads_the_same_of_the_stacks(
    fake: None, frames_read_natively: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(
        MLP(), mesh["tp"], {"net1": ColwiseParallel(), "net2": RowwiseParallel()}
    )
    fully_shard(model, mesh=mesh["dp"])

    def traced() -> list[TraceEvent]:
        with commlens.trace() as trace:
            for _ in range(2):
                model(batch()).sum().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return [msgspec.structs.replace(event, **dict.fromkeys(TIMES, 0)) for event in trace.events]

    natively = traced()
    monkeypatch.setattr(stacks, "_stack_key", None)
    monkeypatch.setattr(stacks, "_local_values", None)
    assert natively == traced()
    assert {event.owner.library for event in natively if event.owner is not None} == {"FSDP2"}
    assert any(event.cause is not None and event.cause.op for event in natively) and any(
        event.through for event in natively
    )


class AveragingSGD(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                dist.all_reduce(parameter.grad)
        super().step(closure)


def test_optimizer(fake: None) -> None:
    model = MLP()
    optimizer = AveragingSGD(model.parameters(), lr=0.1)
    with commlens.trace() as trace:
        model(batch()).sum().backward()
        optimizer.step()
        optimizer.step()
    assert sites(trace) == [(Phase.OPTIMIZER, None)] * 8
    # though its base class's step is wrapped, too
    assert [event.step for event in trace.events] == [0] * 4 + [1] * 4
    assert trace.data.steps == 2
    assert {event.source.line for event in trace.events if event.source} == {
        line_of(AveragingSGD.step, "dist.all_reduce")
    }


def test_optimizer_of_the_library(gloo: None) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = MLP()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)
    with commlens.trace() as trace:
        model(batch()).sum().backward()
        optimizer.step()
        optimizer.step()  # again
    assert len(trace.events) == 8
    assert sites(trace) == [(Phase.OPTIMIZER, None)] * 8
    # the optimizer inside steps, too, and does not count
    assert [event.step for event in trace.events] == [0] * 4 + [1] * 4
    # no qualified names before Python 3.11
    assert {event.through for event in trace.events} <= {"ZeroRedundancyOptimizer.step", "step"}
    first = line_of(test_optimizer_of_the_library, "optimizer.step()")
    assert {event.source.line for event in trace.events if event.source} == {first, first + 1}


def test_clip_grad_norm(fake: None) -> None:
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("tp",))
    model = parallelize_module(MLP(), mesh, {"net1": ColwiseParallel(), "net2": RowwiseParallel()})
    model(batch()).sum().backward()
    with commlens.trace() as trace:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert trace.events
    for event in trace.events:
        assert (event.phase, event.site, event.through) == (Phase.OUTSIDE, None, "clip_grad_norm_")
        assert event.source is not None
        assert event.source.line == line_of(test_clip_grad_norm, "nn.utils.clip_grad_norm_(")


# --- DTensor


CHECKPOINTS: dict[str, Callable[[nn.Module, Path], object]] = {
    "save": lambda model, path: dcp.save({"model": model.state_dict()}, checkpoint_id=path),
    "load": lambda model, path: dcp.load(
        {"model": model.state_dict()}, checkpoint_id=path.parent / "saved"
    ),
    "async_save": lambda model, path: _async_saved(
        dcp.async_save({"model": model.state_dict()}, checkpoint_id=path)
    ),
    "set_model_state_dict": lambda model, path: set_model_state_dict(
        model, MLP().state_dict(), options=StateDictOptions(full_state_dict=True)
    ),
}


def _async_saved(future: Any) -> None:
    # from torch 2.9 on, it may be a future for each part
    getattr(future, "upload_completion", future).result()


@pytest.mark.skipif(not fsdp2_runs_on_cpu(), reason="FSDP2 does not run on CPU")
@pytest.mark.parametrize("function", CHECKPOINTS)
def test_collectives_of_a_checkpoint_say_what_called_them(
    gloo: None, tmp_path: Path, function: str
) -> None:
    model = fully_shard(MLP(), mesh=init_device_mesh("cpu", (1,)))
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "saved")
    with commlens.trace() as trace:
        CHECKPOINTS[function](model, tmp_path / "new")
    assert trace.events
    assert trace.counts(by=("through", "phase")) == {(function, "outside"): len(trace.events)}
    if function == "async_save":
        return  # it communicates in a thread of its own, below no line of the program
    assert {event.source.file for event in trace.events if event.source is not None} == {__file__}


@pytest.mark.skipif(not fsdp2_runs_on_cpu(), reason="FSDP2 does not run on CPU")
def test_collectives_of_a_gathered_state_dict_say_what_called_them(fake: None) -> None:
    model = fully_shard(MLP(), mesh=init_device_mesh("cpu", (8,)))
    with commlens.trace() as trace:
        get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert trace.counts(by=("op", "through", "phase")) == {
        ("all_gather", "get_model_state_dict", "outside"): 4
    }


def test_a_parallel_plans_redistribution_is_explicit(fake: None) -> None:
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("tp",))
    model = parallelize_module(MLP(), mesh, {"net1": ColwiseParallel(), "net2": RowwiseParallel()})
    trace = run(model, batch().requires_grad_())
    assert sites(trace) == [(FORWARD, "MLP.net2"), (BACKWARD, "MLP.net1")]
    for event in trace.events:
        assert event.api == "c10d_functional.all_reduce"
        assert event.cause is not None
        assert not event.cause.implicit
        assert "Partial" in event.cause.before
        assert event.cause.after == "(Replicate(),)"
        assert event.cause.mesh.startswith("DeviceMesh(")


def test_an_op_that_needs_its_input_elsewhere_is_implicit(fake: None) -> None:
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("tp",))
    x = distribute_tensor(torch.randn(16, 16), mesh, [Shard(0)])
    with commlens.trace() as trace:
        x @ x
    event = only(trace)
    assert event.op == "all_gather"
    cause = event.cause
    assert cause is not None
    assert (cause.op, cause.before, cause.after, cause.implicit) == (
        "aten.mm.default",
        "(Shard(dim=0),)",
        "(Replicate(),)",
        True,
    )
    assert event.source is not None
    assert event.source.line == line_of(
        test_an_op_that_needs_its_input_elsewhere_is_implicit, "x @ x"
    )


@pytest.mark.parametrize(
    ("after", "op", "shown"),
    [(Replicate(), "all_gather", "(Replicate(),)"), (Shard(1), None, "(Shard(dim=1),)")],
    ids=["gather", "exchange"],
)
def test_explicit_redistribution(
    fake: None, after: Shard | Replicate, op: str | None, shown: str
) -> None:
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("tp",))
    x = distribute_tensor(torch.randn(16, 16), mesh, [Shard(0)])
    with commlens.trace() as trace:
        x.redistribute(mesh, [after])
    event = only(trace)
    assert op in (None, event.op)
    cause = event.cause
    assert cause is not None
    assert (cause.op, cause.before, cause.after, cause.implicit) == (
        None,
        "(Shard(dim=0),)",
        shown,
        False,
    )
    assert event.source is not None
    assert event.source.line == line_of(test_explicit_redistribution, "x.redistribute")


def test_full_tensor_is_explicit(fake: None) -> None:
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("tp",))
    x = distribute_tensor(torch.randn(16, 16), mesh, [Shard(0)])
    with commlens.trace() as trace:
        x.full_tensor()
    event = only(trace)
    assert event.cause is not None
    assert not event.cause.implicit
    assert event.cause.op is None


def test_a_plain_collective_has_no_cause_and_no_owner(fake: None) -> None:
    with commlens.trace() as trace:
        dist.all_reduce(torch.ones(2))
    event = only(trace)
    assert (event.cause, event.owner, event.through) == (None, None, None)


# --- source lines and steps


def test_source_line(fake: None) -> None:
    with commlens.trace() as trace:
        dist.all_reduce(torch.ones(2))  # here
        functional.wait_tensor(functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD))
    assert [event.source.line for event in trace.events if event.source] == [
        line_of(test_source_line, text) for text in ("# here", "wait_tensor")
    ]
    assert all(event.source is not None and event.source.file == __file__ for event in trace.events)
    assert all(
        event.source is not None and event.source.function == "test_source_line"
        for event in trace.events
    )


def test_source_line_of_backward(fake: None) -> None:
    """A collective that C++ issues in backward: the line that called backward."""
    model = Talker()
    with commlens.trace() as trace:
        model(batch()).sum().backward()
    forward, backward = trace.events
    assert forward.source is not None
    assert forward.source.line == line_of(Talk.forward, "dist.all_reduce")
    assert backward.source is not None
    assert backward.source.line == line_of(Talk.backward, "dist.all_reduce")


def test_steps_are_optimizer_steps(fake: None) -> None:
    model = Talker()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with commlens.trace() as trace:
        for _ in range(3):
            model(batch()).sum().backward()
            optimizer.step()
    assert [event.step for event in trace.events] == [0, 0, 1, 1, 2, 2]
    assert trace.data.steps == 3


def test_setup_ends_with_the_first_forward(fake: None) -> None:
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("tp",))
    with commlens.trace(whole_steps=0) as trace:
        model = parallelize_module(
            MLP(), mesh, {"net1": ColwiseParallel(), "net2": RowwiseParallel()}
        )
        dist.barrier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(batch()).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    setup, steps = [
        [event for event in trace.events if trace.data.is_setup(event) is wanted]
        for wanted in (True, False)
    ]
    assert {event.op for event in setup} == {"scatter", "broadcast", "barrier"} and {
        event.step for event in setup
    } == {0}
    assert {event.phase for event in setup} == {Phase.OUTSIDE} < {event.phase for event in steps}
    assert "scatter" not in {event.op for event in steps}
    answer = trace.to_summary().answer
    assert (
        f" and the setup before them ({sum(event.count for event in setup)} collectives and "
        in answer
    )


def test_a_step_without_modules_ends_the_setup_too(fake: None) -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = AveragingSGD([weight], lr=0.1)
    with commlens.trace() as trace:
        dist.broadcast(weight.data, 0)
        for _ in range(2):
            weight.sum().backward()
            optimizer.step()
    assert [trace.data.is_setup(event) for event in trace.events] == [True, False, False]


def test_what_every_step_issues_before_its_forward_is_no_setup(fake: None) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with commlens.trace(whole_steps=1) as trace:
        dist.broadcast(torch.ones(8), 0)
        for _ in range(3):
            dist.broadcast(torch.ones(4), 0)  # the batch, to the ranks of a tensor-parallel group
            model(torch.ones(4)).sum().backward()
            optimizer.step()
    assert [(event.count, trace.data.is_setup(event)) for event in trace.events] == [
        (1, True),
        (1, False),
        (2, False),
    ]


def test_old_events_are_not_looked_through_at_each_collective(
    fake: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole steps of a sharded model hold more events than are kept elsewhere."""
    looks: list[int] = []
    summarise = EventLog.summarise
    monkeypatch.setattr(
        EventLog, "summarise", lambda log, *args: looks.append(1) or summarise(log, *args)
    )
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with commlens.trace(whole_steps=1) as trace:
        for amount in (2_100, 600, 600):
            weight.grad = torch.ones(4)
            for _ in range(amount):
                dist.all_reduce(weight.grad)
            optimizer.step()
        whole = len(looks)
        for _ in range(600):
            dist.all_reduce(weight.grad)
    assert len(looks) == whole
    assert sum(event.count for event in trace.events) == 2_100 + 3 * 600


def test_steps_without_any_pass_are_no_setup(fake: None) -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with commlens.trace() as trace:
        for _ in range(2):
            weight.grad = torch.ones(4)
            dist.all_reduce(weight.grad)
            optimizer.step()
        torch.nn.Linear(4, 4)(torch.ones(4))
    assert trace.data.setup_until is None


def test_without_a_forward_nothing_is_taken_for_setup(fake: None) -> None:
    with commlens.trace() as trace:
        dist.all_reduce(torch.ones(4))
    assert trace.data.setup_until is None and not trace.data.is_setup(trace.events[0])


def test_only_the_wanted_steps(fake: None) -> None:
    model = Talker()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with commlens.trace(steps="1:3") as trace:
        for _ in range(4):
            model(batch()).sum().backward()
            optimizer.step()
    assert [event.step for event in trace.events] == [1, 1, 2, 2]
    assert trace.coverage.recorded == trace.coverage.dispatched == 4


@pytest.mark.parametrize("fails", ["record", "listener", "step"])
def test_only_a_collective_that_is_not_recorded_is_lost(
    fake: None, fails: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    model = Talker()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with commlens.trace() as trace:
        tracer = trace.tracer
        dist.all_reduce(torch.ones(4))
        with monkeypatch.context() as patched:
            if fails == "record":
                patched.setattr(tracer._stacks, "find", fail)
            elif fails == "listener":
                patched.setattr(tracer, "on_collective", [fail])
            else:
                patched.setattr(tracer.modules, "step_ended", fail)
            model(batch()).sum().backward()
            optimizer.step()
    assert all(0 < event.started_ns <= event.returned_ns for event in trace.events)
    lost = 2 if fails == "record" else 0
    assert trace.coverage.dispatched - trace.coverage.recorded == lost
    assert trace.coverage.blind == (["2 of 3 collectives could not be recorded."] if lost else [])
    assert [each.message for each in caplog.records] == [
        "commlens could not trace a collective or a step, and continues without it:"
        " RuntimeError: broken"
    ]


def test_long_runs_are_summarised(fake: None) -> None:
    model = Talker()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with commlens.trace(whole_steps=2) as trace:
        for _ in range(10):
            model(batch()).sum().backward()
            optimizer.step()
    whole = [event for event in trace.events if event.count == 1]
    summarised = [event for event in trace.events if event.count > 1]
    assert [event.step for event in whole] == [0, 0, 1, 1]
    assert [
        (event.phase, event.site, event.count, event.step, event.last_step) for event in summarised
    ] == [(FORWARD, "Talker", 8, 2, 9), (BACKWARD, "Talker", 8, 2, 9)]
    assert trace.coverage.recorded == trace.coverage.dispatched == 20


# --- what was asked for


def test_waits(gloo: None) -> None:
    x = torch.ones(4)
    with commlens.trace() as trace:
        work = dist.all_reduce(x, async_op=True)
        never = dist.all_reduce(torch.ones(3), async_op=True)
        work.wait()
        functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD))
    never.wait()
    waited, alone, by_tensor = trace.events
    for event in (waited, by_tensor):
        assert (
            0 < event.started_ns <= event.returned_ns <= event.wait_began_ns <= event.wait_ended_ns
        )
    assert alone.returned_ns > 0
    assert (alone.wait_began_ns, alone.wait_ended_ns) == (0, 0)
    assert waited.asynchronous is not False


def test_a_wait_is_not_that_of_a_refused_collective_with_the_same_output(gloo: None) -> None:
    output = torch.ones(4)
    with commlens.trace() as trace:
        with pytest.raises(RuntimeError, match="root"):
            torch.ops._c10d_functional.broadcast_(output, 5, dist.group.WORLD.group_name)
        functional.wait_tensor(output)
    (refused,) = trace.events
    assert refused.returned_ns and not refused.wait_began_ns


def test_groups_and_mesh_dimensions(fake: None) -> None:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    own = dist.new_group([0, 3, 5], group_desc="the odd ones")
    with commlens.trace() as trace:
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1), group=mesh.get_group("dp"))
        dist.all_reduce(torch.ones(1), group=mesh.get_group("tp"))
        dist.all_reduce(torch.ones(1), group=own)
        dist.all_reduce(torch.ones(1), group=mesh.get_group("tp"))
    groups = [trace.data.group_of(event) for event in trace.events]
    assert [group.ranks for group in groups] == [
        tuple(range(8)),
        (0, 2, 4, 6),
        (0, 1),
        (0, 3, 5),
        (0, 1),
    ]
    # torch 2.6 does not tell a mesh of an earlier world (another test's, kept by a cache) from one
    # of this world.
    assert [group.mesh_dim for group in groups][TORCH < (2, 9) :] == [None, "dp", "tp", None, "tp"][
        TORCH < (2, 9) :
    ]
    assert groups[3].label == "the odd ones"
    assert groups[2] is groups[4]


def test_a_mesh_over_the_whole_world_names_its_group(fake: None) -> None:
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))
    with commlens.trace() as trace:
        dist.all_reduce(torch.ones(1), group=mesh.get_group())
    assert trace.data.group_of(only(trace)).label == "dp"


def test_arguments(fake: None) -> None:
    x, shards = torch.ones(2), [torch.zeros(2) for _ in range(8)]
    group = dist.new_group([0, 3, 5])
    with commlens.trace() as trace:
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        dist.broadcast(x, 3, group=group)
        dist.reduce(x, 5, op=dist.ReduceOp.MIN)
        dist.scatter(x, shards, src=0)
        dist.send(x, 3, tag=9)
        dist.recv(x, 5, group=group, tag=4)
        dist.barrier()
    found = [(e.op, e.reduce_op, e.root, e.peer, e.tag) for e in trace.events]
    assert found == [
        ("all_reduce", "MAX", None, None, 0),
        ("broadcast", None, 3, None, 0),
        ("reduce", "MIN", 5, None, 0),
        ("scatter", None, 0, None, 0),
        ("send", None, None, 3, 9),
        ("recv", None, None, 5, 4),
        ("barrier", None, None, None, 0),
    ]
    assert [event.dtype for event in trace.events[:2]] == ["float32", "float32"]


@pytest.mark.skipif(TORCH < (2, 9), reason="the dispatcher's reduce op cannot be read")
def test_reduce_op_of_functional_collectives(fake: None) -> None:
    with commlens.trace() as trace:
        functional.all_reduce(torch.ones(2), "avg", dist.group.WORLD)
        functional.reduce_scatter_tensor(torch.ones(8), "max", 0, dist.group.WORLD)
    assert [event.reduce_op for event in trace.events] == ["AVG", "MAX"]


def test_bytes(fake: None) -> None:
    x = torch.ones(100)
    out, half = torch.zeros(800), torch.zeros(800, dtype=torch.bfloat16)
    with commlens.trace() as trace:
        dist.all_reduce(x)
        dist.all_gather_into_tensor(out, x)
        dist.all_gather(list(out.chunk(8)), x)
        dist.reduce_scatter_tensor(x, out)
        dist.all_to_all_single(out, out.clone())
        dist.broadcast(half, 0)
        dist.send(x, 1)
        dist.recv(x, 1)
        dist.barrier()
    assert [(e.op, e.input_bytes, e.output_bytes, e.wire_bytes) for e in trace.events][:-1] == [
        ("all_reduce", 400, 400, 700),
        ("all_gather", 400, 3200, 2800),
        ("all_gather", 400, 3200, 2800),
        ("reduce_scatter", 3200, 400, 2800),
        ("all_to_all", 3200, 3200, 2800),
        ("broadcast", 1600, 1600, 1600),
        ("send", 400, 0, 400),
        ("recv", 0, 400, 400),
    ]
    assert trace.events[-1].wire_bytes == 0


def test_coalesced_collectives_say_how_many_they_join(fake: None) -> None:
    with commlens.trace() as trace:
        functional.all_reduce_coalesced([torch.ones(2), torch.ones(3)], "sum", dist.group.WORLD)
    event = only(trace)
    assert (event.members, event.input_bytes) == (2, 20)


# --- the other depth


MODELS: dict[str, Callable[[], nn.Module]] = {
    "between": Between,
    "dicts": DictOutput,
    "in place": InPlace,
    "shared": Sharing,
    "twice": Twice,
    "recursion": Recursive,
    "exceptions": Fragile,
    "DDP": lambda: DistributedDataParallel(Stack(), bucket_cap_mb=0.001),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_both_depths_tell_the_same(gloo: None, make: Callable[[], nn.Module]) -> None:
    found = []
    for depth in ("collectives", "ops"):
        torch.manual_seed(0)
        model = make()
        with commlens.trace(depth=depth) as trace:
            for _ in range(2):
                model(batch().requires_grad_()).sum().backward()
        found.append(
            [
                (
                    e.op,
                    e.api,
                    e.phase,
                    e.site,
                    e.call,
                    e.owner,
                    e.source and e.source.line,
                    e.input_bytes,
                )
                for e in trace.events
            ]
        )
    assert found[0] == found[1]
    assert found[0]


# --- what the trace must not disturb


@pytest.mark.long
def test_torch_compile_is_as_fast_afterwards(fake: None) -> None:
    """No recompilation, neither for the trace nor after it."""
    from torch._dynamo.utils import counters

    def step(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

    torch._dynamo.reset()
    counters.clear()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    compiled, compiled_model = (
        torch.compile(step, fullgraph=True, backend="aot_eager"),
        torch.compile(model, backend="aot_eager"),
    )
    x = batch()
    compiled(x)
    compiled_model(x).sum().backward()
    before = dict(counters["frames"]), dict(counters["stats"])
    with commlens.trace() as trace:
        compiled(x)
        compiled_model(x).sum().backward()
    compiled(x)
    compiled_model(x).sum().backward()
    assert (dict(counters["frames"]), dict(counters["stats"])) == before
    assert [event.op for event in trace.events] == ["all_reduce"]
    torch._dynamo.reset()


def test_compiled_under_the_trace_stays_compiled(fake: None) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with commlens.trace():
        compiled(batch()).sum().backward()
    compiled_frames = dict(counters["frames"])
    for _ in range(3):
        compiled(batch()).sum().backward()
    assert dict(counters["frames"]) == compiled_frames
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["aot_eager", long("inductor")])
def test_compiled_collectives_belong_to_the_compiled_module(fake: None, backend: str) -> None:
    """What a compiler made of it (a graph module, generated code) is no module and no line of the
    user's.
    """

    class Gathering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (
                functional.wait_tensor(
                    functional.all_gather_tensor_autograd(self.layer(x), 0, dist.group.WORLD)
                )
                * 2
            )

    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Gathering())
    model[1].compile(backend=backend)
    trace = run(model)
    assert [(event.op, event.phase, event.site, event.call) for event in trace.events] == [
        ("all_gather", FORWARD, "Sequential.1", 1),
        # torch 2.6 compiles it into the forward
        ("reduce_scatter", BACKWARD if TORCH >= (2, 9) else FORWARD, "Sequential.1", 1),
    ]
    assert all(event.source is not None and event.source.file == __file__ for event in trace.events)
    assert [module.path for module in trace.data.modules] == [
        "Sequential",
        "Sequential.0",
        "Sequential.1",
    ]
    torch._dynamo.reset()


def test_compiled_code_is_not_kept(fake: None) -> None:
    """A closed trace holds no code objects: dynamo hangs graphs and example tensors on them."""
    graphs: list[weakref.ref[nn.Module]] = []

    def backend(graph: nn.Module, inputs: list[torch.Tensor]) -> Callable[..., object]:
        graphs.append(weakref.ref(graph))
        return graph.forward

    def traced() -> commlens.Trace:
        model = Talker()
        compiled = torch.compile(
            lambda x: functional.all_reduce(model(x), "sum", dist.group.WORLD) + 1, backend=backend
        )
        with commlens.trace() as trace:
            compiled(batch())
        return trace

    torch._dynamo.reset()
    trace = traced()
    assert trace.events
    assert graphs
    torch._dynamo.reset()
    for _ in range(3):
        gc.collect()
    assert [graph() for graph in graphs if graph() is not None] == []


@pytest.mark.long
def test_memory_is_bounded(fake: None) -> None:
    """300 steps of a tensor-parallel model, of which 5 are kept whole. (tracemalloc makes each of
    them slow.)
    """
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("tp",))
    model = parallelize_module(MLP(), mesh, {"net1": ColwiseParallel(), "net2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = batch().requires_grad_()

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with commlens.trace(whole_steps=5) as trace:
        for _ in range(20):
            step()
        gc.collect()
        tracemalloc.start()
        try:
            began, _ = tracemalloc.get_traced_memory()
            for _ in range(300):
                step()
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - began
        finally:
            tracemalloc.stop()
    assert grown <= 300_000, f"300 steps grew memory by {grown} bytes"
    assert trace.coverage.recorded == trace.coverage.dispatched == 2 * 320


def test_parameters_are_not_kept(fake: None) -> None:
    model = Between()
    trace = run(model)
    watched = [weakref.ref(part) for part in (*model.modules(), *model.parameters())]
    del model
    gc.collect()
    assert [ref() for ref in watched if ref() is not None] == []
    assert trace.events


def test_results_are_ordinary_tensors(fake: None) -> None:
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("tp",))
    model = parallelize_module(MLP(), mesh, {"net1": ColwiseParallel(), "net2": RowwiseParallel()})
    with commlens.trace():
        out = model(batch())
        functional_out = functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
    assert type(out) in (torch.Tensor, functional.AsyncCollectiveTensor)
    assert type(functional_out) in (torch.Tensor, functional.AsyncCollectiveTensor)
    assert not isinstance(out, DTensor)


@pytest.mark.skipif(not fsdp2_runs_on_cpu(), reason="FSDP2 does not run on CPU")
@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    "outlives",
    [True, False],
    ids=["the model outlives the trace", "the model is gone before its end"],
)
def test_parameters_are_those_between_two_steps(outlives: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    with commlens.trace() as trace:
        model = nn.Sequential(nn.Linear(WIDTH, 16, bias=False), nn.ReLU(), nn.Linear(16, WIDTH))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh["dp"])
        model(torch.ones(2, WIDTH))
        if not outlives:
            del model, layer
            gc.collect()
    found = {
        f"{module.path}.{one.name}": one
        for module in trace.data.modules
        for one in module.parameters
    }
    assert [path.removeprefix("FSDP") for path in found] == [
        "Sequential.0.weight",
        "Sequential.2.weight",
        "Sequential.2.bias",
    ]
    weight = list(found.values())[1]
    assert (weight.placements, weight.shape, weight.dtype) == (
        "(Shard(dim=0), Shard(dim=1))",
        (WIDTH, 16),
        "float32",
    )
    assert weight.local_bytes == WIDTH * 16 * 4 // 8 and weight.mesh.startswith("DeviceMesh(")


@pytest.mark.skipif(TORCH < (2, 13), reason="gloo has a Flight Recorder from torch 2.13 on")
def test_entries_of_torchs_recorder_are_found_by_the_moment_of_issue(gloo: None) -> None:
    with commlens.trace() as trace:
        for size in (1, 2, 3):
            dist.all_reduce(torch.ones(size))
    # gloo's entries have no durations: each gets one of its own.
    recorded = [
        {**entry, "duration_ms": entry["record_id"] + 0.5} for entry in trace_events.entries()
    ][-3:]
    assert len(recorded) == 3
    events = list(trace.events)
    trace_events.add_durations(
        events, [*recorded, {"duration_ms": None}, {}], trace.data.started_unix_ns
    )
    assert [event.duration_ns for event in events] == [
        round(entry["duration_ms"] * 1e6) for entry in recorded
    ]
