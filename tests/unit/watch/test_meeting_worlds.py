"""Worlds on several nodes that meet in a folder, as they do in a store."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from met_worlds import STORE, World, eventually, log_of, ticking

from commlens.watch import meeting_worlds
from commlens.watch.hand_made_groups import names_in
from commlens.watch.nodes.beat import Beat, ByHand
from commlens.watch.nodes.exchange import Nodes
from commlens.watch.nodes.meeting_places import Folder
from commlens.watch.open_waits import OpenWait
from commlens.watch.other_worlds import reading_of


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (
        ("_SLOWER", 0.1),
        ("DEFER_S", 0.3),
        ("GROUPS_EVERY_S", 0.0),
        ("_GATHER_S", 20.0),
    ):
        monkeypatch.setattr(meeting_worlds, name, seconds)


@pytest.fixture
def two(quick: None, tmp_path: Path) -> Iterator[tuple[World, World]]:
    """Returns two worlds that have met, the one that reports first."""
    made = [World(member, str(tmp_path / "meet"), tmp_path) for member in (0, 1)]
    eventually(lambda: all(each.hears() for each in made), *made)
    made.sort(key=lambda each: each.worlds.reporter is not None)
    yield made[0], made[1]
    for each in made:
        each.worlds.leave()


def test_a_wait_of_another_world_is_one_of_the_world_that_reports(two: tuple[World, World]) -> None:
    first, second = two
    second.waiting = [OpenWait(time.monotonic_ns() - 10**10, 1, "collective")]
    (wait,) = eventually(lambda: first.worlds.waits(time.monotonic_ns()), *two)
    assert wait.pid < 0 and wait.kind == "collective"
    assert second.worlds.waits(time.monotonic_ns()) == []


def test_the_world_that_reports_gets_the_others_evidence(
    two: tuple[World, World], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two
    gathering = meeting_worlds._Exchange._wait_for_answers

    def answering(*args: Any, **kwargs: Any) -> Any:
        eventually(lambda: second.asked, second)
        return gathering(*args, **kwargs)

    monkeypatch.setattr(meeting_worlds._Exchange, "_wait_for_answers", answering)
    (logs,), problems = first.worlds.gather()
    assert problems == []
    assert [(log.host, log.pid, log.job) for log in logs] == [
        (second.host, second.log.pid, f"job-{second.host}")
    ]
    assert second.worlds.gather() == ([], [])
    first.worlds.announce("before it was joined", "missing", is_complete=True)
    first.worlds.note_joined([first.log])
    first.worlds.announce("of another diagnosis", "missing", is_complete=True)
    first.worlds.note_joined([first.log, *logs])
    first.worlds.announce("Rank 0 of the first never came.", "missing", is_complete=False)
    ((host, news),) = eventually(second.worlds.take_news, *two)
    assert (host, news.text, news.kind) == (
        first.host,
        "Rank 0 of the first never came.",
        "missing",
    )
    late = World(2, second.worlds._where, Path(second.worlds._where).parent)
    eventually(lambda: late.worlds.reporter or first.worlds.reporter, *two, late)
    time.sleep(0.5)
    assert late.worlds.take_news() == []  # it was not looked at
    late.worlds.leave()


def test_a_world_that_meets_others_elsewhere_hears_only_what_is_complete(
    two: tuple[World, World], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two
    second.log.setups += log_of(0, second.host, "10.0.0.2:1/more").setups
    eventually(lambda: first.worlds.reporter, *two)
    for exchange in second.worlds._exchanges.values():
        exchange.answered_by = [beat.slot for beat in exchange.others]
    second.worlds.announce("two places, one of them met", "missing", is_complete=False)
    ((_, news),) = eventually(first.worlds.take_news, *two)
    assert news.text.startswith("two places")
    first.log.setups += log_of(0, first.host, "10.0.0.3:1/mine").setups
    first.log.setups += log_of(0, first.host, "10.0.0.4:1/too").setups
    eventually(lambda: second.worlds.reporter, *two)
    for exchange in first.worlds._exchanges.values():
        exchange.answered_by = [beat.slot for beat in exchange.others]
    first.worlds.announce("not complete", "missing", is_complete=False)
    first.worlds.announce("complete", "missing", is_complete=True)
    ((_, news),) = eventually(second.worlds.take_news, *two)
    assert news.text == "complete"


def test_a_world_that_does_not_answer_is_said_to(
    two: tuple[World, World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting_worlds, "_GATHER_S", 0.2)
    first, second = two
    logs, problems = first.worlds.gather()
    assert logs == [] and problems == [
        "1 world that may share a group made by hand, reported by"
        f" {second.host}, did not answer in time."
    ]
    first.worlds.announce("nobody was heard", "missing", is_complete=True)
    time.sleep(0.5)
    assert second.worlds.take_news() == []


def test_a_world_that_another_node_of_its_job_reports_for_reads_no_boxes(
    two: tuple[World, World],
) -> None:
    first, _ = two
    first.worlds.reported_by = "host7"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(meeting_worlds, "GROUPS_EVERY_S", 3600.0)
        first.worlds._look_at = 0.0
        known = first.worlds.groups([first.member])
        first.worlds.leave_exchanges()
        assert not first.worlds._exchanges and first.worlds.reported_by == ""
        first.member.box = None
        assert first.worlds.groups([first.member]) is known != []


def test_a_world_leaves_its_verdict_to_the_other_for_some_seconds(two: tuple[World, World]) -> None:
    first, second = two
    assert not first.worlds.defer(is_early=False)
    assert second.worlds.defer(is_early=True)
    time.sleep(0.35)
    assert not second.worlds.defer(is_early=True)
    assert second.worlds.defer(is_early=False)
    second.worlds.reported_by = first.host
    time.sleep(0.35)
    assert second.worlds.defer(is_early=False)
    second.worlds.end_stall()
    assert second.worlds.reported_by == ""


def test_a_death_is_left_to_the_world_that_reports_if_it_has_one_too(
    two: tuple[World, World],
) -> None:
    first, second = two
    second.worlds.add_dead([0])
    assert not first.worlds.reporter_has_deaths and not second.worlds.reporter_has_deaths
    first.worlds.add_dead([0])
    eventually(lambda: second.worlds.reporter_has_deaths, *two)


def test_a_world_that_has_left_leaves_its_evidence(two: tuple[World, World]) -> None:
    first, second = two
    first.log.setups += log_of(0, first.host, "10.0.0.2:1/more").setups
    third = World(7, first.worlds._where, Path(first.worlds._where).parent)
    third.log = log_of(1, third.host, "10.0.0.2:1/more")
    met = first.worlds._exchanges
    eventually(lambda: len(met) == 2 and all(each.others for each in met.values()), first, third)
    first.asked = 0
    first.worlds.answer(first.evidence, is_last=True)
    assert first.asked == 1, "for both places"
    first.worlds.leave(first.evidence)
    assert first.asked == 2
    third.worlds.leave()
    eventually(lambda: second.worlds.reporter is None and second.worlds.gather()[0], second)
    ((log,),) = second.worlds.gather()[0]
    assert log.pid == first.log.pid


def test_a_world_that_was_started_again_takes_the_place_of_the_one_that_left(
    two: tuple[World, World],
) -> None:
    first, second = two
    second.worlds.leave(second.evidence)
    eventually(lambda: first.worlds.gather()[0], first)
    number = int(second.host[-1])
    again = World(number, second.worlds._where, Path(second.worlds._where).parent)
    again.log.pid += 500
    again.worlds._name = first.worlds._name + 1  # it reports after the first
    eventually(lambda: again.worlds.reporter and first.hears(), first, again)
    with ticking(again):
        (logs,), problems = first.worlds.gather()
    assert problems == [] and [log.pid for log in logs] == [again.log.pid]
    again.worlds.leave()


def test_all_places_are_asked_at_once(
    two: tuple[World, World], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, silent = two
    first.log.setups += log_of(0, first.host, "10.0.0.2:1/more").setups
    third = World(7, first.worlds._where, Path(first.worlds._where).parent)
    third.log = log_of(1, third.host, "10.0.0.2:1/more")
    met = first.worlds._exchanges
    eventually(lambda: len(met) == 2 and all(each.others for each in met.values()), first, third)
    eventually(lambda: third.worlds.reporter and silent.worlds.reporter, first, silent, third)
    monkeypatch.setattr(meeting_worlds, "_GATHER_S", 3.0)
    with ticking(third):
        (logs,), problems = first.worlds.gather()
    assert [log.host for log in logs] == ["host7"]
    assert len(problems) == 1 and silent.host in problems[0]
    third.worlds.leave()


def test_the_processes_of_a_world_stay_known_when_the_place_ends(two: tuple[World, World]) -> None:
    first, second = two
    ((place, exchange),) = first.worlds._exchanges.items()
    eventually(lambda: exchange.members, *two)
    second.worlds.add_dead([0])
    eventually(lambda: exchange.others[0].dead, *two)
    with ticking(second):
        assert first.worlds.gather()[0] != [] and not first.worlds.out_of_sight
    assert isinstance(place, Folder)
    place.path.rename(place.path.with_name("gone"))
    place.path.touch()
    exchange._known.lost_s = 0.3
    eventually(lambda: exchange.lost_store)
    ((log,),), problems = first.worlds.gather()
    assert first.worlds.out_of_sight == {reading_of(log)} and log.pid == second.log.pid
    assert problems == [
        f"The world that {second.host} reports for met this one in the folder {place.path.parent},"
        " which has ended or cannot be reached any more. Rank 0 of it had died by then. What its"
        f" ranks did then may be printed on {second.host}."
    ]
    answered = {name for beat in exchange.lost_store.beats for name in names_in(beat)}
    assert exchange.lost_worlds(answered) == ([], []), "the world has answered in another place"


def test_a_later_look_at_the_processes_is_sent_as_soon_as_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meeting_worlds, "_MEMBERS_S", 3600.0)
    monkeypatch.setattr(Nodes, "_exchange", lambda *_: None)
    monkeypatch.setattr(Nodes, "others", [Beat(1, "host1", [1])])
    sent: list[bytes] = []
    client: Any = SimpleNamespace(
        set=lambda _, value: sent.append(value), existing_keys=list, get=list
    )
    may_end = threading.Event()
    looks = itertools.count(1)

    def look(records: int) -> bytes:
        may_end.wait(20)
        return b"look %d" % next(looks)

    exchange = meeting_worlds._Exchange("host0", lambda: None, look)
    exchange.members[1] = b"known"
    for number in (1, 2):
        exchange.groups = [ByHand(STORE, 2, ordinal, (0,)) for ordinal in range(number)]
        may_end.clear()
        exchange._members_due = 0.0
        exchange._exchange(client, 0)
        may_end.set()
        eventually(lambda n=number: exchange._exchange(client, 0) or len(sent) == n)
    assert sent == [b"look 1", b"look 2"]


def test_a_look_at_the_processes_that_failed_is_repeated_when_it_is_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meeting_worlds, "_MEMBERS_S", 3600.0)
    monkeypatch.setattr(Nodes, "_exchange", lambda *_: None)
    monkeypatch.setattr(Nodes, "others", [Beat(1, "host1", [1])])
    sent: list[bytes] = []
    client: Any = SimpleNamespace(
        set=lambda _, value: sent.append(value), existing_keys=list, get=list
    )
    looks: list[int] = []

    def look(records: int) -> bytes:
        looks.append(records)
        if len(looks) == 1:
            raise OSError("no stack can be read")
        return b"look"

    exchange = meeting_worlds._Exchange("host0", lambda: None, look)
    exchange.members[1] = b"known"
    exchange.groups = [ByHand(STORE, 2, 0, (0,))]
    exchange._exchange(client, 0)
    eventually(lambda: exchange._exchange(client, 0) or exchange._look_under_way is None)
    exchange._exchange(client, 0)
    assert (len(looks), sent) == (1, []), "it is not repeated all the time"
    for _ in range(2):
        exchange._members_due = 0.0
        eventually(lambda: exchange._exchange(client, 0) or exchange._look_under_way is None)
    assert (len(looks), sent) == (2, [b"look"])


def test_worlds_part_once_all_members_are_in_sight(two: tuple[World, World]) -> None:
    first, second = two
    first.log.setups += log_of(1 - int(first.host[-1]), first.host).setups
    first.tick()
    assert not first.worlds._exchanges
    eventually(lambda: not second.hears(), second)


def test_a_world_sees_its_own_groups_unless_it_must_meet_no_other(
    quick: None, tmp_path: Path
) -> None:
    alone = World(0, "off", tmp_path)
    assert alone.worlds.groups([alone.member]) == []
    seen = World(0, "auto", tmp_path)
    assert seen.worlds.groups([seen.member]) == [ByHand(STORE, 2, 0, (0,))]
