"""Tests of src/commlens/check/schedule.py: how far ranks come."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sequences import Player, play

from commlens.check.schedule import RULES, Outcome, schedule
from commlens.model.ops import matches_by_tag

Program = Callable[[Player], None]


def run(world_size: int, program: Program, backend: str = "gloo") -> Outcome:
    return schedule(play(world_size, program), RULES[backend])


def both_send_first(rank: Player) -> None:
    rank.send(1 - rank.rank)
    rank.recv(1 - rank.rank)


def both_receive_first(rank: Player) -> None:
    rank.recv(1 - rank.rank)
    rank.send(1 - rank.rank)


def one_sends_first(rank: Player) -> None:
    for op in ("send", "recv") if rank.rank == 0 else ("recv", "send"):
        rank.message(op, 1 - rank.rank)


def started_sends(rank: Player) -> None:
    """Both start to send, then receive, and then wait for the send."""
    send = rank.send(1 - rank.rank, wait=False)
    rank.recv(1 - rank.rank)
    rank.wait(send)


def batched(rank: Player) -> None:
    rank.batch(("send", 1 - rank.rank), ("recv", 1 - rank.rank))


def tags_the_other_way_round(rank: Player) -> None:
    if rank.rank == 0:
        first, second = rank.send(1, tag=1, wait=False), rank.send(1, tag=2, wait=False)
        rank.wait(first)
        rank.wait(second)
    else:
        rank.recv(0, tag=2)
        rank.recv(0, tag=1)


def another_tag(rank: Player) -> None:
    if rank.rank == 0:
        rank.send(1, tag=1)
    else:
        rank.recv(0, tag=2)


def groups_in_reverse(rank: Player) -> None:
    a, b = rank.group("1"), rank.group("2")
    for channel in (a, b) if rank.rank == 0 else (b, a):
        rank.collective(channel=channel)


def groups_in_reverse_waited_later(rank: Player) -> None:
    a, b = rank.group("1"), rank.group("2")
    for index in [
        rank.collective(channel=channel, wait=False)
        for channel in ((a, b) if rank.rank == 0 else (b, a))
    ]:
        rank.wait(index)


def one_more_on_rank_0(rank: Player) -> None:
    for _ in range(3 if rank.rank == 0 else 2):
        rank.collective()


def root_goes_on(rank: Player) -> None:
    """The root broadcasts and then sets a key, for which the others wait before they join."""
    if rank.rank == 0:
        rank.collective("broadcast", root=0)
        rank.store("store.set", "sent")
    else:
        rank.store("store.get", "sent")
        rank.collective("broadcast", root=0)


def key_that_nobody_writes(rank: Player) -> None:
    if rank.rank == 1:
        rank.store("store.get", "rate")


def other_size(rank: Player) -> None:
    rank.collective(elements=5 if rank.rank == 1 else 4)


def other_reduce_op(rank: Player) -> None:
    rank.collective(reduce_op="MAX" if rank.rank == 1 else "SUM")


def members_alone_make_a_group(rank: Player) -> None:
    if rank.rank < 2:
        rank.collective(channel=rank.new_group("1", 0, 1))


def group_without_one_member(rank: Player) -> None:
    if rank.rank != 1:
        rank.new_group("1", 0, 1, 2)


@pytest.mark.parametrize(
    ("world_size", "program", "on_gloo", "on_nccl"),
    [
        (2, both_send_first, [0, 1], [0, 1]),
        (2, both_receive_first, [0, 1], [0, 1]),
        (2, one_sends_first, [], []),
        (2, started_sends, [], [0, 1]),
        (2, batched, [], []),
        (2, tags_the_other_way_round, [], []),
        (2, another_tag, [0, 1], []),
        (2, groups_in_reverse, [0, 1], [0, 1]),
        (2, groups_in_reverse_waited_later, [], []),
        (3, one_more_on_rank_0, [0], [0]),
        (3, root_goes_on, [], []),
        (2, key_that_nobody_writes, [1], [1]),
        (3, other_size, [0, 1, 2], [0, 1, 2]),
        (3, other_reduce_op, [], []),
        (3, members_alone_make_a_group, [], []),
        (3, group_without_one_member, [0, 2], []),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_ranks_that_wait_for_ever(
    world_size: int, program: Program, on_gloo: list[int], on_nccl: list[int]
) -> None:
    assert run(world_size, program).stuck == on_gloo
    assert run(world_size, program, "nccl").stuck == on_nccl


def takes_any_then_the_one_of_rank_1(rank: Player) -> None:
    if rank.rank == 0:
        rank.recv(None)
        rank.recv(1)
    else:
        rank.send(0)


def takes_any_of_all(rank: Player) -> None:
    if rank.rank == 0:
        for _ in range(rank.world_size - 1):
            rank.recv(None)
    else:
        rank.send(0)


def test_each_sender_of_a_receive_from_any_rank_is_tried() -> None:
    outcome = run(3, takes_any_then_the_one_of_rank_1)
    assert outcome.stuck == [0, 2]
    assert outcome.ranks[0].ops[0].source == 1


def test_a_receive_from_any_rank_is_legal() -> None:
    outcome = run(4, takes_any_of_all)
    assert outcome.stuck == [] and not outcome.incomplete


def test_not_all_orders_of_many_messages_are_tried() -> None:
    outcome = run(9, takes_any_of_all)
    assert outcome.stuck == [] and outcome.incomplete


def test_a_rank_that_was_cut_off_may_do_what_others_wait_for() -> None:
    sequences = play(3, one_more_on_rank_0)
    sequences[2].cut_off = True
    sequences[1].problem = "its run took longer than 1 s"
    outcome = schedule(sequences, RULES["gloo"])
    assert outcome.stuck == [] and outcome.open_ranks == [0]


def test_a_rank_that_has_ended_holds_the_others_up() -> None:
    sequences = play(3, one_more_on_rank_0)
    sequences[2].cut_off = True
    assert schedule(sequences, RULES["gloo"]).stuck == [0]


def test_what_has_completed_is_the_same_in_each_run() -> None:
    sequences = play(3, takes_any_then_the_one_of_rank_1)
    first, second = (schedule(sequences, RULES["gloo"]) for _ in range(2))
    for rank, state in first.ranks.items():
        assert [op.done_at for op in state.ops] == [op.done_at for op in second.ranks[rank].ops]


def test_the_rules_agree_with_those_of_the_diagnosis() -> None:
    for backend, rules in RULES.items():
        assert rules.backend == backend
        assert rules.meets_by_tag == matches_by_tag(backend)
