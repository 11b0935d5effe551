"""`commlens launch` builds the native engine in the background, once, and disturbs nobody."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chosen import long
from launching import Bench, Program
from zygote_client import Zygote

pytest.importorskip("torch")

from commlens.blackbox import job_dirs
from commlens.native import attempts, cache
from conftest import RunCommlens

pytestmark = pytest.mark.timeout(120)

ENGINE = """
import sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
from commlens.capture import session
if dist.get_rank() == 0:
    print("recorder:", type(session.recording().recorder).__name__, flush=True)
time.sleep(float(sys.argv[1]))
dist.destroy_process_group()
"""


NOTES_PRIORITY = """
import os, pathlib
def note(text):
    with open(os.environ["PRIORITY_NOTES"], "a") as file:
        file.write(text + "\\n")
os.nice = lambda by: note(f"nice {by}")
os.sched_setscheduler = lambda pid, policy, parameter: note(f"policy {policy}")
write_text = pathlib.Path.write_text
pathlib.Path.write_text = lambda path, text, **more: (
    note(f"autogroup {text}") if str(path) == "/proc/self/autogroup" else write_text(path, text, **more)
)
"""
"""Notes which priority is asked for. Beside other tests on two cores, a process of the lowest
priority would take minutes.
"""


class Compiler:
    """A stand-in for the compiler: it notes how it was called, and then runs the lines that a test
    gives.
    """

    def __init__(self, folder: Path, lines: str) -> None:
        self.log = folder / "compiled"
        self.path = folder / "c++-for-tests"
        self.path.write_text(
            '#!/bin/sh\n[ "$1" = --version ] && { echo for-tests 1.0; exit 0; }\necho call >>'
            f" {shlex.quote(str(self.log))}\necho unfinished >"
            f' "$TMPDIR/unfinished.s"\nmade=$3\n{lines}\n'
        )
        self.path.chmod(0o755)

    @property
    def calls(self) -> int:
        """How often it compiled."""
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def bench(tmp_path: Path, zygote: Zygote) -> Iterator[Bench]:
    made = Bench(tmp_path, zygote)
    (tmp_path / "engine.py").write_text(ENGINE)
    (tmp_path / "site" / "sitecustomize.py").write_text(NOTES_PRIORITY)
    made.environ.update(
        COMMLENS_NATIVE_DIR=str(tmp_path / "cache"),
        COMMLENS_AUTO_BUILD="1",
        PRIORITY_NOTES=str(tmp_path / "priority"),
    )
    yield made
    made.close()


def compiling_with(bench: Bench, lines: str) -> Compiler:
    compiler = Compiler(bench.folder, lines)
    bench.environ["CXX"] = str(compiler.path)
    return compiler


def folder_of(bench: Bench) -> Path:
    return Path(bench.environ["COMMLENS_NATIVE_DIR"]) / cache.folder_of(cache.identity())


def until(is_true: Callable[[], object], *, timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.05)


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def recorder(program: Program) -> str:
    assert program.end() == 0, program.report()
    return next(line for line in program.out if line.startswith("recorder: ")).split()[1]


def test_the_next_launch_is_native(
    bench: Bench, native_cache: Path, run_commlens: RunCommlens
) -> None:
    [library] = sorted((native_cache / cache.folder_of(cache.identity())).glob("*/*.so"))[:1]
    compiler = compiling_with(bench, f'sleep 1\ncp {library} "$made"')
    first = bench.launch("engine.py", "0")
    assert recorder(first) == "Recorder"
    assert first.error.count("is being built in the background") == 1
    until(lambda: compiler.calls == 1 and not attempts.is_building(folder_of(bench)))
    assert (bench.folder / "priority").read_text().splitlines() == [
        "nice 19",
        "autogroup 19",
        f"policy {os.SCHED_IDLE}",
    ]
    assert "unfinished.s" not in files(folder_of(bench))
    second = bench.launch("engine.py", "0")
    assert recorder(second) == "NativeRecorder"
    assert "commlens" not in second.error
    assert compiler.calls == 1


@pytest.mark.long
def test_launchers_that_start_at_once_build_once(bench: Bench) -> None:
    compiler = compiling_with(bench, "sleep 2\nexit 1")
    programs = [bench.launch("engine.py", "0") for _ in range(3)]
    for program in programs:
        assert recorder(program) == "Recorder"
    assert sum("is being built" in program.error for program in programs) == 1
    until(lambda: not attempts.is_building(folder_of(bench)))
    assert compiler.calls == 1


@pytest.mark.long
def test_a_failure_is_remembered_with_its_reason_until_something_changes(
    bench: Bench, run_commlens: RunCommlens
) -> None:
    compiler = compiling_with(bench, "echo 'x.cpp:1: error: it is broken' >&2\nexit 1")
    started = bench.launch("engine.py", "0")
    assert recorder(started) == "Recorder"
    until(lambda: attempts.FAILURE in files(folder_of(bench)))
    until(lambda: not attempts.is_building(folder_of(bench)))
    again = bench.launch("engine.py", "0")
    assert recorder(again) == "Recorder"
    assert "commlens" not in again.error
    assert compiler.calls == 1
    said = " ".join(run_commlens("doctor", environ=bench.environ).stdout.split())
    assert (
        "commlens launch does not build it: the build of 20" in said
        and "x.cpp:1: error: it is broken" in said
    )
    compiler = compiling_with(bench, "echo 'y.cpp:1: error: another' >&2\nexit 1")
    os.utime(compiler.path, (1, 1))  # another compiler was installed
    said = " ".join(run_commlens("doctor", environ=bench.environ).stdout.split())
    assert "the next commlens launch builds it in the background" in said


def test_old_failures_and_a_success_are_forgotten(tmp_path: Path) -> None:
    attempts.remember_failure(tmp_path, ["c++"], "broken")
    found = attempts.failure(tmp_path, ["c++"])
    assert found is not None and found.reason == "broken"
    about = json.loads((tmp_path / attempts.FAILURE).read_text())
    (tmp_path / attempts.FAILURE).write_text(
        json.dumps({**about, "unix_s": time.time() - attempts.KEEP_S - 1})
    )
    assert attempts.failure(tmp_path, ["c++"]) is None
    (tmp_path / attempts.FAILURE).write_text("{")
    assert attempts.failure(tmp_path, ["c++"]) is None
    attempts.forget_failure(tmp_path)
    assert files(tmp_path) == set()


@pytest.mark.parametrize(
    "setting",
    [
        {"COMMLENS_AUTO_BUILD": "off"},
        long({"COMMLENS_ENGINE": "python"}),
        long({"COMMLENS_BOX_ENTRIES": "0"}),
    ],
)
def test_nothing_is_built_if_the_user_does_not_want_it(
    bench: Bench, setting: dict[str, str]
) -> None:
    (bench.folder / "nothing.py").write_text("")
    compiler = compiling_with(bench, "exit 1")
    program = bench.launch("nothing.py", **setting)
    assert program.end() == 0
    assert "commlens" not in program.error
    assert compiler.calls == 0 and not folder_of(bench).exists()


@pytest.mark.long
def test_a_rank_under_another_launcher_builds_nothing(bench: Bench) -> None:
    compiler = compiling_with(bench, "exit 1")
    program = bench.torchrun("engine.py", "0", COMMLENS="1")
    assert recorder(program) == "Recorder"
    assert compiler.calls == 0 and not folder_of(bench).exists()


HURRIED = """
import os, signal, sys
class TorchWithoutTimer:
    # torch's C++ ends a process in which a signal's handler raises while it is imported
    @staticmethod
    def find_spec(name, *_):
        if name == "torch._C" and signal.getitimer(signal.ITIMER_REAL)[0]:
            os._exit(3)
sys.meta_path.insert(0, TorchWithoutTimer)
from commlens.launch import background_build as it
from commlens.processes import cgroup
it.AFTER_JOB_S, it._LOOK_S = 0.5, 0.1
if sys.argv[4] == "memory":
    cgroup.free_memory = lambda: it.FREE_TO_GO_ON - 1
it.run(*map(int, sys.argv[1:4]))
"""


@pytest.mark.parametrize("why", ["job over", "memory", "asked to end"])
def test_a_build_that_has_to_end_leaves_neither_process_nor_file(bench: Bench, why: str) -> None:
    compiling_with(bench, "sleep 300 &\nwait")
    folder = folder_of(bench)
    lock = attempts.take_lock(folder)
    assert lock is not None
    # a process that has ended, or this one
    ticks = 1 if why == "job over" else job_dirs.start_ticks(os.getpid())
    process = subprocess.Popen(
        [sys.executable, "-c", HURRIED, str(lock), str(os.getpid()), str(ticks), why],
        env=bench.environ,
        pass_fds=(lock,),
        start_new_session=True,
    )
    os.close(lock)
    if why == "asked to end":
        until(lambda: "unfinished.s" in files(folder))
        assert attempts.is_building(folder)
        process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    until(lambda: bench.processes() == [])
    assert files(folder) <= {attempts.LOCK, ".lock"}
    assert not list(folder.rglob(".building-*"))
    assert not attempts.is_building(folder)


def test_scarce_memory_keeps_a_launch_from_building(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from commlens.config import Settings
    from commlens.launch import background_build
    from commlens.processes import cgroup

    compiler = compiling_with(bench, "exit 1")
    for name in ("CXX", "COMMLENS_NATIVE_DIR"):
        monkeypatch.setenv(name, bench.environ[name])
    monkeypatch.setattr(cgroup, "free_memory", lambda: background_build.FREE_TO_START - 1)
    assert background_build.start(Settings()) == ""
    assert "only 4.3 GB of memory are free" in background_build.why_not()
    assert compiler.calls == 0


@pytest.mark.long
def test_no_build_is_an_error_of_the_launch(bench: Bench) -> None:
    """The cache cannot be written, and there is no compiler."""
    (bench.folder / "nothing.py").write_text("")
    (bench.folder / "file").write_text("")
    compiling_with(bench, "exit 1")
    unwritable = bench.launch("nothing.py", COMMLENS_NATIVE_DIR=str(bench.folder / "file"))
    missing = bench.launch("nothing.py", CXX="no-such-compiler")
    for program in (unwritable, missing):
        assert program.end() == 0
        assert "commlens" not in program.error
