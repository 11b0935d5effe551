"""Stacks from core files, joined into a diagnosis."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from flight_recorder_dumps import dump, entry

from commlens.diagnosis.api import diagnose
from commlens.dumps.cores import Core, add_cores, read_core
from commlens.dumps.detect import CORE, detect_kind
from commlens.dumps.sources import name_paths, open_sources
from commlens.errors import FormatError
from commlens.model.collective import Frame
from commlens.model.ranklog import End, Observation, RankLog, ThreadStack

PROGRAM = """
import threading, time

def load_batch():
    print(flush=True)
    time.sleep(100)

threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
load_batch()
"""


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The core file of rank 1, which is in load_batch."""
    if shutil.which("gcore") is None:
        pytest.skip("gcore, a part of gdb, makes the core file")
    pytest.importorskip("pystack")
    folder = tmp_path_factory.mktemp("core")
    (folder / "train.py").write_text(PROGRAM)
    process = subprocess.Popen(
        [sys.executable, str(folder / "train.py")],
        env={**os.environ, "RANK": "1"},
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None and process.stdout.readline()
        subprocess.run(
            ["gcore", "-o", str(folder / "core"), str(process.pid)], check=True, capture_output=True
        )
        yield folder / f"core.{process.pid}"
    finally:
        process.kill()
        process.communicate()


def read(path: Path) -> Core:
    (source,) = open_sources(name_paths(path), [])
    assert detect_kind(source.head()) is CORE
    return read_core(source)


@pytest.mark.launches
def test_the_stacks_of_a_core_file_join_what_is_known_of_the_rank(
    core: Path, tmp_path: Path
) -> None:
    found = read(core)
    assert (f"core.{found.pid}", found.rank) == (core.name, 1)
    main, other = sorted(found.stacks, key=lambda stack: not stack.is_main)
    assert [frame.where for frame in main.frames] == ["train.py:6", "train.py:9"]
    assert (main.frames[0].function, other.is_main) == ("load_batch", False)
    # rank 0 waits in the second all_reduce, which rank 1 has not issued
    waits = entry(1, state="scheduled", retired=False, time_discovered_completed_ns=None)
    group = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    for rank, entries in enumerate(([entry(0), waits], [entry(0)])):
        status = {"last_enqueued_collective": len(entries), "last_completed_collective": 1}
        whole = dump(entries, pg_config=group, pg_status={"0": status})
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(whole, 2))
    alone, joined = diagnose(tmp_path), diagnose([tmp_path, core])
    assert (alone.culprits, joined.culprits) == ([1], [1])
    assert alone.source != joined.source
    assert joined.source == "train.py:6"


@pytest.mark.launches
def test_a_core_file_that_cannot_be_read_is_one_sentence(core: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    cut.write_bytes(core.read_bytes()[:9000])
    with pytest.raises(FormatError, match="cut"):
        read(cut)


@pytest.mark.parametrize(
    ("pids", "rank", "joined", "left"),
    [
        ([7, 8], -1, [1], []),  # by the pid
        ([8, 8], 1, [1], []),  # of two nodes with one pid, by the rank
        ([8, 8], -1, [], []),
        ([6, 7], 3, [], [3]),  # its process has no log
        ([6, 7], -1, [], []),
        ([8, 7], 1, [], [1]),  # a process with this pid is of another rank
    ],
)
def test_a_core_file_belongs_to_the_rank_of_its_process(
    pids: list[int], rank: int, joined: list[int], left: list[int]
) -> None:
    logs = [RankLog(rank, 2, pid=pid) for rank, pid in enumerate(pids)]
    for log in logs:
        log.observation = Observation(stacks_note="py-spy did not answer")
    problems: list[str] = []
    others = add_cores(logs, [("core.8", Core(8, rank, []))], problems)
    assert [log.rank for log in logs if log.observation.stacks_note is None] == joined
    assert (list(others), len(problems)) == (left, int(not joined and not left))


def test_of_two_core_files_of_a_rank_none_counts() -> None:
    """A worker of a data loader has its rank's environment."""
    stack = ThreadStack(8, "MainThread", (Frame("train.py", 6, "load_batch"),), is_main=True)
    cores = [(f"core.{pid}", Core(pid, 1, [stack])) for pid in (8, 9)]
    problems: list[str] = []
    others = add_cores([], cores, problems)
    assert others[1].stacks == []
    assert problems == [
        "core.9 and another core file are of processes with rank 1: their stacks are left out."
    ]


@pytest.mark.launches
def test_the_core_file_of_a_crash_tells_the_signal(tmp_path: Path) -> None:
    pytest.importorskip("pystack")
    if Path("/proc/sys/kernel/core_pattern").read_text() not in ("core\n", "core.%p\n"):
        pytest.skip("the kernel writes core files elsewhere")
    code = "import ctypes, resource\nresource.setrlimit(resource.RLIMIT_CORE, (-1, -1))\n"
    crashes = [sys.executable, "-c", f"{code}ctypes.string_at(0)"]
    try:
        subprocess.run(crashes, cwd=tmp_path, env={**os.environ, "RANK": "1"}, check=False)
        (path,) = tmp_path.glob("core*")
    except ValueError:
        pytest.skip("no core file may be written here")
    found = read(path)
    assert (found.rank, found.signal) == (1, "SIGSEGV")
    others = add_cores([], [("core", found)], [])
    assert (others[1].end, others[1].signal) == (End.KILLED, "SIGSEGV")
