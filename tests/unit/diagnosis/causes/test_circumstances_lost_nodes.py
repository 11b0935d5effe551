"""Nodes that have fallen silent: no rank of them is blamed, and those that vanished are dead."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import starting_ranks
from builders import START, Job, S, Step, all_reduce

from commlens.diagnosis.examine import diagnose_logs
from commlens.model.cause import LostNode, Missing
from commlens.model.ranklog import End, Observation, RankLog
from commlens.model.verdict import Verdict

NODE = LostNode("n07", [3], 6.0, False)


def waiting_for(last: list[int]) -> list[RankLog]:
    """The logs of ranks that wait for these in their last collective."""

    def program(job: Job, rank: int) -> Iterator[object]:
        group = job.group("0", range(job.size), "default_pg")
        for _ in range(3):
            yield all_reduce(group, line=20)
            yield Step()
        if rank not in last:
            yield all_reduce(group, line=20)

    return Job(4).run(program).logs()


def about(node: LostNode) -> Verdict:
    """The verdict on rank 3, for which the others wait, when this node is lost."""
    return diagnose_logs(waiting_for([3]), lost_nodes=[node])


def test_the_rank_of_a_silent_node_is_not_blamed() -> None:
    found = about(NODE)
    assert (found.kind, found.culprits, found.victims) == ("missing", [], [0, 1, 2])
    assert found.confidence == "low"
    assert isinstance(found.cause, Missing)
    assert found.cause.lost_nodes == [NODE]
    assert found.cause.blamed_by == "unknown"


@pytest.mark.parametrize(
    "ranks", [pytest.param([8, 9], id="outside of the group"), pytest.param([2], id="another rank")]
)
def test_a_node_without_the_rank_to_blame_changes_nothing(ranks: list[int]) -> None:
    found = about(LostNode("n08", ranks, 6.0, False))
    assert found.culprits == [3]
    assert found.cause is not None and not found.cause.lost_nodes


def test_ranks_of_a_node_that_vanished_are_dead() -> None:
    logs = waiting_for([2, 3])
    for log in logs[2:]:
        log.closed = False
        log.observation = msgspec.structs.replace(log.observation, end=End.GONE)
    node = LostNode("n07", [2, 3], 6.0, True)
    found = diagnose_logs(logs, lost_nodes=[node])
    assert (found.kind, found.culprits, found.victims) == ("dead", [2, 3], [0, 1])
    assert found.cause is not None and found.cause.lost_nodes == [node]


def test_a_rank_of_a_node_that_vanished_is_not_inside_of_a_call_of_others() -> None:
    """Nothing that it recorded is known, and nobody need wait for long."""
    calls = [starting_ranks.init(), *starting_ranks.groups(range(4))]
    logs = [starting_ranks.rank(number, *calls) for number in range(3)]
    gone = Observation(End.GONE, ended_ns=START + S)
    logs.append(RankLog(3, 4, "job-1", "n07", initialised=True, observation=gone))
    found = diagnose_logs(logs, stalled_after_s=100, lost_nodes=[LostNode("n07", [3], 6.0, True)])
    assert (found.kind, found.culprits, found.victims) == ("dead", [3], [0, 1, 2])
