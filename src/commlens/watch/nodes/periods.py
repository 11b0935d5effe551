"""How often a node looks at the values of others, by the number of nodes: together they must not
keep the store busy.
"""

from __future__ import annotations

from typing import Final

PERIOD_S: Final = 1.0  # between two values of a node
BUSY_PERIOD_S: Final = 0.2  # while evidence is gathered, or a rank has died
LOST_S: Final = 5.0  # a node or a store that has been silent for this long is taken as lost
QUICK_S: Final = 2.0
"""The longest rest of the node that reports, and of those that would be next. A node that rests for
longer waits for the store to wake it.
"""
# with more, BUSY_PERIOD_S grows with their number, which bounds the load of the store
_BUSY_NODES: Final = 512
_REST_NODES: Final = 625  # with more, so does the period at rest
_WOKEN_NODES: Final = 480
"""The same of nodes that have to be woken: a wait costs the store half as much as an exchange."""
_LOST_PERIODS: Final = 3.0


def rest_period_s(count: int) -> float:
    """Return how long each of so many nodes rests while no rank waits."""
    if rests_long(count):
        return PERIOD_S * count / _WOKEN_NODES
    return PERIOD_S * max(1.0, count / _REST_NODES)


def busy_period_s(count: int) -> float:
    """Return how long each of so many nodes rests while ranks wait."""
    return BUSY_PERIOD_S * max(1.0, count / _BUSY_NODES)


def lost_after_s(count: int) -> float:
    """Return after how long without a new value one of so many nodes is taken as lost."""
    return max(LOST_S, _LOST_PERIODS * rest_period_s(count))


def rests_long(count: int) -> bool:
    """Return whether so many nodes rest for so long that they have to be woken."""
    return PERIOD_S * count / _REST_NODES > QUICK_S


def asked_period_s(count: int) -> float:
    """Return how long it takes until each of so many nodes at rest sees what a command asks."""
    return busy_period_s(count) if rests_long(count) else rest_period_s(count)
