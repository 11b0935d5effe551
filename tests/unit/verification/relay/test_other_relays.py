"""The connections between relays: which of them count."""

from __future__ import annotations

from typing import Any

import pytest

from commlens.verification.relay.connection import Connection
from commlens.verification.relay.other_relays import OtherRelays


class Side:
    """One relay's connections, and what they report."""

    def __init__(self, world_size: int, *, is_hub: bool) -> None:
        self.joined: list[str] = []
        self.messages: list[Any] = []
        self.lost: list[str] = []
        self.others = OtherRelays(
            world_size,
            is_hub=is_hub,
            on_joined=lambda connection: self.joined.append(connection.host),
            on_message=lambda _, message: self.messages.append(message),
            on_changes=lambda _, changes: self.messages.append(changes),
            on_lost=self._lose,
        )

    def _lose(self, _: Connection, why: str) -> None:
        self.lost.append(why)


def serve(*sides: Side) -> None:
    for _ in range(5):
        for side in sides:
            side.others.serve(side.others.select(0.02))


@pytest.mark.parametrize(
    ("changed", "world_size", "joins"),
    [
        pytest.param({}, 2, True, id="a relay of the job"),
        pytest.param({"secret": "0" * 32}, 2, False, id="without the secret"),
        pytest.param({}, 3, False, id="of another world size"),
    ],
)
def test_only_a_relay_of_the_job_joins(
    changed: dict[str, str], world_size: int, joins: bool
) -> None:
    hub, node = Side(2, is_hub=True), Side(world_size, is_hub=False)
    offer = {"hosts": ["127.0.0.1"], **hub.others.listen("127.0.0.1"), **changed}
    node.others.take_offer(offer)
    node.others.connect(1.0)
    serve(hub, node)
    hub.others.send(type="lost", ranks=[7])
    serve(node)
    assert (len(hub.joined), len(node.joined)) == (joins, joins)
    assert node.messages == [{"type": "lost", "ranks": [7]}] * joins
    assert hub.lost == ["it is no relay of this job"] * (not joins)
    for side in (hub, node):
        side.others.close()
