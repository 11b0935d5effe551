"""The rules of Chrome's trace event JSON that Perfetto's importer holds a file to: what breaks them
it drops, and counts as errors.

Google's "Trace Event Format", and trace_processor's json_trace_parser and slice_tracker.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from typing import Any

_ROUNDING_US = 1.0  # times of a clock since 1970, in us, as doubles


def violations(content: bytes) -> list[str]:
    """What Perfetto would not take, in sentences."""
    document = json.loads(content)
    found: list[str] = []
    spans: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    begins: Counter[tuple[Any, ...]] = Counter()
    flows: dict[Any, list[str]] = defaultdict(list)
    for event in document["traceEvents"]:
        kind = event["ph"]
        if not isinstance(event.get("pid"), int):
            found.append(f"no process: {event}")
        if kind == "M":
            if event["name"].endswith("_name") and not isinstance(event["args"]["name"], str):
                found.append(f"metadata without a name: {event}")
            continue
        if (
            not isinstance(event.get("ts"), (int, float))
            or event["ts"] < 0
            or not isinstance(event.get("tid"), int)
        ):
            found.append(f"no time or thread: {event}")
            continue
        track = (event["pid"], event["tid"])
        if kind == "X":
            if event["dur"] < 0:
                found.append(f"ends before it begins: {event}")
            spans[track].append((event["ts"], event["ts"] + event["dur"]))
        elif kind == "B":
            spans[track].append((event["ts"], float("inf")))
        elif kind in "be":
            key = (
                event["pid"],
                event["cat"],
                json.dumps(event.get("id2") or event.get("id")),
                event["name"],
            )
            begins[key] += 1 if kind == "b" else -1
            if begins[key] < 0:
                found.append(f"an async end before its begin: {event}")
        elif kind in "sf":
            flows[event["id"]].append(kind)
            if kind == "f" and event.get("bp") != "e":
                found.append(f"an arrow that would bind to the next slice: {event}")
        else:
            found.append(f"an unknown kind of event: {event}")
    found += [f"an async slice without an end: {key}" for key, number in begins.items() if number]
    found += [
        f"arrow {number} is {kinds}"
        for number, kinds in flows.items()
        if sorted(kinds) != ["f", "s"]
    ]
    found += [
        f"on track {track} a slice ends inside another one: {span}"
        for track, all_ in spans.items()
        for span in _crossing(all_)
    ]
    return found


def _crossing(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    crossing, ends = [], list[float]()
    for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while ends and ends[-1] <= start + _ROUNDING_US:
            ends.pop()
        if ends and end > ends[-1] + _ROUNDING_US:
            crossing.append((start, end))
        ends.append(end)
    return crossing
