"""The value of a node in the store."""

from __future__ import annotations

import msgspec
import pytest

from commlens.watch.mismatches.channel_progress import ChannelDigest
from commlens.watch.nodes.beat import (
    Beat,
    Request,
    decoded,
    key,
    pack_digests,
    unpack_digests,
)
from commlens.watch.nodes.states_tree import Tree


@pytest.mark.parametrize(
    ("one", "other", "meet"),
    [
        ({}, {}, True),
        ({"world_size": 4}, {"world_size": 0}, True),
        ({"world_size": 4}, {"world_size": 8}, False),
        ({"ranks": [1]}, {"ranks": [1]}, False),
        ({"ranks": [-1]}, {"ranks": [-1]}, True),
        ({"ended_at": 2}, {"slot": 2}, False),
        ({"ended_at": 2}, {"slot": 1}, True),
    ],
    ids=["others", "size unknown", "other size", "rank twice", "no ranks yet", "later", "same"],
)
def test_whether_two_nodes_are_of_one_incarnation(
    one: dict[str, object], other: dict[str, object], meet: bool
) -> None:
    first = msgspec.structs.replace(Beat(0, "n0", [0]), **one)
    second = msgspec.structs.replace(Beat(1, "n1", [1]), **other)
    assert first.shares_incarnation(second) is second.shares_incarnation(first) is meet


def test_requests_go_to_all_nodes_or_to_those_that_are_named() -> None:
    assert Request(2, 3, records=9).concerns(1)
    named = Request(2, 3, nodes=[1])
    assert named.concerns(1) and not named.concerns(2)
    beat = Beat(3, "n3", [6], asked=Request(2, 3, [1], 9, Tree(0, 4)))
    assert decoded(msgspec.msgpack.encode(beat), Beat) == beat


def test_the_node_with_the_lowest_rank_reports() -> None:
    beats = [Beat(0, "n0", []), Beat(1, "n1", [4, 5]), Beat(2, "n2", [2, 3])]
    assert [beat.slot for beat in sorted(beats, key=lambda beat: beat.order)] == [2, 1, 0]


def test_digests_are_unpacked_where_they_are_compared() -> None:
    channel = ChannelDigest()
    channel.add(1, 7)
    packed = pack_digests({"dp": channel.blocks()})
    beat = Beat(1, "n1", [4], digests=packed)
    read = decoded(msgspec.msgpack.encode(beat), Beat)
    assert read == beat
    assert read is not None
    assert unpack_digests(bytes(read.digests)) == {"dp": channel.blocks()}
    assert unpack_digests(bytes(Beat(1, "n1", [4]).digests)) == {}
    assert unpack_digests(b"\x81") == {}, "damaged"


def test_what_cannot_be_read_is_no_value() -> None:
    beat = Beat(1, "n1", [4, 5], wait_s=3.5)
    written = msgspec.msgpack.encode(beat)
    assert decoded(written, Beat) == beat
    assert decoded(written[:-3], Beat) is None and decoded(b"", Beat) is None
    assert key("node", 3) == "commlens/7/node/3"
