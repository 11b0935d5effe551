"""Reading /proc and cgroup files: real processes, and files as kernels write them."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from watch_ranks import eventually, sleeper

from commlens.processes import process
from commlens.processes.process import Handle, ProcessEnding

pytestmark = pytest.mark.launches


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
    assert Handle(child.pid).ending() == ProcessEnding(), "gone, and nobody can say how"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("raise SystemExit(3)", ProcessEnding(exit_code=3)),
        ("pass", ProcessEnding(exit_code=0)),
        ("import os; os.kill(os.getpid(), 9)", ProcessEnding(signal="SIGKILL")),
        ("import os; os.abort()", ProcessEnding(signal="SIGABRT")),
    ],
)
def test_how_a_child_ended_without_reaping_it(command: str, expected: ProcessEnding) -> None:
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
        assert handle.ending() == ProcessEnding(exit_code=7)
        handle.close()
        parent.kill()


def test_stopped_and_children() -> None:
    with sleeper() as child:
        os.kill(child.pid, signal.SIGSTOP)
        eventually(lambda: (seen := process.read_stat(child.pid)) is not None and seen.state == "T")
        assert child.pid in process.children(os.getpid())
        child.kill()


def test_memory_in_swap_space(monkeypatch: pytest.MonkeyPatch) -> None:
    assert process.swapped_bytes(os.getpid()) >= 0.0
    assert process.swapped_bytes(-1) == 0.0
    status = "Name:\tpython\nVmData:\t  50 kB\nVmSwap:\t    2048 kB\nHugetlbPages:\t0 kB\n"
    monkeypatch.setattr(process, "read_text", lambda _: status)
    assert process.swapped_bytes(7) == 2048 * 1024


def test_a_process_that_is_recorded_has_its_box_mapped(tmp_path: Path) -> None:
    code = (
        "import mmap, sys; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0);"
        " print(flush=True); sys.stdin.read()"
    )
    for name, recorded in (("rank0.77.box", True), ("rank0.77.boxes", False)):
        (tmp_path / name).write_bytes(bytes(4096))
        command = [sys.executable, "-c", code, str(tmp_path / name)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, **pipes) as child:
            assert child.stdout is not None
            child.stdout.readline()
            assert process.keeps_box(child.pid) is recorded
            child.communicate()
    assert not process.keeps_box(child.pid), "it has ended"


def test_libraries_that_communicate_past_torch(tmp_path: Path) -> None:
    file = tmp_path / "deep_ep_cpp.cpython-312-x86_64-linux-gnu.so"
    file.write_bytes(bytes(4096))
    before = process.bypass_libraries(os.getpid())
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ):
        assert process.bypass_libraries(os.getpid()) == sorted([*before, "deep_ep"])
    assert process.bypass_libraries(2**22 + 1) == []
