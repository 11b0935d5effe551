"""What a check after an optimizer's step compares."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from commlens.model.number_checks import NumberChecks
from commlens.model.numbers import CheckId
from commlens.numbers import sampling
from commlens.numbers.inspection import Inspection
from commlens.numbers.sampling import TensorSampler


class Sent(SimpleNamespace):
    """An exchange that keeps what is sent."""

    def __init__(self) -> None:
        super().__init__(is_running=True, is_ending=False, checks=[], inspections=[])

    def send(self, check: CheckId, inspection: Inspection) -> None:
        self.checks.append(check)
        self.inspections.append(inspection)


@pytest.fixture(autouse=True)
def sent(monkeypatch: pytest.MonkeyPatch, two_ranks: None) -> Sent:
    """What rank 0 of 2 sends."""
    exchange = Sent()
    monkeypatch.setattr(sampling, "exchange_of", lambda ranks: exchange)
    return exchange


def train(parameters: list[Any], every: int = 1, steps: int = 3, *, end: Any = None) -> None:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    sampler = TensorSampler(NumberChecks(every))
    for _ in range(steps):
        for each in parameters:
            each.grad = torch.ones_like(each)
        optimizer.step()
        sampler.after_step(optimizer)
    if end is not None:
        end()
        sampler.end()
    sampler.stop()


def test_an_optimizer_that_trains_copies_is_told_once(
    caplog: pytest.LogCaptureFixture, sent: Sent
) -> None:
    model = nn.Linear(4, 4)
    train([each.detach().double() for each in model.parameters()])
    assert [record.getMessage() for record in caplog.records] == [
        "commlens: optimizer 1 trains tensors that belong to no module, as Megatron's optimizers for"
        " mixed precision train copies of the parameters: the parameters, gradients and states of"
        " this optimizer are not compared. commlens.check_numbers(model) compares those of the"
        " model."
    ]
    assert [each.read()[0] for each in sent.inspections] == [[], [], []]


def test_the_parameters_of_a_model_are_compared(
    caplog: pytest.LogCaptureFixture, sent: Sent
) -> None:
    model = nn.Linear(4, 4)
    train(list(model.parameters()))
    assert caplog.records == []
    [table] = sent.inspections[-1].read()[0]
    assert {each.name for each in table.measures} >= {"weight", "bias", "lr of group 0"}


def test_nothing_is_measured_after_the_end_of_the_exchange(sent: Sent) -> None:
    [weight] = nn.Linear(4, 4, bias=False).parameters()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    sampler = TensorSampler(NumberChecks(every=1))
    sampler.after_step(optimizer)
    sent.is_running = False
    sampler.after_step(optimizer)
    assert sampler.off
    assert not sampler._outputs._is_on
    assert len(sent.inspections) == 1


def test_an_error_of_the_look_for_nan_is_logged_once_and_ends_the_checks(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    [weight] = nn.Linear(4, 4, bias=False).parameters()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    sampler = TensorSampler(NumberChecks(every=1, nan=True))
    monkeypatch.setattr(sampling, "_sampler", sampler)
    sampler.watch = sampling.NanWatch()
    sampler.watch.start()
    sampler.watch.error = RuntimeError("unreadable")
    for _ in range(2):
        sampling._after_step(optimizer, (), {})
    [record] = caplog.records
    assert "unreadable" in record.getMessage()
    assert sampler.off
    nn.Identity()(torch.tensor([float("nan")]))
    assert sampler.watch.event is None


def test_a_short_job_is_compared_early(sent: Sent) -> None:
    train([nn.Parameter(torch.ones(3))], 100, 30)
    assert len(sent.inspections) == 2  # after steps 1 and 10


def test_at_the_end_the_steps_after_the_last_check_are_compared(sent: Sent) -> None:
    model = nn.Linear(4, 4)
    train(list(model.parameters()), 100, 30, end=lambda: None)
    assert [each.number for each in sent.checks] == [1, 10, 30]
    assert sent.is_ending
    [table] = sent.inspections[-1].read()[0]
    assert {each.kind for each in table.measures} == {"parameter"}


@pytest.mark.parametrize("steps", [10, 200])
def test_a_step_is_not_compared_twice(sent: Sent, steps: int) -> None:
    train(list(nn.Linear(4, 4).parameters()), 100, steps, end=lambda: None)
    assert [each.number for each in sent.checks] == [1, 10, 100, 200][: len(sent.checks)]
    assert sent.checks[-1].number == steps


def test_parameters_that_were_loaded_after_the_last_step_are_not_compared(sent: Sent) -> None:
    model = nn.Linear(4, 4)
    state = {name: each.clone() for name, each in model.state_dict().items()}
    train(list(model.parameters()), 100, 30, end=lambda: model.load_state_dict(state))
    assert [each.number for each in sent.checks] == [1, 10]


def test_parameters_whose_writes_are_not_counted_end_no_checks(sent: Sent) -> None:
    with torch.inference_mode():
        frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    optimizer = torch.optim.SGD([frozen, *nn.Linear(4, 4).parameters()], lr=0.1)
    sampler = TensorSampler(NumberChecks(every=1))
    sampler.after_step(optimizer)
    assert [each.number for each in sent.checks] == [1]


def test_a_job_that_ends_by_an_exception_is_not_compared_at_the_end(sent: Sent) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = TensorSampler(NumberChecks(every=100))
    for _ in range(2):
        sampler.after_step(optimizer)
    try:
        raise ValueError("no batch")
    except ValueError:
        sampler.end()
    assert [each.number for each in sent.checks] == [1]
    sampler.end()
    assert [each.number for each in sent.checks] == [1, 2]


def test_a_job_without_a_step_is_told_that_nothing_was_compared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    TensorSampler(NumberChecks()).end()
    assert [record.getMessage() for record in caplog.records] == [
        "commlens: no numbers were compared: no optimizer of torch made a step"
    ]
