"""Prints the hardware of a node."""

from __future__ import annotations

from pathlib import Path

from commlens.commands.table import print_table


def print_health(root: Path, topology: Path | None = None) -> None:
    """Look at this node once, and print its parts, what its kernel has logged about them, and the
    sources that cannot be read.

    Args:
        root: the folder below which the node's files are.
        topology: the user's inventory of hosts.
    """
    from commlens.diagnosis.views.health import health_table
    from commlens.health.monitor import look_once
    from commlens.health.topology import read_inventory

    health = look_once(root, inventory=read_inventory(topology) if topology is not None else None)
    table = health_table(health)
    where = [f"switch {health.leaf}"] if health.leaf else []
    where += [f"rack {health.rack}"] if health.rack else []
    at = f" ({', '.join(where)})" if where else ""
    print(f"The hardware of {health.host}{at}, with counts and times since boot:")
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
