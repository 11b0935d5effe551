"""Progress of each backend as torch's own recorder knows it, since a CPU thread must not query the
device.

Read from torch's sources, 2.6 to 2.13: the status of a backend holds three counters and needs no
query of the device. The list of the ops in flight does query events, so it is read only while a
program stands still. From torch 2.15 on, torch's hooks fill recorders of their own, which can be
read without a query. Their entries are read, not their status: it counts all calls, not
collectives.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from commlens.model.ops import recorder_wire_op
from commlens.tap import recorder_dumps

NEVER = -1
_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_DEFAULT_SIZE = 2000


class Status(NamedTuple):
    """The last collectives of one backend by the backend's own numbering; -1 for none."""

    enqueued: int
    started: int
    """Known only while torch's recorder records when an op starts (``TORCH_NCCL_ENABLE_TIMING``);
    else -1.
    """
    completed: int


class InFlight(NamedTuple):
    """The collectives of one backend that are not known to be complete, by the backend's own
    numbering.
    """

    alone: set[int]
    coalesced: set[int]
    started: set[int]


def statuses() -> dict[str, Status]:
    """Return the status of each backend by its ``uid``; empty if torch's recorder is missing,
    switched off or of another form.
    """
    for answer in recorder_dumps.read_recorders(entries=False, only_active=True):
        status = answer.get("pg_status", {})
        try:
            return {
                uid: Status(
                    int(one["last_enqueued_collective"]),
                    int(one.get("last_started_collective", NEVER)),
                    int(one["last_completed_collective"]),
                )
                for uid, one in status.items()
            }
        except Exception:  # the next recorder is another one, that of gloo
            return {}
    return {}


def in_flight() -> dict[str, InFlight] | None:
    """Return each backend's collectives in flight by its ``uid``, without messages; None if torch's
    recorder does not tell.
    """
    for answer in recorder_dumps.read_recorders(entries=True, only_active=True):
        if "pg_status" not in answer:
            continue
        found = {uid: InFlight(set(), set(), set()) for uid in answer["pg_status"]}
        try:
            for entry in answer.get("entries", []):
                if entry["is_p2p"]:
                    continue
                known = found.setdefault(str(entry["pg_id"]), InFlight(set(), set(), set()))
                number = int(entry["collective_seq_id"])
                # The record that closes a coalesced group. It also closes a batch of messages, with
                # the number of the last collective.
                closes = str(entry["profiling_name"]).endswith("coalesced")
                (known.coalesced if closes else known.alone).add(number)
                if entry["state"] == "started":
                    known.started.add(number)
        except Exception:
            continue
        return found
    return None


EntryKey = tuple[str, int]
"""``"alone"`` and ``"coalesced"`` with a collective's number: the latter is the record that closes
a coalesced group. ``"send"``, ``"recv"`` and ``"batch"`` with a message's number.
"""
Durations = dict[str, dict[EntryKey, int]]
"""By a backend's ``uid``: the durations in ns."""


def durations() -> Durations:
    """Return how long collectives and messages took on the device, as far as torch's recorder has
    measured them; empty if it tells none.
    """
    found: Durations = {}
    try:
        for entry in recorder_dumps.nccl_entries():
            duration_ms = entry.get("duration_ms")
            if duration_ms is None:
                continue
            known = found.setdefault(str(entry["pg_id"]), {})
            title, number = str(entry["profiling_name"]), int(entry["collective_seq_id"])
            if entry["is_p2p"]:
                keys = [(title.split(" ")[0].rpartition(":")[2], int(entry["p2p_seq_id"]))]
            elif title.endswith("coalesced"):
                # It closes a group of collectives or of messages, and carries both numbers: the
                # first one with a number is the one that has made it.
                keys = [("coalesced", number), ("batch", int(entry.get("p2p_seq_id", 0)))]
            else:
                keys = [("alone", number)]
            for key in keys:
                known.setdefault(key, round(duration_ms * 1e6))
    except Exception:  # a recorder of another form
        return {}
    return found


class RecorderEntry(NamedTuple):
    """A collective in a recorder that torch's hooks fill."""

    op: str
    completed: bool
    created_ns: int


def hooked(recorder: str) -> dict[str, list[RecorderEntry]]:
    """Return each group's collectives in a recorder that torch's hooks fill, oldest first, without
    messages; empty if the recorder is off or of another form.
    """
    found: dict[str, list[RecorderEntry]] = {}
    for entry in recorder_dumps.read_recorder(recorder).get("entries", ()):
        try:
            group, is_message = str(entry["process_group"][0]), bool(entry["is_p2p"])
            op = recorder_wire_op(str(entry["profiling_name"]).rpartition(":")[2])
            completed, created_ns = entry["state"] == "completed", int(entry["time_created_ns"])
        except Exception:
            return {}
        if not is_message:
            found.setdefault(group, []).append(RecorderEntry(op, completed, created_ns))
    return found


def capacity() -> int:
    """Return the number of entries in the ring buffer of torch's recorder."""
    for name in _SIZES:
        text = os.environ.get(name, "")
        if text.isdigit():
            return int(text)
    return _DEFAULT_SIZE
