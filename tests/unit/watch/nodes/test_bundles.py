"""The values of neighbouring nodes in one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from commlens.watch.nodes.beat import key
from commlens.watch.nodes.bundles import GROUP, STALE_S, Bundles, bundled_by, store_bundle

NODES = 200


class Store:
    """Values in memory, and the keys that were asked for."""

    def __init__(self) -> None:
        self.values = {key("node", slot): f"node {slot}".encode() for slot in range(NODES)}
        self.asked: list[str] = []

    def set(self, name: str, value: bytes) -> None:
        self.values[name] = value

    def existing_keys(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name in self.values]

    def get(self, names: Sequence[str]) -> list[bytes]:
        self.asked += names
        return [self.values[name] for name in names]

    def bundle(self, number: int = 1) -> None:
        """Store all bundles."""
        for slot in range(0, NODES, GROUP):
            own = self.values[key("node", slot)]
            store_bundle(self, slot, own, bundled_by(slot, NODES), number)  # type: ignore[arg-type]
        self.asked = []


def read(
    bundles: Bundles, store: Store, now: float = 0.0, direct: Sequence[int] = ()
) -> set[bytes]:
    store.asked = []
    return set(bundles.read(store, range(1, NODES), now, direct))  # type: ignore[arg-type]


ALL = {f"node {slot}".encode() for slot in range(1, NODES)}


def test_each_value_is_in_one_bundle_if_there_are_many_nodes() -> None:
    bundled = [slot for first in range(NODES) for slot in bundled_by(first, NODES)]
    assert sorted([*bundled, *range(0, NODES, GROUP)]) == list(range(NODES))
    assert bundled_by(0, 128) == []


def test_bundles_are_read_in_place_of_values() -> None:
    store, bundles = Store(), Bundles()
    assert read(bundles, store) == ALL and len(store.asked) == NODES - 1
    store.bundle()
    assert read(bundles, store) == ALL
    assert store.asked == [key("bundle", group) for group in range(7)]
    assert read(bundles, store, direct=[40]) == ALL
    assert store.asked[7:] == [key("node", 40)]


def test_values_of_a_lost_bundler_are_read_themselves() -> None:
    store, bundles = Store(), Bundles()
    store.bundle()
    read(bundles, store, 0.0)
    store.bundle(number=2)
    store.values[key("node", 70)] = b"news"
    lost = store.values[key("bundle", 2)]
    read(bundles, store, 0.0)
    assert b"news" not in read(bundles, store, STALE_S)
    store.bundle(number=3)
    store.values[key("bundle", 2)] = lost
    assert b"news" in read(bundles, store, STALE_S + 0.1)
    assert len(store.asked) == 7 + GROUP
    store.bundle(number=4)
    read(bundles, store, STALE_S + 0.2)
    assert len(store.asked) == 7, "it is back"


@pytest.mark.parametrize("content", [b"", b"no bundle"])
def test_a_damaged_bundle_is_not_read(content: bytes) -> None:
    store, bundles = Store(), Bundles()
    store.bundle()
    store.values[key("bundle", 1)] = content
    assert read(bundles, store) == ALL


def test_a_node_that_has_not_stored_its_value_is_left_out() -> None:
    store, bundles = Store(), Bundles()
    del store.values[key("node", 50)]
    store.bundle()
    assert read(bundles, store) == ALL - {b"node 50"}
