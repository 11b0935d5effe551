"""The logs that a real job would leave."""

from __future__ import annotations

from sequences import Player, play

from commlens.check.judge import logs_of
from commlens.check.schedule import RULES, schedule
from commlens.model.collective import State
from commlens.model.ranklog import End, RankLog


def logs(world_size: int, program) -> list[RankLog]:
    return logs_of(schedule(play(world_size, program), RULES["gloo"]), "gloo")


def one_more_on_rank_0(rank: Player) -> None:
    for _ in range(2 if rank.rank == 0 else 1):
        rank.collective()


def test_a_rank_that_waits_has_its_collective_in_flight() -> None:
    waits, ended = logs(2, one_more_on_rank_0)
    assert [op.state for op in waits.collectives] == [State.COMPLETED, State.ISSUED]
    assert waits.collectives[1].waited_for
    assert waits.observation.end is End.RUNNING
    assert ended.observation.end is End.CLEAN and ended.closed


def test_the_groups_have_the_backend_whose_rules_count() -> None:
    assert {
        op.channel.group.backend for log in logs(2, one_more_on_rank_0) for op in log.collectives
    } == {"gloo"}


def raises_on_rank_1(rank: Player) -> None:
    rank.collective()
    if rank.rank == 1:
        rank.raises("ValueError: bad sample")
    else:
        rank.collective()


def test_an_exception_ends_a_rank_only_if_it_comes_so_far() -> None:
    _, raised = logs(2, raises_on_rank_1)
    assert raised.exception == "ValueError: bad sample"
    assert raised.observation.end is End.FAILED

    def waits_first(rank: Player) -> None:
        if rank.rank == 1:
            rank.recv(0)
        raises_on_rank_1(rank)

    _, waits = logs(2, waits_first)
    assert waits.exception is None and waits.observation.end is End.RUNNING


def writes_each_step(rank: Player) -> None:
    if rank.rank == 0:
        for step in range(3):
            rank.store("store.set", f"rate-{step}")
    else:
        rank.store("store.get", "rate-3")


def test_a_wait_for_a_key_is_as_in_a_black_box() -> None:
    writer, waits = logs(2, writes_each_step)
    assert [op.channel.group.name for op in writer.keys_written] == ["rate-0"]
    assert waits.store_wait is not None
    assert waits.store_wait.channel.group.name == "rate-3"
