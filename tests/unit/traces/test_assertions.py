"""``assert_collectives`` and golden files."""

from __future__ import annotations

import json
import re

import msgspec
import pytest
from traces import Recorder, block, one_event, training

import commlens
from commlens.model.collective import ProcessGroup
from commlens.model.trace import Coverage, Phase, TraceData
from commlens.testing import assert_collectives, assert_matches_golden
from commlens.traces.assertions import condense


def failure(*args: object, **more: object) -> str:
    with pytest.raises(AssertionError) as caught:
        assert_collectives(commlens.Trace(training()), *args, **more)  # type: ignore[arg-type]
    return str(caught.value)


def test_what_holds():
    trace = commlens.Trace(training())
    assert_collectives(trace)
    assert_collectives(trace, {"all_gather": 8, "all_reduce": 16, "reduce_scatter": 8})
    assert_collectives(
        trace, {"all_reduce": 6, "reduce_scatter": 8, "broadcast": 0}, phase="backward"
    )
    assert_collectives(trace, counts={"dp": 16, "tp": 16}, by="mesh_dim", bytes_at_most=340_192)
    assert_collectives(
        trace, {("tp", "all_reduce"): 6}, by=("mesh_dim", "op"), module="layers.*.net1"
    )
    assert_collectives(trace, {"MLP.layers.0.net2": 2}, by="module", module="layers.0.net2")
    assert_collectives(trace, {Phase.FORWARD: 16, Phase.BACKWARD: 14, Phase.OUTSIDE: 2}, by="phase")
    assert_collectives(trace, 32)
    assert_collectives(trace, 0, phase="optimizer", none_on=["dp", "tp"])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"module": "layers.0.nett2"},
            "The trace has no module 'layers.0.nett2'. Did you mean 'layers.0.net2'?",
        ),
        (
            {"module": ["layers.0.net2", "layers.9"]},
            "The trace has no module 'layers.9'. Did you mean 'layers.3'?",
        ),
        ({"module": "layers.*.nett2"}, "The trace has no module 'layers.*.nett2'."),
        ({"mesh_dim": "ttp"}, "The trace has no mesh dimension 'ttp'. Did you mean 'tp'?"),
        (
            {"group": "xyz"},
            "The trace has no group 'xyz'. There are dp, 4, mesh_dp, tp, 5, mesh_tp.",
        ),
        ({"none_on": "ttp"}, "The trace has no group 'ttp'. Did you mean 'tp'?"),
        ({"op": "all_reduse"}, "The trace has no op 'all_reduse'. Did you mean 'all_reduce'?"),
        ({"phase": "forwards"}, "There is no phase 'forwards'."),
        ({"moduel": "net1"}, "A collective has no field 'moduel'."),
        ({"counts": {"all_reduse": 0}, "phase": "optimizer"}, "The trace has no op 'all_reduse'."),
        (
            {"counts": {("ttp", "all_reduce"): 0}, "by": ("mesh_dim", "op"), "phase": "optimizer"},
            "The trace has no mesh dimension 'ttp'.",
        ),
    ],
)
def test_names_of_nothing_never_pass(wrong, message):
    with pytest.raises(commlens.SelectionError, match=re.escape(message)):
        assert_collectives(commlens.Trace(training()), **{"counts": {}, **wrong})


def test_names_of_what_does_not_communicate_pass():
    data = training()
    data.groups.append(ProcessGroup("9", (0, 4), "mesh_pp", "gloo", "pp"))
    assert_collectives(data, {}, mesh_dim="pp")
    assert_collectives(data, {}, op="all_to_all", module="MLP.layers.*.net1")
    assert_collectives(data, {"broadcast": 0}, phase="optimizer", none_on="pp")


class HasTrace:
    def trace(self) -> commlens.Trace:
        return commlens.Trace(training())


class HasData:
    data = training()


def test_whatever_holds_a_trace(tmp_path):
    commlens.Trace(training()).save(tmp_path / "x.json.gz")
    for holder in (
        training(),
        HasTrace(),
        HasData(),
        tmp_path / "x.json.gz",
        str(tmp_path / "x.json.gz"),
    ):
        assert_collectives(holder, 32)
    with pytest.raises(commlens.SelectionError, match="not list"):
        assert_collectives([], 32)


def test_too_many_with_their_lines():
    assert (
        failure({"all_reduce": 1}, phase="outside")
        == "Unexpected collectives (phase=outside):\n- all_reduce: expected 1, found 2:\n    #16"
        " all_reduce on tp [0-3], outside all modules, float32 64 B, at train.py:29"
        " (clip_grad_norm_)\n    #32 all_reduce on tp [0-3], outside all modules, float32 64 B,"
        " at train.py:29 (clip_grad_norm_)"
    )


def test_none_and_a_misspelt_one():
    text = failure({"allreduce": 16, "broadcast": 1, "all_gather": 8, "reduce_scatter": 8})
    assert "- allreduce: expected 16, found none (did you mean 'all_reduce'?)" in text
    assert "- broadcast: expected 1, found none\n" in text
    assert "- all_reduce: expected none, found 16:" in text and "... and 11 more" in text
    assert "all_gather:" not in text


def test_none_on_a_limit_and_a_total():
    assert (
        "- expected no collectives on tp, found 6:\n    #9 all_reduce on tp [0-3], backward of"
        " MLP.layers.3.net1" in failure(none_on="tp", phase="backward")
    )
    text = failure(bytes_at_most=1000, module="layers.0.net2")
    assert (
        "- expected at most 1.0 kB on the wire, found 12.0 kB (11,000 bytes too many). The"
        " costliest:\n    #2 all_reduce" in text
    )
    assert "- expected 3 collectives, found 32:" in failure(3)


def test_an_incomplete_trace_never_passes():
    data = training()
    data.coverage = Coverage(40, 32)
    with pytest.raises(AssertionError, match="it lacks 8 dispatched collectives"):
        assert_collectives(data, none_on=())


def test_an_unknown_field_is_no_assertion():
    with pytest.raises(commlens.SelectionError, match="Did you mean 'mesh_dim'"):
        assert_collectives(training(), mesh_dims="tp")
    with pytest.raises(commlens.SelectionError, match="Did you mean 'op'"):
        assert_collectives(training(), {}, by="ops")


# --- golden files


def test_a_golden_file_is_written_once_and_held_to(tmp_path, monkeypatch):
    golden = tmp_path / "golden" / "mlp.json"
    with pytest.raises(
        AssertionError,
        match=(
            r"There is no golden file .*mlp.json yet. Run the test once with pytest"
            r" --commlens-update"
        ),
    ):
        assert_matches_golden(training(), golden)
    monkeypatch.setenv("COMMLENS_UPDATE_GOLDEN", "1")
    assert_matches_golden(training(), golden)
    monkeypatch.setenv("COMMLENS_UPDATE_GOLDEN", "0")
    before = golden.read_bytes()
    assert_matches_golden(training(), golden)
    with pytest.raises(AssertionError) as caught:
        assert_matches_golden(commlens.Trace(training(dtype="bfloat16")), golden)
    assert (
        "8 all_gather on dp in forward of MLP.layers.0-3: dtype bfloat16 instead of float32"
        in str(caught.value)
    )
    assert "pytest --commlens-update (or COMMLENS_UPDATE_GOLDEN=1), which rewrites the file" in str(
        caught.value
    )
    assert golden.read_bytes() == before
    assert_matches_golden(training(steps=1), golden, update=True)
    assert commlens.Trace.load(golden).calls == 16


def test_a_golden_file_holds_nothing_that_changes_by_itself(tmp_path):
    data, later = training(), training()
    later.started_unix_ns += 5_000_000_000
    later.commlens_version, later.torch_version, later.script = "9", "3.0", "/elsewhere/train.py"
    later.groups = [
        msgspec.structs.replace(group, name=f"{number + 40}")
        for number, group in enumerate(later.groups)
    ]
    for event in later.events:
        event.started_ns += 999
        event.source = msgspec.structs.replace(
            event.source, file="/elsewhere/train.py", line=event.source.line + 3
        )
    later.events.reverse()
    for path, made in ((tmp_path / "a.json", data), (tmp_path / "b.json", later)):
        assert_matches_golden(made, path, update=True)
    assert sorted(condense(data).groups, key=str) == sorted(condense(later).groups, key=str)
    text = (tmp_path / "a.json").read_text()
    assert "/home/me" not in text and "2.13.0" not in text and "started_ns" not in text
    assert len(text) < 8000
    same = msgspec.structs.replace(later, events=later.events[::-1])
    assert_matches_golden(same, tmp_path / "b.json", update=True)
    assert (tmp_path / "b.json").read_text() == text


def test_a_golden_file_tells_the_setup_from_the_steps(tmp_path):
    golden = tmp_path / "g.json"
    assert_matches_golden(training(steps=2, setup=3), golden, update=True)
    assert_matches_golden(training(steps=4, setup=3), golden)
    with pytest.raises(AssertionError, match="5 instead of 3"):
        assert_matches_golden(training(steps=4, setup=5), golden)


def test_a_damaged_golden_file_is_no_difference(tmp_path):
    (tmp_path / "g.json").write_text("{")
    with pytest.raises(commlens.FormatError):
        assert_matches_golden(training(), tmp_path / "g.json")


def test_alike_collectives_are_counted_together():
    def more(rec: Recorder, step: int) -> None:
        rec.issue(
            "all_gather",
            "dp",
            Phase.FORWARD,
            "MLP.layers.0",
            32000,
            77,
            owner=block("MLP.layers.0"),
        )

    condensed = condense(training(change=more))
    (first,) = [
        event
        for event in condensed.events
        if event.site == "MLP.layers.0" and event.op == "all_gather"
    ]
    assert first.count == 4 and first.source is None
    assert condense(one_event(count=7)).events[0].count == 7
    assert condense(TraceData()).events == []


def test_a_golden_file_can_be_viewed(tmp_path):
    assert_matches_golden(training(), tmp_path / "g.json", update=True)
    assert json.loads((tmp_path / "g.json").read_text())["schema"] == "commlens.trace/1"
    assert (
        commlens.Trace.load(tmp_path / "g.json")
        .to_summary()
        .answer.startswith("32 collectives, 340 kB on the wire, over 2")
    )
