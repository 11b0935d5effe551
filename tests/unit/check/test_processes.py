"""Tests of src/commlens/check/processes.py, with real processes."""

from __future__ import annotations

import os
import select
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from object_chain import SIZE, chain

from commlens.check import processes
from commlens.check.objects import SharedValues
from commlens.check.processes import Player, RankProcesses
from commlens.check.run_rank import Plan, Run, warm_up
from commlens.model.ranklog import End

pytestmark = pytest.mark.launches  # forks ranks


@pytest.fixture(autouse=True)
def _warm() -> None:
    warm_up()


def told(player: Player) -> Run:
    assert select.select([player], [], [], 30)[0]
    return player.receive()


def test_a_process_waits_for_an_object_and_goes_on(tmp_path: Path) -> None:
    shared = SharedValues()
    plan = chain(tmp_path)
    second = Player(plan, 1, shared)
    try:
        waits = told(second)
        assert waits.needs is not None and waits.needs[:3] == ("send", 0, 1)
        assert second.is_waiting and second.memory() > 1 << 20
        first = Player(plan, 0, shared)
        try:
            gave = told(first)
        finally:
            assert first.end() == "rank 0 has 5\n"
        assert gave.needs is None
        shared.add(gave.sent, gave.keys)
        second.resume(shared.of(1))
        ended = told(second)
        assert ended.needs is None and not ended.sequence.problem
    finally:
        assert second.end() == "rank 1 has 6\n"
    assert (tmp_path / "starts").read_text().split() == ["1", "0"]


def test_a_process_that_dies_is_told() -> None:
    player = Player(Plan(lambda: os.kill(os.getpid(), signal.SIGKILL), 2), 1, SharedValues())
    try:
        run = told(player)
    finally:
        player.end()
    assert run.sequence.end == End.KILLED
    assert run.sequence.problem == "its run ended early (SIGKILL)"


def test_a_process_that_pauses_within_a_message_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def send_half(link: Connection, _: object) -> None:
        os.write(link.fileno(), (100).to_bytes(4, "big") + b"half")
        os.kill(os.getpid(), signal.SIGSTOP)

    monkeypatch.setattr(processes, "_send", send_half)
    monkeypatch.setattr(processes, "_LINK_S", 1)
    player = Player(Plan(lambda: None, 2), 0, SharedValues())
    try:
        run = told(player)
    finally:
        player.end()
    assert run.sequence.problem == "its process paused for 1 s while it sent its sequence"


def test_a_process_that_is_paused_does_not_hold_up_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_LINK_S", 1)
    player = Player(chain(tmp_path), 1, SharedValues())
    try:
        assert told(player).needs is not None
        os.kill(player._pid, signal.SIGSTOP)
        began_s = time.monotonic()
        player.resume(SharedValues(keys={"more than a socket holds": [bytes(16 << 20)]}))
        assert time.monotonic() - began_s < 20
        assert not player.is_waiting
    finally:
        player.end()


def test_a_process_that_takes_too_long_is_late() -> None:
    player = Player(Plan(lambda: None, 2, timeout_s=-20.0), 0, SharedValues())
    try:
        assert player.is_late()
        player.kill()
        run = told(player)
    finally:
        player.end()
    assert run.sequence.problem == "its run took longer than -20 s"


@pytest.mark.parametrize("memory", [1 << 30, 0])
def test_each_rank_starts_once_if_the_memory_suffices(
    memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_WAITING_MAX", memory)
    ranks = RankProcesses(chain(tmp_path))
    sequences = ranks.sequences_of(range(SIZE))
    starts = (tmp_path / "starts").read_text().split()
    assert set(starts) == {"0", "1", "2", "3"}
    assert (len(starts) == SIZE) is (memory > 0)
    assert [ranks.outputs[rank] for rank in range(SIZE)] == [
        f"rank {rank} has {5 + rank}\n" for rank in range(SIZE)
    ]
    assert not any(sequence.problem for sequence in sequences.values())


def test_what_ranks_know_does_not_depend_on_the_number_of_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_WAITING_MAX", 0)
    starts = []
    for cpus in (1, SIZE):
        monkeypatch.setattr(processes.os, "sched_getaffinity", lambda pid, n=cpus: range(n))
        folder = tmp_path / str(cpus)
        folder.mkdir()
        RankProcesses(chain(folder)).sequences_of(range(SIZE))
        starts.append(sorted((folder / "starts").read_text().split()))
    assert starts[0] == starts[1]


def test_others_need_not_import_what_a_first_rank_that_waits_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported: list[tuple[str, ...]] = []
    monkeypatch.setattr(processes, "import_modules", imported.append)
    RankProcesses(chain(tmp_path)).sequences_of([1, 2])
    assert len(imported) == 1
