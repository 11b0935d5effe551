"""The estimate of a network's time."""

from __future__ import annotations

from commlens.model.network import Estimate, Network, SetupEstimate


def test_the_average_step() -> None:
    network = Network(intra_bandwidth=1e9, inter_bandwidth=1e8)
    estimate = Estimate(network=network, parts=[], steps=4, seconds=2.0, setup=SetupEstimate())
    assert estimate.seconds_per_step == 0.5
