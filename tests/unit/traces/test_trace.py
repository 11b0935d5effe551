"""``commlens.Trace``: filters, counts, rows and the summary."""

from __future__ import annotations

import io

import msgspec
import pytest
from traces import Recorder, one_event, render, trace, training

import commlens
from commlens.model.collective import ProcessGroup
from commlens.model.trace import Owner, Phase, Redistribution, TraceData
from commlens.model.wire_bytes import wire_bytes
from commlens.reports.trace_terminal import print_events
from commlens.testing import assert_collectives
from commlens.traces import wording

SUMMARY = """\
32 collectives, 340 kB on the wire, over 2 optimizer steps (16 collectives and
170 kB each), rank 0 of 8.
The 32 collectives took 2.9 ms; the rank waited for 1.9 ms of it (67%), and
other work ran during the rest. A step took 1.6 ms, of which the rank waited 960
us (60%) in collectives.

mesh dimension   ranks   calls     bytes   share     time   waited
──────────────────────────────────────────────────────────────────
dp                   2      16    256 kB     75%   1.4 ms   960 us
tp                   4      16   84.2 kB     25%   1.4 ms   960 us
"""


@pytest.mark.parametrize(
    ("wanted", "number"),
    [
        ({}, 32),
        ({"phase": "backward"}, 14),
        ({"phase": Phase.BACKWARD}, 14),
        ({"phase": ["backward", "outside"]}, 16),
        ({"phase": "unclassified"}, 0),
        ({"op": "all_reduce"}, 16),
        ({"op": ("all_reduce", "all_gather")}, 24),
        ({"mesh_dim": "tp"}, 16),
        ({"group": "mesh_tp"}, 16),
        ({"group": "5"}, 16),
        ({"ranks": (0, 4)}, 16),
        ({"group_size": 4}, 16),
        ({"module": "layers.0"}, 6),
        ({"module": "MLP.layers.0"}, 6),
        ({"module": "layers.0.net2"}, 2),
        ({"module": "layers.*.net2"}, 8),
        ({"module": "layers.1"}, 8),
        ({"module": "layer"}, 0),
        ({"module": "net2"}, 0),
        ({"module": None}, 2),
        ({"step": 1}, 16),
        ({"step": "1:"}, 16),
        ({"step": range(0, 2)}, 32),
        ({"owner": "FSDP2"}, 16),
        ({"owner": "layers.3"}, 4),
        ({"owner": "FSDP2 MLP.layers.3"}, 4),
        ({"cause": "implicit"}, 6),
        ({"cause": "explicit"}, 8),
        ({"cause": "mm"}, 6),
        ({"cause": "aten.mm"}, 6),
        ({"cause": "Partial(sum) -> Replicate()"}, 14),
        ({"source": "train.py:14"}, 8),
        ({"source": "train.py"}, 32),
        ({"source": "rain.py"}, 0),
        ({"source": "clip_grad_norm_"}, 2),
        ({"through": "clip_grad_norm_"}, 2),
        ({"dtype": "float32"}, 32),
        ({"api": "c10d.all_gather"}, 8),
        ({"reduce_op": "AVG"}, 8),
        ({"wire_bytes": lambda size: size > 10_000}, 16),
        ({"sequence": 3}, 1),
        ({"op": "all_reduce", "phase": "backward", "module": "layers.3"}, 2),
    ],
)
def test_filters(wanted, number):
    assert trace().filter(**wanted).calls == number


@pytest.mark.parametrize(
    ("wanted", "hint"),
    [
        ({"fase": "forward"}, "no field 'fase'. Did you mean 'phase'?"),
        ({"site": "net1"}, "Did you mean 'module'?"),
        ({"xyz": 1}, "The fields are op, phase"),
        ({"phase": "backwards"}, "Did you mean 'backward'?"),
        ({"phase": 7}, "The phases are forward, backward"),
        ({"step": "a:b"}, "not a step or a range"),
    ],
)
def test_what_does_not_exist_is_a_clear_error(wanted, hint):
    with pytest.raises(commlens.SelectionError) as caught:
        trace().filter(**wanted)
    assert hint in str(caught.value)


def test_counts_and_bytes():
    assert trace().counts() == {"all_gather": 8, "all_reduce": 16, "reduce_scatter": 8}
    assert trace().counts(by=("mesh_dim", "op"))["tp", "all_reduce"] == 16
    assert trace().bytes(by="phase")["outside"] == 2 * wire_bytes("all_reduce", 4, 64, 64)
    assert trace().bytes(by="op", of="output")["all_gather"] == 8 * 32000
    with pytest.raises(commlens.SelectionError, match="kind of bytes 'air'"):
        trace().bytes(of="air")  # type: ignore[arg-type]


def test_summarised_events_count_in_full():
    summarised = commlens.Trace(one_event(count=10, step=3, last_step=12))
    assert summarised.calls == 10 and summarised.counts() == {"all_reduce": 10}
    assert summarised.wire_bytes == 10 * summarised.events[0].wire_bytes
    assert summarised.filter(step="3:13").calls == 10
    part = summarised.filter(step="5:8")
    assert part.calls == 0
    assert any(
        "10 summarised collectives cannot be assigned to a step" in text
        for text in part.coverage.blind
    )


def test_a_part_says_what_it_is_part_of():
    part = trace().filter(phase="backward").filter(mesh_dim="tp")
    assert part.coverage.blind == ["Filtered by mesh_dim=tp: 6 of 14 collectives."]
    assert part.filter().coverage.blind == part.coverage.blind
    assert part.to_summary().answer == "6 of 32 collectives, 36.0 kB on the wire, rank 0 of 8."
    assert trace().coverage.blind == []


def test_data_may_be_made_anew_each_time_it_is_asked_for():
    class Live(commlens.Trace):
        @property
        def data(self) -> TraceData:
            return training(steps=next(self.steps))

    live = Live(TraceData())
    live.steps = iter([1, 2])
    assert live.calls == 16 and live.calls == 32


def test_the_summary_by_eye():
    text = render(trace().to_summary())
    assert text.startswith(SUMMARY)
    assert max(map(len, text.splitlines())) <= 80
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "MLP 30 340 kB 2.7 ms 1.8 ms" in lines
    assert "layers.0-3 16 256 kB 30 340 kB 2.7 ms 1.8 ms" in lines
    assert "net2 8 48.0 kB 8 48.0 kB 720 us 480 us" in lines
    assert "net1 (of layers.1-3) 6 36.0 kB 6 36.0 kB 540 us 360 us" in lines
    one_line = " ".join(lines)
    assert (
        "128 kB 38% 8 all_gather on dp (2 ranks): forward of MLP.layers.0-3, for their own FSDP2"
        " parameters, at train.py:19" in one_line
    )
    assert (
        "36.0 kB 11% 6 all_reduce on tp (4 ranks): backward of MLP.layers.1-3.net1, DTensor"
        " Partial(sum) -> Replicate(), to run mm (implicit), at train.py:28" in one_line
    )
    assert (
        "2 all_reduce on tp (4 ranks): outside all modules, at train.py:29 (clip_grad_norm_)"
        in one_line
    )
    assert "All 32 dispatched collectives are recorded and classified." in one_line
    assert "Bytes are bytes on the wire: through one rank's link" in one_line


@pytest.mark.parametrize("width", [30, 40, 200])
def test_every_width_and_no_colour(width):
    out = io.StringIO()
    trace().summary(out, width=width, colour=False)
    assert "\x1b" not in out.getvalue()
    assert max(map(len, out.getvalue().splitlines())) <= width
    coloured = io.StringIO()
    trace().summary(coloured, width=width, colour=True)
    assert "\x1b[" in coloured.getvalue()


def test_ddp_buckets_and_point_to_point():
    rec = Recorder()
    rec.data.groups.append(ProcessGroup("0", tuple(range(8)), "default_pg", "gloo"))
    rec.issue(
        "all_reduce",
        "default_pg",
        Phase.BACKWARD,
        "DDP",
        64,
        12,
        owner=Owner("DDP", "bucket 0", ("net.0.weight", "net.0.bias", "net.2.weight")),
    )
    rec.issue("send", "default_pg", Phase.OUTSIDE, None, 64, 13, peer=1)
    whys = [why.sentence for why in commlens.Trace(rec.finish()).to_summary().why]
    assert (
        "1 all_reduce on default (8 ranks): backward of DDP, for DDP's bucket 0 (net.0.weight,"
        " net.0.bias and 1 more), at train.py:12" in whys
    )
    assert "1 send on default (8 ranks): outside all modules, to rank 1, at train.py:13" in whys


def test_a_group_without_a_mesh_is_found_by_the_name_that_the_table_shows():
    rec = Recorder()
    rec.data.groups.append(ProcessGroup("0", tuple(range(8)), "default_pg", "gloo"))
    rec.issue("all_reduce", "default_pg", Phase.OUTSIDE, None, 64, 12)
    rec.issue("all_reduce", "tp", Phase.OUTSIDE, None, 64, 13)
    trace = commlens.Trace(rec.finish())
    assert [row.name for row in trace.to_summary().by_mesh_dim] == ["default", "tp"]
    assert [
        event.source.line for event in trace.filter(mesh_dim="default").events if event.source
    ] == [12]
    assert_collectives(trace, {"all_reduce": 1}, mesh_dim="default")


def test_a_pipelines_message_has_its_microbatch():
    rec = Recorder()
    rec.issue("send", "dp", Phase.BACKWARD, "Stage", 64, 12, peer=4, microbatch=3)
    trace = commlens.Trace(rec.finish())
    printed = io.StringIO()
    print_events(trace.to_rows(), trace.whys(), file=printed, width=120)
    assert "backward of Stage (microbatch 3), at train.py:12" in printed.getvalue()
    times = trace.to_summary().times
    assert (
        times is not None
        and "backward of Stage (microbatch 3), at train.py:12" in times.slowest[0].sentence
    )
    with pytest.raises(AssertionError, match=r"backward of Stage \(microbatch 3\)"):
        assert_collectives(trace, {}, bytes_at_most=0)


def test_a_masked_partial_placement_is_told_by_its_kind():
    mask = "(_MaskPartial(reduce_op=sum, offset_shape=torch.Size([64, 16]), offset_dim=0),)"
    rec = Recorder()
    rec.issue(
        "all_reduce",
        "tp",
        Phase.FORWARD,
        "MLP.embedding",
        64,
        12,
        cause=Redistribution(None, mask, "(Replicate(),)", False),
    )
    assert commlens.Trace(rec.finish()).whys() == ["DTensor MaskPartial -> Replicate() (explicit)"]


def test_owner_elsewhere_is_named():
    data = training(layers=1, steps=1)
    data.events[0] = msgspec.structs.replace(data.events[0], site="MLP.head")
    assert any(
        "forward of MLP.head, for FSDP2's parameters of layers.0" in why.sentence
        for why in commlens.Trace(data).to_summary().why
    )


@pytest.mark.parametrize(
    ("paths", "folded"),
    [
        (["a.0.b", "a.1.b", "a.2.b"], "a.0-2.b"),
        (["a.0", "a.1", "a.3"], "a.0-1+3"),
        (["a.0.1", "a.1.1"], "a.0-1.1"),
        (["a"], "a"),
        ([], ""),
    ],
)
def test_folding(paths, folded):
    assert wording.fold(paths) == folded
