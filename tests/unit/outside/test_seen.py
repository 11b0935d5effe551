"""The ranks of a job that is seen from outside, sorted by what they do."""

from __future__ import annotations

from seen_ranks import GROUP, call, sample, stay

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
    assert job.world == 6 and job.absent == [5]
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
