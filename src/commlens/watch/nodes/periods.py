"""How often a node looks at the values of others, by the number of nodes: together they must not
keep the store busy.
"""

from __future__ import annotations

from typing import Final

PERIOD_S: Final = 1.0  # between two values of a node
BUSY_PERIOD_S: Final = 0.2  # while evidence is gathered, or a rank has died
# with more, BUSY_PERIOD_S grows with their number, which bounds the load of the store
_BUSY_NODES: Final = 512
_REST_NODES: Final = 625  # with more, so does the period at rest
_REST_MAX_S: Final = 2.0


def rest_period_s(count: int) -> float:
    """Return how long each of so many nodes rests while no rank waits."""
    return min(_REST_MAX_S, PERIOD_S * max(1.0, count / _REST_NODES))


def busy_period_s(count: int) -> float:
    """Return how long each of so many nodes rests while ranks wait."""
    return BUSY_PERIOD_S * max(1.0, count / _BUSY_NODES)
