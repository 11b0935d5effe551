"""What a node told, as data."""

from __future__ import annotations

import msgspec

from commlens.model.health import HealthEvent, NodeHealth, NotRead, RankPlace, gpus_by_index

S = 1_000_000_000
HEALTH = NodeHealth(
    "n03",
    began_ns=S,
    taken_ns=9 * S,
    ranks=[RankPlace(4, 77, "0000:4f:00.0", True)],
    events=[
        HealthEvent(what="xid", fault="gpu-fault", part="0000:4f:00.0", at_ns=5 * S, number=79),
        HealthEvent(what="errors-rose", fault="network-errors", part="a", at_ns=8 * S, since_ns=S),
    ],
    values={"gpu": {"0000:4f:00.0": {"index": 0.0, "name": "H100"}}},
    not_read=[NotRead("kernel log", "no right")],
)


def test_it_survives_a_dump() -> None:
    assert msgspec.json.decode(msgspec.json.encode(HEALTH), type=NodeHealth) == HEALTH


def test_a_clock_that_was_ahead_is_corrected() -> None:
    shifted = HEALTH.shifted(-S // 2)
    assert (shifted.began_ns, shifted.taken_ns) == (S // 2, 17 * S // 2)
    assert [(each.since_ns, each.at_ns) for each in shifted.events] == [
        (0, 9 * S // 2),
        (S // 2, 15 * S // 2),
    ]
    assert HEALTH.events[0].at_ns == 5 * S


def test_the_earliest_time_of_an_event() -> None:
    exact, counted = HEALTH.events
    assert (exact.first_ns, counted.first_ns) == (5 * S, S)


def test_gpus_by_their_index() -> None:
    assert gpus_by_index(HEALTH.values) == {0: "0000:4f:00.0"}
    assert gpus_by_index({"gpu": {"0000:03:00.0": {"used_percent": 3.0}}}) == {}
