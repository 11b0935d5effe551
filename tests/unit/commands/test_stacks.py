"""``commlens stacks``: whose ranks are shown, and those that stand for others."""

from __future__ import annotations

from pathlib import Path

import pytest

from commlens.commands.stacks import find_ranks, with_alike_ranks
from commlens.diagnosis.fold.alike import Alike, AlikeRanks
from commlens.errors import CommandError
from commlens.model.ranklog import RankLog
from commlens.reports.stacks_terminal import StackRow
from commlens.watch.other_nodes import OtherNodes


def test_ranks_that_were_not_read_stand_where_those_in_their_state_do() -> None:
    alike = AlikeRanks(
        [
            Alike(frozenset([0, 1]), frozenset([2, 3, 4])),
            Alike(frozenset([6]), frozenset()),
            Alike(frozenset(), frozenset([8])),
        ]
    )
    classes = [StackRow([0, 1, 6], ()), StackRow([7], (), "stopped"), StackRow([9], ())]
    assert [each.ranks for each in with_alike_ranks(classes, OtherNodes(alike=alike))] == [
        [7],
        [9],
        [0, 1, 2, 3, 4, 6],
    ]


@pytest.mark.parametrize(("met", "shown"), [("rollout", [0, 1]), ("ended", [])])
def test_jobs_that_run_are_one_only_if_they_meet(
    monkeypatch: pytest.MonkeyPatch, met: str, shown: list[int]
) -> None:
    def refuse(*_: object) -> None:
        raise CommandError("Several jobs run on this machine")

    jobs = [Path("/dev/shm/trainer"), Path("/dev/shm/rollout")]
    logs = [RankLog(0, 1, job="trainer")]
    monkeypatch.setattr("commlens.watch.jobs.find_jobs", lambda *_: jobs)
    monkeypatch.setattr("commlens.watch.snapshot.snapshot", lambda *_, **__: logs)
    others = {Path("/dev/shm", met): [RankLog(0, 1, job=met)]}
    monkeypatch.setattr("commlens.watch.other_worlds.logs_of_other_worlds", lambda *_: others)
    monkeypatch.setattr("commlens.outside.find_ranks.find_worlds", refuse)
    if shown:
        assert [log.rank for log in find_ranks(None, None).logs] == shown
    else:
        with pytest.raises(CommandError):
            find_ranks(None, None)
