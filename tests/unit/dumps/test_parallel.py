"""Reading many ranks' dumps: reduced where they are read, in this process or in others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from builders import Job, training

from commlens.dumps.discover import DumpFiles, discover
from commlens.dumps.parallel import reduce_foreign
from commlens.formats.columns import RankColumns
from commlens.formats.rank_log_columns import columns_from_log
from commlens.reports.converted.flight_recorder import to_pickle


def count(several: Iterable[RankColumns]) -> list[tuple[int, int]]:
    return [(rows.rank, len(rows)) for rows in several]


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dumps")
    for log in Job(8).run(training(lambda *_: None)).logs():
        (folder / f"_dump_{log.rank}").write_bytes(to_pickle(columns_from_log(log), []))
    (folder / "_dump_9").write_bytes(b"\x80\x02" + bytes(50))
    (folder / "a-dump").write_bytes((folder / "_dump_0").read_bytes())
    return folder


def test_here(dumps: Path) -> None:
    problems: list[str] = []
    steps: list[tuple[int, int]] = []
    found = list(
        reduce_foreign(
            discover(dumps),
            count,
            problems,
            progress=lambda done, total: steps.append((done, total)),
        )
    )
    assert found == [(rank, 16) for rank in range(8)]
    assert len(problems) == 2
    assert steps[-1] == (10, 10)


def test_in_threads(dumps: Path) -> None:
    problems: list[str] = []
    with ThreadPoolExecutor(2) as executor:
        found = list(reduce_foreign(discover(dumps), count, problems, executor=executor))
    assert found == [(rank, 16) for rank in range(8)]
    assert len(problems) == 2


SCRIPT = """
import multiprocessing, sys
from concurrent.futures import ProcessPoolExecutor
from commlens.dumps.parallel import reduce_foreign
from commlens.dumps.discover import discover

def count(several):
    return [(rows.rank, len(rows)) for rows in several]

if __name__ == "__main__":
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as executor:
        problems = []
        print(list(reduce_foreign(discover(sys.argv[1]), count, problems, executor=executor)), len(problems))
"""


@pytest.mark.launches
def test_in_other_processes(dumps: Path, tmp_path: Path) -> None:
    # a program of its own, which takes its helpers along when it ends
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py", dumps], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{[(rank, 16) for rank in range(8)]} 2\n"


def test_only_some_ranks(dumps: Path) -> None:
    assert list(reduce_foreign(discover(dumps), count, [], ranks={3, 5})) == [(3, 16), (5, 16)]


def test_nothing(tmp_path: Path) -> None:
    found: DumpFiles = discover(tmp_path)
    assert list(reduce_foreign(found, count, [])) == []


@pytest.mark.launches
def test_the_command_has_no_threads_when_it_begins_to_read() -> None:
    script = (
        "import os\n"
        "from commlens.dumps.parallel import import_numpy_single_threaded\n"
        "before = dict(os.environ)\n"
        "import_numpy_single_threaded()\n"
        "from commlens.dumps.parallel import _may_fork\n"
        "import commlens.diagnosis.api, commlens.diagnosis.index.columns\n"
        "assert dict(os.environ) == before\n"
        "assert _may_fork(), os.listdir('/proc/self/task')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
