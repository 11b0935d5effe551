"""The ops of a step, with hashes of all that they read and write."""

from __future__ import annotations

import gc
import types
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from commlens.model.numbers import OpPlace, OpRun
from commlens.numbers import op_watch
from commlens.numbers.inspection import tensors_to_check
from commlens.numbers.op_watch import OpChecks, OpWatch
from commlens.numbers.replicas import Model, module_names


class Watched:
    """A model whose ops are watched, and its optimizer."""

    def __init__(self, *modules: nn.Module) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), *modules)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.watch = OpWatch()
        self.watch.install()
        self.start()

    def start(self) -> None:
        self.watch.start(tensors_to_check(Model([self.model], (0,)), self.optimizer))

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 4)).sum().backward()
        self.optimizer.step()

    def ops(self) -> list[tuple[OpRun, OpPlace]]:
        log = self.watch.take(module_names([self.model]))
        assert self.watch.error is None
        return [(run, log.places[run.place]) for run in log.runs]


@pytest.fixture
def watched() -> Watched:
    return Watched()


@pytest.fixture(autouse=True)
def leave_no_mode_behind() -> object:
    """Leave the mode and the hooks of modules as they were."""
    from torch.nn.modules import module

    hooks = (module._global_forward_pre_hooks, module._global_forward_hooks)
    before = [dict(each) for each in hooks]
    yield
    while torch._C._len_torch_dispatch_stack():
        torch.utils._python_dispatch._pop_mode()
    for each, kept in zip(hooks, before, strict=True):
        each.clear()
        each.update(kept)


def test_the_module_and_the_line_of_an_op_also_in_the_backward_pass(watched: Watched) -> None:
    watched.step()
    ops = {run.op: place for run, place in watched.ops()}
    forward, backward = ops["aten.addmm.default"], ops["aten.mm.default"]
    assert (forward.module, forward.backward) == ("0", False)
    assert (backward.module, backward.backward) == ("0", True)
    assert forward.source == backward.source
    assert forward.source.startswith("test_op_watch.py:")


def test_an_op_without_a_backward_pass_is_not_taken_for_the_one_before() -> None:
    watched = Watched(nn.Dropout(0.5))
    watched.step()
    places = {run.op: place for run, place in watched.ops()}
    assert places["aten.bernoulli_.float"].module == "1"
    assert (places["aten.mm.default"].module, places["aten.mm.default"].backward) == ("0", True)


def test_the_parameters_that_an_op_writes(watched: Watched) -> None:
    watched.step()
    writes = [(run.op, kind, name) for run, _ in watched.ops() for kind, name, _ in run.writes]
    assert [each[1:] for each in writes] == [("parameter", "0.weight"), ("parameter", "0.bias")]
    assert {op for op, _, _ in writes} == {"aten.add_.Tensor"}


def test_a_write_through_a_view(watched: Watched) -> None:
    watched.model[0].weight.data[1, 2] = 5.0
    [(run, _)] = [each for each in watched.ops() if each[0].writes]
    assert run.writes[0][:2] == ("parameter", "0.weight")


def test_a_write_to_a_tensor_of_which_another_one_is_a_part() -> None:
    module = nn.Module()
    module.register_buffer("flat", torch.zeros(12))
    module.register_buffer("part", module.flat[2:4])
    watched = Watched(module)
    module.flat[8] = 5.0
    [(run, _)] = [each for each in watched.ops() if each[0].writes]
    assert [each[:2] for each in run.writes] == [("buffer", "1.flat")]


def test_a_change_without_an_op(watched: Watched) -> None:
    watched.model[0].weight.detach().numpy()[1, 2] = 5.0
    watched.step()
    ops = watched.ops()
    changed = [run for run, _ in ops if not run.op]
    assert [run.writes[0][:2] for run in changed] == [("parameter", "0.weight")]


def test_the_same_step_has_the_same_hashes() -> None:
    watched = Watched(nn.Dropout(0.5))
    state = torch.get_rng_state()
    results = []
    for _ in range(2):
        torch.set_rng_state(state)
        watched.start()
        watched.model(torch.ones(2, 4))
        results.append([(run.op, run.outputs) for run, _ in watched.ops()])
    assert results[0] == results[1]
    watched.start()
    watched.model(torch.ones(2, 4))  # with other random numbers
    other = [(run.op, run.outputs) for run, _ in watched.ops()]
    assert [op for op, _ in other] == [op for op, _ in results[0]]
    assert other != results[0]


def test_random_numbers_are_an_input() -> None:
    watched = Watched()
    for seed in (1, 1, 2):
        torch.rand(3, generator=torch.Generator().manual_seed(seed))
    one, same, other = (run for run, _ in watched.ops() if "rand" in run.op)
    assert one.inputs == same.inputs != other.inputs
    assert one.outputs == same.outputs != other.outputs


def test_nothing_is_recorded_between_steps_and_nothing_changes(watched: Watched) -> None:
    watched.ops()
    watched.step()
    assert watched.ops() == []
    with_watch = [each.detach().clone() for each in watched.model.parameters()]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert all(map(torch.equal, with_watch, model.parameters()))


def test_no_tensor_is_kept_alive_after_the_end(watched: Watched) -> None:
    watched.step()
    weight = StorageWeakRef(watched.model[0].weight.untyped_storage())
    watched.watch.stop()
    del watched.model, watched.optimizer
    gc.collect()
    assert weight.expired()


def test_it_does_not_begin_inside_of_another_mode(watched: Watched) -> None:
    with pytest.raises(RuntimeError, match="another dispatch mode"):
        OpWatch().install()


@pytest.mark.parametrize(("most", "is_sent"), [(3, False), (op_watch.RUNS_MAX, True)])
def test_a_step_of_too_many_ops_is_left_out_and_told_once(
    most: int, is_sent: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(op_watch, "RUNS_MAX", most)
    sent: list[Any] = []
    exchange: Any = types.SimpleNamespace(send=lambda _check, report: sent.append(report))
    model = nn.Linear(4, 4)
    checks = OpChecks()
    checks.install(lambda *_: None)
    for step in (1, 2):
        checks.begin([Model([model], (0,))], ())
        model(torch.ones(2, 4)).sum().backward()
        checks.end(step, exchange)
    assert len(sent) == (2 if is_sent else 0)
    told = "step 1 has more than 3 ops; those steps are not compared op by op"
    assert [each.getMessage() for each in caplog.records] == [f"commlens: {told}"] * (not is_sent)
