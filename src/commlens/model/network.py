"""A network, and the estimated time of collectives on it. traces/network.py has the rules."""

from __future__ import annotations

from typing import Final

import msgspec

US: Final = 1e-6


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """A network. Bandwidths are per rank and direction, in bytes per second; latencies are per hop,
    in seconds.
    """

    name: str = "your network"
    intra_bandwidth: float
    inter_bandwidth: float
    intra_latency: float = 1.9 * US
    inter_latency: float = 4.0 * US
    ranks_per_node: int = 8
    source: str = ""  # source of the figures


class Part(msgspec.Struct):
    """The estimate for one mesh dimension or group, on one rank."""

    name: str
    ranks: int
    nodes: int  # spanned by one such group
    calls: int = 0
    wire_bytes: int = 0
    seconds: float = 0.0


class SetupEstimate(msgspec.Struct):
    """The estimate for the collectives before the first forward, which no step repeats."""

    calls: int = 0
    wire_bytes: int = 0
    seconds: float = 0.0


class Estimate(msgspec.Struct, kw_only=True):
    """The estimated time of a rank's collectives if none overlaps with computation."""

    network: Network
    parts: list[Part]  # of the steps, the longest first
    steps: int  # of the trace, at least 1
    seconds: float  # of all collectives of the steps
    setup: SetupEstimate

    @property
    def seconds_per_step(self) -> float:
        """The average over the trace's steps."""
        return self.seconds / self.steps
