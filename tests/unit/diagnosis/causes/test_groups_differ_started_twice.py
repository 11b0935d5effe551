"""Ranks that exist twice."""

from __future__ import annotations

from goldens import hold
from starting_ranks import WORLD, init, rank, verdict

from commlens.model.ranklog import End, Observation


def test_ranks_that_exist_twice() -> None:
    """Whatever the processes of such a job do to each other is a consequence, also where one of
    them ended.
    """
    for log in (logs := [rank(number, init()) for number in range(WORLD)])[:2]:
        log.twins = [(2000 + log.rank, 1000), (2010 + log.rank, 1001)]
    logs[3].observation = Observation(End.KILLED, signal="SIGABRT")
    found = verdict(*logs)
    assert (found.kind, found.culprits, found.confidence) == ("mismatch/group", [], "high")
    claim = found.cause.claims[0]
    assert (claim.rank, claim.pids, claim.started_by) == (0, [2000, 2010], [1000, 1001])
    hold("mismatch/group-of-ranks-started-twice", found)
    assert [finding.root_cause for finding in found.findings[1:]] == [False] * (
        len(found.findings) - 1
    )
    for log in (logs := [rank(number, init(), inside=False, issued="") for number in range(WORLD)]):
        log.twins = [(2000 + log.rank, 1000), (2010 + log.rank, 1001)]
        log.observation, log.closed = Observation(End.CLEAN), True
    assert verdict(*logs).kind == "healthy", "they met one after the other"
