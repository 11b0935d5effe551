"""What changed between two traces, and where ranks differ."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from chosen import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_traces import one_more, ranks
from traces import Recorder, block, training

import commlens
from commlens.model.trace import Phase, TraceData, TraceEvent
from commlens.traces.diff_ranks import compare_ranks
from commlens.traces.ranks import RankTraces

Edit = Callable[[TraceEvent], "TraceEvent | None"]


def edited(edit: Edit) -> TraceData:
    """A trace with every event changed, or left out."""
    data = training()
    data.events = [new for event in data.events if (new := edit(event)) is not None]
    return data


def set_if(condition: Callable[[TraceEvent], bool], **fields: object) -> Edit:
    return lambda event: msgspec.structs.replace(event, **fields) if condition(event) else event


def sentences(after: TraceData, before: TraceData | None = None) -> list[str]:
    comparison = commlens.Trace(training() if before is None else before).compare(
        commlens.Trace(after)
    )
    return [f"{change.kind}: {change.sentence}" for change in comparison.changes]


def test_nothing_changed():
    comparison = commlens.Trace(training()).compare(commlens.Trace(training()))
    assert not comparison and comparison.changes == [] and comparison.notes == []
    assert str(comparison) == "Nothing changed: 32 collectives, 340 kB on the wire."


def test_times_lines_order_and_threads_are_no_change():
    data = training()
    data.events = [
        msgspec.structs.replace(
            event,
            started_ns=event.started_ns * 3,
            source=None,
            thread=1,
            sequence=99 - event.sequence,
        )
        for event in reversed(data.events)
    ]
    assert sentences(data) == []


def test_gone_and_new():
    gone = edited(lambda event: None if event.through else event)
    assert sentences(gone) == [
        "gone: gone: 2 all_reduce on tp outside all modules, 192 B on the wire"
    ]
    assert sentences(training(), gone) == [
        "new: new: 2 all_reduce on tp outside all modules, 192 B on the wire"
    ]


def test_layers_are_told_together():
    def no_tp_forward(event: TraceEvent) -> TraceEvent | None:
        return None if event.cause is not None and not event.cause.implicit else event

    assert sentences(edited(no_tp_forward)) == [
        "gone: gone: 8 all_reduce on tp in forward of MLP.layers.0-3.net2, 48.0 kB on the wire,"
        " DTensor Partial(sum) -> Replicate()"
    ]
    more = sentences(training(layers=5))
    assert (
        "new: new: 2 all_gather on dp in forward of MLP.layers.4, 32.0 kB on the wire, for FSDP2"
        " MLP.layers.4" in more
    )


def test_counts():
    def twice(rec: Recorder, step: int) -> None:
        rec.issue(
            "all_gather",
            "dp",
            Phase.FORWARD,
            "MLP.layers.0",
            32000,
            19,
            owner=block("MLP.layers.0"),
        )

    assert sentences(training(change=twice)) == [
        "count: 2 more all_gather on dp in forward of MLP.layers.0 (4 instead of 2), 32.0 kB on the"
        " wire"
    ]


def test_dtype_and_bytes():
    assert sentences(training(dtype="bfloat16")) == [
        (
            "changed: 8 all_gather on dp in forward of MLP.layers.0-3: dtype bfloat16 instead of"
            " float32 and size 16.0 kB instead of 32.0 kB"
        ),
        (
            "changed: 8 reduce_scatter on dp in backward of MLP.layers.0-3: dtype bfloat16 instead"
            " of float32 and size 16.0 kB instead of 32.0 kB"
        ),
    ]


def test_sizes_that_round_alike_are_told_in_bytes():
    def slightly_more(event: TraceEvent) -> TraceEvent:
        return (
            msgspec.structs.replace(event, input_bytes=event.input_bytes + 16)
            if event.op == "reduce_scatter"
            else event
        )

    assert sentences(edited(slightly_more)) == [
        "changed: 8 reduce_scatter on dp in backward of MLP.layers.0-3: bytes in 32,016 B instead"
        " of 32,000 B"
    ]


def test_placements_cause_reduce_op_and_more():
    def is_forward_tp(event: TraceEvent) -> bool:
        return event.cause is not None and not event.cause.implicit

    def other(event: TraceEvent) -> TraceEvent:
        if not is_forward_tp(event) or event.cause is None:
            return event
        cause = msgspec.structs.replace(
            event.cause, after="(Shard(dim=1),)", implicit=True, op="aten.add.Tensor"
        )
        return msgspec.structs.replace(event, cause=cause, reduce_op="AVG")

    assert sentences(edited(other)) == [
        "changed: 8 all_reduce on tp in forward of MLP.layers.0-3.net2: reduce op AVG instead of"
        " SUM, placements Partial(sum) -> Shard(1) instead of Partial(sum) -> Replicate() and cause"
        " add, implicit instead of DTensor, explicit"
    ]


def test_moved_to_another_phase_module_or_group():
    optimizer = edited(set_if(lambda event: event.through is not None, phase=Phase.OPTIMIZER))
    assert sentences(optimizer) == [
        "moved: 2 all_reduce on tp: moved from outside all modules to the optimizer step"
    ]
    module = edited(
        set_if(lambda event: event.site == "MLP.layers.1.net1", site="MLP.layers.1.norm")
    )
    assert sentences(module) == [
        "moved: 2 all_reduce on tp: moved from backward of MLP.layers.1.net1 to backward of"
        " MLP.layers.1.norm"
    ]
    group = edited(set_if(lambda event: event.through is not None, group=0))
    assert sentences(group) == [
        "moved: 2 all_reduce on tp outside all modules: now on dp, group size 2 instead of 4"
    ]


def test_replaced():
    data = edited(set_if(lambda event: event.through is not None, op="all_gather", wire_bytes=48))
    assert sentences(data) == [
        "replaced: 2 all_reduce on tp outside all modules: replaced by all_gather, 48 B on the wire"
        " instead of 96 B"
    ]


def test_the_largest_first():
    def both(event: TraceEvent) -> TraceEvent | None:
        return None if event.through or event.op == "reduce_scatter" else event

    assert [text.split(" on ")[0] for text in sentences(edited(both))] == [
        "gone: gone: 8 reduce_scatter",
        "gone: gone: 2 all_reduce",
    ]


def test_a_larger_world():
    data = training()
    data.world_size = 16
    assert sentences(data) == ["world-size: the world size is 16 instead of 8"]


def test_other_numbers_of_steps_are_compared_by_the_step():
    comparison = commlens.Trace(training(steps=2)).compare(commlens.Trace(training(steps=4)))
    assert not comparison and comparison.per_step
    assert comparison.answer == "Nothing changed: 16 collectives per step, 170 kB on the wire."
    assert comparison.notes == [
        "The first trace covers 2 steps, the second 4; figures are per step."
    ]
    one_more = training(steps=4)
    one_more.events.append(msgspec.structs.replace(one_more.events[0]))
    (change,) = commlens.Trace(training(steps=2)).compare(commlens.Trace(one_more)).changes
    assert (
        change.sentence
        == "0.25 more all_gather on dp in forward of MLP.layers.0 (1.25 instead of 1), 4.0 kB on"
        " the wire"
    )


def test_the_setup_is_compared_on_its_own_where_figures_are_per_step():
    comparison = commlens.Trace(training(steps=2, setup=3)).compare(
        commlens.Trace(training(steps=4, setup=3))
    )
    assert not comparison and comparison.per_step
    assert comparison.answer == "Nothing changed: 16 collectives per step, 170 kB on the wire."
    assert comparison.notes == [
        "The first trace covers 2 steps, the second 4; figures are per step; the setup before the"
        " first forward is compared on its own."
    ]
    (change,) = (
        commlens.Trace(training(steps=2, setup=3))
        .compare(commlens.Trace(training(steps=4, setup=5)))
        .changes
    )
    assert (
        change.sentence
        == "2 more scatter on tp outside all modules (5 instead of 3), 600 kB on the wire, in the"
        " setup"
    )
    # An older trace does not tell the setup apart.
    unknown = msgspec.structs.replace(training(steps=4, setup=3), setup_until=None)
    assert commlens.Trace(training(steps=2, setup=3)).compare(commlens.Trace(unknown))


def test_another_name_of_the_model_is_noted_once():
    def renamed(event: TraceEvent) -> TraceEvent:
        site = None if event.site is None else event.site.replace("MLP", "FSDPMLP", 1)
        owner = event.owner and msgspec.structs.replace(
            event.owner, name=event.owner.name.replace("MLP", "FSDPMLP", 1)
        )
        return msgspec.structs.replace(event, site=site, owner=owner)

    comparison = commlens.Trace(training()).compare(commlens.Trace(edited(renamed)))
    assert not comparison
    assert comparison.notes == [
        "The model's class is MLP in the first trace and FSDPMLP in the second: modules are"
        " compared without it."
    ]


def test_summarised_and_whole_traces_are_equal():
    summarised = training(steps=1)
    for event in summarised.events:
        event.count = 2
        event.last_step = 1
    summarised.steps = 2
    assert sentences(summarised) == []


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.integers(0, 31), max_size=6, unique=True),
    st.lists(st.integers(0, 31), max_size=6, unique=True),
)
def test_whatever_is_left_out_is_counted(left: list[int], right: list[int]):
    one, other = training(), training()
    one.events = [event for place, event in enumerate(one.events) if place not in left]
    other.events = [event for place, event in enumerate(other.events) if place not in right]
    there, back = (
        commlens.Trace(one).compare(commlens.Trace(other)),
        commlens.Trace(other).compare(commlens.Trace(one)),
    )
    assert there.calls_after - there.calls_before == len(left) - len(right)
    assert bool(there) == bool(back)
    assert (
        there.wire_bytes_after - there.wire_bytes_before
        == commlens.Trace(other).wire_bytes - commlens.Trace(one).wire_bytes
    )


# --- ranks


def test_runs_are_compared_rank_by_rank():
    before, after = RankTraces(ranks()), RankTraces(ranks((3, one_more(3, 1)), (5, one_more(5, 1))))
    assert not compare_ranks(before, before)
    comparison = compare_ranks(before, after)
    (change,) = comparison.changes
    assert (
        change.sentence
        == "ranks 3,5: new: 2 all_gather on tp in backward of MLP.layers.1, 6.0 kB on the wire"
        and change.ranks == [3, 5]
    )
    assert comparison.answer.startswith(
        "8 ranks compared. 1 change: 260 collectives instead of 256"
    )
    partly = compare_ranks(RankTraces(ranks()[:4]), before)
    assert not partly and partly.notes == [
        "Not compared: ranks 4-7, traced only in the second run."
    ]
    everywhere = compare_ranks(
        before, RankTraces([commlens.Trace(one_more(rank, 1)) for rank in range(8)])
    )
    assert everywhere.changes[0].sentence.startswith("new: 2 all_gather")


# --- times
