"""Reading /proc and cgroup files: real processes, and files as kernels write them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from watch_ranks import eventually

from commlens.blackbox import job_dirs
from commlens.processes import process
from commlens.processes.cgroup import Cgroup
from commlens.processes.early_handles import EarlyHandles
from commlens.processes.process import Ending, Handle

pytestmark = pytest.mark.launches


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )


def test_read_stat_of_this_process() -> None:
    seen = process.read_stat(os.getpid())
    assert seen is not None
    assert seen.state == "R"
    assert seen.cpu_s > 0
    assert not seen.ended
    assert process.is_running(os.getpid(), seen.start_ticks)
    assert not process.is_running(os.getpid(), seen.start_ticks + 1), (
        "another start time is another process"
    )


def test_a_process_name_with_parentheses(tmp_path: Path) -> None:
    program = tmp_path / "a) R (b"
    program.symlink_to(sys.executable)
    with subprocess.Popen(
        [program, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    ) as child:
        seen = process.read_stat(child.pid)
        child.kill()
    assert seen is not None
    assert seen.start_ticks > 0
    assert seen.state in "RSD"


def test_a_process_that_is_being_ended() -> None:
    assert not process.is_ending(os.getpid())
    with sleeper() as child:
        assert not process.is_ending(child.pid)
        child.kill()
        eventually(lambda: process.is_ending(child.pid))


def test_no_such_process() -> None:
    with sleeper() as child:
        child.kill()
    assert process.read_stat(child.pid) is None
    assert process.io_bytes(child.pid) is None
    assert process.environment(child.pid) == {}
    assert process.children(child.pid) == []
    assert Handle(child.pid).ending() == Ending(), "gone, and nobody can say how"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("raise SystemExit(3)", Ending(exit_code=3)),
        ("pass", Ending(exit_code=0)),
        ("import os; os.kill(os.getpid(), 9)", Ending(signal="SIGKILL")),
        ("import os; os.abort()", Ending(signal="SIGABRT")),
    ],
)
def test_how_a_child_ended_without_reaping_it(command: str, expected: Ending) -> None:
    child = subprocess.Popen([sys.executable, "-c", command], stderr=subprocess.DEVNULL)
    handle = Handle(child.pid)
    eventually(lambda: handle.ending() is not None)
    assert handle.ending() == expected
    code = child.wait(10)
    assert code == (
        expected.exit_code if expected.signal is None else -getattr(signal, expected.signal)
    ), "its parent could still reap it"
    handle.close()


def test_how_a_grandchild_ended_is_read_from_its_zombie() -> None:
    # The parent prints the pid of its child, and does not reap it before it is told to.
    code = (
        "import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', 'raise"
        " SystemExit(7)']); print(c.pid, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        handle = Handle(int(parent.stdout.readline()))
        eventually(lambda: handle.ending() is not None)
        assert handle.ending() == Ending(exit_code=7)
        handle.close()
        parent.kill()


def test_handles_are_opened_as_soon_as_there_is_a_box(tmp_path: Path) -> None:
    early = EarlyHandles(tmp_path)
    with sleeper() as killed, sleeper() as running:
        started = {child.pid: job_dirs.start_ticks(child.pid) for child in (killed, running)}
        for rank, pid in enumerate(started):
            (tmp_path / job_dirs.box_name(rank, pid)).touch()
        eventually(lambda: len(early._handles) == 2)
        before_ns = time.time_ns()
        os.kill(killed.pid, signal.SIGKILL)
        eventually(lambda: early._handles[killed.pid].ended_ns > 0)
        killed.wait(10)
        early.stop()
        handles = [early.take(pid, ticks) for pid, ticks in started.items()]
        assert [handle.ending() for handle in handles if handle is not None] == [
            Ending(signal="SIGKILL"),
            None,
        ]
        assert handles[0] is not None
        assert 0 < handles[0].ended_ns - before_ns < 5e9
        assert early.take(running.pid, 1) is None, "another start time is another process"
        running.kill()
    early.close()


def test_stopped_and_children() -> None:
    with sleeper() as child:
        os.kill(child.pid, signal.SIGSTOP)
        eventually(lambda: (seen := process.read_stat(child.pid)) is not None and seen.state == "T")
        assert child.pid in process.children(os.getpid())
        child.kill()


def test_cgroup_v2(tmp_path: Path) -> None:
    (tmp_path / "cgroup.procs").write_text("")
    (tmp_path / "cpu.stat").write_text(
        "usage_usec 5\nnr_periods 9\nnr_throttled 4\nthrottled_usec 2500000\n"
    )
    (tmp_path / "memory.events").write_text("low 0\noom 1\noom_kill 2\n")
    (tmp_path / "memory.pressure").write_text(
        "some avg10=9.00 avg60=0 avg300=0 total=1\nfull avg10=7.25 avg60=0 avg300=0 total=1\n"
    )
    seen = Cgroup([tmp_path], [tmp_path]).read()
    assert (seen.throttled_s, seen.oom_kills, seen.memory_pressure) == (2.5, 2, 7.25)


def test_cgroup_v1_and_nothing(tmp_path: Path) -> None:
    (tmp_path / "cpu.stat").write_text("nr_periods 9\nnr_throttled 4\nthrottled_time 1500000000\n")
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    seen = Cgroup([tmp_path], [tmp_path]).read()
    assert (seen.throttled_s, seen.oom_kills) == (1.5, 1)
    nothing = Cgroup().read()
    assert (nothing.throttled_s, nothing.oom_kills) == (None, None)


def test_cgroup_is_found_for_a_real_process() -> None:
    Cgroup.of(os.getpid()).read()
    assert Cgroup.of(2**22 + 1).cpu == [], "no such process: no files"
