"""What a command reads of the nodes of a job."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from commlens.watch import other_nodes
from commlens.watch.nodes.beat import QUESTION, Beat, key
from commlens.watch.nodes.bundles import bundled_by, store_bundle
from commlens.watch.other_nodes import AskedNodes, newest_beats


class Store:
    """The values of nodes, in memory, and how many were read."""

    def __init__(self, beats: Sequence[Beat]) -> None:
        self.values = {key("node", beat.slot): msgspec.msgpack.encode(beat) for beat in beats}
        self.values[key("nodes")] = b""
        self.counter = 3 * QUESTION + max(beat.slot for beat in beats) + 1
        self.read = 0

    def add(self, name: str, amount: int) -> int:
        self.counter += amount
        return self.counter

    def set(self, name: str, value: bytes) -> None:
        self.values[name] = value

    def existing_keys(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name in self.values]

    def get(self, names: Sequence[str]) -> list[bytes]:
        self.read += len(names)
        return [self.values[name] for name in names]


def beats_of(*slots: int, size: int) -> list[Beat]:
    """Return the values of nodes with one rank each, whose workers were restarted."""
    return [Beat(slot, "a", [slot % size], world_size=size) for slot in slots]


def test_the_nodes_that_came_last_are_read() -> None:
    store = Store(beats_of(*range(9), size=3))
    assert [beat.slot for beat in newest_beats(store, 9)] == [6, 7, 8]  # type: ignore[arg-type]


def test_ranks_of_nodes_that_are_too_many_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_nodes, "_MOST", 4)
    store = Store(beats_of(*range(6), size=6))
    assert AskedNodes(store, [0]).unread == (  # type: ignore[arg-type]
        "Nothing is known of ranks 0-1: only the 4 nodes that came last were asked."
    )
    assert AskedNodes(Store(beats_of(*range(6), size=3)), [0]).unread == ""  # type: ignore[arg-type]


def test_the_values_of_many_nodes_are_read_in_bundles() -> None:
    store = Store(beats_of(*range(400), size=400))
    for slot in range(0, 400, 32):
        own = store.values[key("node", slot)]
        store_bundle(store, slot, own, bundled_by(slot, 400), 1)  # type: ignore[arg-type]
    store.values[key("node", 0)] = msgspec.msgpack.encode(Beat(0, "a", [0], wait_s=9.0))
    store.read = 0
    nodes = AskedNodes(store, [7])  # type: ignore[arg-type]
    assert len(nodes.beats) == 400 and len(nodes.others) == 399
    assert store.read == 13 + 1
    assert nodes.beats[0].wait_s == 9.0, "bundles are late"
