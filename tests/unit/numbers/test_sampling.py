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
from commlens.numbers.sampling import Sampler


class Sent(SimpleNamespace):
    """An exchange that keeps what is sent."""

    def __init__(self) -> None:
        super().__init__(is_running=True, inspections=[])

    def send(self, _check: CheckId, inspection: Inspection) -> None:
        self.inspections.append(inspection)


@pytest.fixture(autouse=True)
def sent(monkeypatch: pytest.MonkeyPatch, two_ranks: None) -> Sent:
    """What rank 0 of 2 sends."""
    exchange = Sent()
    monkeypatch.setattr(sampling, "exchange_of", lambda ranks: exchange)
    return exchange


def train(parameters: list[Any]) -> None:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    sampler = Sampler(NumberChecks(every=1))
    for _ in range(3):
        for each in parameters:
            each.grad = torch.ones_like(each)
        optimizer.step()
        sampler.after_step(optimizer)
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
    sampler = Sampler(NumberChecks(every=1))
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
    sampler = Sampler(NumberChecks(every=1, nan=True))
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
