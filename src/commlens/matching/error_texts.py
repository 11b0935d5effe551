"""Recognise errors by their text: a peer's failure, a mismatch between ranks, a refusal by strict
verification.
"""

from __future__ import annotations

import re

# Raised by gloo, NCCL and torch's store when the other side failed or a wait timed out (torch 2.6
# to 2.15), or by Ctrl-C in a wait.
_CLOSED_TEXT = r"closed by peer|reset by peer|broken pipe|connection (was )?(closed|refused|reset)"
# gloo's monitored_barrier has texts of its own: this one on rank 0, and "successfully reached" on
# the ranks that wait for rank 0.
_TIMEOUT_TEXT = r"timed? ?out|timeout|failed to pass monitoredBarrier"
_PEER = re.compile(
    rf"{_CLOSED_TEXT}|{_TIMEOUT_TEXT}|connection (was )?aborted|socket closed|"
    r"remote process exited|network error|ncclRemoteError|ncclSystemError|peer closed|"
    r"DistNetworkError|failed to (recv|send|connect)|no route to host|process group has been (shut"
    r" ?down|destroyed|aborted)|"
    r"successfully reached monitoredBarrier|"
    r"communicator was aborted|pair closure|KeyboardInterrupt|rank \d+ .*"
    r" (left|failed)|SignalException",
    re.IGNORECASE,
)
_CLOSED = re.compile(_CLOSED_TEXT, re.IGNORECASE)
_TIMEOUT = re.compile(_TIMEOUT_TEXT, re.IGNORECASE)
# Wider: may be about a peer.
_PERHAPS_PEER = re.compile(
    r"by peer|reset|time[d ]*out|connect|remote|abort|shut ?down", re.IGNORECASE
)
# Raised by the backend when two ranks' tensors do not match; the records say which rank is at
# fault.
_MISMATCH = re.compile(
    r"EnforceNotMet|enforce fail|preamble|op\.nbytes|gloo/transport|mismatch between"
    r" collectives|CollectiveFingerPrint|"
    r"invalid (tensor|collective)|unexpected (size|length)|size mismatch",
    re.IGNORECASE,
)
# Raised by commlens's strict verification on every rank that it refuses a collective.
_REFUSAL = re.compile(r"\bDistributedOperationException\b")


def is_peer_error(text: str | None) -> bool:
    """Return whether an error says that another rank failed, or that a wait took too long."""
    return _PEER.search(text or "") is not None


def is_closed_connection(text: str | None) -> bool:
    """Return whether an error says that the other side's system closed a connection: the process
    there has ended, or its machine.
    """
    return _CLOSED.search(text or "") is not None


def is_timeout(text: str | None) -> bool:
    """Return whether an error says that a wait took too long."""
    return _TIMEOUT.search(text or "") is not None


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
