"""The summary of a trace."""

from __future__ import annotations

from traces import Recorder, render, trace

import commlens
from commlens.model.trace import Coverage, Phase, TraceData


def test_totals_of_the_summary_add_up():
    summary = trace().to_summary()
    for rows in (summary.by_mesh_dim, summary.by_phase, summary.by_op):
        assert sum(row.calls for row in rows) == summary.calls
        assert sum(row.wire_bytes for row in rows) == summary.wire_bytes
    inside = sum(row.own_calls for row in summary.by_module)
    assert inside == summary.calls - trace().filter(module=None).calls
    assert summary.by_module[0].calls == inside
    assert sum(why.calls for why in summary.why) == summary.calls


def test_what_is_missing_or_unclassified_is_said():
    rec = Recorder()
    rec.issue("all_reduce", "tp", None, None, 64, 12)
    rec.issue("broadcast", "dp", Phase.FORWARD, None, 64, 13)
    data = rec.finish()
    summary = commlens.Trace(data).to_summary()
    assert (
        summary.coverage
        == "All 2 dispatched collectives are recorded; 2 unclassified: all_reduce at train.py:12"
        " (1) and broadcast at train.py:13 (1)."
    )
    assert not summary.complete
    for line in (14, 15):
        rec.issue("reduce", "tp", None, None, 64, line)
    coverage = commlens.Trace(rec.finish()).to_summary().coverage
    assert coverage.endswith(
        "broadcast at train.py:13 (1), reduce at train.py:14 (1) and 1 other place."
    )
    data.coverage = Coverage(5, 2, 0, ["Symmetric memory is not seen."])
    text = render(commlens.Trace(data).to_summary())
    assert (
        "2 of 5 dispatched collectives are recorded" in text
        and "Symmetric memory is not seen." in text
    )


def test_an_empty_trace():
    empty = commlens.Trace(TraceData(rank=1, world_size=2))
    assert (
        render(empty.to_summary())
        == "No collectives, rank 1 of 2.\n\nNo collective was dispatched, so none is missing.\n"
    )
    assert empty.to_rows() == [] and empty.counts() == {}
