"""Tests of src/commlens/check/prediction.py."""

from __future__ import annotations

import pytest
from sequences import Player, play

from commlens.check.prediction import (
    Dimension,
    dimension_of,
    does_as,
    fixed_peers,
    names_in,
    predict,
)
from commlens.check.sequence import RankSequence

WORLD = 8


def mesh(rank: Player) -> None:
    """Rows of two and columns of four, which all ranks make."""
    rows = [rank.new_group(str(row + 1), 2 * row, 2 * row + 1) for row in range(4)]
    columns = [rank.new_group(str(column + 5), *range(column, 8, 2)) for column in range(2)]
    first = rank.rank // 2 * 2
    rank.collective("broadcast", rows[rank.rank // 2], root=first, reduce_op=None)
    rank.collective("all_reduce", columns[rank.rank % 2])


def ring(rank: Player) -> None:
    rank.batch(("send", (rank.rank + 1) % WORLD), ("recv", (rank.rank - 1) % WORLD))


def server(rank: Player) -> None:
    if rank.rank:
        rank.send(0)


def events(sequence: RankSequence | None) -> object:
    assert sequence is not None
    return sequence.rank, sequence.events


def test_a_rank_has_its_own_groups_and_roots() -> None:
    ranks = play(WORLD, mesh)
    names = names_in([ranks[0]])
    assert all(events(predict(ranks[0], rank, names)) == events(ranks[rank]) for rank in ranks)
    assert all(does_as(ranks[5], each, names) for each in ranks.values())


def test_a_neighbour_is_at_the_same_distance() -> None:
    ranks = play(WORLD, ring)
    assert all(events(predict(ranks[3], rank, {})) == events(ranks[rank]) for rank in ranks)
    assert does_as(ranks[0], ranks[7], {})


def test_a_peer_may_have_a_place_of_its_own() -> None:
    ranks = play(WORLD, server)
    fixed = fixed_peers(ranks[3], [ranks[5]])
    assert fixed == {1}
    assert fixed_peers(play(WORLD, ring)[3], [play(WORLD, ring)[5]]) == frozenset()
    assert events(predict(ranks[3], 6, {}, fixed)) == events(ranks[6])
    assert does_as(ranks[3], ranks[5], {})
    assert not does_as(ranks[3], ranks[0], {})


def test_a_rank_outside_of_a_crooked_group_cannot_do_the_same() -> None:
    def program(rank: Player) -> None:
        group = rank.new_group("1", 0, 1, 5)
        if rank.rank in (0, 1, 5):
            rank.collective("all_reduce", group)

    ranks = play(WORLD, program)
    assert predict(ranks[0], 2, {}) is None
    assert does_as(ranks[0], ranks[5], {})
    assert not does_as(ranks[0], ranks[2], {})


@pytest.mark.parametrize("difference", ["elements", "op", "more", "error"])
def test_ranks_that_differ_do_not_do_the_same(difference: str) -> None:
    def program(rank: Player) -> None:
        odd = rank.rank == 3
        rank.collective(
            "broadcast" if odd and difference == "op" else "all_reduce",
            elements=5 if odd and difference == "elements" else 4,
        )
        if odd and difference == "more":
            rank.collective()
        if odd and difference == "error":
            rank.raises("ValueError: bad sample")

    ranks = play(WORLD, program)
    assert does_as(ranks[0], ranks[2], {})
    assert not does_as(ranks[0], ranks[3], {})


def test_a_dimension_divides_the_world_into_groups() -> None:
    columns = Dimension(stride=4, size=3)
    assert columns.ranks(0) == (0, 4, 8)
    assert columns.ranks(9) == (1, 5, 9)
    assert columns.ranks(13) == (13, 17, 21)
    assert [columns.position(rank) for rank in (1, 5, 9, 13)] == [0, 1, 2, 0]


@pytest.mark.parametrize(
    ("ranks", "dimension"),
    [
        ((0, 1, 2, 3), Dimension(1, 4)),
        ((5, 13), Dimension(8, 2)),
        ((20, 24), None),  # along such a dimension, 20 is in the group of 16
        ((0, 1, 3), None),
        ((3, 1), None),
        ((2,), None),
    ],
)
def test_groups_lie_along_dimensions(ranks: tuple[int, ...], dimension: Dimension | None) -> None:
    assert dimension_of(ranks) == dimension
