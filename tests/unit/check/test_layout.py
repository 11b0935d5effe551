"""Tests of src/commlens/check/layout.py."""

import pytest

from commlens.check.layout import Dimension, dimension_of


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
