"""Real processes send real signals to a Python process with handlers of its own."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from commlens.processes import senders
from conftest import SOURCE

pytestmark = [
    pytest.mark.launches,
    pytest.mark.skipif(not senders.AVAILABLE, reason="the handler in C was not built here"),
]

PROGRAM = '''
import os, signal, subprocess, sys, time
from commlens.processes.senders import senders_remembered, take_sender

handled = []
remembered = senders_remembered([signal.SIGHUP, signal.SIGTERM])
remembered.__enter__()
signal.signal(signal.SIGHUP, lambda number, _: handled.append(number))

def hang_up():
    """The sender is reaped after its signal has come, and its name can be read until then."""
    before, sender = len(handled), subprocess.Popen(["kill", "-HUP", str(os.getpid())])
    while len(handled) == before:
        time.sleep(0.01)
    sender.wait()
'''
WAIT = """
print("ready", flush=True)
until = time.monotonic() + 30
while not handled and time.monotonic() < until:
    time.sleep(0.01)
print(handled, take_sender(signal.SIGHUP), take_sender(signal.SIGHUP), flush=True)
"""


def start(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM + program],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdout=subprocess.PIPE,
        text=True,
    )


def run(program: str) -> str:
    process = start(program)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return said


def test_a_program_that_ends_at_once():
    process = start(WAIT)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    kill = subprocess.Popen(["kill", "-HUP", str(process.pid)])
    said = process.communicate(timeout=60)[0]
    assert kill.wait(60) == 0, "not reaped before, which nothing could keep up with"
    assert said.startswith("[1] Sender(is_kernel=False, "), "Python's handler was called, too"
    assert f"pid={kill.pid}, uid={os.getuid()}, is_own_user=True, name='kill'" in said
    with open("/proc/self/comm") as file:  # noqa: PTH123
        assert f"parent_pid={os.getpid()}, parent_name='{file.read().strip()}'" in said
    assert said.endswith(") None\n"), "a sender is told once"


def test_the_terminal():
    pid, terminal = pty.fork()
    if pid == 0:  # its controlling terminal is the new one
        program = PROGRAM.replace("SIGHUP", "SIGINT") + WAIT.replace("SIGHUP", "SIGINT")
        os.execve(
            sys.executable,
            [sys.executable, "-c", program],
            {**os.environ, "PYTHONPATH": str(SOURCE)},
        )
    try:
        said, until = b"", time.monotonic() + 60
        while b"ready" not in said and time.monotonic() < until:
            said += os.read(terminal, 1000)
        os.write(terminal, b"\x03")
        while b"Sender" not in said and time.monotonic() < until:
            said += os.read(terminal, 1000)
        assert b"[2] Sender(is_kernel=True, pid=0, " in said
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)


def test_a_handler_that_is_installed_later():
    assert (
        run(
            """
hang_up()
first = take_sender(signal.SIGHUP)
for _ in range(3):
    signal.signal(signal.SIGHUP, lambda number, _: handled.append("later"))
hang_up()
print(handled, first.name, take_sender(signal.SIGHUP).name)
"""
        )
        == "[1, 'later'] kill kill\n"
    )


def test_a_handler_that_was_installed_before():
    assert (
        run(
            """
remembered.__exit__(None, None, None)
former = signal.signal
signal.signal(signal.SIGHUP, lambda number, _: handled.append("later"))
hang_up()
unseen = take_sender(signal.SIGHUP)
with senders_remembered([signal.SIGHUP]):
    hang_up()
print(handled, unseen, take_sender(signal.SIGHUP).name, signal.signal is former)
"""
        )
        == "['later', 'later'] None kill True\n"
    )


def test_a_signal_of_its_own_has_no_sender():
    assert run(
        "os.kill(os.getpid(), signal.SIGHUP); print(handled, take_sender(signal.SIGHUP))"
    ) == ("[1] None\n")


@pytest.mark.parametrize(
    "program",
    [
        "print(flush=True); os.kill(os.getpid(), signal.SIGTERM)",
        """
print(flush=True)
signal.signal(signal.SIGTERM, print)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
os.kill(os.getpid(), signal.SIGTERM)
""",
    ],
)
def test_a_signal_that_nothing_handles_ends_the_process(program: str):
    process = start(program)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM


def test_a_program_that_is_started_has_the_default():
    assert (
        run(
            """
signal.signal(signal.SIGTERM, print)
child = subprocess.Popen(["sleep", "60"])
child.terminate()
print(child.wait(30))
"""
        )
        == "-15\n"
    )
