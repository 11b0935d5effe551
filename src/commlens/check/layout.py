"""Where a rank stands in groups: its position along each dimension of a world."""

from __future__ import annotations

from typing import NamedTuple


class Dimension(NamedTuple):
    """Groups of ``size`` ranks at equal distances, which divide the world: a dimension of a mesh,
    the ranks of a node, the world itself.
    """

    stride: int
    size: int

    def position(self, rank: int) -> int:
        """Return a rank's place in its group."""
        return rank // self.stride % self.size

    def ranks(self, rank: int) -> tuple[int, ...]:
        """Return the group of a rank."""
        first = rank - self.position(rank) * self.stride
        return tuple(range(first, first + self.stride * self.size, self.stride))


def dimension_of(ranks: tuple[int, ...]) -> Dimension | None:
    """Return the dimension to which a group belongs; None if it lies crooked."""
    if len(ranks) < 2:
        return None
    found = Dimension(ranks[1] - ranks[0], len(ranks))
    return found if found.stride > 0 and found.ranks(ranks[0]) == ranks else None
