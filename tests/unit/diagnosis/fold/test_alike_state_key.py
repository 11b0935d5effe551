"""Which ranks are in the same state."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import pytest
from builders import Job, Stay, Step, all_reduce, collective, recv

from commlens.diagnosis.fold.alike import records_of, state_key
from commlens.model.collective import State
from commlens.model.ranklog import End, RankLog

SIZE, NODE = 64, 4


def logs_of(odd: Callable[[Job, int], Iterator[object]]) -> list[RankLog]:
    """Run 64 ranks with tensor parallel groups of four and data parallel ones of 16; rank 20 does
    something else at last.
    """

    def program(job: Job, rank: int) -> Iterator[object]:
        node, place = divmod(rank, NODE)
        tensor = job.group(f"tp{node}", range(node * NODE, (node + 1) * NODE), "tp")
        data = job.group(f"dp{place}", range(place, SIZE, NODE), "dp")
        for _ in range(3):
            yield collective("broadcast", tensor, 8, line=9, root=tensor.ranks[1])
            yield all_reduce(data, 8, line=10)
            yield Step()
        if rank == 20:
            yield from odd(job, rank)
        yield all_reduce(tensor, 8, line=11)
        if rank != 20:
            yield all_reduce(data, 8, line=12)

    return Job(SIZE).run(program).logs()


def stays(job: Job, rank: int) -> Iterator[object]:
    yield Stay(57, "load_batch")


def keys_of(logs: list[RankLog]) -> list[bytes | None]:
    return [state_key(log) for log in logs]


def test_ranks_that_wait_in_one_large_group_are_in_one_state() -> None:
    keys = keys_of(logs_of(stays))
    assert keys[20] is None, "it does not wait"
    in_data_parallel = [keys[rank] for rank in range(0, SIZE, NODE) if rank != 20]
    assert in_data_parallel[0] is not None and len(set(in_data_parallel)) == 1
    assert len({keys[rank] for rank in range(NODE)}) == NODE, "four groups"


def test_ranks_in_one_place_of_small_groups_are_in_one_state() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        node = rank // NODE
        yield all_reduce(job.world, 8, line=10)
        if rank % NODE == 3:
            yield Stay(57, "load_batch")
        yield all_reduce(job.group(f"tp{node}", range(node * NODE, node * NODE + 4), "tp"), line=11)

    keys = keys_of(Job(SIZE).run(program).logs())
    assert [keys[rank] for rank in range(3, SIZE, NODE)] == [None] * (SIZE // NODE)
    assert all(len({keys[rank] for rank in range(place, SIZE, NODE)}) == 1 for place in range(3))
    assert len(set(keys)) == 4


@pytest.mark.parametrize(
    "change",
    [
        lambda log: setattr(log.observation, "proc_state", "T"),
        lambda log: setattr(log.observation, "end", End.KILLED),
        lambda log: setattr(log.observation, "holds_gil", True),
        lambda log: setattr(log, "exception", "ValueError: no"),
        lambda log: setattr(log, "problems", ["12 of 2000 records are torn"]),
        lambda log: setattr(log, "left", True),
        lambda log: setattr(log, "initialised", False),
        lambda log: setattr(log, "issued", log.issued + 1),
        lambda log: setattr(log.collectives[-2], "state", State.FAILED),
    ],
)
def test_unusual_ranks_are_in_no_state_with_others(change: Callable[[RankLog], None]) -> None:
    log = logs_of(stays)[0]
    assert state_key(log) is not None
    change(log)
    assert state_key(log) is None


def test_a_rank_that_waits_for_a_message_is_in_no_state_with_others() -> None:
    def waits(job: Job, rank: int) -> Iterator[object]:
        yield recv(job.world, 21, line=30)

    assert keys_of(logs_of(waits))[20] is None


@pytest.mark.parametrize(
    "change",
    [
        lambda log: setattr(log, "steps", log.steps + 1),
        lambda log: setattr(
            log.collectives[0],
            "args",
            msgspec.structs.replace(log.collectives[0].args, root=log.rank),
        ),
        lambda log: setattr(log.collectives[2], "stack", log.collectives[1].stack),
    ],
)
def test_ranks_with_another_history_are_in_another_state(
    change: Callable[[RankLog], None],
) -> None:
    logs = logs_of(stays)
    before = state_key(logs[0])
    change(logs[0])
    after = state_key(logs[0])
    assert before is not None and after is not None
    assert records_of(before) != records_of(after)


def test_a_stack_is_no_part_of_the_records() -> None:
    log = logs_of(stays)[0]
    before = state_key(log)
    log.stacks = []
    after = state_key(log)
    assert before is not None and after is not None
    assert records_of(before) == records_of(after)
