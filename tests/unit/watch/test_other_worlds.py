"""The logs of jobs that share a group made by hand with the watched one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commlens.model.collective import (
    SETUP,
    Channel,
    Collective,
    CollectiveArgs,
    HandMade,
    ProcessGroup,
    State,
)
from commlens.model.ranklog import RankLog
from commlens.watch import other_worlds
from commlens.watch.other_worlds import OtherWorlds, logs_of_other_worlds, with_other_worlds


def member(rank: int, job: str, store: str) -> RankLog:
    group = ProcessGroup("", (), hand_made=HandMade(rank, 2, store))
    args = CollectiveArgs("new_group", "new_group")
    made = Collective(0, Channel(group, SETUP), 1, args, State.COMPLETED, 1, 1)
    return RankLog(rank, 1, job, "n03", 1000 + rank, rank, setups=[made])


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, str, Any]]:
    """Two jobs beside the watched one, of which one meets it; returns what is done to them."""
    stores = {"rollout": "localhost:1/weights", "else": "localhost:2/weights"}
    done: list[tuple[str, str, Any]] = []

    class FakeRoster:
        def __init__(self, folders: list[Path]) -> None:
            self.job = folders[0].name

        def refresh(self) -> None:
            done.append(("refresh", self.job, 0.0))

        def read_headers(self) -> None:
            done.append(("poll", self.job, 0.0))

        def current(self) -> str:
            return self.job

        def close(self) -> None:
            done.append(("close", self.job, 0.0))

    def observe(roster: FakeRoster, _: object, *, window_s: float, wait_s: float) -> dict[int, Any]:
        done.append(("observe", roster.job, (window_s, wait_s)))
        return {}

    def read_logs(job: str, _: object, *, newest: int | None) -> tuple[list[RankLog], list[str]]:
        done.append(("read", job, newest))
        return [member(1, job, stores[job])], []

    for job in ("trainer", *stores):
        (tmp_path / job).mkdir()
    fakes = SimpleNamespace(Roster=FakeRoster, observe=observe, read_logs=read_logs)
    for name, fake in vars(fakes).items():
        monkeypatch.setattr(other_worlds, name, fake)
    monkeypatch.setattr(other_worlds, "is_over", lambda *_: False)
    return done


def test_each_box_is_read_once_a_look(
    looks: list[tuple[str, str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that is not joined is let go, and looked at again only after some seconds."""
    others, own = OtherWorlds(newest=9), [member(0, "trainer", "localhost:1/weights")]
    now = 100.0
    monkeypatch.setattr(other_worlds.time, "monotonic", lambda: now)
    for seconds, apart in ((0.0, ["else"]), (0.5, []), (5.0, ["else"])):
        now = 100.0 + seconds
        assert [*others.logs(own, [tmp_path / "trainer"])] == [tmp_path / "rollout"]
        assert [job for what, job, _ in looks if what == "read"].count("rollout") == 1
        assert {waits for what, _, waits in looks if what == "observe"} == {(0.0, 0.0)}
        assert [job for what, job, _ in looks if what == "close"] == apart
        assert {newest for what, _, newest in looks if what == "read"} == {9}
        looks.clear()
    others.close()
    assert looks == [("close", "rollout", 0.0)]


def test_where_only_boxes_are_needed_no_process_is_observed(
    looks: list[tuple[str, str, Any]], tmp_path: Path
) -> None:
    own = [member(0, "trainer", "localhost:1/weights")]
    assert [*OtherWorlds(observes=False, newest=1).logs(own, [tmp_path / "trainer"])] == [
        tmp_path / "rollout"
    ]
    assert {what for what, *_ in looks} == {"refresh", "poll", "read", "close"}


def test_a_single_look_waits_for_a_stack_only_while_it_observes(
    looks: list[tuple[str, str, Any]], tmp_path: Path
) -> None:
    own = [member(0, "trainer", "localhost:1/weights")]
    assert [*logs_of_other_worlds(own, [tmp_path / "trainer"])] == [tmp_path / "rollout"]
    waits = [seen for what, _, seen in looks if what == "observe"]
    assert max(waits) == (0.5, 0.5)
    assert [job for what, job, _ in looks if what == "close"] == ["else", "rollout"]


def test_a_job_without_such_groups_reads_nothing(
    looks: list[tuple[str, str, Any]], tmp_path: Path
) -> None:
    assert OtherWorlds().logs([RankLog(0, 1)], [tmp_path / "trainer"]) == {}
    assert looks == []


def test_logs_that_other_nodes_sent_are_joined(
    looks: list[tuple[str, str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those that were read here, too, nor those of jobs that share no group with this one."""
    monkeypatch.setattr(other_worlds, "near_processes", lambda _: ())

    def sent(rank: int, job: str, host: str, store: str) -> list[RankLog]:
        log = member(rank, job, store)
        log.host, log.script, log.world = host, f"{job}.py", job
        return [log]

    own = sent(0, "trainer", "n03", "n03:1/weights")
    here = member(1, "rollout", "n03:1/weights")  # which is read on this node
    apart = sent(1, "apart", "n04", "n03:3/weights")
    joined = with_other_worlds(own, [tmp_path / "trainer"], [[here], apart])
    assert sorted(log.pid for log in joined) == [1000, 1001]
    server = sent(1, "server", "n04", "n03:1/weights")
    joined = with_other_worlds(own, [tmp_path / "none" / "trainer"], [server, [], apart])
    assert [(log.host, log.rank) for log in joined] == [("n04", 1), ("n03", 2)]
    assert [world.name for world in joined[0].worlds.worlds] == ["server", "trainer"]
    # a container has its own pids, but not always its own host name
    server[0].host, server[0].pid = own[0].host, own[0].pid
    joined = with_other_worlds(own, [tmp_path / "none" / "trainer"], [server])
    assert [world.name for world in joined[0].worlds.worlds] == ["server", "trainer"]


@pytest.mark.parametrize("job", ["engine", "engine-of-n04"])
def test_a_world_without_a_default_group_on_two_nodes_is_one(tmp_path: Path, job: str) -> None:
    own, other = member(0, "engine", "n03:1/dp"), member(1, job, "n03:1/dp")
    own.world_size = other.world_size = 2
    other.host = "n04"
    joined = with_other_worlds([own], [tmp_path / "none" / "engine"], [[other]])
    assert [(log.host, log.rank, log.worlds.are_several) for log in joined] == [
        ("n03", 0, False),
        ("n04", 1, False),
    ]
