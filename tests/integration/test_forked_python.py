"""Forks that stand for ``python program`` (``forked_python.py``) are as the Pythons that they stand
for.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from zygote_client import FRESH, Zygote

pytest.importorskip("torch")
if FRESH in os.environ:
    pytest.skip("commands are Pythons of their own here", allow_module_level=True)

SEES = """
import json, os, subprocess, sys

before = sorted(vars())

def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(line.split(maxsplit=1)[1] for line in lines if line.startswith(name))

# torch imports modules that set filters of their own
import torch
stream = lambda one: [one.name, one.mode, one.encoding, one.errors, one.line_buffering, one.write_through]
print(json.dumps({
    "argv": [sys.argv, sys.orig_argv, __name__, __file__, before],
    "path": sys.path,
    "environ": sorted(os.environ.items()),
    "process": [open("/proc/self/cmdline").read(), open("/proc/self/environ").read(), open("/proc/self/comm").read()],
    "exe": os.readlink("/proc/self/exe"),
    "place": [os.getcwd(), os.getppid(), os.getsid(0) == os.getpid(), len(os.listdir("/proc/self/task"))],
    "signals": [status(name) for name in ("SigBlk", "SigIgn", "SigCgt")],
    "streams": [stream(one) for one in (sys.stdin, sys.stdout, sys.stderr)],
    "warned": sys.warnoptions,
}))
if sys.argv[1:] == ["starts"]:
    sys.exit(subprocess.run([sys.executable, "-u", sys.argv[0], "started"]).returncode)
"""

ENDS = """
import os, signal, sys, threading, time

how = sys.argv[1]
if how == "exit": sys.exit(3)
if how == "words": sys.exit("no such file")
if how == "raise": raise ValueError("bad batch")
if how == "interrupt": raise KeyboardInterrupt
if how == "abort": os.abort()
if how == "ctrl-c": os.kill(os.getpid(), signal.SIGINT); time.sleep(5)
if how == "term": os.kill(os.getpid(), signal.SIGTERM)
if how == "thread": threading.Timer(0.2, print, ["later"]).start()
print("the last line has no line break", end="")
"""


def both(
    zygote: Zygote, command: list[str], folder: Path, **environ: str
) -> list[subprocess.CompletedProcess[str]]:
    """Run a Python as a fork and as itself."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder), **environ}
    options = {"cwd": folder, "env": environment, "text": True, "start_new_session": True}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    ran = []
    for popen in (zygote.popen, subprocess.Popen):
        process = popen([sys.executable, *command], **options, **pipes)
        out, err = process.communicate(timeout=60)
        ran.append(subprocess.CompletedProcess(command, process.returncode, out, err))
    return ran


@pytest.mark.parametrize(
    "command", [["sees.py", "a", "b"], ["-u", "-m", "sees"], ["sees.py", "starts"]]
)
def test_a_fork_sees_and_shows_what_a_python_does(
    zygote: Zygote, tmp_path: Path, command: list[str]
) -> None:
    (tmp_path / "sees.py").write_text(SEES)
    forked, real = both(zygote, command, tmp_path, PYTHONWARNINGS="ignore,error::UserWarning")
    assert (forked.returncode, real.returncode) == (0, 0), forked.stderr + real.stderr
    for lines in zip(forked.stdout.splitlines(), real.stdout.splitlines(), strict=True):
        seen, expected = map(json.loads, lines)
        for each in (seen, expected):
            each["place"][1] = each["place"][1] == os.getpid()
        assert seen == expected


@pytest.mark.parametrize(
    "how", ["", "exit", "words", "raise", "interrupt", "abort", "ctrl-c", "term", "thread"]
)
def test_a_fork_ends_as_a_python_does(zygote: Zygote, tmp_path: Path, how: str) -> None:
    (tmp_path / "ends.py").write_text(ENDS)
    forked, real = both(zygote, ["ends.py", how], tmp_path)
    assert (forked.returncode, forked.stdout) == (real.returncode, real.stdout)
    assert forked.stderr.splitlines() == real.stderr.splitlines()


def test_what_python_reads_at_its_start_makes_it_a_python_of_its_own(
    zygote: Zygote, tmp_path: Path
) -> None:
    program = "import sys; print('torch' in sys.modules, sys.flags.optimize)"
    (tmp_path / "program.py").write_text(program)
    forked, _ = both(zygote, ["program.py"], tmp_path)
    own, _ = both(zygote, ["program.py"], tmp_path, PYTHONOPTIMIZE="1")
    assert (forked.stdout, own.stdout) == ("True 0\n", "False 1\n")


def test_a_signal_reaches_the_fork_and_what_forks_for_it_ends_with_it(
    zygote: Zygote, tmp_path: Path
) -> None:
    (tmp_path / "sleeps.py").write_text("import time; print(1, flush=True); time.sleep(60)")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with zygote.popen(
        [sys.executable, "sleeps.py"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"1\n"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert len(children) == 1
    subprocess.run(["tail", f"--pid={children[0]}", "-f", "/dev/null"], timeout=10, check=True)
