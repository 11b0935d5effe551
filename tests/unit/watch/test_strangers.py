"""Ranks without a black box, found by the environment of real processes that do nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from watch_ranks import eventually

from commlens.blackbox import job_dirs
from commlens.model.collective import (
    SETUP,
    Channel,
    Collective,
    CollectiveArgs,
    ProcessGroup,
    State,
)
from commlens.model.ranklog import RankLog
from commlens.model.worlds import Outsider, Worlds
from commlens.text import INLINE_CODE
from commlens.watch import strangers
from commlens.watch.strangers import (
    JobMeeting,
    Strangers,
    find_strangers,
    meeting_of,
    near_processes,
    unrecorded_lines,
    why_unrecorded,
)

PORT = str(20001 + os.getpid() % 8000)
OTHER_PORT = str(int(PORT) + 10000)
SLEEPS = "import time; time.sleep(60)"


@pytest.fixture
def run() -> Iterator[Any]:
    started: list[subprocess.Popen[bytes]] = []

    def start(program: str = SLEEPS, **environ: str) -> int:
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", program], env={**os.environ, "WORLD_SIZE": "3", **environ}
            )
        )
        return started[-1].pid

    yield start
    for process in started:
        for child in strangers.process.children(process.pid):
            os.kill(child, 9)
        process.kill()
        process.wait()


def test_found_by_its_environment(run: Any) -> None:
    """Not a rank's child, another job's rank, or what is no rank."""
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEPS!r}])"
    rank = run(child, RANK="1", MASTER_PORT=PORT)
    lightning = run(LOCAL_RANK="2", MASTER_PORT=PORT)
    run(RANK="1", MASTER_PORT="1")
    run(MASTER_PORT=PORT)
    meeting = JobMeeting("127.0.0.1", PORT, 3, 0)
    eventually(
        lambda: (
            len(strangers.process.children(rank)) == 1
            and strangers.process.environment(strangers.process.children(rank)[0])
        )
    )
    found = find_strangers(meeting, {0}, restart=2)
    assert [(worker.rank, worker.pid, worker.restart) for worker in found] == [
        (1, rank, 2),
        (2, lightning, 2),
    ]
    assert find_strangers(meeting, {0, 1, 2}, restart=0) == []
    other_node = run(RANK="1", MASTER_PORT=OTHER_PORT, GROUP_RANK="1")
    eventually(lambda: "GROUP_RANK" in strangers.process.environment(other_node))
    assert (
        find_strangers(JobMeeting("127.0.0.1", OTHER_PORT, 3, 0, ("0", "", "", "")), {0}, restart=0)
        == []
    )
    assert (
        len(
            find_strangers(
                JobMeeting("127.0.0.1", OTHER_PORT, 3, 0, ("1", "", "", "")), {0}, restart=0
            )
        )
        == 1
    )


def test_a_job_that_meets_on_another_host(run: Any) -> None:
    """Two jobs may share a node, each with its rank 0 on another one, and both with the usual port."""
    pid = run(RANK="1", MASTER_ADDR="node1", MASTER_PORT=OTHER_PORT)
    eventually(lambda: "MASTER_ADDR" in strangers.process.environment(pid))
    assert [
        worker.pid
        for worker in find_strangers(JobMeeting("node1", OTHER_PORT, 3, 0), {0}, restart=0)
    ] == [pid]
    assert find_strangers(JobMeeting("node2", OTHER_PORT, 3, 0), {0}, restart=0) == []


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({"COMMLENS": ""}, "COMMLENS=1 is not in its environment"),
        ({"COMMLENS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "TORCH_DEVICE_BACKEND_AUTOLOAD"),
        ({"COMMLENS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}, "may lack commlens"),
    ],
)
def test_why(
    run: Any, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], reason: str
) -> None:
    pid = run(**environ)
    eventually(lambda: "COMMLENS" in strangers.process.environment(pid))
    assert why_unrecorded(pid, joined=True) == "", (
        "it has not loaded torch: it may still be recorded"
    )
    monkeypatch.setattr(strangers.process, "has_torch", lambda pid: True)
    assert reason in why_unrecorded(pid, joined=True)
    assert (why_unrecorded(pid, joined=False) == "") is (reason == "may lack commlens"), (
        "it may still import torch"
    )


def member(rank: int, pid: int, *, place: str = "", size: int = 3) -> Any:
    group = ProcessGroup("default_pg", tuple(range(size)))
    call = Collective(
        0,
        Channel(group, SETUP),
        1,
        CollectiveArgs("init_process_group", ""),
        State.COMPLETED,
        1,
        module=place,
    )
    box = SimpleNamespace(log=lambda newest: SimpleNamespace(setups=[call])) if place else None
    return SimpleNamespace(rank=rank, pid=pid, box=box, alive=True, here=True, world_size=size)


def test_where_the_ranks_meet(run: Any) -> None:
    known = member(0, os.getpid(), place="tcp://localhost:29511")
    assert meeting_of([known]) == JobMeeting("localhost", "29511", 3, 0)
    assert meeting_of([member(0, os.getpid(), place="file:///tmp/x")]) is None


def test_the_line_at_the_start(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = run(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEPS!r}])")
    eventually(lambda: len(strangers.process.children(parent)) == 1)
    child = strangers.process.children(parent)[0]
    assert job_dirs.parent_of(child) == parent
    recorded = [
        member(0, parent, place="tcp://127.0.0.1:29500"),
        member(1, os.getpid(), place="tcp://127.0.0.1:29500"),
    ]
    assert unrecorded_lines(recorded) == [
        "2 of 3 ranks are recorded: no process of rank 2 was found on this node."
    ]
    monkeypatch.setattr(strangers.process, "has_torch", lambda pid: pid == child)
    (line,) = unrecorded_lines([*recorded, member(2, child)])
    assert line.startswith(
        f"2 of 3 ranks are recorded: rank 2 (pid {child}) is a child of rank 0 and is not recorded:"
        " COMMLENS=1 is not"
    )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    elsewhere = [
        member(0, os.getpid(), place="tcp://node1:29500"),
        member(1, os.getpid(), place="tcp://node1:29500"),
    ]
    assert unrecorded_lines(elsewhere) == [], "the third rank may be on another node"
    assert (
        unrecorded_lines([*recorded, member(2, os.getpid(), place="tcp://127.0.0.1:29500")]) == []
    )


def test_a_rank_that_may_still_import_torch_is_not_named(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NCCL, a rank leaves init_process_group before the others come to it."""
    pid = run(COMMLENS="1", TORCH_DEVICE_BACKEND_AUTOLOAD="1")
    eventually(lambda: "COMMLENS" in strangers.process.environment(pid))
    monkeypatch.setattr(strangers.process, "has_torch", lambda pid: True)
    known = member(0, os.getpid(), place="tcp://127.0.0.1:29500", size=2)
    stranger = member(1, pid, size=2)
    known.status, stranger.status = SimpleNamespace(initialised=True), None
    looks = Strangers(SimpleNamespace(current=lambda: [known, stranger]), None)  # type: ignore[arg-type]
    assert [looks.lines_at_start(now) for now in (1.0, 3.5, 6.0)] == [[], [], []]
    grown = strangers.process.age_s(pid) + 30
    monkeypatch.setattr(strangers.process, "age_s", lambda pid: grown)
    (line,) = looks.lines_at_start(9.0)
    assert f"rank 1 (pid {pid}) " in line and "is not recorded: its Python may lack" in line
    assert looks.lines_at_start(12.0) == [], "it is said once"


CONNECT = "import socket, sys; s = socket.create_connection(('127.0.0.1', {})); sys.stdin.read()"


def test_processes_that_are_connected_with_ranks_whose_group_lacks_members(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This process is rank 0. One process is connected with it, a child of it; another is not."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        subprocess.Popen(
            [sys.executable, "-c", CONNECT.format(server.getsockname()[1])], stdin=subprocess.PIPE
        ) as near,
        subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other,
    ):
        client = server.accept()[0]
        pids = [near.pid, other.pid, os.getpid()]
        monkeypatch.setattr(strangers, "python_processes", lambda: [(pid, {}) for pid in pids])
        monkeypatch.setattr(strangers.process, "has_torch", lambda _: True)
        group = ProcessGroup("weights", (0, 1))
        args = CollectiveArgs("new_group", "new_group")
        made = Collective(0, Channel(group, SETUP), 1, args, State.ISSUED, 1, 1)
        worlds = Worlds(outsiders=(Outsider(1, "weights", 1, 2),))
        log = RankLog(0, 1, host=os.uname().nodename, pid=os.getpid(), setups=[made], worlds=worlds)
        assert near_processes([log]) == (), "a child of a rank is no member"
        monkeypatch.setattr(strangers, "ancestors_of", lambda pid: [pid])
        monkeypatch.setattr(strangers, "_line_of", lambda _: None)
        (found,) = near_processes([log])
        assert (found.pid, found.numbers, found.command) == (near.pid, (0,), INLINE_CODE)
        assert not found.recorded
        elsewhere = msgspec.structs.replace(log, host="another")
        in_no_group = msgspec.structs.replace(log, setups=[])
        assert near_processes([elsewhere]) == near_processes([in_no_group]) == ()
        monkeypatch.setattr(strangers.process, "has_torch", lambda _: False)
        assert near_processes([log]) == ()
        for child in (near, other):
            child.communicate()
        client.close()
