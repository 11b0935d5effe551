"""What changed between two traces, and where ranks differ."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from chosen import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import Recorder, block, training

import commlens
from commlens.model.trace import Phase, TraceData, TraceEvent
from commlens.traces.diff_ranks import compare_ranks
from commlens.traces.ranks import RankTraces

Edit = Callable[[TraceEvent], "TraceEvent | None"]


def edited(edit: Edit, data: TraceData | None = None) -> TraceData:
    """A trace with every event changed, or left out."""
    data = training() if data is None else data
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


def ranks(*changed: tuple[int, TraceData]) -> list[commlens.Trace]:
    different = dict(changed)
    return [commlens.Trace(different.get(rank) or training(rank)) for rank in range(8)]


def one_more(rank: int, *layers: int) -> TraceData:
    def change(rec: Recorder, step: int) -> None:
        for layer in layers:
            rec.issue("all_gather", "tp", Phase.BACKWARD, f"MLP.layers.{layer}", 4000, 40)

    return training(rank, change=change)


def test_all_ranks_alike():
    merged = RankTraces(ranks())
    assert (
        merged.answer() == "All 8 ranks issued the same collectives." and merged.differences() == []
    )
    assert merged.classes() == [list(range(8))]
    assert len(merged.to_rows()) == 8 * 32 and {row["rank"] for row in merged.to_rows()} == set(
        range(8)
    )
    assert len(merged) == 8 and merged[3].data.rank == 3


def test_a_rank_that_issued_more():
    merged = RankTraces(ranks((3, one_more(3, 1))))
    assert merged.answer() == "Ranks 0-2,4-7 and rank 3 issued different collectives."
    assert merged.differences() == [
        "rank 3 issued 2 more all_gather on tp in backward of MLP.layers.1 than ranks 0-2,4-7 (2"
        " instead of 0)"
    ]
    folded = RankTraces(ranks((3, one_more(3, 0, 1, 2))))
    assert folded.differences() == [
        "rank 3 issued 2 more all_gather on tp in backward of MLP.layers.0-2 each than ranks"
        " 0-2,4-7 (2 instead of 0)"
    ]


def test_sizes_that_differ():
    assert (
        RankTraces(ranks((0, training(0, dtype="bfloat16")))).differences()[0]
        == "rank 0: all_gather on dp in forward of MLP.layers.0 is bfloat16 16.0 kB; on ranks 1-7"
        " it is float32 32.0 kB"
    )


def test_order_that_differs():
    data = training(5)
    data.events[0], data.events[1] = data.events[1], data.events[0]
    merged = RankTraces(ranks((5, data)))
    assert merged.answer() == "All 8 ranks issued the same collectives, but not in the same order."
    assert merged.differences() == [
        "rank 5's order differs from rank 0's from #1 on: all_reduce on tp in forward of"
        " MLP.layers.0.net2, where rank 0 has all_gather on dp in forward of MLP.layers.0"
    ]


def test_messages_are_compared_by_pairs():
    def sends(rank: int, number: int) -> TraceData:
        def change(rec: Recorder, step: int) -> None:
            for _ in range(number):
                op, peer = ("send", rank + 1) if rank % 2 == 0 else ("recv", rank - 1)
                rec.issue(op, "tp", Phase.OUTSIDE, None, 64, 50, peer=peer)

        return training(rank, change=change)

    pairs = [commlens.Trace(sends(rank, 2)) for rank in range(8)]
    assert (
        RankTraces(pairs).answer() == "All 8 ranks issued the same collectives."
        and RankTraces(pairs).differences() == []
    )
    pairs[3] = commlens.Trace(sends(3, 1))
    assert (
        RankTraces(pairs).answer()
        == "All 8 ranks issued the same collectives; some sends and receives do not match."
    )
    assert RankTraces(pairs).differences() == [
        "rank 2 sent 4 messages to rank 3 on tp, but rank 3 received 2"
    ]
    assert RankTraces(pairs[3:]).differences() == []  # whoever sends to rank 3 is not here
    for event in pairs[3].events:
        event.peer = None
    assert RankTraces(pairs).differences() == []


def pipelined(
    messages: dict[tuple[int, int], int], *, more: tuple[int, ...] = (), group: str = "tp"
) -> RankTraces:
    """Eight ranks with these messages between them; the ranks in ``more`` issue one more
    all_gather.
    """

    def traced(rank: int) -> TraceData:
        def change(rec: Recorder, step: int) -> None:
            for (sender, receiver), calls in messages.items():
                for _ in range(calls if rank in (sender, receiver) else 0):
                    op, peer = ("send", receiver) if rank == sender else ("recv", sender)
                    rec.issue(op, group, Phase.FORWARD, None, 64, 50, peer=peer)
            if rank in more:
                rec.issue("all_gather", "dp", Phase.FORWARD, "MLP.layers.1", 4000, 40)

        return training(rank, change=change)

    return RankTraces(commlens.Trace(traced(rank)) for rank in range(8))


LINE = {pair: 2 for rank in range(3) for pair in ((rank, rank + 1), (rank + 1, rank))}
TWO_LINES = LINE | {(one + 4, other + 4): calls for (one, other), calls in LINE.items()}
RING = {(rank, (rank + 1) % 8): 2 for rank in range(8)}


@pytest.mark.parametrize(
    ("messages", "more", "answer", "differing"),
    [
        (
            TWO_LINES,
            (0, 4),
            (
                "All 8 ranks issued the same collectives as the others of their pipeline stage"
                " (0,4; 1,5; 2,6; 3,7)."
            ),
            0,
        ),
        (
            TWO_LINES,
            (4,),
            "Rank 0 and rank 4 issued different collectives. They are one stage of a pipeline",
            1,
        ),
        # interleaved
        (
            TWO_LINES | {(3, 0): 1, (7, 4): 1},
            (0, 4),
            "All 8 ranks issued the same collectives as the others of their",
            0,
        ),
        (
            RING | {(7, 0): 1},
            (3,),
            (
                "All 8 ranks pass messages like stages of a pipeline, so their collectives are not"
                " compared."
            ),
            0,
        ),
        (
            {(rank, rank + 4): 1 for rank in range(4)},
            (0, 1, 2, 3),
            "All 8 ranks issued the same collectives as the others",
            0,
        ),
        (
            {(rank, rank ^ 1): 1 for rank in range(8)},
            (0, 2, 4, 6),
            "All 8 ranks issued the same collectives as the others",
            0,
        ),
        # context parallelism
        (RING, (0,), "Ranks 1-7 and rank 0 issued different collectives.", 1),
        # one rank sends to all
        (
            {(0, rank): 1 for rank in range(1, 8)},
            (0,),
            "Ranks 1-7 and rank 0 issued different collectives.",
            1,
        ),
    ],
)
def test_stages_of_a_pipeline_are_compared_within_a_stage(messages, more, answer, differing):
    merged = pipelined(messages, more=more)
    assert merged.answer().startswith(answer)
    assert len(merged.differences()) == differing
    only = merged.filter(op="all_gather")  # the messages still tell the stages
    assert only.stages == merged.stages
    assert len(only.differences()) == differing


def test_rooted_and_uneven_collectives_may_differ_in_size():
    def traced(rank: int, dtype: str = "float32") -> commlens.Trace:
        def change(rec: Recorder, step: int) -> None:
            rec.issue(
                "scatter",
                "tp",
                Phase.OUTSIDE,
                None,
                64,
                50,
                root=0,
                input_bytes=256 * (rank == 0),
                output_bytes=64,
                dtype=dtype,
            )
            rec.issue(
                "gather",
                "tp",
                Phase.OUTSIDE,
                None,
                64,
                51,
                root=0,
                input_bytes=64,
                output_bytes=256 * (rank == 0),
            )
            rec.issue(
                "all_to_all",
                "tp",
                Phase.OUTSIDE,
                None,
                64,
                52,
                input_bytes=64 + rank,
                output_bytes=64 - rank,
            )

        return commlens.Trace(training(rank, change=change))

    assert (
        RankTraces(traced(rank) for rank in range(8)).answer()
        == "All 8 ranks issued the same collectives."
    )
    assert RankTraces(
        traced(rank, "int64" if rank == 3 else "float32") for rank in range(8)
    ).differences() == [
        "rank 3: scatter on tp outside all modules is int64; on ranks 0-2,4-7 it is float32"
    ]


def test_missing_and_double_ranks():
    assert (
        RankTraces(ranks()[:6]).answer()
        == "The 6 ranks here issued the same collectives. There is no trace of ranks 6-7."
    )
    assert RankTraces(ranks()[:1]).answer() == "One trace, from rank 0 of 8."
    with pytest.raises(commlens.CommandError, match="Two traces are from rank 0"):
        RankTraces([*ranks(), *ranks()[:1]])
    with pytest.raises(commlens.CommandError, match="no traces"):
        RankTraces([])


def test_many_classes():
    merged = RankTraces(ranks(*((rank, one_more(rank, *range(rank))) for rank in (1, 2, 3))))
    assert (
        merged.answer()
        == "The 8 ranks fall into 4 classes that issued different collectives: 0,4-7; 1; 2; 3."
    )
    assert merged.filter(phase="forward").answer() == "All 8 ranks issued the same collectives."


def test_runs_are_compared_rank_by_rank():
    before, after = RankTraces(ranks()), RankTraces(ranks((3, one_more(3, 1)), (5, one_more(5, 1))))
    assert not compare_ranks(before, before)
    comparison = compare_ranks(before, after)
    (change,) = comparison.changes
    assert (
        change.sentence
        == "ranks 3,5: new: 2 all_gather on tp in backward of MLP.layers.1, 6.0 kB on the wire"
        and change.ranks
        == [
            3,
            5,
        ]
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


def slower(
    data: TraceData, factor: float, jitter: Callable[[int], float] = lambda step: 1.0
) -> TraceData:
    """A trace whose steps take longer by a factor, each by another jitter."""
    moments: dict[int, int] = {}
    now = 0
    per_step = 16
    for number, event in enumerate(list(data.events)):
        moments[number] = now
        now += int(100_000 * factor * jitter(number // per_step))
        shift = moments[number] - event.started_ns
        data.events[number] = msgspec.structs.replace(
            event,
            started_ns=moments[number] + 1,
            returned_ns=event.returned_ns + shift,
            wait_began_ns=event.wait_began_ns + shift,
            wait_ended_ns=event.wait_ended_ns + shift,
        )
    return data


def uneven(step: int) -> float:
    return 1 + (step * 7 % 5) / 10


def test_time_that_moved_is_told_and_is_no_change():
    before, after = slower(training(steps=9), 1.0, uneven), slower(training(steps=9), 1.6, uneven)
    comparison = commlens.Trace(before).compare(commlens.Trace(after))
    assert not comparison
    assert [change.subject for change in comparison.times] == ["a step"]
    assert (
        comparison.time
        == "Time moved: a step takes 3.1 ms (2.6 ms to 3.6 ms) instead of 1.9 ms (1.6 ms to 2.2"
        " ms). These are medians of 7 steps, with their 95% intervals."
    )


def test_no_claim_within_the_noise():
    before, after = slower(training(steps=9), 1.0, uneven), slower(training(steps=9), 1.2, uneven)
    comparison = commlens.Trace(before).compare(commlens.Trace(after))
    assert comparison.times == [] and comparison.time.startswith(
        "Time did not move by more than the noise: a step takes 2.3 ms"
    )


def test_few_steps_decide_nothing():
    comparison = commlens.Trace(slower(training(steps=5), 1.0)).compare(
        commlens.Trace(slower(training(steps=5), 9.0))
    )
    assert comparison.times == []
    assert (
        comparison.time == "Times are not compared: 3 and 3 whole steps are too few, 4 are needed."
    )


def test_times_of_several_ranks():
    runs = [
        RankTraces(
            commlens.Trace(slower(training(rank, steps=9), factor, uneven)) for rank in range(4)
        )
        for factor in (1.0, 1.6)
    ]
    comparison = compare_ranks(*runs)
    assert not comparison and comparison.time.startswith("Time moved: a step takes 3.1 ms")


def test_previews_and_accelerators_have_no_times_to_compare():
    preview = msgspec.structs.replace(training(steps=9), preview=True)
    assert commlens.Trace(preview).compare(commlens.Trace(preview)).time == ""
