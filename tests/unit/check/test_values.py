"""Tests of src/commlens/check/values.py."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from commlens.check.branches import BranchLine, Choice, Moment
from commlens.check.values import Values
from commlens.tracing.preview.world import FakeWorld


def decisions(
    program: Callable[[], object], choices: Iterable[Choice] = (), *, fake: bool = False
) -> list[BranchLine]:
    """Run a program as rank 1 of 4."""
    with FakeWorld(4, 1, fake_tensors=fake), Values(4, choices) as values:
        dist.init_process_group("gloo")
        program()
    return values.decisions


def at(program: Callable[[], object], text: str, value: bool | float) -> Choice:
    """Choose the answer of the line of a program that contains a text."""
    lines, first = inspect.getsourcelines(program)
    (found,) = (place for place, line in enumerate(lines) if text in line)
    return Choice("test_values.py", first + found, value)


def reduced() -> torch.Tensor:
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    return tensor


def test_what_the_rank_knows_decides_nothing_new() -> None:
    def program() -> None:
        x = torch.rand(3)
        if x.sum() > 1 and x[0].item() > 2 and math.isnan(x.mean().item()):
            raise AssertionError
        assert torch.equal(x, x)

    assert decisions(program) == []


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: bool(x.sum() > 100),
        lambda x: x.sum().item() > 100,
        lambda x: math.isnan(x.sum().item() / 3),
        lambda x: max(4.0, x.mean().item()),
        lambda x: torch.equal(x, x * 2),
        lambda x: torch.allclose(x, x * 2),
        lambda x: x.tolist()[0] > 3,
        lambda x: x.isnan().any().item(),
    ],
)
def test_a_truth_that_others_decide_is_noted(ask: Callable[[torch.Tensor], object]) -> None:
    (found,) = decisions(lambda: ask(reduced()))
    assert (found.how, found.taken, found.alike, found.certain) == ("truth", (False,), True, True)
    assert found.frame.file == __file__


def test_a_number_that_is_only_shown_is_not_noted() -> None:
    def program() -> None:
        loss = reduced().mean()
        print(f"{loss.item() / 3:.3f} {loss:.3f} {loss}", loss)

    assert decisions(program) == []
    assert decisions(program, fake=True) == []


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: range(x.sum().int().item()),
        lambda x: int(x.sum()),
        lambda x: float(x.sum()),
        lambda x: round(x.sum().item()),
        lambda x: x.numpy(),
    ],
)
def test_a_number_that_cannot_be_followed_may_decide(
    ask: Callable[[torch.Tensor], object],
) -> None:
    (found,) = decisions(lambda: ask(reduced()))
    assert found.how == "number"
    assert not found.certain


def test_a_shape_that_others_decide_is_noted() -> None:
    (found,) = decisions(lambda: reduced().nonzero())
    assert found.how == "shape"


def test_values_of_one_rank_may_differ() -> None:
    def program() -> None:
        if (reduced() * torch.rand(3)).isnan().any():
            raise AssertionError

    (found,) = decisions(program)
    assert not found.alike


def test_a_choice_answers_a_truth() -> None:
    seen: list[bool] = []

    def program() -> None:
        if reduced().isnan().any():
            seen.append(True)
        loss = reduced().mean().item()
        if loss > 100:
            seen.append(True)

    choices = [at(program, "if reduced", True), at(program, "if loss", True)]
    found = decisions(program, choices)
    assert seen == [True, True]
    assert [(each.taken, each.forced) for each in found] == [((True,), True)] * 2


def test_a_choice_answers_a_number() -> None:
    seen: list[object] = []

    def program() -> None:
        count = reduced().sum().int().item()
        if count == 7:
            seen.append(list(range(count)))
        mean = float(reduced().mean())
        seen.append(mean)

    found = decisions(program, [at(program, "count = ", 7), at(program, "mean = ", 2)])
    assert seen == [list(range(7)), 2.0]
    assert [(each.how, each.forced) for each in found] == [("number", True)] * 2


def test_a_choice_answers_what_the_rank_knows_too() -> None:
    seen: list[bool] = []

    def program() -> None:
        seen.append(torch.ones(3).sum().item() > 1)

    (found,) = decisions(program, [at(program, "seen.append", False)])
    assert seen == [False]
    assert found.forced


def broadcast_flag(root: int) -> list[bool]:
    flag = torch.zeros(1)
    answers = []
    for number in range(3):
        if dist.get_rank() == root:
            flag.fill_(number == 1)
        dist.broadcast(flag, root)
        answers.append(bool(flag))
    return answers


def test_the_moment_of_each_question_is_noted() -> None:
    def program() -> None:
        dist.barrier(dist.new_group([0, 1]))
        for _ in range(2):
            assert reduced().sum().item() == 3

    (found,) = decisions(program)
    assert found.asked == (Moment(2, 1), Moment(3, 2))
    assert not found.received


def test_a_received_value_is_noted_as_such() -> None:
    def program() -> None:
        command = torch.zeros(1)
        dist.recv(command, 0)
        assert command == 0

    (found,) = decisions(program)
    assert found.received and not found.alike


def test_the_rank_that_sends_a_value_knows_it() -> None:
    assert decisions(lambda: broadcast_flag(1)) == []
    assert len(decisions(lambda: broadcast_flag(0))) == 1


def test_a_rank_gets_the_answers_of_others_to_what_they_have_alike() -> None:
    with FakeWorld(4, 0), Values(4) as sender:
        dist.init_process_group("gloo")
        sent = broadcast_flag(0)
    with FakeWorld(4, 1), Values(4, answers=sender.answers) as receiver:
        dist.init_process_group("gloo")
        received = broadcast_flag(0)
    assert sent == received == [False, True, False]
    assert sender.answers == receiver.answers
    assert receiver.decisions == []


def test_a_loss_that_became_a_tensor_again_is_not_known() -> None:
    def program() -> None:
        average = torch.tensor(reduced().mean().item() / 2)
        if average > 5:
            raise AssertionError

    (found,) = decisions(program)
    assert found.how == "truth"


def test_a_hook_of_a_backward_pass_is_seen() -> None:
    def check_gradient(gradient: torch.Tensor) -> None:
        dist.all_reduce(gradient)
        if gradient.isnan().any():
            raise AssertionError

    def program() -> None:
        x = torch.ones(3, requires_grad=True)
        x.register_hook(check_gradient)
        (x * 2).sum().backward()

    (found,) = decisions(program)
    assert found.frame.function == "check_gradient"


@pytest.mark.parametrize("fake", [False, True])
def test_a_training_step_decides_where_the_program_does(fake: bool) -> None:
    def program() -> None:
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu")
        loss = model(torch.ones(2, 4)).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 1e6:
            raise AssertionError
        scaler.step(optimizer)  # leaves the step out if a gradient is infinite
        scaler.update()

    norm, step = decisions(program, fake=fake)
    assert norm.frame.line == at(program, "clip_grad", True).line
    assert step.frame.line == at(program, "scaler.step", True).line
    assert (norm.how, step.how) == ("truth", "truth")
