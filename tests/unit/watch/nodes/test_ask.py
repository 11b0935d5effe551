"""What ``commlens status`` reads of the nodes of a job."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from commlens.watch.nodes import ask
from commlens.watch.nodes.beat import Beat, key


class Store:
    """The values of nodes, in memory."""

    def __init__(self, beats: Sequence[Beat]) -> None:
        self.values = {key("node", beat.slot): msgspec.msgpack.encode(beat) for beat in beats}

    def existing(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name in self.values]

    def get(self, names: Sequence[str]) -> list[bytes]:
        return [self.values[name] for name in names]


def beats_of(*slots: int, size: int) -> list[Beat]:
    """Return the values of nodes with one rank each, whose workers were restarted."""
    return [Beat(slot, "a", [slot % size], world_size=size) for slot in slots]


@pytest.fixture(autouse=True)
def four_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask, "_MOST", 4)


def test_the_nodes_that_came_last_are_read() -> None:
    store = Store(beats_of(*range(9), size=3))
    beats = ask._newest_beats(store, 9)  # type: ignore[arg-type]
    assert [beat.slot for beat in beats] == [6, 7, 8]
    assert ask._unread(beats, 9) == ""


def test_ranks_of_nodes_that_are_too_many_are_told() -> None:
    store = Store(beats_of(*range(6), size=6))
    beats = ask._newest_beats(store, 6)  # type: ignore[arg-type]
    assert ask._unread(beats, 6) == (
        "Nothing is known of ranks 0-1: only the 4 nodes that came last were asked."
    )
