"""What NCCL itself told a process's plugin: communicators, operations and transfers between nodes.

Times are Unix ns; 0 if it has not happened or is unknown.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

VERSIONS: Final = "2.27 to 2.30"
"""The versions of NCCL whose interface the plugin was written for; it steps aside for others."""

TransferState = Literal[
    "",
    "waits-for-own-gpu",
    "waits-for-peer",
    "in-network",
    "waits-for-data",
    "flushes",
]
"""What the oldest step under way of a transfer waits for; empty: unknown."""


_UNCOUNTED: Final = 255
"""The highest count of channels: of an operation with more, nothing tells that it has ended."""


class NcclTransfer(msgspec.Struct, frozen=True):
    """One side of a transfer between two ranks on one channel, which has not ended."""

    peer: int  # rank in the communicator
    channel: int
    is_send: bool
    steps: int  # in all
    done: int  # steps that have ended
    state: TransferState = ""
    moved_ns: int = 0  # the last sign of movement


class NcclOp(msgspec.Struct, frozen=True):
    """A collective or message of a communicator."""

    # from 1, of the communicator's collectives, messages, captured calls or replayed collectives
    number: int
    func: str  # NCCL's name: "AllReduce", "Send"
    datatype: str  # "ncclBfloat16"
    count: int  # elements; of an operation that was launched only, perhaps bytes
    root: int = -1  # rank in the communicator; -1: none
    peer: int = -1
    thread: int = 0  # that called, or launched it
    called_ns: int = 0
    returned_ns: int = 0
    launched_ns: int = 0
    started_ns: int = 0  # its kernel, on the first channel
    stopped_ns: int = 0  # on all channels
    channels: int = 0
    started_on: int = 0  # channels
    stopped_on: int = 0
    device_ns: int = 0  # from the kernel's start to its end, by the device's clock
    nccl_number: int = -1  # NCCL's own, for each function; -1: unknown
    captured: bool = False  # into a CUDA graph
    with_kernels: bool = False  # the start and the end of its kernel are told
    is_message: bool = False
    is_replay: bool = False  # launched by a CUDA graph, into which it was captured
    transfers: tuple[NcclTransfer, ...] = ()

    @property
    def has_stopped(self) -> bool:
        """Whether its kernel has ended on all channels."""
        return self.with_kernels and 0 < self.channels <= self.stopped_on < _UNCOUNTED


class NcclCommunicator(msgspec.Struct, frozen=True):
    """A communicator of a process, with its newest operations by number: captured ones first, and
    replayed ones last.
    """

    hash: str  # of all its ranks, as NCCL's RAS service calls it: hexadecimal, without 0x
    name: str  # that its maker gave it; empty if none
    size: int
    rank: int
    nodes: int
    nccl_version: int = 0  # 23007: 2.30.7; 0: unknown
    made_ns: int = 0
    closed_ns: int = 0
    collectives: int = 0  # ever called, without captured ones
    messages: int = 0
    replayed: int = 0  # collectives ever launched by CUDA graphs
    # the highest number of a collective whose kernel has ended
    finished: int = 0
    ops: tuple[NcclOp, ...] = ()


class NcclRecord(msgspec.Struct, frozen=True):
    """The file that the plugin of a process keeps."""

    pid: int
    start_ticks: int
    level: Literal["calls", "kernels", "transfers"] = "calls"
    nccl_version: int = 0
    library: str = ""  # the file of NCCL
    # the plugin has stepped aside, because it does not know this NCCL
    is_other_nccl: bool = False
    communicators: tuple[NcclCommunicator, ...] = ()
    lost: int = 0  # communicators, operations and transfers for which there was no room
    torn: int = 0  # operations that were being written
    # transfers that this process makes for others, which are not recorded
    for_others: int = 0


def version_text(version: int) -> str:
    """Return ``"2.30.7"`` for NCCL's number 23007."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}" if version else "unknown"
