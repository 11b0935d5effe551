"""The durations that torch's Flight Recorder measured on an accelerator, which it does under
TORCH_NCCL_ENABLE_TIMING=1.

Its entries hold no sequence number of ours. An entry was created while our collective was being
issued, so their moments tell which belong together. Tried on torch 2.13.0 with gloo, whose entries
have moments but no durations; on NCCL by the format only.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import Any

from commlens.model.trace import TraceEvent
from commlens.tap import torch_offers

_MS = 1_000_000


def entries() -> list[dict[str, Any]]:
    """Return the entries of torch's recorders; none if this torch has none, or none is on."""
    found = (content.get("entries") for content in torch_offers.read_recorders(entries=True))
    return [entry for entries in found if isinstance(entries, list) for entry in entries]


def add_durations(
    events: Iterable[TraceEvent], recorded: Sequence[dict[str, Any]], started_unix_ns: int
) -> None:
    """Set the duration of the events during whose issue an entry with a duration was created."""
    timed = sorted(
        (entry["time_created_ns"], entry["duration_ms"])
        for entry in recorded
        if isinstance(entry.get("duration_ms"), (int, float))
        and isinstance(entry.get("time_created_ns"), int)
    )
    moments = [moment for moment, _ in timed]
    for event in events:
        if event.count > 1 or not event.returned_ns:
            continue
        first = bisect.bisect_left(moments, started_unix_ns + event.started_ns)
        last = bisect.bisect_right(moments, started_unix_ns + event.returned_ns)
        if last - first == 1:  # another thread's may have been created meanwhile
            event.duration_ns = round(timed[first][1] * _MS)
