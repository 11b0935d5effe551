"""Group values by a key, and sort names."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Return the values of each key, in the order in which they come; keys in that of their first
    value.
    """
    found: dict[Key, list[Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """Return a key that sorts ``node9`` before ``node10``."""
    # texts and numbers alternate, so only like parts are compared
    return tuple(
        (int(part), "") if part.isdecimal() and len(part) < 20 else (-1, part)
        for part in re.split(r"(\d+)", name)
    )
