"""The JSON that PyTorch's CommDebugMode writes."""

from __future__ import annotations

import json

import pytest
from comm_debug_json import ADDMM, AG, AR, module
from traces import render

import commlens
from commlens.model.trace import Depth


def test_comm_debug_modes_json_is_read(tmp_path):
    leaf = module("MLP.net2", forward=[[AR, 2]], ops=[ADDMM])
    tree = module("MLP", module("MLP.net1"), leaf, leaf, forward=[[AR, 3]], backward=[[AG, 1]])
    root = module("Global", tree, forward=[[AR, 3], ["c10d.allreduce_", 4]], backward=[[AG, 1]])
    path = tmp_path / "comm_mode_log.json"
    path.write_text(json.dumps(root, indent=4))
    trace = commlens.Trace.load(path)
    assert trace.counts(by=("op", "phase", "module")) == {
        ("all_reduce", None, None): 4,
        ("all_reduce", "forward", "MLP"): 1,
        ("all_gather", "backward", "MLP"): 1,
        ("all_reduce", "forward", "MLP.net2"): 2,
    }
    assert {row.path for row in trace.data.modules} == {"MLP", "MLP.net1", "MLP.net2"}
    assert trace.data.ops[0].input_shapes == ((16,), (8, 10)) and trace.data.depth is Depth.OPS
    assert (
        trace.coverage.dispatched == trace.coverage.recorded == 8
        and trace.coverage.unclassified == 4
    )
    assert "bytes, groups, order, times" in trace.coverage.blind[0]
    out = trace.to_summary()
    assert not out.bytes_known and out.answer == "8 collectives, by CommDebugMode's count."
    assert out.by_mesh_dim == [] and out.coverage == "CommDebugMode's JSON has no self-check."
    assert "bytes" not in render(out).split("This trace is from CommDebugMode's JSON")[0]


def test_a_damaged_one_gets_a_sentence(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"fqn": "Global", "children": [{"fqn": 7}]}')
    with pytest.raises(
        commlens.FormatError, match="looks like CommDebugMode's JSON but is damaged"
    ):
        commlens.Trace.load(path)
