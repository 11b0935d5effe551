"""Ranks that did one round of the same lines more, or fewer."""

from __future__ import annotations

from collections.abc import Iterator

from builders import Job, all_reduce, collective
from goldens import hold
from judging import judge

from commlens.model.collective import State
from commlens.model.ranklog import End, Observation


def test_ranks_that_are_already_in_the_next_collective_count_for_the_majority() -> None:
    """Rank 1 does one round fewer. Ranks 0 and 3 wait for it in the first collective of the round,
    ranks 2 and 4 in the second.
    """

    def program(job: Job, rank: int) -> Iterator[object]:
        for number in range(8 if rank == 1 else 9):
            yield all_reduce(job.world, 2, line=40, is_async=number == 8 and rank in (2, 4))
            yield all_reduce(job.world, 30, line=40)

    logs = Job(5).run(program).logs()
    for rank in (2, 4):  # a rooted collective can complete on some ranks without the others
        logs[rank].collectives[-2].state = State.COMPLETED
    logs[1].closed, logs[1].observation = True, Observation(End.CLEAN, 0)
    verdict = judge(logs)
    assert (verdict.kind, verdict.why, verdict.culprits) == ("missing", "finished", [1])


def test_one_more_round_of_the_same_lines_has_no_line_of_its_own() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(4 + (rank == 0)):
            yield all_reduce(job.world, 4, line=14)
            yield collective("barrier", job.world, line=28)

    verdict = judge(Job(3).run(program).logs())
    assert verdict.cause.outcome != "extra-line" and verdict.source == "train.py:14"


def test_two_halves_of_which_one_finished_name_nobody() -> None:
    """One round too many on one side, or one too few on the other."""
    verdict = judge(
        Job(2)
        .run(lambda job, rank: (all_reduce(job.world, line=20) for _ in range(5 + rank)))
        .logs()
    )
    assert (verdict.kind, verdict.why, verdict.culprits, verdict.is_fault) == (
        "missing",
        "finished",
        [],
        True,
    )
    hold("missing/one-of-two-finished", verdict)
