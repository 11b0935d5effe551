"""torch's own recorder, args for what a CPU thread may not ask a device: how far each group has come.

Only the per-group status is read (three counters), never the entries, about once a second and from the watchdog thread.
Seen on gloo with torch 2.13.0; that NCCL fills the same counters is taken from torch's sources.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import torch._C._distributed_c10d as _c10d


class GroupStatus(NamedTuple):
    """Counters of one group: how many collectives were enqueued and how many are complete, by torch's own numbering."""

    enqueued: int
    completed: int


def group_statuses() -> dict[str, GroupStatus]:
    """By torch's process-local group id; empty where this torch has no recorder, or it is switched off."""
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(_c10d, name, None)
        if dump is None:
            continue
        try:
            status: dict[str, Any] = json.loads(dump(includeCollectives=False, onlyActive=False)).get("pg_status", {})
            return {
                key: GroupStatus(int(value["last_enqueued_collective"]), int(value["last_completed_collective"]))
                for key, value in status.items()
            }
        except Exception:  # whatever it answers instead, nothing is known
            continue
    return {}


def group_id(process_group: Any) -> str | None:
    """The id under which torch's recorder files a group; None where it cannot be told."""
    try:
        return str(process_group._id())
    except Exception:
        return None
