"""What commands learn of worlds on other nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from met_worlds import World, eventually, log_of, ticking

from commlens.watch import asked_worlds, meeting_worlds
from commlens.watch.asked_worlds import ask_worlds, look_everywhere
from commlens.watch.other_nodes import OtherNodes

NOTHING = OtherNodes()


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[World, World]]:
    """Returns two worlds that have met; the first is on this host."""
    monkeypatch.setattr(meeting_worlds, "_SLOWER", 0.1)
    monkeypatch.setattr(meeting_worlds, "GROUPS_EVERY_S", 0.0)
    here = os.uname().nodename
    made = [
        World(member, str(tmp_path / "meet"), tmp_path, here * (not member)) for member in (0, 1)
    ]
    eventually(lambda: all(each.hears() for each in made), *made)
    yield made[0], made[1]
    for each in made:
        each.worlds.leave()


def asked(world: World, where: str = "") -> OtherNodes:
    return ask_worlds(NOTHING, {world.boxes: [world.log]}, where or world.worlds._where)


def test_a_world_on_another_node_tells_what_its_ranks_do(two: tuple[World, World]) -> None:
    here, there = two
    with ticking(here), ticking(there):
        found = asked(here)
    assert found.lines == [] and [[log.host for log in logs] for logs in found.worlds] == [
        [there.host]
    ]
    assert (here.asked, there.asked) == (0, 1)


def test_both_are_one_picture(two: tuple[World, World]) -> None:
    here, there = two
    with ticking(here), ticking(there):
        logs, elsewhere, others = look_everywhere(here.boxes, [here.log], here.worlds._where)
    assert [(log.host, log.rank) for log in logs] == [(there.host, 0), (here.host, 1)]
    assert logs[0].worlds.are_several and others == {} and len(elsewhere.worlds) == 1


def test_the_setting_of_a_rank_tells_where_they_meet(
    two: tuple[World, World], monkeypatch: pytest.MonkeyPatch
) -> None:
    environs = {1000: {"COMMLENS_MEET": two[0].worlds._where}}
    monkeypatch.setattr("commlens.processes.process.environment", lambda pid: environs[pid])
    with ticking(two[0]), ticking(two[1]):
        assert len(asked(two[0], "auto").worlds) == 1
    assert asked(two[0], "off") is NOTHING


def test_the_last_evidence_of_a_world_that_has_left_is_read(two: tuple[World, World]) -> None:
    here, there = two
    there.worlds.leave(there.evidence)
    with ticking(here):
        eventually(lambda: not here.hears())
        found = asked(here)
    assert found.lines == [] and [log.pid for logs in found.worlds for log in logs] == [1001]


def test_a_world_that_does_not_answer_is_named_by_its_host(
    two: tuple[World, World], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> bytes:
        raise ValueError("no evidence")

    monkeypatch.setattr(asked_worlds, "_ANSWERS_S", 0.2)
    two[1].look = fail  # type: ignore[method-assign]
    with ticking(two[0]), ticking(two[1]):
        found = asked(two[0])
    assert not found.worlds and found.lines == [
        "A world that host1 reports for may share a group made by hand with this one, and did not"
        " answer: run the same command on host1."
    ]


def test_a_store_that_has_ended_is_named(tmp_path: Path) -> None:
    log = log_of(0, "here", "127.0.0.1:1/weights")
    assert ask_worlds(NOTHING, {tmp_path: [log]}, "auto").lines == [
        "The worlds on other nodes that share a group made by hand with this one cannot be asked:"
        " the group's store at 127.0.0.1:1 refuses connections. Run the same command there."
    ]


def test_nobody_is_asked_if_all_members_are_in_sight(tmp_path: Path) -> None:
    runs = {tmp_path / str(member): [log_of(member, "here", "x:1/w")] for member in (0, 1)}
    assert ask_worlds(NOTHING, runs, "auto") is NOTHING
