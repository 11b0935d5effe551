"""What is true of a scenario: the verdict that it must get. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FAULT_STEP = 6
"""The step of the fault: six healthy ones before it give every rank a history."""

PROGRAMS = Path(__file__).parent / "programs"


def culprit_rank(world_size: int) -> int:
    """The rank at fault in every scenario with one: neither the first nor the last where that is possible."""
    return {2: 1, 4: 2, 8: 5}.get(world_size, world_size // 2)


def marked_lines(program: str, scenario: str) -> tuple[str, ...]:
    """``"plain.py:57"`` for every line of the program that carries the comment ``# fault: SCENARIO``.

    Raises:
        LookupError: when no line does.
    """
    path = PROGRAMS / f"{program}.py"
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
    """The verdict that a scenario must get. Where several answers are right, each of them is here."""

    kinds: tuple[str, ...]
    whys: tuple[str, ...]
    culprits: tuple[int, ...]
    ops: tuple[str, ...] = ()  # of the collective that the verdict names; empty: it need not name one
    lines: tuple[str, ...] = ()  # the culprit's own; empty: there is none to name


HEALTHY = Truth(kinds=("healthy",), whys=(), culprits=())
