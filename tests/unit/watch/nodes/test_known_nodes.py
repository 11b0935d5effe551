"""Which nodes' values a node reads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec

from commlens.watch.nodes.beat import Beat, News, key
from commlens.watch.nodes.exchange import Nodes
from commlens.watch.nodes.known_nodes import KnownNodes


def test_a_slow_store_makes_no_node_read_all_values() -> None:
    node = Nodes("host50", lambda: None)
    node.update(slot=50, ranks=[50])
    node._known.count = 100
    first, *others = (
        Beat(slot, f"host{slot}", [slot], successors=list(range(1, 9))) for slot in range(40)
    )
    client: Any = SimpleNamespace(existing_keys=list, get=list)

    def read(values: Sequence[Beat], age_s: float) -> list[str]:
        node._contact.note_answer(time.monotonic() - age_s)
        node._known.note(values, node._contact.answered_at)
        return sorted(node._values(client))

    first_and_next = [key("node", slot) for slot in (0, 1)]
    assert read([first, *others], 60) == first_and_next, "the store took a minute"
    assert read([msgspec.structs.replace(each, count=1) for each in others], 30) == [
        key("node", slot) for slot in range(9)
    ]
    assert len(read([], 0)) == 99, "all that might report have been silent for half a minute"


def test_what_follows_from_the_values_is_kept_until_one_changes() -> None:
    mine = Beat(0, "host0", [0])
    known = KnownNodes()
    beats = [Beat(slot, f"host{slot}", [slot], dead=[2] if slot == 2 else []) for slot in (1, 2)]
    known.note(beats, 100.0)
    assert known.view(mine, 100.0).dead == [], "its watcher may have been killed long ago"
    again = [msgspec.structs.replace(beat, count=1) for beat in beats]
    known.note(again, 101.0)
    view = known.view(mine, 101.0)
    assert view.dead == [2] and view.first == again[0]
    known.note(again, 102.0)
    assert known.view(mine, 106.0) is view
    assert known.view(mine, 106.1).live == []
    other = msgspec.structs.replace(mine, ranks=[1])
    assert known.view(other, 101.0).first == again[1], "the first one is of another incarnation"


def test_a_line_is_for_the_nodes_that_it_names() -> None:
    said = [News(1, "all"), News(2, "one", to=[5]), News(3, "another", to=[6, 7])]
    known = KnownNodes()
    for count in (1, 2):
        known.note([Beat(1, "host1", [1], count=count, news=said)], 100.0)
    news = known.take_news(Beat(5, "host5", [5]), 100.0)
    assert [each.text for _, each in news] == ["all", "one"]
