"""``commlens status`` and ``commlens top``: the rows of a job, folded and sorted, and one frame of
the screen.
"""

from __future__ import annotations

import pytest
from builders import Job, Stay, at, training

from commlens.diagnosis.views.status import JobStatus, StatusRow, arrange, cells, fold, status_of
from commlens.model.ranklog import End


def status(*fault: object) -> JobStatus:
    logs = Job(4).run(training(at(2, 5, *fault) if fault else at(-1, 0))).logs(after_s=30)
    return status_of("train", logs)


def test_a_job_that_nothing_ails_is_one_line():
    job = status()
    assert not job.needs_attention
    assert job.answer.startswith(
        "nothing is wrong: all collectives agree and no rank waits; step 8, "
    )
    assert job.answer.endswith(" per step")


def test_a_rank_that_others_wait_for():
    job = status(Stay(57, "load_batch"))
    assert job.needs_attention and job.verdict.culprits == [2]
    rows = arrange(fold(job.rows), "rank")
    assert [(row.ranks, row.waits_for, row.activity) for row in rows] == [
        ([0, 1, 3], [2], "in-collective"),
        ([2], [], "data-loading"),
    ]
    assert rows[0].collective.startswith("in all_reduce #") and rows[1].collective.startswith(
        "after all_gather #"
    )
    assert (rows[0].pid, rows[1].pid) == (0, job.rows[2].pid)
    assert rows[0].for_ns == max(row.for_ns for row in job.rows if row.ranks != [2])


def test_a_dead_rank_is_in_a_row_of_its_own():
    logs = Job(4).run(training(at(1, 5, Stay(57, "load_batch")))).logs(after_s=30)
    logs[1].observation.end, logs[1].observation.signal = End.KILLED, "SIGKILL"
    job = status_of("train", logs)
    assert job.needs_attention
    assert [row.process for row in fold(job.rows) if row.ranks == [1]] == ["killed by SIGKILL"]


@pytest.mark.parametrize(("order", "first"), [("rank", [0, 1, 3]), ("state", [2])])
def test_rows_are_sorted(order, first):
    assert arrange(fold(status(Stay(57, "load_batch")).rows), order)[0].ranks == first


@pytest.mark.parametrize("end", [{"end": End.KILLED, "signal": "SIGKILL"}, {"proc_state": "T"}])
def test_a_rank_that_was_killed_or_stopped_is_among_the_odd_ones(end):
    logs = Job(4).run(training(at(1, 5, Stay(57, "load_batch")))).logs(after_s=30)
    for name, value in end.items():
        setattr(logs[1].observation, name, value)
    rows = status_of("train", logs).rows
    assert [row.ranks for row in arrange(rows, "state")] == [[1], [0], [2], [3]]


def test_many_ranks_are_written_short():
    row = StatusRow([*range(0, 10_000, 3), 5, 8, 77], waits_for=list(range(0, 900, 7)))
    text = cells(row)
    assert len(text[0]) <= 26 and text[0].endswith("(3337)")
    assert text[5] == "0-896:7"
