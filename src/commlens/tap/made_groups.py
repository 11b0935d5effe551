"""Groups that one line makes again and again, and that are never destroyed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import torch.distributed.distributed_c10d as c10d

MANY: Final = 16
"""Of the same ranks, alive, made by one line."""


class ManyGroups(NamedTuple):
    """Groups of the same ranks."""

    maker: Any
    times: int
    ranks: str


class MadeGroups:
    """Counts the groups that this process makes."""

    def __init__(self) -> None:
        self._made: Counter[tuple[Any, tuple[int, ...]]] = Counter()

    def note(self, maker: Any, ranks: Iterable[int]) -> None:
        """Note that ``maker``, a stack, made a group of these ranks."""
        self._made[maker, tuple(ranks)] += 1

    def many(self) -> Iterator[ManyGroups]:
        """Yield the makers of many groups that are still alive."""
        for (maker, ranks), times in self._made.items():
            if times < MANY:
                continue
            wanted = sorted(ranks)
            alive = [of for of in c10d._world.pg_group_ranks.values() if sorted(of) == wanted]
            if len(alive) >= MANY:
                text = str(list(ranks)) if len(ranks) <= 8 else f"{wanted[0]}-{wanted[-1]}"
                yield ManyGroups(maker, times, text)
