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
    first, *others = (
        Beat(slot, f"host{slot}", [slot], successors=list(range(1, 9))) for slot in range(40)
    )
    client: Any = SimpleNamespace(existing_keys=list, get=list)

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


def test_the_oldest_waits_of_many_nodes_are_followed() -> None:
    node = Nodes("host0", lambda: None)
    node.update(slot=0, ranks=[0])
    node._contact = time.monotonic()
    beats = [
        Beat(slot, f"host{slot}", [slot], wait_id=7, wait_s=float(slot)) for slot in range(1, 30)
    ]
    node._known.note(beats, node._contact)
    now_ns = time.monotonic_ns()
    found = node.waits(now_ns)
    assert [wait.pid for wait in found] == [-1 - slot for slot in range(29, 21, -1)]
    assert found[0].since_ns == now_ns - 29_000_000_000
    later = [msgspec.structs.replace(beat, count=1, wait_s=beat.wait_s + 3) for beat in beats[:-1]]
    ended = msgspec.structs.replace(beats[-1], count=1, wait_id=0)
    node._known.note([*later, ended], node._contact)
    assert node.waits(now_ns + 1_000_000_000) == [
        *found[1:],
        found[-1]._replace(since_ns=now_ns - 21_000_000_000, pid=-22),
    ], "a wait does not begin anew"


def test_a_line_is_for_the_nodes_that_it_names() -> None:
    said = [News(1, "all"), News(2, "one", to=[5]), News(3, "another", to=[6, 7])]
    known = KnownNodes()
    for count in (1, 2):
        known.note([Beat(1, "host1", [1], count=count, news=said)], 100.0)
    news = known.take_news(Beat(5, "host5", [5]), 100.0)
    assert [each.text for _, each in news] == ["all", "one"]
