"""What a process waits for in the kernel, of real processes that wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from commlens.processes.blocked import lost_child, waits_for
from commlens.processes.process import children, read_stat

pytestmark = pytest.mark.skipif(
    os.uname().machine not in ("x86_64", "aarch64"),
    reason="numbers of system calls are known for these",
)

LOCK = "import fcntl, sys; h = open(sys.argv[1], 'w'); fcntl.{}(h, fcntl.LOCK_EX)"
HOLD = f"{LOCK}; print(flush=True); sys.stdin.read()"
SOCKET = (
    "import socket; s = socket.create_server(('127.0.0.1', 0)); c ="
    " socket.create_connection(s.getsockname()); "
)
WAITS = {
    "import os; r, w = os.pipe(); os.read(r, 1)": "it waits to read from a pipe",
    "import os; r, w = os.pipe(); os.write(w, bytes(1 << 20))": (
        "it waits to write to a pipe that is full"
    ),
    "import time; time.sleep(100)": "it sleeps",
    # what time.sleep is up to Python 3.10
    "import select; select.select([], [], [], 100)": "it sleeps",
    "import os, sys; os.mkfifo(sys.argv[1]); open(sys.argv[1])": (
        "it waits for another process to open a named pipe"
    ),
    "import subprocess; subprocess.run(['sleep', '30'])": (
        "it waits for its child process {child} (sleep 30)"
    ),
    SOCKET + "print(s.getsockname()[1], flush=True); c.recv(1)": (
        "it waits for data from 127.0.0.1:{said}"
    ),
    "import socket; socket.create_server(('127.0.0.1', 0)).accept()": "it waits for a connection",
    "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()": "",
}
"""A program -> what it waits for. Python's locks wait in futex, which shows nothing."""


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        for pid in children(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.kill()
        process.communicate()


def start(started: list[subprocess.Popen[str]], code: str, path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    started.append(process)
    return process


def eventually(process: subprocess.Popen[str], expected: str) -> None:
    end = time.monotonic() + 15
    while waits_for(process.pid).text != expected and time.monotonic() < end:
        time.sleep(0.05)
    assert waits_for(process.pid).text == expected


def test_what_processes_wait_for(started: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    if not Path(f"/proc/{os.getpid()}/syscall").read_text():
        pytest.skip("this kernel does not show system calls")
    running = [start(started, code, tmp_path / "fifo") for code in WAITS]
    for process, words in zip(running, WAITS.values(), strict=True):
        said = (
            process.stdout.readline().strip()
            if "{said}" in words and process.stdout is not None
            else ""
        )
        child = ""
        if "{child}" in words:
            end = time.monotonic() + 15
            while not children(process.pid) and time.monotonic() < end:
                time.sleep(0.01)
            child = str(children(process.pid)[0])
        eventually(process, words.format(child=child, said=said))


@pytest.mark.parametrize("how", ["flock", "lockf"])
def test_a_file_lock_and_its_holder(
    started: list[subprocess.Popen[str]], tmp_path: Path, how: str
) -> None:
    path = tmp_path / "build.lock"
    holder = start(started, HOLD.format(how), path)
    assert holder.stdout is not None
    holder.stdout.readline()
    waiter = start(started, LOCK.format(how), path)
    command = " ".join([sys.executable, "-c", HOLD.format(how), str(path)])[:80]
    eventually(
        waiter, f"it waits for the lock of {path}, which process {holder.pid} ({command}...) holds"
    )
    assert waits_for(waiter.pid).holder == holder.pid


def test_a_lock_that_a_child_inherited(
    started: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    path = tmp_path / "build.lock"
    code = (
        LOCK.format("flock")
        + "; import os, time; child = os.fork()\nif child: print(child, flush=True)\nelse:"
        " time.sleep(60)"
    )
    holder = start(started, code, path)
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    holder.wait(timeout=15)
    try:
        waiter = start(started, LOCK.format("flock"), path)
        eventually(
            waiter,
            f"it waits for the lock of {path}, which process {holder.pid} took: a former child of"
            " it may still hold it",
        )
    finally:
        os.kill(child, signal.SIGKILL)


def test_nothing_of_a_process_that_is_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert not waits_for(process.pid).text


@pytest.mark.skipif(sys.version_info < (3, 11), reason="time.sleep was a select")
def test_when_a_sleep_ends(started: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    process = start(started, "import time; time.sleep(100)", tmp_path)
    eventually(process, "it sleeps")
    left_s = (waits_for(process.pid).wakes_ns - time.monotonic_ns()) / 1e9
    assert 80 < left_s < 100


@pytest.mark.parametrize(
    ("child", "words"),
    [
        ("kill -STOP $$", "is stopped"),
        ("kill -KILL $$", "was ended by SIGKILL"),
        ("exit 3", "ended with status 3"),
        ("exit 0", ""),
    ],
)
def test_a_child_that_is_lost(
    started: list[subprocess.Popen[str]], tmp_path: Path, child: str, words: str
) -> None:
    code = f"import subprocess, time; p = subprocess.Popen(['sh', '-c', {child!r}]); print(p.pid, flush=True); time.sleep(100)"
    process = start(started, code, tmp_path)
    assert process.stdout is not None
    pid = process.stdout.readline().strip()
    end = time.monotonic() + 15
    while (stat := read_stat(int(pid))) is None or stat.state not in "TZ":
        assert time.monotonic() < end
        time.sleep(0.02)
    assert lost_child(process.pid) == (f"its child process {pid} (sh) {words}" if words else "")


def test_the_name_of_a_child_is_shown_without_its_control_characters(
    started: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    child = (
        "import os, signal; open('/proc/self/comm', 'w').write('a\\x1b[2Jb');"
        " os.kill(os.getpid(), signal.SIGSTOP)"
    )
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    process = start(started, code, tmp_path)
    end = time.monotonic() + 15
    while not (words := lost_child(process.pid)):
        assert time.monotonic() < end
        time.sleep(0.02)
    assert "\x1b" not in words and words.endswith(") is stopped")
