"""Events that both timelines in Chrome's trace event JSON have: the names of processes and
tracks.
"""

from __future__ import annotations

from typing import Any


def name_rank(rank: int, host: str = "") -> list[dict[str, Any]]:
    """Return the events that name a rank's process, and sort it among the others."""
    name = f"rank {rank}{f' ({host})' if host else ''}"
    return [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}},
        {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}},
    ]


def name_track(rank: int, track: int, name: str) -> dict[str, Any]:
    """Return the event that names a track of a rank's process."""
    return {"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": name}}
