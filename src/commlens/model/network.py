"""A network and an estimate of what collectives would take on it, as data. reading/network.py holds the rules."""

from __future__ import annotations

from typing import Final

import msgspec

US: Final = 1e-6


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """A network. Bandwidths are of one rank in one direction, in bytes per second; latencies of one hop, in seconds."""

    name: str = "the network that was given"
    intra_bandwidth: float
    inter_bandwidth: float
    intra_latency: float = 1.9 * US
    inter_latency: float = 4.0 * US
    ranks_per_node: int = 8
    source: str = ""  # where the figures come from


class Part(msgspec.Struct):
    """What one mesh dimension (or group) would take, for one rank."""

    name: str
    ranks: int
    nodes: int  # that one such group spans
    calls: int = 0
    wire_bytes: int = 0
    seconds: float = 0.0


class Estimate(msgspec.Struct, kw_only=True):
    """An estimate of the time that a rank's collectives would take, were none hidden behind computation."""

    network: Network
    parts: list[Part]  # the longest first
    steps: int  # the trace's, at least 1
    seconds: float  # of everything
    step_time: float | None = None  # seconds, as given

    @property
    def seconds_per_step(self) -> float:
        """The average over the trace's steps."""
        return self.seconds / self.steps

    @property
    def share(self) -> float | None:
        """Part of a step that it would be; more than 1 where it cannot fit. None without a step's time."""
        return self.seconds_per_step / self.step_time if self.step_time else None
