"""The ranks of a job that is seen from outside, sorted by what they do."""

from __future__ import annotations

import pytest
from seen_ranks import GROUP, call, sample, stay, synced, two_worlds

from commlens.model.cause import CollectiveRef
from commlens.outside.sample import HostSamples
from commlens.outside.seen import SeenJob, ranks_of


def test_each_rank_is_in_one_class() -> None:
    samples = [
        sample(0, call("all_reduce", 81)),
        sample(1, call("all_reduce", 81), moved=True),
        sample(2, stay("load_batch", 57)),
        sample(3, [], moved=None),
        sample(4, call("all_reduce", 81), state="T"),
    ]
    job = SeenJob([HostSamples("n1", samples[:3], 6, [0, 1, 5]), HostSamples("n2", samples[3:])])
    assert job.size == 6 and job.gone == [5]
    assert [ranks_of(some) for some in (job.stuck, job.moving, job.outside, job.unread)] == [
        [0],
        [1],
        [2, 4],
        [3],
    ], "a stopped rank counts as outside, whatever its stack is"


def test_waits_in_one_call_at_one_line_are_one() -> None:
    rows = call("all_reduce", 81, passed=GROUP)
    samples = [
        sample(0, call("recv", 53, src=1)),
        sample(1, call("all_reduce", 81)),
        sample(2, call("all_reduce", 81)),
        sample(3, rows),
    ]
    waits = SeenJob([HostSamples("n1", samples, 4)]).waits()
    assert [wait.ranks for wait in waits] == [[1, 2], [0], [3]]
    assert waits[1].collective == CollectiveRef("recv", 0, 1)
    assert waits[2].group is None, "a variable that holds a group does not tell its ranks"


WAITS, BARRIER, STAYS = synced(81), call("barrier", 90), stay("load", 57)


@pytest.mark.parametrize(
    ("trainers", "rollouts", "linked", "outside", "surely", "may"),
    [
        ([WAITS, BARRIER], [WAITS, STAYS], "t0-r0 t0-r1", [3], False, True),
        ([WAITS, BARRIER], [WAITS, STAYS], "t0-r0", [3], False, False),
        ([WAITS, BARRIER], [BARRIER, STAYS], "t0-r0", [3], True, True),
        # trainer 1 is not connected with the rollout workers, and they wait for another
        ([WAITS, STAYS], [WAITS, WAITS], "t0-r0 t0-r1", [1], False, False),
        # nothing waits for rollout 1
        ([BARRIER, STAYS], [STAYS, STAYS], "t0-r0 t0-r1", [1], True, True),
        ([WAITS], [STAYS, STAYS], "t0-r1", [2], False, True),
    ],
)
def test_which_ranks_of_several_worlds_may_be_awaited(
    trainers, rollouts, linked, outside, surely, may
):
    job = SeenJob(two_worlds(trainers, rollouts, linked))
    assert ranks_of(job.outside) == outside
    (one,) = job.outside
    assert (job.is_needed(one), job.may_hold_up_all(one)) == (surely, may)


def test_the_numbers_of_several_worlds() -> None:
    calls = [call("broadcast", 53, src=1), call("broadcast", 54, passed=GROUP, src=1)]
    job = SeenJob(two_worlds([BARRIER, BARRIER], calls))
    assert [world.name for world in job.worlds.worlds] == ["trainer", "rollout"]
    assert job.ranks == [0, 1, 2, 3] and job.size == 4
    assert [one.call.root for one in job.stuck if one.call is not None] == [None, None, 3, None], (
        "a rank in a group that may reach other worlds is nobody's number"
    )
    groups = [wait.group.ranks for wait in job.waits() if wait.group is not None]
    assert groups == [[0, 1], [2, 3]], "each world has a default group of its own"


def test_hosts_with_one_world_each_have_the_same() -> None:
    one = HostSamples("n1", [sample(0, BARRIER)], 2, world="localhost|1")
    other = HostSamples("n2", [sample(1, BARRIER)], 2, world="n1|1")
    job = SeenJob([one, other])
    assert (job.ranks, job.size, bool(job.worlds)) == ([0, 1], 2, False)
    alike = HostSamples("n2", [sample(0, BARRIER)], 2, world="n1|2")
    assert SeenJob([one, alike]).ranks == [0, 2], "two hosts with a rank 0 each have two worlds"
    of_two = two_worlds([BARRIER], [BARRIER], "t0-r0")
    second = HostSamples("n2", [sample(1, BARRIER)], 2, world="trainer")
    lost = HostSamples("n3", notes=["n3 did not answer"])
    assert SeenJob([*of_two, second, lost]).ranks == [0, 1, 2]
