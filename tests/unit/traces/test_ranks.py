"""Traces of all ranks, side by side."""

from __future__ import annotations

import pytest
from rank_traces import one_more, ranks
from traces import Recorder, training

import commlens
from commlens.model.trace import Phase, TraceData
from commlens.traces.ranks import RankTraces


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
