"""The timeline of a trace: waits that overlap get lanes of their own."""

from __future__ import annotations

import json

from traces import training

import commlens
from commlens.reports.converted.perfetto_traces import trace_to_perfetto


def test_slices_of_a_track_nest() -> None:
    data = training(steps=1)
    for number, event in enumerate(data.events):  # every wait ends while the next ones go on
        event.wait_ended_ns = event.started_ns + 250_000 + number
    content, left_out = trace_to_perfetto([(0, 0, commlens.Trace(data).to_rows())])
    assert left_out == 0
    tracks: dict[int, list[tuple[float, float]]] = {}
    for event in json.loads(content)["traceEvents"]:
        if event["ph"] == "X":
            tracks.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(tracks) > 1
    for spans in tracks.values():
        open_ends: list[float] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 1e-6
            open_ends.append(end)
