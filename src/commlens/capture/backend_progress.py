"""Progress of each group as torch's own recorder knows it, since a CPU thread must not query the device.

Only the status of each group is read (three counters), never the entries, about once a second and from the watchdog thread.
Seen on gloo with torch 2.13.0; torch's sources say that NCCL fills the same counters.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import torch._C._distributed_c10d as _c10d


class GroupStatus(NamedTuple):
    """The collectives of one group that are enqueued and complete, by torch's own numbering."""

    enqueued: int
    completed: int


def group_statuses() -> dict[str, GroupStatus]:
    """Return the status of each group by torch's process-local group id; empty if torch's recorder is missing or switched off."""
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
        except Exception:  # an answer of another form: nothing is known
            continue
    return {}


def group_id(process_group: Any) -> str | None:
    """Return the id under which torch's recorder files a group; None if torch does not say."""
    try:
        return str(process_group._id())
    except Exception:
        return None
