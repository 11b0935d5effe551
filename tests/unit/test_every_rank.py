"""Reading many ranks' dumps: reduced where they are read, in this process or in others."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest
from builders import Job
from test_diagnose_findings import training

from commlens.formats.every_rank import read_foreign
from commlens.formats.gathered import Gathered, gather
from commlens.formats.log_rows import rows_of_log
from commlens.formats.rows import Rows
from commlens.reports.converted.flight_recorder import to_pickle


def count(several: Iterable[Rows]) -> list[tuple[int, int]]:
    return [(rows.rank, len(rows)) for rows in several]


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dumps")
    for log in Job(8).run(training(lambda *_: None)).logs():
        (folder / f"_dump_{log.rank}").write_bytes(to_pickle(rows_of_log(log), []))
    (folder / "_dump_9").write_bytes(b"\x80\x02" + bytes(50))
    (folder / "a-dump").write_bytes((folder / "_dump_0").read_bytes())
    return folder


def test_here(dumps: Path) -> None:
    problems: list[str] = []
    steps: list[tuple[int, int]] = []
    found = read_foreign(gather(dumps), count, problems, progress=lambda done, total: steps.append((done, total)))
    assert sorted(found) == [(rank, 16) for rank in range(8)]
    assert len(problems) == 2
    assert steps[-1] == (10, 10)


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_elsewhere(dumps: Path, kind: str) -> None:
    problems: list[str] = []
    executor: Executor = (
        ThreadPoolExecutor(2) if kind == "threads" else ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn"))
    )
    with executor:
        found = read_foreign(gather(dumps), count, problems, executor=executor)
    assert sorted(found) == [(rank, 16) for rank in range(8)]
    assert len(problems) == 2


def test_only_some_ranks(dumps: Path) -> None:
    assert read_foreign(gather(dumps), count, [], ranks={3, 5}) == [(3, 16), (5, 16)]


def test_nothing(tmp_path: Path) -> None:
    found: Gathered = gather(tmp_path)
    assert read_foreign(found, count, []) == []
