"""Prints the hardware of a node."""

from __future__ import annotations

from pathlib import Path

from commlens.commands.table import print_table


def print_health(root: Path) -> None:
    """Look at this node once, and print its parts, what its kernel has logged about them, and the
    sources that cannot be read.

    Args:
        root: the folder below which the node's files are.
    """
    from commlens.diagnosis.views.health import health_table
    from commlens.health.monitor import look_once

    health = look_once(root)
    table = health_table(health)
    print(f"The hardware of {health.host}:")
    if table.rows:
        print_table(table.rows, indent=2)
    if table.events:
        print("What the kernel has logged about it, the newest first:")
        for event in table.events:
            print(f"  - {event}")
    if table.not_read:
        print("What cannot be read here:")
        for each in table.not_read:
            print(f"  - {each}")
