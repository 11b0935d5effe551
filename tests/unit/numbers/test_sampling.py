"""What a check after an optimizer's step compares."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from commlens.model.number_checks import NumberChecks
from commlens.numbers import sampling
from commlens.numbers.sampling import Sampler


@pytest.fixture(autouse=True)
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The checks that rank 0 of 2 sends."""
    checks: list[Any] = []
    exchange = SimpleNamespace(send=lambda check, inspection: checks.append(inspection))
    monkeypatch.setattr(sampling, "exchange_of", lambda ranks: exchange)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield checks
    dist.destroy_process_group()


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
    caplog: pytest.LogCaptureFixture, sent: list[Any]
) -> None:
    model = nn.Linear(4, 4)
    train([each.detach().double() for each in model.parameters()])
    assert [record.getMessage() for record in caplog.records] == [
        "commlens: optimizer 1 trains tensors that belong to no module, as Megatron's optimizers for"
        " mixed precision train copies of the parameters: the parameters, gradients and states of"
        " this optimizer are not compared. commlens.check_numbers(model) compares those of the"
        " model."
    ]
    assert [each.read()[0] for each in sent] == [[], [], []]


def test_the_parameters_of_a_model_are_compared(
    caplog: pytest.LogCaptureFixture, sent: list[Any]
) -> None:
    model = nn.Linear(4, 4)
    train(list(model.parameters()))
    assert caplog.records == []
    [table] = sent[-1].read()[0]
    assert {each.name for each in table.measures} >= {"weight", "bias", "lr of group 0"}
