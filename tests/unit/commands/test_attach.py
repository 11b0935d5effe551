"""``commlens attach`` on a job that is recorded after all."""

from __future__ import annotations

from pathlib import Path

import pytest

from commlens.commands import attach
from commlens.model.ranklog import RankLog
from commlens.outside.find_ranks import FoundWorld
from commlens.processes.ranks import RankProcess


@pytest.mark.parametrize(
    ("logs", "recorded"),
    [
        ([RankLog(0, 2, pid=41), RankLog(1, 2, pid=42)], True),
        ([RankLog(0, 2, pid=41), RankLog(1, 2, pid=42), RankLog(2, 3, pid=43)], True),
        ([RankLog(0, 2, pid=41)], False),
        # as many logs as ranks: that of another process instead
        ([RankLog(0, 2, pid=41), RankLog(1, 2, pid=43)], False),
        ([RankLog(0, 2, pid=41), RankLog(1, 2, pid=42, unrecorded="COMMLENS is not set")], False),
    ],
)
def test_black_boxes_decide_only_if_all_ranks_here_have_one(
    monkeypatch: pytest.MonkeyPatch, logs: list[RankLog], recorded: bool
) -> None:
    ranks = [RankProcess(rank, pid, 1, 2, command="train.py") for rank, pid in ((0, 41), (1, 42))]
    monkeypatch.setenv("COMMLENS_HEALTH", "off")
    monkeypatch.setattr("commlens.watch.jobs.find_jobs", lambda *_: [Path("/dev/shm/job")])
    monkeypatch.setattr("commlens.watch.snapshot.snapshot", lambda _: logs)
    assert (attach._of_black_boxes([FoundWorld(ranks, [])]) is not None) == recorded
