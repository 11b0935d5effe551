"""Which nodes' values a node reads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec

from commlens.watch.nodes.beat import Beat, key
from commlens.watch.nodes.exchange import Nodes


def test_a_slow_store_makes_no_node_read_all_values() -> None:
    node = Nodes("host50", lambda: None)
    node.update(slot=50, ranks=[50])
    first, *others = (
        Beat(slot, f"host{slot}", [slot], successors=list(range(1, 9))) for slot in range(40)
    )
    client: Any = SimpleNamespace(existing=list, get=list)

    def read(values: Sequence[Beat], age_s: float) -> list[str]:
        node._contact = time.monotonic() - age_s
        node._known.note(values, node._contact)
        return sorted(node._values(client, 100))

    first_and_next = [key("node", slot) for slot in (0, 1)]
    assert read([first, *others], 60) == first_and_next, "the store took a minute"
    assert read([msgspec.structs.replace(each, count=1) for each in others], 30) == [
        key("node", slot) for slot in range(9)
    ]
    assert len(read([], 0)) == 99, "all that might report have been silent for half a minute"
