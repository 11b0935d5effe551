"""The page's timeline."""

from __future__ import annotations

from collections.abc import Iterator

from builders import MS, Job, Stay, all_reduce
from verdict_pages import page_of, stays

from commlens.diagnosis.examine import examine_logs
from commlens.model.collective import LearnedHow
from commlens.reports.verdict_page import verdict_page


def test_records_without_times_have_tables_but_no_timeline() -> None:
    logs = Job(4).run(stays).logs()
    for log in logs:
        for op in log.collectives:
            op.announced_ns = op.entered_ns = op.returned_ns = op.done_ns = op.wait_ended_ns = 0
            op.wait_began_ns = MS if op.wait_began_ns else 0
    page = page_of(logs)
    assert page.timeline.lanes == [] and page.timeline.notes == []
    assert page.tables


def test_an_end_that_was_found_later_is_no_moment() -> None:
    logs = Job(4).run(stays).logs()
    in_cpp, in_python = logs[0].collectives[1:3]
    in_cpp.learned_how, in_cpp.wait_ended_ns = LearnedHow.POLL, 0
    in_python.learned_how = LearnedHow.POLL
    assert page_of(logs).timeline.lanes[0].ops.state == [0, 4, 0, 1]


def test_ranks_that_did_not_run_together_have_no_times() -> None:
    page = verdict_page(examine_logs(Job(4).run(stays).logs()), has_times=False)
    assert page.timeline.lanes == [] and page.timeline.notes == []
    assert page.step is None
    assert "Recorded until" not in dict(page.facts)
    assert page.classes and not [one for one in page.classes if " s" in one.detail]


def test_the_timeline_of_a_job_with_a_single_collective_shows_a_span_in_which_times_differ() -> (
    None
):
    def program(job: Job, rank: int) -> Iterator[object]:
        yield Stay(20, "load") if rank else all_reduce(job.world, line=10)

    begin, end = page_of(Job(2).run(program).logs()).timeline.window  # type: ignore[arg-type]
    assert end - begin >= 300, "microseconds"
