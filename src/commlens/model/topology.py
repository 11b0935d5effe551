"""Where hosts are, as data: on which leaf switch, in which rack."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from commlens.model.grouping import natural


class HostPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a host is; what is empty is not known."""

    leaf: str = ""
    rack: str = ""
    rails: list[str] = []  # the network adapter of each GPU, in the order of the GPUs


@dataclass
class Inventory:
    """Where hosts are, as the user or Slurm says it."""

    hosts: Mapping[str, HostPlace] = field(default_factory=dict)  # by their short names
    pattern: re.Pattern[str] | None = None  # of a host's name, with the groups leaf and rack
    rails: Sequence[str] = ()  # of every host that has none of its own

    def of(self, host: str) -> HostPlace:
        """Return what is known of a host."""
        place = self.hosts.get(host.partition(".")[0], HostPlace())
        match = self.pattern.search(host) if self.pattern is not None and host else None
        told = match.groupdict() if match is not None else {}
        return HostPlace(
            place.leaf or told.get("leaf") or "",
            place.rack or told.get("rack") or "",
            place.rails or list(self.rails),
        )


def rail_of(nic: str, nics: Sequence[str]) -> str:
    """Return the number of an adapter's rail: its place among all adapters of the node's GPUs, or
    nothing if all GPUs share one.
    """
    names = sorted({*nics} - {""}, key=natural)
    return str(names.index(nic)) if nic in names and len(names) > 1 else ""
