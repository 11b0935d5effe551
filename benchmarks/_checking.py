"""Checks a program in a folder of its own, as `commlens check` does."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from commlens.check.api import check_plan
from commlens.check.run_rank import Plan
from commlens.launch import worker
from commlens.model.verdict import Verdict


def check_source(
    source: str, world_size: int, folder: Path, *, timeout_s: float, backend: str = ""
) -> Verdict:
    """Return the verdict on a program, which becomes the file train.py of a new folder.

    Args:
        source: of the program.
        world_size: number of ranks.
        folder: an earlier one is removed.
        timeout_s: of one rank.
        backend: whose rules hold; empty: that of the program.
    """
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "pids").mkdir(parents=True)
    (folder / "train.py").write_text(source)
    before = Path.cwd()
    os.chdir(folder)
    try:
        plan = Plan(
            lambda: worker.execute(["train.py"], module=False), world_size, timeout_s=timeout_s
        )
        checked, _ = check_plan(plan, script="train.py", backend=backend)
    finally:
        os.chdir(before)
    return checked.verdict
