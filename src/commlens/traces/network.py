"""An estimate of the time that collectives take, from bytes, group and a model of the network.

The model: Ranks are numbered node by node. A group inside one node moves its bytes at
``intra_bandwidth``, the rate of one rank's links in one direction. A group across nodes moves them
at the rate of the network adapters: every rank has one, a ring through k ranks of a node uses k
adapters, and no ring is faster than the links inside a node. All-to-alls send directly to each
peer, inside the node and across nodes at the same time. Point-to-point uses one adapter. Each hop
adds latency: once around the ring for gathers and scatters, twice the depth of a tree for
all-reduces, the depth of a tree for broadcasts and reduces, one hop for point-to-point. Bandwidths
are line rates of an otherwise idle network; reality is slower. The model ignores overlap with
computation, congestion, in-network reduction and skew between ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from commlens.errors import CommandError, did_you_mean
from commlens.model.network import US, Estimate, Network, Part, SetupEstimate
from commlens.model.ops import BARRIERS, POINT_TO_POINT
from commlens.model.trace import TraceData
from commlens.traces.wording import label

GB: Final = 1e9

_LATENCY = "latencies: NCCL's tuning table, LL128"

PRESETS: Final[dict[str, Network]] = {
    preset.name: preset
    for preset in (
        Network(
            name="h100-ib",
            intra_bandwidth=450 * GB,
            inter_bandwidth=50 * GB,
            source=(
                "DGX H100: NVLink 4, 900 GB/s both ways; one 400 Gb/s InfiniBand adapter per GPU;"
                f" {_LATENCY}"
            ),
        ),
        Network(
            name="h200-ib",
            intra_bandwidth=450 * GB,
            inter_bandwidth=50 * GB,
            source=f"DGX H200: the links of DGX H100; {_LATENCY}",
        ),
        Network(
            name="h100-efa",
            intra_bandwidth=450 * GB,
            inter_bandwidth=50 * GB,
            inter_latency=15 * US,
            source=(
                "AWS p5.48xlarge: NVLink 4; EFA 3200 Gb/s per node of 8; latency of a hop assumed"
                " 15 us"
            ),
        ),
        Network(
            name="a100-ib",
            intra_bandwidth=300 * GB,
            inter_bandwidth=25 * GB,
            source=(
                "DGX A100: NVLink 3, 600 GB/s both ways; one 200 Gb/s InfiniBand adapter per GPU;"
                f" {_LATENCY}"
            ),
        ),
        Network(
            name="a100-efa",
            intra_bandwidth=300 * GB,
            inter_bandwidth=6.25 * GB,
            inter_latency=15 * US,
            source=(
                "AWS p4d.24xlarge: NVLink 3; EFA 400 Gb/s per node of 8; latency of a hop assumed"
                " 15 us"
            ),
        ),
        Network(
            name="b200-ib",
            intra_bandwidth=900 * GB,
            inter_bandwidth=50 * GB,
            source=(
                "DGX B200: NVLink 5, 1.8 TB/s both ways; one 400 Gb/s InfiniBand adapter per GPU;"
                f" {_LATENCY}"
            ),
        ),
        Network(
            name="gb200-nvl72",
            intra_bandwidth=900 * GB,
            inter_bandwidth=50 * GB,
            ranks_per_node=72,
            source=(
                "GB200 NVL72: NVLink 5 between the 72 GPUs of a rack; one 400 Gb/s InfiniBand"
                f" adapter per GPU; {_LATENCY}"
            ),
        ),
        Network(
            name="pcie-ethernet",
            intra_bandwidth=25 * GB,
            inter_bandwidth=12.5 * GB / 8,
            intra_latency=2.5 * US,
            inter_latency=30 * US,
            source=(
                "8 GPUs on PCIe 4.0 x16, about 25 GB/s; one 100 Gb/s Ethernet adapter per node;"
                " latency of a hop assumed 30 us"
            ),
        ),
    )
}
"""Networks by name. docs/preview.md lists the same figures."""


def estimate(data: TraceData, network: Network | str) -> Estimate:
    """Estimate the time of every collective of a trace on a network, or on a preset."""
    net = preset(network) if isinstance(network, str) else network
    parts: dict[tuple[str, int, int], Part] = {}
    setup = SetupEstimate()
    for event in data.events:
        group = data.group_of(event)
        key = (label(group), len(group.ranks), nodes_of(group.ranks, net))
        part = setup if data.is_setup(event) else parts.setdefault(key, Part(*key))
        seconds = collective_seconds(
            event.op, group.ranks, event.wire_bytes, net, rank=data.rank, peer=event.peer
        )
        part.calls += event.count
        part.wire_bytes += event.wire_bytes * event.count
        part.seconds += seconds * event.count
    ordered = sorted(parts.values(), key=lambda part: -part.seconds)
    return Estimate(
        network=net,
        parts=ordered,
        steps=max(1, data.steps),
        seconds=sum(part.seconds for part in ordered),
        setup=setup,
    )


def collective_seconds(
    op: str,
    ranks: Sequence[int],
    wire_bytes: int,
    network: Network,
    *,
    rank: int = 0,
    peer: int | None = None,
) -> float:
    """Return the seconds that one collective takes in the model at the top of this module.

    ``wire_bytes`` pass one rank's link (model/wire_bytes.py); ``rank`` and ``peer`` matter for
    point-to-point only.
    """
    size = len(ranks)
    if size <= 1:
        return 0.0
    if op in POINT_TO_POINT:
        far = nodes_of(ranks if peer is None else (rank, peer), network) > 1
        return wire_bytes / (
            network.inter_bandwidth if far else network.intra_bandwidth
        ) + _latency(network, far)
    nodes = nodes_of(ranks, network)
    per_node = max(1, size // nodes)
    crosses = nodes > 1
    if op == "all_to_all":
        # the fraction of the bytes sent that leaves the node
        outside = (size - per_node) / (size - 1) if crosses else 0.0
        moving = max(
            wire_bytes * (1 - outside) / network.intra_bandwidth,
            wire_bytes * outside / network.inter_bandwidth,
        )
        return moving + _latency(network, crosses)
    bandwidth = (
        min(network.intra_bandwidth, network.inter_bandwidth * per_node)
        if crosses
        else network.intra_bandwidth
    )
    return wire_bytes / bandwidth + _hop_latencies(op, size, nodes, network)


def nodes_of(ranks: Sequence[int], network: Network) -> int:
    """Return the number of nodes that a group spans."""
    return len({rank // network.ranks_per_node for rank in ranks})


def _latency(network: Network, far: bool) -> float:
    return network.inter_latency if far else network.intra_latency


def _hop_latencies(op: str, size: int, nodes: int, network: Network) -> float:
    crossings = nodes if nodes > 1 else 0
    ring = (
        crossings * network.inter_latency
        + (size - 1 - max(0, crossings - 1)) * network.intra_latency
    )
    per_node = max(1, size // nodes)
    tree = (
        math.ceil(math.log2(nodes)) * network.inter_latency
        + math.ceil(math.log2(per_node)) * network.intra_latency
    )
    if op == "all_reduce" or op in BARRIERS:
        return 2 * min(ring, tree)
    if op in ("broadcast", "reduce"):
        return tree
    return ring


def preset(name: str) -> Network:
    """Return a preset by its name.

    Raises:
        CommandError: unknown preset.
    """
    found = PRESETS.get(name.lower())
    if found is None:
        hint = did_you_mean(name.lower(), PRESETS) or f" The presets are {', '.join(PRESETS)}."
        raise CommandError(f"There is no network preset {name!r}.{hint}")
    return found
