"""The expected verdict of a scenario. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FAULT_STEP = 6
"""The step of the fault. The six healthy steps before it give every rank a history."""


def culprit_rank(world_size: int) -> int:
    """Return the culprit of every scenario with a fault: neither the first nor the last rank if the world is large enough."""
    return {2: 1, 4: 2, 8: 5}.get(world_size, world_size // 2)


def marked_lines(path: Path, scenario: str) -> tuple[str, ...]:
    """Return ``"plain.py:57"`` for every line of the program with the comment ``# fault: SCENARIO``."""
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        _, mark, names = line.partition("# fault: ")
        if mark and scenario in [name.strip() for name in names.split(",")]:
            found.append(f"{path.name}:{number}")
    if not found:
        raise LookupError(f"No line of {path} is marked '# fault: {scenario}'.")
    return tuple(found)


@dataclass(frozen=True)
class Truth:
    """The expected verdict of a scenario, with every correct answer if there are several."""

    kinds: tuple[str, ...]
    whys: tuple[str, ...]
    culprits: tuple[int, ...]
    ops: tuple[str, ...] = ()  # of the collective in the verdict; empty: it need not name one
    lines: tuple[str, ...] = ()  # of the culprit; empty: there is none


HEALTHY = Truth(kinds=("healthy",), whys=(), culprits=())
