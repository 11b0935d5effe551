"""The observer of a test suite's jobs saves a dump with each verdict, whoever made it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from boxes import busy_box

from commlens.blackbox import job_dirs
from commlens.testing.observer import Job, SuiteObserver


def job_of(folder: Path, reporter: Any) -> Job:
    thread = threading.Thread(target=time.sleep, args=(0.5,))
    thread.start()
    return Job(folder, SimpleNamespace(reporter=reporter), thread, time.monotonic())  # type: ignore[arg-type]


def test_a_look_before_the_timeout_saves_a_dump(tmp_path: Path) -> None:
    observer = SuiteObserver(tmp_path)
    folder = job_dirs.user_folder(tmp_path) / "job-1"
    folder.mkdir(parents=True)
    for rank, pid in enumerate((os.getpid(), os.getppid())):
        here = job_dirs.this_machine()._asdict()
        busy_box(rank, 2, pid=pid, start_ticks=job_dirs.start_ticks(pid), about=here).write(folder)
    job = job_of(folder, SimpleNamespace(dump=None, is_saving=False))
    observer._look(job)
    (verdict,) = job.verdicts(observer._test)
    assert verdict.is_fault
    dump = job.dump()
    assert dump is not None and {"index.html", "verdict.json"} <= {
        path.name for path in dump.iterdir()
    }


def test_a_dump_is_kept_only_with_its_page(tmp_path: Path) -> None:
    reporter = SimpleNamespace(dump=None, is_saving=False)
    job = job_of(tmp_path, reporter)
    job.said.append((time.monotonic(), SimpleNamespace(summary="rank 1", kind="missing")))  # type: ignore[arg-type]

    def save() -> None:
        time.sleep(0.1)
        reporter.is_saving = True
        reporter.dump = tmp_path
        time.sleep(0.2)
        (tmp_path / "index.html").touch()
        reporter.is_saving = False

    saving = threading.Thread(target=save)
    saving.start()
    assert job.dump() == tmp_path and (tmp_path / "index.html").exists()
    saving.join()
