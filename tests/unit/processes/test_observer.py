"""Observing a process from outside over a window."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from watch_ranks import eventually

from commlens.blackbox import job_dirs
from commlens.model.collective import FrameKind
from commlens.model.ranklog import End, Observation
from commlens.processes import process, pyspy
from commlens.processes.observer import Observer, Pulse

pytestmark = pytest.mark.launches

SECOND = 1_000_000_000


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    """A process that sleeps until it is told to spin."""
    code = (
        "import sys\nprint('up', flush=True)\nfor line in sys.stdin:\n    sum(i for i in"
        " range(6_000_000))\n    print('spun', flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as started:
        assert started.stdout is not None
        started.stdout.readline()
        yield started
        started.kill()


def pulse(**changed: int) -> Pulse:
    return Pulse(
        **({"heartbeat_ns": time.monotonic_ns(), "main_stack_since_ns": 1, "records": 5} | changed)
    )


def observer_of(child: subprocess.Popen[str]) -> Observer:
    observer = Observer(use_py_spy=False)
    observer.add(child.pid, job_dirs.start_ticks(child.pid))
    return observer


def test_sleeping_then_computing(child: subprocess.Popen[str]) -> None:
    observer = observer_of(child)
    observer.sample(child.pid, pulse())
    time.sleep(0.05)
    observer.sample(child.pid, pulse())
    asleep = observer.observe(child.pid)
    assert asleep.end is End.RUNNING
    assert asleep.proc_state == "S"
    assert asleep.cpu_s is not None
    assert asleep.cpu_s < 0.04
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("go\n")
    child.stdin.flush()
    child.stdout.readline()
    observer.sample(child.pid, pulse())
    worked = observer.observe(child.pid)
    assert worked.cpu_s is not None
    assert worked.cpu_s >= 0.05


def test_work_outside_its_own_threads() -> None:
    """A child process that computes, and a connection to a server that takes its data."""
    code = (
        "import socket, subprocess, sys\ns = socket.create_connection(('127.0.0.1',"
        " int(sys.argv[1])))\np = subprocess.Popen([sys.executable, '-c', 'while True:"
        " pass'])\ntry:\n    while True: s.sendall(bytes(100_000))\nfinally: p.kill()"
    )
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        started = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", code, str(server.getsockname()[1])],
                stderr=subprocess.DEVNULL,
            )
        )
        taken = stack.enter_context(server.accept()[0])
        stack.callback(started.terminate)
        eventually(lambda: bool(process.children(started.pid)))
        observer = Observer(use_py_spy=False)
        observer.add(started.pid, job_dirs.start_ticks(started.pid))
        observer.sample(started.pid, pulse())
        end = time.monotonic() + 15
        while time.monotonic() < end and (observer.observe(started.pid).children_cpu_s or 0) < 0.3:
            taken.recv(1 << 16)
            time.sleep(0.05)
            observer.sample(started.pid, pulse())
        seen = observer.observe(started.pid)
        os.kill(process.children(started.pid)[0], signal.SIGKILL)
    assert seen.children_cpu_s is not None
    assert seen.children_cpu_s >= 0.3
    assert (seen.children_running_fraction or 0) > 0
    if process.tcp_sockets():  # else the kernel does not tell
        assert seen.net_bytes is not None
        assert seen.net_bytes > 10_000
        assert seen.unsent_bytes is not None
        assert seen.unsent_bytes > 0


def test_to_serve_a_store_of_the_watchers_is_no_work() -> None:
    code = (
        "import socket\ns = socket.create_server(('127.0.0.1', 0))\n"
        "print(s.getsockname()[1], flush=True)\nc = s.accept()[0]\n"
        "import os\nwhile data := os.read(c.fileno(), 1 << 16):\n    os.write(c.fileno(), data)"
    )
    if not process.tcp_sockets():
        pytest.skip("the kernel does not tell what connections move")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        observers = [Observer(use_py_spy=False) for _ in range(2)]
        observers[1].store_ports = frozenset({port})
        with socket.create_connection(("127.0.0.1", port)) as client:
            for observer in observers:
                observer.add(server.pid, job_dirs.start_ticks(server.pid))
                observer.sample(server.pid, pulse())
            for _ in range(4):
                client.sendall(bytes(1 << 16))
                left = 1 << 16
                while left:
                    left -= len(client.recv(left))
                time.sleep(0.5)
                for observer in observers:
                    observer.sample(server.pid, pulse())
        plain, served = (observer.observe(server.pid) for observer in observers)
        server.kill()
    assert (plain.net_bytes or 0) > 1 << 18 and (plain.io_bytes or 0) > 1 << 18
    assert served.net_bytes == 0 and served.unsent_bytes == 0 and (served.io_bytes or 0) < 1 << 10


def test_connections_are_read_once_for_all_ranks_that_serve_no_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads: list[int] = []
    sockets = {1: process.TcpSocket(100, 0, 29500), 2: process.TcpSocket(100, 0, 40000)}
    monkeypatch.setattr(process, "tcp_sockets", lambda: reads.append(1) or sockets)
    mine, other = os.getpid(), os.getppid()
    monkeypatch.setattr(process, "socket_inodes", lambda pid: [1] if pid == mine else [2])
    observer = Observer(use_py_spy=False)
    observer.store_ports = frozenset({29500})
    for pid in (mine, other):
        observer.add(pid, 0)
    of_each: list[int] = []
    for pids in ((mine, other), (mine, other), (other, mine)):
        reads.clear()
        for pid in pids:
            observer.sample(pid, pulse())
        of_each.append(len(reads))
        time.sleep(0.5)
    assert of_each == [1, 1, 2], "and anew after the counters of the one that serves"


def test_one_write_of_a_large_file_shows_before_it_returns(
    child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = (
        "rchar: 500\nwchar: 100\nsyscr: 9\nsyscw: 3\nread_bytes: 0\nwrite_bytes:"
        " {}\ncancelled_write_bytes: 7\n"
    )
    read = process.read_text
    disk = iter([0, 5_000_000])
    monkeypatch.setattr(
        process,
        "read_text",
        lambda path: counts.format(next(disk)) if path == f"/proc/{child.pid}/io" else read(path),
    )
    observer = observer_of(child)
    observer.sample(child.pid, pulse())
    time.sleep(0.5)
    observer.sample(child.pid, pulse())
    assert observer.observe(child.pid).io_bytes == 5_000_000


def test_stopped_is_not_holding_the_gil(child: subprocess.Popen[str]) -> None:
    observer = observer_of(child)
    silent = time.monotonic_ns() - 3 * SECOND
    os.kill(child.pid, signal.SIGSTOP)
    eventually(lambda: (seen := process.read_stat(child.pid)) is not None and seen.state == "T")
    observer.sample(child.pid, pulse(heartbeat_ns=silent))
    observer.sample(child.pid, pulse(heartbeat_ns=silent))
    seen = observer.observe(child.pid)
    assert (seen.proc_state, seen.stopped_fraction, seen.holds_gil) == ("T", 1.0, False)


def spin(core: int, nice: int) -> subprocess.Popen[str]:
    """Start a process of which one thread spins on a core, while its main thread sleeps."""
    code = (
        f"import os, threading, time\nos.sched_setaffinity(0, {{{core}}})\nos.nice({nice})\n"
        "def spin():\n    while True: pass\n"
        "threading.Thread(target=spin, daemon=True).start()\nprint('up', flush=True)\n"
        "time.sleep(60)"
    )
    started = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    started.stdout.readline()
    return started


@pytest.mark.skipif(sys.version_info < (3, 11), reason="time.sleep was a select")
def test_one_long_sleep_is_told_from_one_after_another() -> None:
    for code, least_s in (("time.sleep(60)", 50.0), ("\nwhile True: time.sleep(0.7)", 0.0)):
        with subprocess.Popen([sys.executable, "-c", f"import time; {code}"]) as sleeper:
            observer = observer_of(sleeper)
            found: list[Observation] = []
            while len(found) < 2:
                time.sleep(0.4)
                observer.sample(sleeper.pid, pulse())
                seen = observer.observe(sleeper.pid)
                found += [seen] if seen.wakes_in_s else []
            sleeper.kill()
        lasts_s, again_s = (one.sleeps_s for one in found)
        assert (abs(lasts_s - again_s) < 0.01) is bool(least_s), found
        assert least_s <= found[1].wakes_in_s <= again_s


def test_a_thread_without_a_core_is_not_kept_out_by_the_gil() -> None:
    core = min(os.sched_getaffinity(0))
    with spin(core, 19) as starved, spin(core, 0) as neighbour:
        observer = observer_of(starved)
        silent = time.monotonic_ns() - 3 * SECOND
        for _ in range(3):
            observer.sample(starved.pid, pulse(heartbeat_ns=silent))
            time.sleep(0.5)
        observer.sample(starved.pid, pulse(heartbeat_ns=silent))
        seen = observer.observe(starved.pid)
        starved.kill()
        neighbour.kill()
    assert seen.holds_gil is False


@pytest.mark.parametrize(
    ("waits", "is_starved"),
    [
        # the kernel counts a wait when it ends: ready three times, and has hardly run
        ([(0, 5, True, 3), (0, 5, True, 3), (0, 5, True, 3)], True),
        ([(0, 5, True, 3), (0, 6, True, 3), (0, 7, True, 3)], True),
        ([(0, 5, True, 3), (SECOND // 2, 6, True, 4), (SECOND // 2, 6, True, 4)], True),
        # it slept, or ran
        ([(0, 5, True, 3), (0, 6, True, 4), (0, 6, True, 4)], False),
        ([(0, 5, True, 3), (0, SECOND, True, 3), (0, 2 * SECOND, True, 3)], False),
        ([(0, 5, False, 3), (0, 5, False, 3), (0, 5, False, 3)], False),
        ([(0, 5, False, 3), (0, 5, False, 3), (2 * SECOND, 9, False, 4)], True),
    ],
)
def test_a_thread_is_starved_by_the_waits_that_have_ended_and_the_one_that_has_not(
    monkeypatch: pytest.MonkeyPatch, waits: list[tuple[int, int, bool, int]], is_starved: bool
) -> None:
    observer, now = Observer(use_py_spy=False), time.monotonic_ns()
    observer.add(os.getpid(), 0)
    for second, wait in enumerate(waits):
        monkeypatch.setattr("time.monotonic_ns", lambda second=second: now + second * SECOND)
        monkeypatch.setattr(
            process, "core_times", lambda _, wait=wait: {7: process.CoreTimes(*wait)}
        )
        monkeypatch.setattr(process, "read_stat", lambda _: process.Stat(1, "S", 0.0))
        observer.sample(os.getpid(), pulse(heartbeat_ns=now - 3 * SECOND))
    assert observer.observe(os.getpid()).holds_gil is not is_starved


def test_a_running_process_without_heartbeats_holds_the_gil(child: subprocess.Popen[str]) -> None:
    observer = observer_of(child)
    silent = time.monotonic_ns() - 3 * SECOND
    observer.sample(child.pid, pulse(heartbeat_ns=silent))
    observer.sample(child.pid, pulse(heartbeat_ns=silent))
    assert observer.observe(child.pid).holds_gil is True
    observer.sample(child.pid, pulse())
    assert observer.observe(child.pid).holds_gil is False
    observer.sample(child.pid, pulse(heartbeat_ns=silent, closed=True))
    assert observer.observe(child.pid).holds_gil is None, (
        "after a goodbye there is no watchdog thread"
    )


@pytest.mark.parametrize(
    ("state", "cpu_s", "holds"), [("R", 0.1, False), ("R", 0.9, True), ("S", 0.0, True)]
)
def test_a_process_without_a_core_does_not_hold_the_gil(
    monkeypatch: pytest.MonkeyPatch, state: str, cpu_s: float, holds: bool
) -> None:
    """On a busy machine its watchdog thread gets no core either."""
    observer, now = Observer(use_py_spy=False), time.monotonic_ns()
    observer.add(os.getpid(), 0)
    monkeypatch.setattr(process, "core_times", lambda _: {})
    for tenth in range(30):
        monkeypatch.setattr("time.monotonic_ns", lambda tenth=tenth: now + tenth * SECOND // 10)
        monkeypatch.setattr(
            process,
            "read_stat",
            lambda pid, tenth=tenth: process.Stat(1, state, cpu_s * tenth / 10),
        )
        observer.sample(os.getpid(), Pulse(heartbeat_ns=now))
    assert observer.observe(os.getpid()).holds_gil is holds


@pytest.mark.parametrize(
    ("first", "second", "moved"),
    [
        ({"records": 5}, {"records": 6}, True),
        ({"main_stack_since_ns": 1}, {"main_stack_since_ns": 2}, True),
        ({"main_stack_since_ns": 1}, {"main_stack_since_ns": 1}, False),
        # the first look after a collective is no movement
        ({"main_stack_since_ns": 0}, {"main_stack_since_ns": 1}, False),
        ({"main_stack_since_ns": 0}, {"main_stack_since_ns": 0}, None),
    ],
)
def test_stack_moved(
    child: subprocess.Popen[str], first: dict[str, int], second: dict[str, int], moved: bool | None
) -> None:
    observer = observer_of(child)
    observer.sample(child.pid, pulse(**first))
    observer.sample(child.pid, pulse(**second))
    assert observer.observe(child.pid).stack_moved is moved


def test_the_end_is_remembered(child: subprocess.Popen[str]) -> None:
    observer = observer_of(child)
    child.kill()
    child.wait(10)
    seen = observer.ended(child.pid, process.ProcessEnding(signal="SIGKILL"), at_ns=123)
    assert (seen.end, seen.signal, seen.ended_ns) == (End.KILLED, "SIGKILL", 123)
    assert observer.observe(child.pid) is seen


@pytest.mark.parametrize(
    ("ending", "clean", "end"),
    [
        (process.ProcessEnding(exit_code=0), None, End.CLEAN),
        (process.ProcessEnding(exit_code=0), False, End.CLEAN),
        (process.ProcessEnding(exit_code=3), True, End.FAILED),
        (process.ProcessEnding(), True, End.CLEAN),
        (process.ProcessEnding(), False, End.FAILED),
        (process.ProcessEnding(), None, End.GONE),
    ],
)
def test_exit_status_beats_the_box_which_beats_nothing(
    child: subprocess.Popen[str], ending: process.ProcessEnding, clean: bool | None, end: End
) -> None:
    assert observer_of(child).ended(child.pid, ending, clean=clean).end is end


def test_pyspy_answer() -> None:
    answer = [
        {"os_thread_id": 8, "thread_name": "other", "owns_gil": True, "frames": []},
        {
            "os_thread_id": 7,
            "thread_name": None,
            "owns_gil": False,
            "frames": [{"name": "f", "filename": "/x/torch/a.py", "line": 3}],
        },
    ]
    stacks = pyspy.parse(
        answer, 7, lambda file: FrameKind.TORCH if "torch" in file else FrameKind.USER, 99
    )
    main = stacks.threads[0].stack
    assert (main.is_main, main.name, main.taken_ns, main.frames[0].kind) == (
        True,
        "MainThread",
        99,
        FrameKind.TORCH,
    )


@pytest.mark.parametrize(("main_id", "named_first"), [(7, False), (None, True)])
def test_a_thread_that_the_program_names_main_thread(
    main_id: int | None, named_first: bool
) -> None:
    named = {"os_thread_id": 8, "thread_name": "MainThread", "frames": []}
    main = {"os_thread_id": main_id, "thread_name": "renamed", "frames": []}
    threads = pyspy.parse([named, main], 7, lambda _: FrameKind.USER, 99).threads
    assert [one.stack.is_main for one in threads] == [True, False]
    assert (threads[0].stack.thread == 8) == named_first


@pytest.mark.skipif(pyspy.find() is None, reason="py-spy is not installed")
def test_stacks_of_a_real_process(child: subprocess.Popen[str]) -> None:
    stacks = pyspy.take(child.pid, lambda _: FrameKind.USER)
    if stacks.note is not None and "may not read" in stacks.note:
        pytest.skip(stacks.note)
    assert stacks.note is None
    assert stacks.threads[0].stack.is_main
    assert stacks.threads[0].stack.frames[-1].function == "<module>"


def test_no_stacks_of_a_process_that_is_gone() -> None:
    with subprocess.Popen(["true"]) as gone:
        pass
    stacks = pyspy.take(gone.pid, lambda _: FrameKind.USER)
    assert stacks.threads == []
    assert stacks.note


@pytest.mark.skipif(pyspy.find() is None, reason="py-spy is not installed")
@pytest.mark.parametrize(
    ("changed", "is_asked"),
    [
        ({"main_stack_since_ns": 0}, True),
        ({}, False),
        ({"main_stack_since_ns": 0, "records": 4}, False),
    ],
    ids=["without-a-stack", "with-a-stack", "went-on"],
)
def test_py_spy_reads_a_process_that_beats_and_records_no_stacks(
    child: subprocess.Popen[str], changed: dict[str, int], is_asked: bool
) -> None:
    observer = Observer()
    observer.add(child.pid, job_dirs.start_ticks(child.pid))
    observer.sample(child.pid, pulse(**changed))
    time.sleep(1.6)
    observer.sample(child.pid, pulse(**changed | {"records": 5}))
    seen = observer.observe(child.pid, wait_s=5)
    assert bool(seen.stacks or seen.stacks_note) == is_asked
