"""Tests of src/commlens/check/exchange.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commlens.check.exchange import NUMBERS_MAX, CheckExchange, Given, result, settled, unpack
from commlens.check.values import Values
from commlens.tap import tap, torch_patches
from commlens.tracing.preview.objects import Key, Message
from commlens.tracing.preview.world import FakeWorld

Messages = dict[Key, Message | None]


@pytest.fixture(autouse=True)
def listener() -> Iterator[None]:
    """Stand in for the recorder of a check: while one is there, torch up to 2.9 lets the tap note
    the reduce ops, which Python cannot read otherwise.
    """
    tracer = tap.WaitSubscriber()
    torch_patches.add_tracer(tracer)
    yield
    torch_patches.remove_tracer(tracer)


class Run:
    """A program as one rank of a world of two."""

    def __init__(self, rank: int, program: Callable[[int], Any], messages: Messages) -> None:
        self.guesses: list[str] = []
        self.exchange = CheckExchange(rank, messages, self.guesses.append)
        with FakeWorld(2, rank), Values(2, exchange=self.exchange) as values:
            dist.init_process_group("gloo")
            self.result = program(rank)
        self.decisions = values.decisions


def both(program: Callable[[int], Any], rounds: int = 2) -> list[Run]:
    """Run both ranks, and again with what the others gave."""
    messages: Messages = {}
    for _ in range(rounds):
        runs = [Run(rank, program, messages) for rank in range(2)]
        for run in runs:
            messages = messages | run.exchange.gave
    return runs


def smallest(rank: int) -> Any:
    number = torch.tensor([rank + 3])
    dist.all_reduce(number, dist.ReduceOp.MIN)
    return number.item()


def lengths(rank: int) -> Any:
    found = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(found, torch.tensor([rank + 3]))
    return [each.item() for each in found]


def counts(rank: int) -> Any:
    sends, gets = torch.tensor([rank + 1, rank + 3]), torch.zeros(2, dtype=torch.int64)
    dist.all_to_all_single(gets, sends)
    return gets.tolist()


def from_rank_1(rank: int) -> Any:
    flag = torch.tensor(rank == 1)
    dist.broadcast(flag, 1)
    return flag.item()


def gathered_on_rank_0(rank: int) -> Any:
    found = [torch.zeros(1, dtype=torch.int64) for _ in range(2)] if rank == 0 else None
    dist.gather(torch.tensor([rank + 3]), found, dst=0)
    return [each.item() for each in found or ()]


def header(rank: int) -> Any:
    shape = torch.tensor([4, 6] if rank == 0 else [0, 0])
    if rank == 0:
        dist.send(shape, 1)
    else:
        dist.recv(shape, 0)
    return shape.tolist()


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (smallest, [3, 3]),
        (lengths, [[3, 4], [3, 4]]),
        (counts, [[1, 2], [3, 4]]),
        (from_rank_1, [True, True]),
        (gathered_on_rank_0, [[3, 4], []]),
        (header, [[4, 6], [4, 6]]),
    ],
)
def test_what_ranks_give_is_delivered_and_known(program: Any, expected: list[Any]) -> None:
    runs = both(program)
    assert [run.result for run in runs] == expected
    assert [run.decisions for run in runs] == [[], []]


def test_a_rank_wants_what_decides_and_was_not_delivered() -> None:
    run = Run(0, smallest, {})
    (missing,) = run.exchange.took
    assert missing[1] == 1 and run.exchange.took[missing] is None
    assert run.decisions and not run.guesses


def test_nobody_wants_what_decides_nothing() -> None:
    def program(rank: int) -> None:
        number = torch.tensor([rank])
        dist.all_reduce(number)
        print(number)

    assert not Run(0, program, {}).exchange.took


def test_a_rank_wants_what_goes_into_what_it_gives() -> None:
    def program(rank: int) -> torch.Tensor:
        number = torch.tensor([rank + 1])
        dist.all_reduce(number)
        dist.all_reduce(number.add_(rank))
        return number

    assert Run(0, program, {}).exchange.took
    assert [run.result.tolist() for run in both(program, rounds=3)] == [[7], [7]]


def test_what_was_delivered_is_a_guess_until_it_is_settled() -> None:
    assert both(smallest)[0].guesses == ["exchange"]
    assert settled({("tensor 0", 1, None, (0, 1), 1): None}) == {"exchange", "object"}
    assert settled({("gather", 1, None, (0, 1), 1): None}) == {"exchange"}


def test_numbers_that_a_rank_does_not_know_are_delivered_and_stay_open() -> None:
    def program(rank: int) -> Any:
        score = torch.ones(2)
        dist.all_reduce(score)
        sends, gets = (score * (rank + 2)).long(), torch.zeros(2, dtype=torch.int64)
        dist.all_to_all_single(gets, sends)
        return gets.tolist()

    runs = both(program)
    assert [run.result for run in runs] == [[2, 3], [2, 3]]
    assert all(run.decisions and not run.guesses for run in runs)


def test_a_call_is_found_by_its_place_in_the_group() -> None:
    def program(rank: int) -> Any:
        dist.barrier() if rank else dist.all_reduce(torch.ones(1))
        return smallest(rank)

    assert [run.result for run in both(program)] == [3, 3]

    def other(rank: int) -> Any:
        number = torch.tensor([rank + 3])
        dist.all_reduce(number, dist.ReduceOp.MAX if rank else dist.ReduceOp.MIN)
        return number.item()

    def skips(rank: int) -> Any:
        if rank:
            dist.barrier()
        return smallest(rank)

    for apart in (other, skips):
        assert all(run.decisions for run in both(apart))


def test_messages_meet_only_where_both_backends_let_them() -> None:
    def program(rank: int) -> list[int]:
        numbers = [torch.tensor([tag]) for tag in (1, 2)]
        for number, tag in zip(numbers, (1, 2) if rank == 0 else (2, 1), strict=True):
            if rank == 0:
                dist.send(number, 1, tag=tag)
            else:
                dist.recv(number, 0, tag=tag)
        return [number.item() for number in numbers]

    assert both(program)[1].decisions


def test_data_and_what_torch_exchanges_itself_are_left_out() -> None:
    def program(rank: int) -> None:
        dist.all_reduce(torch.ones(2))
        dist.all_reduce(torch.ones(NUMBERS_MAX + 1, dtype=torch.int64))
        dist.all_gather_object([None, None], rank)
        torch.nn.parallel.DistributedDataParallel(torch.nn.BatchNorm1d(2))

    assert not Run(0, program, {}).exchange.gave


def given(
    op: str, *values: Any, agreed: Any = (), splits: Any = (), dtype: Any = None
) -> list[Given]:
    """Return what the ranks give, as it comes out of their messages."""
    splits = splits or [()] * len(values)
    return [
        unpack(Given(op, agreed, True, split, torch.tensor(value, dtype=dtype)).pack())
        for value, split in zip(values, splits, strict=True)
    ]


def taken(ranks: list[Given], *shapes: Any, place: int = 0, dtype: Any = torch.int64) -> Any:
    """Return what a rank gets; None if the tensors do not fit."""
    outputs = [torch.full(shape, 7).to(dtype) for shape in shapes]
    fits = result(ranks, place, outputs)
    assert fits or all((each == torch.tensor(7).to(dtype)).all() for each in outputs)
    return [each.tolist() for each in outputs] if fits else None


@pytest.mark.parametrize(
    ("value", "dtype"), [([[1, -2], [3, 4]], torch.int32), ([], torch.int64), (True, torch.bool)]
)
def test_a_message_holds_a_tensor(value: Any, dtype: torch.dtype) -> None:
    tensor = (
        torch.tensor(value, dtype=dtype).t()
        if value and value is not True
        else torch.tensor(value, dtype=dtype)
    )
    back = unpack(Given("send", (0, 1), False, (), tensor).pack())
    assert (back.op, back.agreed, back.known, back.splits) == ("send", (0, 1), False, ())
    assert back.tensor.dtype is dtype and torch.equal(back.tensor, tensor)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("MIN", [1, 2]), ("MAX", [3, 5]), ("SUM", [4, 7]), ("PRODUCT", [3, 10])],
)
def test_numbers_are_reduced(name: str, expected: list[int]) -> None:
    assert taken(given("allreduce_", [1, 5], [3, 2], agreed=(name,)), (2,)) == [expected]


def test_a_sum_wraps_as_on_a_backend() -> None:
    ranks = given("allreduce_", [200], [100], agreed=("SUM",), dtype=torch.uint8)
    assert taken(ranks, (1,), dtype=torch.uint8) == [[44]]


def test_flags_are_reduced_by_min_and_max_only() -> None:
    for name, expected in (("MIN", [[False]]), ("MAX", [[True]]), ("SUM", None)):
        ranks = given("allreduce_", [True], [False], agreed=(name,))
        assert taken(ranks, (1,), dtype=torch.bool) == expected


def test_tensors_are_gathered() -> None:
    assert taken(given("allgather_", [1], [3]), (1,), (1,)) == [[1], [3]]
    assert taken(given("_allgather_base_", [1], [3]), (2,)) == [[1, 3]]
    assert taken(given("broadcast_", [4]), (1,), place=1) == [[4]]


def test_each_rank_gets_its_part() -> None:
    assert taken(given("alltoall_base_", [1, 2], [3, 4]), (2,), place=1) == [[2, 4]]
    uneven = given("alltoall_base_", [1, 2, 3], [4, 5], splits=[(1, 2), (2, 0)])
    assert taken(uneven, (3,)) == [[1, 4, 5]]
    assert taken(uneven, (2,), place=1) == [[2, 3]]


@pytest.mark.parametrize(
    "ranks",
    [
        given("allreduce_", [1], agreed=("SUM",))
        + given("allreduce_", [1], agreed=("SUM",), dtype=torch.int32),
        given("allreduce_", [1], [1, 2], agreed=("SUM",)),
        given("allreduce_", [1], [2], agreed=(None,)),
        given("allgather_", [1], [2, 3]),
        given("alltoall_base_", [1, 2], [4, 5], splits=[(1, 0), (2, 0)]),
        given("alltoall_base_", [1, 2], [4, 5], splits=[(2, 0), (2, 0)]),
        given("broadcast_", [1], dtype=torch.int32),
    ],
)
def test_tensors_that_do_not_fit_give_nothing(ranks: list[Given]) -> None:
    assert taken(ranks, (1,)) is None
