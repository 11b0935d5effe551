"""The bandwidth that collectives on devices reach, and what their links carry at most.

Bandwidths are those of the bus, as nccl-tests counts them: what passes the narrowest link, so that
they can be compared with its nominal rate whatever the op and the number of members. (All-to-all
is left out: its traffic passes each link in another share on several nodes.) A group within
a node is compared with NVLink, or with PCIe where a GPU is known to have no NVLink; one on several
nodes with the adapters nearest to its GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from statistics import median
from typing import Final, NamedTuple

import msgspec

from commlens.model.collective import ProcessGroup
from commlens.model.grouping import grouped
from commlens.model.health import NodeHealth, RankPlace
from commlens.model.ranklog import RankLog
from commlens.model.wire_bytes import wire_bytes
from commlens.speed.device_times import TimedCollective, TransferKind, usual_transfers
from commlens.text import group_phrase

_PCIE_LANE: Final = (0.25e9, 0.5e9, 0.985e9, 1.969e9, 3.938e9, 7.563e9)
"""Bytes a second in one direction, by generation."""

_SHOWN: Final = 5


class NominalRate(NamedTuple):
    """What the links of a group carry at most, bytes a second in one direction."""

    rate: float
    links: str  # "PCIe 5.0 x16"


class ReachedRate(msgspec.Struct):
    """The bus bandwidth of one kind of transfer in one group, and that of its links."""

    op: str
    payload_bytes: int  # what each rank contributes
    group: str  # "group dp [0-3]"
    bytes_s: float
    nominal_bytes_s: float
    links: str  # "PCIe 5.0 x16"

    @property
    def share(self) -> float:
        """The part of the nominal rate that is reached."""
        return self.bytes_s / self.nominal_bytes_s


def item_size(dtype: str) -> int:
    """Return the bytes of an element: ``"bfloat16"`` has 2, ``"bool"`` 1."""
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


def bus_rate(kind: TransferKind, ns: float) -> float:
    """Return the bus bandwidth of a transfer that took some time; 0 if its op is not compared."""
    size = kind.numel * item_size(kind.dtype)
    # of the output, each as large as what one rank contributes; 0: the op is not compared
    parts = {"all_reduce": 1, "reduce_scatter": 1, "all_gather": kind.members}.get(kind.op, 0)
    passing = wire_bytes(kind.op, kind.members, size, size * parts) if parts else 0
    return passing / max(1.0, ns) * 1e9


def reached_rate(
    kind: TransferKind, group: ProcessGroup, ns: float, nodes: Iterable[NodeHealth]
) -> ReachedRate | None:
    """Return the bus bandwidth of transfers that take some time; None if their op has none, the
    nominal rate of their links is not known, or they reach more: then other links carry them.
    """
    nominal, rate = nominal_rate(group.ranks, nodes), bus_rate(kind, ns)
    if nominal is None or not 0 < rate <= nominal.rate:
        return None
    payload = kind.numel * item_size(kind.dtype)
    return ReachedRate(kind.op, payload, group_phrase(group), rate, *nominal)


def reached_rates(timed: Iterable[TimedCollective], logs: Iterable[RankLog]) -> list[ReachedRate]:
    """Return the bus bandwidths of the transfers that take most time, where the nominal rate of
    their links is known.

    Args:
        timed: the collectives on devices.
        logs: of the ranks, with the hardware of their nodes.
    """
    nodes = [log.health for log in logs if log.health is not None]
    transfers = sorted(
        (
            (kind, usual)
            for kind, groups in usual_transfers(timed).items()
            for usual in groups.values()
        ),
        key=lambda each: -each[1].ns * each[1].times,
    )
    found = (reached_rate(kind, usual.group, usual.ns, nodes) for kind, usual in transfers)
    return [each for each in found if each is not None][:_SHOWN]


def nominal_rate(ranks: Collection[int], nodes: Iterable[NodeHealth]) -> NominalRate | None:
    """Return what the links between some ranks carry at most; None if that is not known of all."""
    places = {place.rank: (node, place) for node in nodes for place in node.ranks}
    if not all(rank in places for rank in ranks):
        return None
    by_host = grouped((places[rank][0].host, places[rank]) for rank in ranks)
    rates = (
        [_of_gpu(*each) for each in next(iter(by_host.values()))]
        if len(by_host) == 1
        else [_of_adapters(each) for each in by_host.values()]
    )
    known = [rate for rate in rates if rate is not None]
    return min(known, default=None) if len(known) == len(rates) else None


def _of_gpu(node: NodeHealth, place: RankPlace) -> NominalRate | None:
    values = node.values.get("gpu", {}).get(place.gpu, {})
    links, mb_s, generation, lanes = (
        value if isinstance(value := values.get(name), float) else None
        for name in ("nvlinks", "nvlink_mb_s", "pcie_generation_max", "pcie_width_max")
    )
    if links and mb_s:
        return NominalRate(links * mb_s * 1e6, f"{links:.0f} NVLinks of {mb_s / 1000:.0f} GB/s")
    if links == 0 and generation and lanes and generation <= len(_PCIE_LANE):
        lane = _PCIE_LANE[int(generation) - 1]
        return NominalRate(lane * lanes, f"PCIe {generation:.0f}.0 x{lanes:.0f}")
    return None


def _of_adapters(each: Sequence[tuple[NodeHealth, RankPlace]]) -> NominalRate | None:
    """Return what the different adapters of some ranks of a node carry together."""
    node = each[0][0]
    gbits = [
        node.values.get("infiniband", {}).get(nic, {}).get("rate_gbit")
        for nic in {place.nic for _, place in each}
    ]
    known = [gbit for gbit in gbits if isinstance(gbit, float) and gbit > 0]
    if len(known) < len(gbits):
        return None
    number = f"{len(known)} adapters" if len(known) > 1 else "one adapter"
    return NominalRate(sum(known) / 8 * 1e9, f"{number} of {median(known):.0f} Gbit/s a node")
