"""Recognise errors whose text decides what to do: a GPU that two ranks use, a port that is taken, a
store that cannot be reached.

The texts are those of NCCL 2.18 to 2.28 and of torch 1.13 to 2.15.
"""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple

ErrorKind = Literal[
    "shared-gpu",
    "no-such-gpu",
    "device-assert",
    "bad-kernel",
    "shared-memory",
    "port-taken",
    "not-all-joined",
    "store-unreachable",
    "store-lost",
    "rendezvous",
    "no-interface",
    "old-driver",
    "fabric-manager",
    "network-link",
    "versions",
    "unused-parameters",
]
"""What the error is about.

``shared-gpu``: two ranks use one GPU. ``no-such-gpu``: the node shows fewer GPUs than ranks.
``device-assert``: a check in a kernel of the rank's program failed. ``bad-kernel``: such a kernel
failed otherwise. ``shared-memory``: /dev/shm is full.
``port-taken``: another process listens on the store's port. ``not-all-joined``: fewer processes
came to the store than the world size says. ``store-unreachable``: the store's address does not
answer. ``store-lost``: the store's process ended. ``rendezvous``: not all nodes came to torchrun's
rendezvous. ``no-interface``: NCCL finds no network interface. ``old-driver``: a node's driver is
older than CUDA needs. ``fabric-manager``: the service for NVSwitch does not run.
``network-link``: an InfiniBand connection broke.
``versions``: a message has another length than its receiver's NCCL sends. ``unused-parameters``:
DDP waits for gradients that were not computed.
"""

_TEXT_MAX: Final = 4000
_KINDS: Final[tuple[tuple[ErrorKind, re.Pattern[str]], ...]] = (
    ("shared-gpu", re.compile(r"Duplicate GPU detected")),
    ("no-such-gpu", re.compile(r"CUDA error: invalid device ordinal")),
    ("device-assert", re.compile(r"CUDA error: device-side assert")),
    (
        "bad-kernel",
        re.compile(
            r"CUDA error: (?:an illegal memory access|misaligned address"
            r"|unspecified launch failure|an illegal instruction)"
        ),
    ),
    (
        "shared-memory",
        re.compile(
            r"/dev/shm\b.{0,200}(?:No space left|error 28)|No space left on device.{0,80}/dev/shm"
            r"|killed by signal: Bus error|insufficient shared memory \(shm\)",
            re.DOTALL,
        ),
    ),
    ("port-taken", re.compile(r"EADDRINUSE|[Aa]ddress already in use")),
    (
        "not-all-joined",
        re.compile(
            r"waiting for clients\. (?P<detail>\d{1,7}/\d{1,7}) clients joined"
            r"|world_size=(?P<size>\d{1,7}),"
            r" (?:num_workers_joined|worker_count)=(?P<joined>\d{1,7})"
        ),
    ),
    (
        "store-unreachable",
        re.compile(
            r"client socket has (?:timed out|failed).{0,80} to connect to"
            r" (?P<detail>\([^)\n]{1,255}\)|\[[^\n]{1,255}?\]:\d{1,5})"
        ),
    ),
    (
        "store-lost",
        re.compile(r"RendezvousConnectionError|connection to the C10d store has failed"),
    ),
    ("rendezvous", re.compile(r"Rendezvous(?:Timeout|Closed|GracefulExit)Error")),
    ("no-interface", re.compile(r"[Nn]o socket interface found")),
    ("old-driver", re.compile(r"CUDA driver version is insufficient|driver .{0,40} is too old")),
    ("fabric-manager", re.compile(r"Error 802: system not yet initialized|'system not yet init")),
    (
        "network-link",
        re.compile(
            r"NET/IB ?: .{0,120}ompletion .{0,120}(?:status=|error )(?:12\b|IBV_WC_RETRY_EXC_ERR)"
        ),
    ),
    ("versions", re.compile(r"Message truncated ?: received \d+ bytes instead of \d+")),
    (
        "unused-parameters",
        re.compile(r"Expected to have finished reduction in the prior iteration"),
    ),
)
_OWN: Final = (
    "shared-gpu",
    "no-such-gpu",
    "device-assert",
    "bad-kernel",
    "shared-memory",
    "port-taken",
    "no-interface",
    "old-driver",
    "fabric-manager",
    "unused-parameters",
)
_PEER_HOST: Final = re.compile(
    r"(?:by|from|to) (?:remote )?peer (?P<host>[A-Za-z0-9][\w.:-]{0,254}?)<\d{1,5}>"
)
_LOOPBACK: Final = re.compile(r"localhost$|127\.")


class KnownError(NamedTuple):
    """What an error's text decides."""

    kind: ErrorKind
    detail: str = ""  # the address that does not answer; how many joined, of how many


def known_error(text: str | None) -> KnownError | None:
    """Return what an error's text decides; None if it decides nothing."""
    text = (text or "")[:_TEXT_MAX]
    for kind, pattern in _KINDS:
        if found := pattern.search(text):
            fields = found.groupdict()
            joined = f"{fields['joined']}/{fields['size']}" if fields.get("joined") else ""
            return KnownError(kind, fields.get("detail") or joined)
    return None


def peer_host(text: str | None) -> str:
    """Return the host or address of the peer that an error of NCCL names; empty if none, or if it
    is this machine's name for itself.
    """
    found = _PEER_HOST.search((text or "")[:_TEXT_MAX])
    return found["host"] if found is not None and not _LOOPBACK.match(found["host"]) else ""


def is_kernel_error(text: str | None) -> bool:
    """Return whether an error is of a kernel of the rank's program."""
    known = known_error(text)
    return known is not None and known.kind in ("device-assert", "bad-kernel")


def is_own_error(text: str | None) -> bool:
    """Return whether an error's text shows that no peer's end caused it, whatever words of peers it
    holds: NCCL calls a full /dev/shm a system error, as it does a broken connection.
    """
    known = known_error(text)
    return known is not None and known.kind in _OWN
