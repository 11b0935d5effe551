"""The screen of commlens top."""

from __future__ import annotations

import io
import time

from builders import Job, Stay, at, training
from rich.console import Console

from commlens.diagnosis.views.status import (
    HEADINGS,
    JobStatus,
    StatusRow,
    arrange,
    cells,
    fold,
    status_of,
)
from commlens.model.verdict import Verdict
from commlens.reports.top_screen import Screen, View, draw


def frame(
    job: JobStatus,
    rows: list[StatusRow],
    view: View,
    width: int = 80,
    height: int = 24,
    stack: tuple[str, ...] = (),
) -> list[str]:
    """One frame as the terminal shows it."""
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=False)
    console.print(
        draw(
            Screen(
                job, rows, [cells(row, narrow=width < 110) for row in rows], HEADINGS, list(stack)
            ),
            view,
            width,
            height,
        )
    )
    lines = console.file.getvalue().rstrip("\n").split("\n")
    assert len(lines) <= height and max(map(len, lines)) <= width
    return [line.rstrip() for line in lines]


def test_a_frame_of_80_columns_holds_the_answer_and_all_columns():
    logs = Job(4).run(training(at(2, 5, Stay(57, "load_batch")))).logs(after_s=30)
    job = status_of("train", logs)
    rows = arrange(fold(job.rows), "rank")
    lines = frame(job, rows, View(stack=True), stack=("Ranks 0-1,3", "all_reduce  x.py:1"))
    assert "rank 2 never reached all_reduce" in " ".join(lines[1:3])
    table = next(number for number, line in enumerate(lines) if line.startswith("ranks"))
    assert lines[table].split() == ["ranks", "process", "collective", "for", "waits", "for", "at"]
    assert (
        lines[table + 1].startswith("0-1,3 ")
        and "30 s" in lines[table + 1]
        and "…" not in lines[table + 1]
    )
    assert "all_reduce  x.py:1" in lines
    assert lines[-1].startswith("up/down  enter stack") and "1-2 of 2 by rank" in lines[-1]


def test_a_frame_of_ten_thousand_rows_is_drawn_at_once():
    rows = [
        StatusRow(
            [rank],
            pid=rank,
            process="sleeping",
            collective=f"in all_reduce #{rank}",
            for_ns=rank,
            step=3,
        )
        for rank in range(10_000)
    ]
    job = JobStatus(
        "big",
        "big: 10,000 ranks on 1,250 hosts",
        Verdict(kind="missing", summary="rank 7 is missing " * 30),
        rows,
    )
    view = View(folded=False)
    for _ in range(1005):
        view.press("down", len(rows))
    began = time.process_time()
    lines = frame(job, rows, view)
    assert time.process_time() - began < 5.0  # 30 ms on an idle machine
    assert any(line.startswith("1005 ") for line in lines) and "of 10000" in lines[-1]
    assert len([line for line in lines if "rank 7 is missing" in line]) <= 3


def test_keys():
    view = View(jobs=2)
    for key in ("down", "down", "down", "up", "enter", "s", "s"):
        view.press(key, 3)
    assert (view.chosen, view.stack, view.order) == (1, True, "state")
    view.press("f", 3)
    view.press("n", 3)
    view.press("escape", 3)
    assert (view.folded, view.job, view.chosen, view.stack) == (False, 1, 0, False)
    view.press("q", 3)
    assert view.quit
