"""Tests of src/commlens/check/classes.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sequences import Player, play

from commlens.check.classes import Classes, explore_classes
from commlens.check.sequence import RankSequence
from commlens.model.collective import Channel


def classes_of(
    world_size: int, program: Callable[[Player], None], also: Iterable[int] = ()
) -> tuple[Classes, dict[int, RankSequence]]:
    """Return what is found, and the truth."""
    truth = play(world_size, program)
    found = explore_classes(
        lambda ranks: {rank: truth[rank] for rank in ranks}, world_size, 8, also
    )
    return found, truth


def mesh(rank: Player, height: int, width: int) -> tuple[list[Channel], list[Channel]]:
    """Make the groups of a mesh's rows and columns, as all ranks do."""
    size = height * width
    rows = [
        rank.new_group(str(row), *range(width * row, width * (row + 1))) for row in range(height)
    ]
    columns = [
        rank.new_group(str(height + each), *range(each, size, width)) for each in range(width)
    ]
    return rows, columns


def same(found: Classes, truth: dict[int, RankSequence]) -> bool:
    return all(found.sequences[rank].events == sequence.events for rank, sequence in truth.items())


def test_a_world_of_one_kind_needs_few_runs() -> None:
    def program(rank: Player) -> None:
        rank.collective()

    found, truth = classes_of(1024, program)
    assert len(found.ran) < 24
    assert [len(each) for each in found.classes] == [1024]
    assert (found.drawn, found.surprising) == (8, [])
    assert same(found, truth)


def test_the_border_between_two_kinds_is_found() -> None:
    def program(rank: Player) -> None:
        rank.collective(elements=5 if rank.rank < 300 else 4)

    found, truth = classes_of(1024, program)
    assert [len(each) for each in found.classes] == [724, 300]
    assert len(found.ran) < 64
    assert same(found, truth)


def test_the_dimensions_of_groups_are_found() -> None:
    """The first row of each column broadcasts; the last columns have less."""

    def program(rank: Player) -> None:
        rows, columns = mesh(rank, 16, 16)
        row, column = divmod(rank.rank, 16)
        rank.collective("all_gather", rows[row], elements=3 if column >= 11 else 4)
        rank.collective("all_reduce", columns[column], elements=3 if column >= 11 else 4)
        if row == 0:
            rank.collective("broadcast", rows[row], root=0, reduce_op=None)

    found, truth = classes_of(256, program)
    assert sorted(len(each) for each in found.classes) == [5, 11, 75, 165]
    assert len(found.ran) < 80
    assert same(found, truth)


def test_ranks_that_differ_in_turn_need_few_runs() -> None:
    """The two ranks of tensor parallelism do different things, in every pair alike."""

    def program(rank: Player) -> None:
        pairs, halves = mesh(rank, 32, 2)
        pair, half = divmod(rank.rank, 2)
        rank.collective("all_gather", pairs[pair])
        rank.collective("all_reduce", halves[half], elements=4 + half)

    found, truth = classes_of(64, program)
    assert [len(each) for each in found.classes] == [32, 32]
    assert len(found.ran) < 22
    assert same(found, truth)


def test_a_border_is_found_among_ranks_that_differ_in_turn() -> None:
    """It lies between two rows of a mesh, within a node."""

    def program(rank: Player) -> None:
        rows, columns = mesh(rank, 32, 4)
        row, column = divmod(rank.rank, 4)
        rank.collective("all_gather", rows[row])
        rank.collective("all_reduce", columns[column], elements=4 + column // 2)
        if rank.rank >= 84:
            rank.collective("barrier", columns[column], elements=None)

    found, truth = classes_of(128, program)
    assert len(found.classes) == 4
    assert same(found, truth)


def test_all_stages_of_a_pipeline_are_run() -> None:
    def program(rank: Player) -> None:
        stage, column = divmod(rank.rank, 32)
        channel = [rank.new_group(str(each), *range(each, 128, 32)) for each in range(32)][column]
        if stage > 0:
            rank.message("recv", rank.rank - 32, channel=channel, elements=stage)
        if stage < 3:
            rank.message("send", rank.rank + 32, channel=channel, elements=stage + 1)

    found, truth = classes_of(128, program)
    assert [len(each) for each in found.classes] == [32, 32, 32, 32]
    assert len(found.ran) < 32
    assert same(found, truth)


def test_ranks_without_order_are_reported() -> None:
    def program(rank: Player) -> None:
        rank.collective(elements=rank.rank * 7919 % 101 + 1)

    found, _ = classes_of(1024, program)
    assert found.surprising
    assert len(found.ran) < 300


def test_ranks_are_run_that_are_asked_for() -> None:
    def program(rank: Player) -> None:
        rank.collective("broadcast" if rank.rank == 333 else "all_reduce")

    found, _ = classes_of(1024, program, also=[333])
    assert [333] in found.classes
