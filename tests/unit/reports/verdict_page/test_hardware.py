"""What changed in the hardware, on the page."""

from __future__ import annotations

from builders import Job, S, training
from verdict_pages import page_of

from commlens.model.collective import State
from commlens.model.health import HealthEvent, NodeHealth, RankPlace
from commlens.model.ranklog import End, Observation, RankLog
from commlens.reports.verdict_page.hardware import CHANGES_SHOWN


def stuck_logs(*events: HealthEvent) -> list[RankLog]:
    """Four ranks, all in one collective; two run on n0, which tells of its hardware."""
    logs = Job(4).run(training(lambda *_: None)).logs()
    for log in logs:
        del log.collectives[11:]
        log.issued, log.closed, log.host = 11, False, f"n{log.rank // 2}"
        last = log.collectives[-1]
        last.state, last.done_ns, last.wait_ended_ns = State.ISSUED, 0, 0
        log.observation = Observation(End.RUNNING, window_s=5, cpu_s=0.0, stack_moved=False)
    ranks = [RankPlace(0, logs[0].pid, "a"), RankPlace(1, logs[1].pid, "b")]
    logs[0].health = NodeHealth(
        "n0", taken_ns=stalled_ns(logs) + 60 * S, ranks=ranks, events=list(events)
    )
    return logs


def stalled_ns(logs: list[RankLog]) -> int:
    return max(log.collectives[-1].announced_ns for log in logs)


def xid(number: int, at_ns: int, part: str = "a") -> HealthEvent:
    return HealthEvent(what="xid", fault="gpu-fault", part=part, at_ns=at_ns, number=number)


def test_nothing_where_nothing_changed():
    assert page_of(stuck_logs()).hardware is None


def test_what_explains_the_verdict_is_marked():
    at_ns = stalled_ns(stuck_logs())
    rose = HealthEvent(
        what="ecc-corrected",
        fault="gpu-memory",
        part="b",
        at_ns=at_ns - 400 * S,
        since_ns=at_ns - 460 * S,
    )
    page = page_of(stuck_logs(xid(79, at_ns - S), xid(63, at_ns - S // 2, "b"), rose))
    assert page.hardware is not None
    assert [(each.node, each.ranks, each.mark) for each in page.hardware.changes] == [
        ("n0", "0-1", ""),
        ("n0", "0-1", "explains"),
        ("n0", "0-1", "coincides"),
    ]
    first, second, _ = page.hardware.changes
    assert first.since < first.at and not second.since
    assert second.what.startswith("GPU a reported Xid 79")
    assert page.hardware.left_out == ""


def test_the_oldest_changes_are_left_out_but_not_the_reason():
    at_ns = stalled_ns(stuck_logs())
    later = [xid(63, at_ns + number * S, "c") for number in range(CHANGES_SHOWN + 5)]
    page = page_of(stuck_logs(xid(31, at_ns - 900 * S, "b"), xid(79, at_ns - S), *later))
    assert page.hardware is not None
    assert [each.mark for each in page.hardware.changes] == ["explains", *[""] * CHANGES_SHOWN]
    assert page.hardware.left_out == "6 earlier changes left out"
