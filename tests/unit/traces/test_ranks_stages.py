"""The stages of a pipeline, as the messages tell them."""

from __future__ import annotations

import pytest
from traces import Recorder, training

import commlens
from commlens.model.trace import Phase, TraceData
from commlens.traces.ranks import RankTraces


def pipelined(messages: dict[tuple[int, int], int], *, more: tuple[int, ...] = ()) -> RankTraces:
    """Eight ranks with these messages between them; the ranks in ``more`` issue one more
    all_gather.
    """

    def traced(rank: int) -> TraceData:
        def change(rec: Recorder, step: int) -> None:
            for (sender, receiver), calls in messages.items():
                for _ in range(calls if rank in (sender, receiver) else 0):
                    op, peer = ("send", receiver) if rank == sender else ("recv", sender)
                    rec.issue(op, "tp", Phase.FORWARD, None, 64, 50, peer=peer)
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
