"""What stacks show is found as data, in the causes of the diagnosis."""

from __future__ import annotations

import pytest
from seen_ranks import FUNCTIONAL, call, frame, sample, seen_on, stay, synced, two_worlds

from commlens.model.cause import (
    Cause,
    Cycle,
    Dead,
    LoopRound,
    Mismatch,
    Missing,
    NoneWaits,
    StuckInside,
    Unrecorded,
    Working,
)
from commlens.outside.causes import find_causes, none_waits
from commlens.outside.sample import HostSamples
from commlens.outside.seen import SeenJob
from commlens.processes.pyspy import SeenFrame

WAITS = call("all_reduce", 81)


def causes(*frames: list[SeenFrame], **options: object) -> list[Cause]:
    return [found.cause for found in find_causes(SeenJob(seen_on(*frames, **options)))]


def test_a_rank_in_no_call_is_missing_where_the_others_wait() -> None:
    (cause,) = causes(WAITS, WAITS, stay("load_batch", 57), WAITS)
    assert isinstance(cause, Missing)
    assert (cause.culprits, cause.blamed_by, cause.confidence) == ([2], "absence", "high")
    assert cause.came == [0, 1, 3]
    assert (cause.activity.why, cause.activity.source) == ("data-loading", "train.py:57")
    (wait,) = cause.waits
    assert (wait.ranks, wait.collective.op, wait.source) == ([0, 1, 3], "all_reduce", "train.py:81")
    assert wait.group is not None and wait.group.ranks == [0, 1, 2, 3]


def test_ranks_at_two_places_are_two_causes_and_none_is_sure() -> None:
    found = causes(WAITS, WAITS, WAITS, stay("load_batch", 57), stay("evaluate", 60))
    assert [one.culprits for one in found] == [[3], [4]]
    assert {one.doubt for one in found if isinstance(one, Missing)} == {"many-outside"}


def test_ranks_of_two_worlds_at_two_places_are_one_cause_that_names_none() -> None:
    stuck = [synced(81), call("barrier", 90)]
    (found,) = find_causes(SeenJob(two_worlds(stuck, [stay("load", 57), stay("serve", 60)])))
    assert isinstance(found.cause, Missing)
    assert (found.cause.ranks, found.cause.culprits, found.cause.blamed_by) == (
        [2, 3],
        [],
        "undecided",
    )
    assert len(found.sides) == 2


def test_a_rank_that_works_may_yet_arrive() -> None:
    samples = [sample(rank, WAITS) for rank in range(3)]
    samples.append(sample(3, stay("evaluate", 57), cpu_s=2.4))
    (found,) = find_causes(SeenJob([HostSamples("n1", samples, 4)]))
    assert isinstance(found.cause, Working)
    assert (found.cause.ranks, found.cause.activity.works) == ([3], True)


def test_of_a_rank_without_a_process_nobody_saw_the_end() -> None:
    samples = [sample(rank, WAITS) for rank in (0, 1, 3)]
    (found,) = find_causes(SeenJob([HostSamples("n1", samples, 4, [0, 1, 2, 3])]))
    assert isinstance(found.cause, Dead)
    assert (found.cause.ranks, found.cause.processes) == ([2], ["gone"])
    assert (found.cause.doubt, found.cause.certain) == ("unobserved", True)


def test_a_stack_that_cannot_be_read_blames_nobody() -> None:
    samples = [sample(0, [], moved=None), *(sample(rank, WAITS) for rank in (1, 2, 3))]
    (found,) = find_causes(SeenJob([HostSamples("n1", samples, 4)]))
    assert isinstance(found.cause, Unrecorded)
    assert (found.cause.ranks, found.cause.reason) == ([0], "unreadable")
    assert found.cause.culprits == []


def test_ranks_whose_messages_wait_for_each_other_are_a_ring() -> None:
    ring = [call("recv", 53, src=1), call("recv", 54, src=0, step=7)]
    (cause,) = causes(*ring)
    assert isinstance(cause, Cycle)
    assert [(wait.rank, wait.awaited, wait.source) for wait in cause.ring] == [
        (0, 1, "train.py:53"),
        (1, 0, "train.py:54"),
    ]
    assert cause.other_round == LoopRound(1, "step", 7, 6)
    assert (cause.culprits, cause.blamed_by) == ([1], "rounds")


def test_a_message_whose_other_rank_is_in_a_collective_decides_nothing() -> None:
    (cause,) = causes(WAITS, WAITS, WAITS, call("recv", 85, src=0))
    assert isinstance(cause, Missing)
    assert (cause.ranks, cause.came, cause.outcome) == ([0], [3], "message-missing")
    assert (cause.culprits, cause.blamed_by) == ([], "undecided")


@pytest.mark.parametrize(
    ("odd", "kind"),
    [
        pytest.param(call("all_gather", 85), "mismatch/op", id="op"),
        pytest.param(call("all_reduce", 85), "missing", id="line"),
    ],
)
def test_the_majority_decides_between_two_calls(odd: list[SeenFrame], kind: str) -> None:
    (cause,) = causes(WAITS, WAITS, WAITS, odd)
    assert isinstance(cause, Mismatch)
    assert (cause.kind, cause.culprits, cause.blamed_by) == (kind, [3], "majority")
    assert [(issued.ranks, issued.source) for issued in cause.issued] == [
        ([0, 1, 2], "train.py:81"),
        ([3], "train.py:85"),
    ]


def test_where_nothing_decides_the_ranks_wait_for_each_other() -> None:
    blind = [frame("wait_tensor", 9, FUNCTIONAL), frame("step", 2)]
    (cause,) = causes(WAITS, WAITS, WAITS, blind)
    assert isinstance(cause, Cycle)
    assert (cause.culprits, cause.blamed_by, cause.ring) == ([], "undecided", [])
    assert [wait.ranks for wait in cause.waits] == [[0, 1, 2], [3]]


def test_a_rank_in_another_round_of_its_loop() -> None:
    (cause,) = causes(WAITS, WAITS, WAITS, call("all_reduce", 81, step=5))
    assert isinstance(cause, Mismatch)
    assert (cause.kind, cause.culprits, cause.blamed_by) == ("missing", [3], "rounds")
    assert cause.other_round == LoopRound(3, "step", 5, 6)


def test_all_ranks_inside_one_call() -> None:
    (cause,) = causes(*[WAITS] * 4)
    assert isinstance(cause, StuckInside)
    assert (cause.kind, cause.state, cause.culprits) == ("stuck-inside", "no-progress", [])
    (cause,) = causes(*[WAITS] * 4, cpu_s=2.4)
    assert isinstance(cause, StuckInside)
    assert (cause.kind, cause.state, cause.busy) == ("waiting", "moving", [0, 1, 2, 3])


def test_no_rank_waits() -> None:
    job = SeenJob(seen_on(*[WAITS] * 4, moved=True))
    assert find_causes(job) == []
    cause = none_waits(job)
    assert isinstance(cause, NoneWaits)
    assert (cause.moving, cause.whole_job, cause.confidence) == ([0, 1, 2, 3], True, "high")


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([17, 18, 18], LoopRound(0, "step", 17, 18)),
        ([18, 18, 17], LoopRound(2, "step", 17, 18)),
        ([17, 17, 18], LoopRound(2, "step", 18, 17)),
        ([17, 18, 19], None),
        ([17, 17, 18, 18], None),
        ([17, 17, 17], None),
    ],
)
def test_a_round_is_told_only_if_it_is_true_of_all_ranks(
    steps: list[int], told: LoopRound | None
) -> None:
    calls = [call("all_reduce", 81 if i else 85, step=step) for i, step in enumerate(steps)]
    (cause,) = causes(*calls)
    assert isinstance(cause, Mismatch)
    assert cause.other_round == told
