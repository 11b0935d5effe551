"""Recognise errors by their text: a peer's failure, a mismatch between ranks, a refusal by strict
verification.
"""

from __future__ import annotations

import re
from typing import Final, Literal, get_args

Consequence = Literal["unspecific", "closed", "network", "timeout", "aborted"]
"""An error that another rank's fault may have caused, the nearest to the cause first.

``unspecific``: the library's own text tells no cause, so it may be this rank's own error.
``closed``: a peer's system closed a connection. ``network``: a peer failed, or was not reached.
``timeout``: a wait took too long. ``aborted``: this rank's own watchdog, launcher or user gave up.
"""

# The texts of torch 2.6 to 2.15, gloo, NCCL and RCCL 2.18 to 2.28, nccl2, and HCCL of CANN 7 and 8.
# gloo's monitored_barrier has texts of its own: "failed to pass" on rank 0, and "successfully
# reached" on the ranks that wait for rank 0.
_CONSEQUENCES: Final[dict[Consequence, str]] = {
    "closed": r"closed by (remote )?peer|reset by peer|broken pipe"
    r"|connection (was )?(closed|refused|reset)",
    "network": r"remote process exited|rank \d+ .* (left|failed)|peer closed|socket closed"
    r"|network error|ncclRemoteError|DistNetworkError|no route to host"
    r"|failed to (recv|send|connect)|socket (recv|send) failed|connection (was )?aborted"
    r"|NET/IB ?: .{0,120}ompletion .{0,120}(status=|error )",
    "timeout": r"time[sd]? ?out|failed to pass monitoredBarrier|successfully reached monitored"
    r"|Remote Rank did not send|notify record from remote rank|pair closure",
    "aborted": r"process group has been (shut ?down|destroyed|aborted)|communicator was aborted"
    r"|KeyboardInterrupt|SignalException",
    "unspecific": r"[NR]CCL\b.{0,200}\b(internal|unhandled system) error|NCCL operation failed"
    r"|ncclInternalError|ncclSystemError|HCCL (function )?error",
}
_PATTERNS: Final = {name: re.compile(text, re.I) for name, text in _CONSEQUENCES.items()}
# Wider: may be about a peer.
_PERHAPS_PEER = re.compile(
    r"by peer|reset|time[d ]*out|connect|remote|abort|shut ?down", re.IGNORECASE
)
# Raised by the backend when two ranks' tensors do not match; the records say which rank is at
# fault.
_MISMATCH = re.compile(
    r"EnforceNotMet|enforce fail|preamble|op\.nbytes|gloo/transport|mismatch between"
    r" collectives|CollectiveFingerPrint|"
    r"message truncated : receiving|collective mismatch error|mismatched collective|"
    r"invalid (tensor|collective)|unexpected (size|length)|size mismatch",
    re.IGNORECASE,
)
_REFUSED_ADDRESS = re.compile(
    r"(?:connectFullMesh|connecting).{0,300}connection refused.{0,80}"
    r"remote=\[?([^\]\s]+?)\]?:(\d+)",
    re.IGNORECASE | re.DOTALL,
)
# Raised by commlens's strict verification on every rank that it refuses a collective.
_REFUSAL = re.compile(r"\bDistributedOperationException\b")


Failure = Literal[
    "memory",
    "refused",
    "broken-device",
    "no-device",
    "busy-device",
    "connection",
    "device",
    "crashed",
    "interrupted",
]
"""What a failed program's error is about, for whoever starts it again.

``memory``: there was not enough. ``refused``: a server knows the request and refuses it.
``broken-device``: a GPU or its link does not work any more. ``no-device``: the process may use no
GPU. ``busy-device``: another process has it. ``connection``: a network, a server or
a shared file system did not answer. ``device``: a GPU's error that does not say whether the program
or the device is at fault. ``crashed``: by a signal of its own, as Python's faulthandler tells.
``interrupted``: by Ctrl-C.
"""

# The exceptions of torch, of the standard library, requests, urllib3, aiohttp and botocore, the
# texts of CUDA, and errno's names on Linux. The first that matches counts.
_FAILURES: Final[dict[Failure, str]] = {
    "memory": r"\b(?:\w*OutOfMemoryError|MemoryError)\b|out of memory",
    "refused": r"\b40[0134] Client Error|\bHTTP Error 40[0134]\b",
    "broken-device": r"uncorrectable (?:ECC|NVLink)|over nvlink|hardware error",
    "no-device": r"no CUDA-capable|No CUDA GPUs|unsupported display driver"
    r"|[Dd]river/library version mismatch",
    "busy-device": r"busy or unavailable",
    "connection": r"\b\w*(?:Connection|BrokenPipe|Timeout|URL|HTTP|DistNetwork|DistStore"
    r"|IncompleteRead|Protocol|Disconnected|MaxRetry|ChunkedEncoding)\w*Error\b"
    r"|RemoteDisconnected|\bIncompleteRead\b|\b(?:Read|Connect)Timeout\b"
    r"|\[Errno (?:5|70|110|111|112|113|116|121)\]|Stale file handle|Remote I/O error"
    r"|Service ?Unavailable|Too Many Requests|SlowDown|Temporary failure in name resolution"
    r"|couldn't connect|\b[Tt]imed out\b",
    "device": r"CUDA error|cuda error|cuDNN|CUBLAS_STATUS|HIP error",
    "crashed": r"^Fatal Python error: (?:Segmentation fault|Bus error|Abort|Illegal|Floating)",
    "interrupted": r"^(?:KeyboardInterrupt|SystemExit: 0)",
}
_FAILURE_PATTERNS: Final = {name: re.compile(text) for name, text in _FAILURES.items()}


# torch 2.1 to 2.15: CUDACachingAllocator.cpp
_IN_USE = re.compile(
    r"(?P<other>Process \d+ has|this process has) (?P<size>[\d.]+) (?P<unit>[KMG])iB"
)
_ALLOCATED: Final = re.compile(
    r"(?P<size>[\d.]+) (?P<unit>[KMG])iB is (?:allocated|reserved) by PyTorch"
)
_MIB: Final = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}


def is_memory_of_others(text: str) -> bool:
    """Return whether an error says that other processes use more of the GPU's memory than the one
    that got none. In a container torch does not know its own process among them: it is taken to be
    the smallest that can hold what torch has allocated.
    """
    used: dict[str, list[float]] = {"t": [], "P": []}
    for found in _IN_USE.finditer(text):
        used[found["other"][0]].append(_mib(found))
    own, others = sum(used["t"]), used["P"]
    if not used["t"]:
        least = sum(_mib(found) for found in _ALLOCATED.finditer(text))
        own = min((each for each in others if each >= least > 0), default=sum(others))
        return sum(others) - own > own
    return sum(others) > own


def _mib(found: re.Match[str]) -> float:
    return float(found["size"]) * _MIB[found["unit"]]


def failure_of(text: str) -> Failure | None:
    """Return what an error is about; None if its text does not show that."""
    return next((name for name, found in _FAILURE_PATTERNS.items() if found.search(text)), None)


def consequence_of(text: str | None) -> Consequence | None:
    """Return how an error may follow from another rank's; None if its text does not show that."""
    return next((name for name, found in _PATTERNS.items() if found.search(text or "")), None)


def distance_to_cause(text: str | None) -> int:
    """Return how far an error is from the cause: 0 if it may be the cause itself."""
    found = consequence_of(text)
    return get_args(Consequence).index(found) + 1 if found is not None else 0


def is_peer_error(text: str | None) -> bool:
    """Return whether an error may follow from another rank's: that failed, or that did not come."""
    return consequence_of(text) is not None


def is_closed_connection(text: str | None) -> bool:
    """Return whether an error says that the other side's system closed a connection: the process
    there has ended, or its machine.
    """
    return _PATTERNS["closed"].search(text or "") is not None


def refused_address(text: str | None) -> str:
    """Return the address at which no process answered gloo while it made a group; empty if the
    error does not name it.
    """
    found = _REFUSED_ADDRESS.search(text or "")
    return f"{found[1]}:{found[2]}" if found is not None else ""


def is_timeout(text: str | None) -> bool:
    """Return whether an error says that a wait took too long."""
    return _PATTERNS["timeout"].search(text or "") is not None


def may_be_peer_error(text: str) -> bool:
    """Return whether an error could be about a peer: unless it surely is not, peers may still meet
    the collective that raised it.
    """
    return is_peer_error(text) or _PERHAPS_PEER.search(text) is not None


def is_mismatch_error(text: str | None) -> bool:
    """Return whether an error is one that a backend raises for mismatched collectives."""
    return _MISMATCH.search(text or "") is not None


def is_refusal(text: str | None) -> bool:
    """Return whether an error is strict verification's. It is never the cause itself: the records
    show the cause.
    """
    return _REFUSAL.search((text or "").split(":", 1)[0]) is not None
