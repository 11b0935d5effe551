"""The estimate of collectives' time: the model of docs/preview.md, in numbers that can be checked
by hand.
"""

from __future__ import annotations

import io

import pytest

from commlens.errors import CommandError
from commlens.model.collective import ProcessGroup
from commlens.model.network import Network
from commlens.model.trace import Phase, TraceData, TraceEvent
from commlens.reports.trace_terminal import print_estimate
from commlens.text import short_duration
from commlens.traces.network import (
    PRESETS,
    collective_seconds,
    estimate,
    nodes_of,
    preset,
)

NET = Network(
    intra_bandwidth=100e9,
    inter_bandwidth=10e9,
    intra_latency=0.0,
    inter_latency=0.0,
    ranks_per_node=4,
)
MB = 1_000_000


@pytest.mark.parametrize(
    ("op", "ranks", "expected"),
    [
        ("all_reduce", range(4), 100 * MB / 100e9),  # one node
        # one rank of each of 8 nodes: its own adapter
        ("all_gather", range(0, 32, 4), 100 * MB / 10e9),
        ("all_gather", range(8), 100 * MB / 40e9),  # 4 ranks of each of 2 nodes: four adapters
        ("reduce_scatter", range(16), 100 * MB / 40e9),
        ("broadcast", range(2), 100 * MB / 100e9),
        ("all_to_all", range(8), 100 * MB * 4 / 7 / 10e9),  # 4 of the 7 peers are elsewhere
        ("all_reduce", [5], 0.0),
        ("all_reduce", [], 0.0),
    ],
)
def test_bytes_take_time(op, ranks, expected):
    assert collective_seconds(op, list(ranks), 100 * MB, NET) == pytest.approx(expected)


def test_no_ring_is_faster_than_a_node_is_inside():
    fast_outside = Network(
        intra_bandwidth=20e9,
        inter_bandwidth=10e9,
        intra_latency=0.0,
        inter_latency=0.0,
        ranks_per_node=4,
    )
    assert collective_seconds("all_gather", range(8), 100 * MB, fast_outside) == pytest.approx(
        100 * MB / 20e9
    )


@pytest.mark.parametrize(("rank", "peer", "bandwidth"), [(0, 3, 100e9), (3, 4, 10e9), (4, 3, 10e9)])
def test_point_to_point_goes_by_where_the_two_are(rank, peer, bandwidth):
    assert collective_seconds("send", range(8), MB, NET, rank=rank, peer=peer) == pytest.approx(
        MB / bandwidth
    )


@pytest.mark.parametrize(
    ("op", "ranks", "hops"),
    [
        ("all_gather", range(4), 3),  # around the ring
        ("all_reduce", range(4), 2 * 2),  # up and down a tree of depth 2
        ("barrier", range(4), 2 * 2),
        ("broadcast", range(4), 2),
        ("all_reduce", range(2), 2),
        ("send", range(4), 1),
        ("all_gather", range(0, 32, 4), 80),  # 8 hops between nodes
        ("all_gather", range(8), 26),  # 2 between nodes, 6 inside
        ("all_reduce", range(8), 2 * (10 + 2)),
    ],
)
def test_hops_take_time(op, ranks, hops):
    net = Network(
        intra_bandwidth=1e9,
        inter_bandwidth=1e9,
        intra_latency=1.0,
        inter_latency=10.0,
        ranks_per_node=4,
    )
    assert collective_seconds(
        op, list(ranks), 0, net, rank=0, peer=1 if op == "send" else None
    ) == pytest.approx(hops)


def test_which_groups_cross_nodes_follows_from_their_ranks():
    assert nodes_of(range(4), NET) == 1
    assert nodes_of(range(2, 6), NET) == 2
    assert nodes_of(range(0, 512, 8), PRESETS["h100-ib"]) == 64


def test_every_preset_says_where_its_figures_come_from():
    for name, network in PRESETS.items():
        assert network.name == name
        assert network.source
        assert network.intra_bandwidth >= network.inter_bandwidth


def _trace(steps: int = 2) -> TraceData:
    groups = [
        ProcessGroup("1", tuple(range(0, 32, 4)), mesh_dim="dp"),
        ProcessGroup("2", tuple(range(4)), mesh_dim="tp"),
    ]
    events = [
        TraceEvent(
            sequence=1, op="all_gather", api="", phase=Phase.FORWARD, group=0, wire_bytes=1000 * MB
        ),
        TraceEvent(
            sequence=2,
            op="all_reduce",
            api="",
            phase=Phase.FORWARD,
            group=1,
            wire_bytes=100 * MB,
            count=20,
            last_step=1,
        ),
    ]
    return TraceData(world_size=32, groups=groups, events=events, steps=steps)


def test_an_estimate_is_by_mesh_dimension_and_counts_summarised_collectives_in_full():
    found = estimate(_trace(), NET)
    assert [
        (part.name, part.ranks, part.nodes, part.calls, part.wire_bytes) for part in found.parts
    ] == [("dp", 8, 8, 1, 1000 * MB), ("tp", 4, 1, 20, 2000 * MB)]
    assert found.seconds == pytest.approx(0.1 + 0.02)
    assert found.seconds_per_step == pytest.approx(0.06)


def test_without_steps_the_whole_is_one():
    found = estimate(_trace(steps=0), "h100-ib")
    assert found.seconds_per_step == found.seconds


def test_the_setup_before_the_first_forward_is_no_part_of_a_step():
    data = _trace()
    data.events.append(
        TraceEvent(
            sequence=3, op="all_reduce", api="", phase=Phase.BACKWARD, group=1, wire_bytes=100 * MB
        )
    )
    data.setup_until = 1
    found = estimate(data, NET)
    assert [(part.name, part.calls) for part in found.parts] == [("tp", 21)]
    assert found.seconds_per_step == pytest.approx(21 * 0.001 / 2)
    assert (found.setup.calls, found.setup.wire_bytes, found.setup.seconds) == (
        1,
        1000 * MB,
        pytest.approx(0.1),
    )
    out = io.StringIO()
    print_estimate(found, out, width=100)
    text = " ".join(out.getvalue().split())
    assert "All collectives of an average step (of 2), one after another: 10 ms." in text
    assert "Setup before the first forward, once: 1 collective, 1.0 GB, 100 ms." in text


def test_what_is_printed_calls_itself_an_estimate():
    out = io.StringIO()
    print_estimate(estimate(_trace(), NET), out, width=100)
    text = " ".join(out.getvalue().split())
    assert "Estimated time per step" in text
    assert "not a measurement" in text
    assert "one after another: 60 ms." in text
    assert "100 GB/s inside a node of 4, 10 GB/s per rank between nodes" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 us"),
        (4e-6, "4.0 us"),
        (1.9e-6, "1.9 us"),
        (0.178, "178 ms"),
        (1.2, "1.2 s"),
        (130, "130 s"),
    ],
)
def test_seconds_as_people_write_them(value, text):
    assert short_duration(value * 1e9) == text


def test_unknown_presets():
    with pytest.raises(CommandError, match="Did you mean h100-ib"):
        preset("h100-bi")
