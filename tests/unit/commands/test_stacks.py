"""``commlens stacks``: whose ranks are shown, and those that stand for others."""

from __future__ import annotations

from pathlib import Path

import pytest
from met_worlds import log_of

from commlens.commands.stacks import read_stacks, with_alike_ranks
from commlens.diagnosis.fold.alike import Alike, AlikeRanks
from commlens.errors import CommandError
from commlens.model.collective import (
    Channel,
    Collective,
    CollectiveArgs,
    Frame,
    FrameKind,
    ProcessGroup,
    State,
)
from commlens.model.ranklog import End, Observation, RankLog, ThreadStack
from commlens.outside.sample import HostSamples, RankSample
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


def test_only_stacks_of_ranks_that_moved_since_are_read_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stack(line: int, taken_ns: int = 1) -> ThreadStack:
        frame = Frame("train.py", line, "step", FrameKind.USER)
        return ThreadStack(0, "MainThread", (frame,), taken_ns=taken_ns, is_main=True)

    args, channel = (
        CollectiveArgs("barrier", "barrier"),
        Channel(ProcessGroup("0", (0, 1, 2)), "cpu"),
    )
    moved = Collective(1, channel, 1, args, State.ISSUED, announced_ns=2)
    logs = [
        RankLog(0, 3, pid=41, stacks=[stack(10)]),
        RankLog(1, 3, pid=42, stacks=[stack(20)], collectives=[moved]),
        RankLog(2, 3, pid=43, stacks=[stack(30)], observation=Observation(end=End.GONE)),
    ]
    seen = [
        RankSample(RankLog(rank, 2, pid=pid, observation=Observation(stacks=[stack(line)])))
        for rank, pid, line in ((0, 41, 11), (1, 42, 21))
    ]
    monkeypatch.setattr("commlens.watch.jobs.find_jobs", lambda *_: [Path("/dev/shm/job")])
    monkeypatch.setattr("commlens.watch.snapshot.snapshot", lambda *_, **__: logs)
    monkeypatch.setattr("commlens.outside.find_ranks.find_worlds", lambda *_: [None])
    monkeypatch.setattr("commlens.outside.look.look_at", lambda *_, **__: [HostSamples("", seen)])
    lines = {log.rank: log.main_stack.frames[0].line for log in read_stacks(None, None)[0]}
    assert lines == {0: 10, 1: 21, 2: 30}


@pytest.mark.parametrize(("met", "shown"), [("rollout", [0, 1]), ("ended", [])])
def test_jobs_that_run_are_one_only_if_they_meet(
    monkeypatch: pytest.MonkeyPatch, met: str, shown: list[int]
) -> None:
    def refuse(*_: object) -> None:
        raise CommandError("Several jobs run on this machine")

    jobs = [Path("/dev/shm/trainer"), Path("/dev/shm/rollout")]
    logs = [log_of(0, "n0")]
    monkeypatch.setattr("commlens.watch.jobs.find_jobs", lambda *_: jobs)
    monkeypatch.setattr("commlens.watch.snapshot.snapshot", lambda *_, **__: logs)
    others = {Path("/dev/shm", met): [log_of(1, "n1")]}
    monkeypatch.setattr("commlens.watch.asked_worlds.logs_of_other_worlds", lambda *_: others)
    monkeypatch.setattr("commlens.outside.find_ranks.find_worlds", refuse)
    if shown:
        assert [log.rank for log in read_stacks(None, None)[0]] == shown
    else:
        with pytest.raises(CommandError):
            read_stacks(None, None)
