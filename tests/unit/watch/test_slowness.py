"""When the watcher looks for slow ranks, and whether it still reports those whom it found."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from paced_jobs import job
from paced_samples import found, late

from commlens.blackbox.header import BoxStatus
from commlens.blackbox.reader import OpenBox
from commlens.model.verdict import Verdict
from commlens.processes import process
from commlens.processes.observer import Observer
from commlens.speed.pace import Judgement, SlowRanks
from commlens.watch.nodes.exchange import Nodes
from commlens.watch.roster import Member
from commlens.watch.slowness import Line, Slowness

ALONE = cast(Nodes, SimpleNamespace(others=[]))


def member(rank: int, status: Any = None) -> Member:
    """A rank; all are this process."""
    pid = os.getpid()
    made = Member(pid, 0, rank, 4, rank, 0, process.Handle.invisible(pid))
    made.box, made.status = cast(OpenBox, object()), cast(BoxStatus, status)
    return made


class Looks(Slowness):
    """Notes when it would read the ranks' records."""

    def __init__(self) -> None:
        super().__init__()
        self.at: list[float] = []
        self.now = 0.0

    def _sample(self, members: Sequence[Member], ranks: Sequence[Member]) -> list[Verdict | Line]:
        self.at.append(self.now)
        return []


def looks(seconds: int, *read: Callable[[float], float]) -> list[float]:
    """When it looks, by when each rank had read its durations at a moment; it began at 1000 s."""
    slowness = Looks()
    for half in range(2000, 2000 + 2 * seconds):
        slowness.now = half / 2
        status = [SimpleNamespace(timed_mono_ns=int(each(slowness.now) * 1e9)) for each in read]
        ranks = [member(rank, each) for rank, each in enumerate(status)]
        slowness.poll(ranks, ALONE, slowness.now)
    return [at - 1000 for at in slowness.at]


def every_20_s(now: float) -> float:
    return now // 20 * 20


def test_it_looks_just_after_durations_were_read() -> None:
    assert looks(100, every_20_s, every_20_s) == [0, 20, 40, 60, 80]


def test_it_looks_all_the_time_where_none_are_read() -> None:
    assert looks(20, lambda _: 0.0) == [0, 5, 10, 15]


def test_a_rank_that_reads_none_any_more_is_waited_for_once() -> None:
    """As after a CUDA graph was captured."""
    assert looks(90, lambda _: 1000.0, every_20_s) == [0, 65, 70, 75, 80, 85]
    again = looks(160, lambda now: 1000.0 if now < 1090 else every_20_s(now), every_20_s)
    assert again == [0, 65, 70, 75, 80, 85, 100, 120, 140], "it reads them again"


@pytest.mark.parametrize("judged", ["the same", "others", "none"])
def test_ranks_that_the_other_nodes_clear_meanwhile_are_not_reported(judged: str) -> None:
    logs = job(4, 200, late)
    slow = found(logs)
    now: dict[str, SlowRanks | None] = {"the same": slow, "others": slow._replace(ranks=[3])}
    slowness = Slowness()
    observer = Observer(use_py_spy=False)
    observer.add(os.getpid(), 0)
    look = SimpleNamespace(observer=observer, profiles=dict)
    slowness.logs, slowness._slow, slowness._look = logs[2:3], slow, cast(Any, look)
    reporter = SimpleNamespace(judgement=Judgement(now.get(judged), [0, 1, 2, 3]))
    nodes = SimpleNamespace(
        others=[SimpleNamespace(world_size=4)], reporter=reporter, update=lambda **_: None
    )
    news = slowness.poll([member(2, None)], cast(Nodes, nodes), 0.0)
    assert [isinstance(each, Verdict) for each in news] == [True] * (judged == "the same")
    assert (slowness.verdict is None) is (judged != "the same")
