"""The hardware of a node, as data: what changed and when, the parts that the job's ranks use, and
the sources that cannot be read. "GPU 0000:4f:00.0 reported Xid 79 at 10:00:03" is a
``HealthEvent(what="xid", fault="gpu-fault", part="0000:4f:00.0", number=79, at_ns=...)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

Fault = Literal[
    "gpu-fault",
    "gpu-memory",
    "thermal",
    "pcie",
    "network-down",
    "network-errors",
    "storage",
    "host-memory",
    "clock",
]
"""The class of a fault of hardware, or of what a node shares among its processes. ``clock``
explains nothing by itself.
"""

What = Literal[
    "xid",
    "nvswitch-error",
    "gpu-gone",
    "gpu-reset",
    "ecc-uncorrected",
    "ecc-corrected",
    "rows-remapped",
    "gpu-throttled",
    "pcie-error",
    "pcie-error-corrected",
    "pcie-width-fell",
    "memory-error",
    "memory-error-corrected",
    "machine-check",
    "oom-kill",
    "memory-pressure",
    "link-down",
    "link-up",
    "rate-fell",
    "adapter-error",
    "errors-rose",
    "drops-rose",
    "retransmits-rose",
    "nfs-silent",
    "nfs-back",
    "io-error",
    "io-pressure",
    "hung-task",
    "cpu-throttled",
    "swapping",
    "clock-step",
]
"""What changed, or what the kernel reported."""

THERMAL_REASONS: Final = 0x8 | 0x20 | 0x40 | 0x80
"""The bits of NVIDIA's throttle reasons that mean trouble: hardware slowdown, thermal slowdown (by
software and by hardware), power brake.
"""

Value = float | str
Values = dict[str, dict[str, Value]]
"""The values of one source: by part, then by name."""


def gpus_by_index(sources: Mapping[str, Values]) -> dict[int | None, str]:
    """Return the PCI addresses of a node's GPUs by index; an unknown local rank (None) has none."""
    return {
        int(index): address
        for address, values in sources.get("gpu", {}).items()
        if isinstance(index := values.get("index"), (int, float))
    }


class HealthEvent(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One change of a part of a node."""

    what: What
    fault: Fault
    # PCI address, interface, server; "memory", "disk", "cpu", "tcp" or "clock" of the node
    part: str
    at_ns: int  # when it happened or was noticed, Unix ns
    since_ns: int = 0  # it happened after this look at a counter; 0: at_ns is exact
    over: bool = False  # it was well again at the last look
    number: int = 0  # of an Xid
    pid: int = 0  # the process that the kernel names; 0: none
    name: str = ""  # of the counter, or of the process
    before: Value = 0.0
    after: Value = 0.0

    @property
    def first_ns(self) -> int:
        """The earliest time at which it may have happened."""
        return self.since_ns or self.at_ns


class RankPlace(msgspec.Struct, frozen=True, omit_defaults=True):
    """The parts of the node that a rank uses."""

    rank: int
    pid: int = 0
    gpu: str = ""  # PCI address; empty: unknown, or none
    gpu_seen: bool = False  # the driver lists the process there; else it is that of the local rank
    gpu_index: int = -1  # of the GPU on its node; -1: unknown
    nic: str = ""  # the network adapter nearest to the GPU; empty: unknown
    rail: str = ""  # the number of that adapter among those of the node; empty: unknown
    swapped_bytes: float = 0.0  # of its memory, in swap space


class NotRead(msgspec.Struct, frozen=True):
    """A source that cannot be read."""

    source: str
    reason: str  # in a clause, with what would change it


class RasRank(msgspec.Struct, frozen=True, omit_defaults=True):
    """A rank of a communicator, as NCCL's RAS names it."""

    rank: int  # in the communicator
    pid: int = 0
    host: str = ""  # its IP address


class RasCommunicator(msgspec.Struct, frozen=True, omit_defaults=True):
    """A communicator, as NCCL's RAS describes it."""

    name: str
    size: int = 0  # 0: unknown
    pids: list[int] = []  # of its ranks, in their order; 0: unknown; empty: not told
    op: str = ""  # in whose count the ranks differ most
    apart: bool = False  # the ranks have launched different numbers of operations
    behind: list[RasRank] = []  # that launched the fewest; empty: not told
    silent: list[RasRank] = []  # that do not answer, or count as dead


class RasReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer of NCCL's RAS service."""

    answered: bool
    taken_ns: int = 0
    version: str = ""  # of NCCL
    communicators: list[RasCommunicator] = []
    problem: str = ""  # why there is no answer, in a clause


class NodeHealth(msgspec.Struct, omit_defaults=True):
    """The hardware of one node, with the ranks that run there."""

    host: str
    began_ns: int = 0  # the first look, Unix ns; 0: events may be of any time
    taken_ns: int = 0  # the last one
    ranks: list[RankPlace] = []
    networks: list[str] = []  # interfaces that the job uses; empty: unknown
    events: list[HealthEvent] = []  # in the order of their times
    values: dict[str, Values] = {}  # of the last look, by source
    not_read: list[NotRead] = []
    ras: RasReport | None = None
    leaf: str = ""  # the switch that it is connected to; empty: unknown
    rack: str = ""

    def shifted(self, by_ns: int) -> NodeHealth:
        """Return it with other times: the node's clock was ahead or behind."""

        def shift(at_ns: int) -> int:
            return at_ns + by_ns if at_ns else 0

        events = [
            msgspec.structs.replace(event, at_ns=shift(event.at_ns), since_ns=shift(event.since_ns))
            for event in self.events
        ]
        return msgspec.structs.replace(
            self, began_ns=shift(self.began_ns), taken_ns=shift(self.taken_ns), events=events
        )
