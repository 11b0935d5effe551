"""Builds in the background that run, and that failed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from commlens.native import attempts


def test_one_builds_at_a_time(tmp_path: Path) -> None:
    first = attempts.take_lock(tmp_path / "new")
    assert first is not None and attempts.take_lock(tmp_path / "new") is None
    assert attempts.is_building(tmp_path / "new")
    os.close(first)
    assert not attempts.is_building(tmp_path / "new")


def test_a_failure_counts_for_a_day_and_for_its_compiler(tmp_path: Path) -> None:
    compiler = ["/bin/sh", "-x"]
    assert attempts.failure(tmp_path, compiler) is None
    attempts.remember_failure(tmp_path, compiler, "no space")
    failure = attempts.failure(tmp_path, compiler)
    assert failure is not None and failure.reason == "no space"
    assert attempts.failure(tmp_path, ["/bin/sh"]) is None, "another compiler"
    about = json.loads((tmp_path / attempts.FAILURE).read_text())
    about["unix_s"] = time.time() - attempts.KEEP_S - 1
    (tmp_path / attempts.FAILURE).write_text(json.dumps(about))
    assert attempts.failure(tmp_path, compiler) is None, "a day later"
    attempts.forget_failure(tmp_path)
    attempts.forget_failure(tmp_path)
    assert list(tmp_path.iterdir()) == []
