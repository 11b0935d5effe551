"""The stall detector on members and times that the tests make up: no process, no box, no clock."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from builders import Job, Stay, at, training

from commlens.blackbox import layout as L
from commlens.config import Settings
from commlens.diagnosis.examine import diagnose_logs
from commlens.model.cause import Missing
from commlens.model.ranklog import End, Observation, RankLog
from commlens.model.verdict import GroupRef, Verdict
from commlens.watch import stall as stall_module
from commlens.watch.open_waits import waits
from commlens.watch.stall import Check, StallDetector, patience_s

S = 1_000_000_000
MISSING = Verdict(kind="missing", culprits=[1], victims=[0])


def member(
    pid: int, *, since_s: float = 0.0, steps: int = 1, timeout_s: float = 0.0, alive: bool = True
) -> Any:
    status = SimpleNamespace(
        closed=False,
        oldest_index=7 if since_s else 0,
        oldest_mono_ns=int(since_s * S),
        phase=1,
        main_stack_since_mono_ns=0,
        steps=steps,
        timeout_s=timeout_s,
        in_setup=False,
        blocked_since_mono_ns=0,
        left=False,
        expires_mono_ns=0,
    )
    return SimpleNamespace(pid=pid, alive=alive, status=status)


def update(detector: StallDetector, members: list[Any], at_s: float) -> Check | None:
    return detector.update(members, waits(members), int(at_s * S))


def test_patience() -> None:
    assert patience_s(60, 0) == 180
    assert patience_s(60, 1) == 60
    assert patience_s(2, 0) == 2, "a short timeout is never extended"


def test_no_timeout_of_torch_applies_to_a_call_of_a_library() -> None:
    applies, never = member(1, since_s=100.0, timeout_s=20.0), member(1, since_s=100.0)
    never.status.timeout_s, never.status.expires_mono_ns = 20.0, L.NEVER
    for seen, timeout_s in ((applies, 20.0), (never, 0.0)):
        check = update(StallDetector(Settings(stall_timeout=60.0)), [seen], 119.0)
        assert (check.timeout_s if check is not None else 0.0) == timeout_s


def test_a_stall_is_confirmed_and_reported_once() -> None:
    detector = StallDetector(Settings(stall_timeout=10.0))
    members = [member(1, since_s=100.0), member(2)]
    assert update(detector, members, 101) is None and detector.stall is None, (
        "nothing is suspicious yet"
    )
    assert update(detector, members, 103) is None and detector.stall is not None, (
        "samples are taken from now on"
    )
    check = update(detector, members, 109.9)
    assert check is not None and check.may_still_end
    assert not detector.add_verdict(check, MISSING), "the stall timeout is not over"
    check = update(detector, members, 110.1)
    assert check is not None and not check.may_still_end
    assert detector.add_verdict(check, MISSING), "it came out twice"
    check = update(detector, members, 111.2)
    assert check is not None
    assert not detector.add_verdict(check, MISSING), "it was reported before"


def test_a_thread_may_wait_for_a_command_while_the_job_goes_on() -> None:
    detector = StallDetector(Settings(stall_timeout=10.0))
    members = [member(1, since_s=100.0), member(2)]
    assert update(detector, members, 140) is None
    verdict = diagnose_logs(Job(2).run(training(at(1, 5, Stay(57, "load_batch")))).logs())
    assert isinstance(verdict.cause, Missing)
    for at_s, is_reported in ((150, False), (160, True)):
        check = update(detector, members, at_s)
        assert check is not None
        verdict.cause.held_up_s = at_s - 149.5
        assert detector.add_verdict(check, verdict) is is_reported, at_s
        if not is_reported:
            for later in range(1, 9):
                assert update(detector, members, at_s + later) is None, "it looks now and then"


def test_a_rank_that_is_late_gets_its_time_although_another_one_has_finished() -> None:
    detector = StallDetector(Settings(stall_timeout=10.0))
    members = [member(1, since_s=100.0), member(2)]
    verdict = diagnose_logs(Job(2).run(training(at(1, 5, Stay(57, "load_batch")))).logs())
    detector.add_finished_rank(100.0)
    reported = []
    for step in range(200):
        at_s = 101.5 + step / 10
        if (check := update(detector, members, at_s)) and detector.add_verdict(check, verdict):
            reported.append(at_s)
    assert len(reported) == 1 and 110 <= reported[0] <= 114, reported


def test_the_processes_are_observed_before_a_wait_that_is_long_already_when_it_is_seen() -> None:
    detector = StallDetector(Settings(stall_timeout=10.0))
    members = [member(1, since_s=100.0), member(2)]
    assert update(detector, members, 101) is None
    assert update(detector, members, 120) is None and detector.stall is not None, (
        "samples are taken from now on"
    )
    assert update(detector, members, 120.4) is None
    assert update(detector, members, 120.6) is not None


def test_a_pause_of_the_whole_job_is_no_wait() -> None:
    detector = StallDetector(Settings(stall_timeout=10.0))
    members = [member(1, since_s=100.0), member(2)]
    assert detector.add_pause(105 * S), "it begins"
    assert not detector.add_pause(106 * S)
    assert not detector.add_pause(107 * S)
    assert update(detector, members, 112) is None
    assert update(detector, members, 116) is None
    check = update(detector, members, 117.1)
    assert check is not None and not check.may_still_end


def test_another_verdict_is_another_report() -> None:
    detector = StallDetector(Settings(stall_timeout=10.0))
    members = [member(1, since_s=100.0), member(2)]
    reported = []
    for tenth in range(100, 200):
        check = update(detector, members, 100 + tenth / 10)
        verdict = MISSING if tenth < 150 else Verdict(kind="missing", culprits=[2], victims=[0])
        if check is not None and detector.add_verdict(check, verdict):
            reported.append(verdict.culprits)
    assert reported == [[1], [2]]


def test_a_verdict_that_becomes_surer_is_another_report() -> None:
    detector = StallDetector(Settings(stall_timeout=10.0))
    members = [member(1, since_s=100.0), member(2)]
    reported = []
    for tenth in range(100, 200):
        check = update(detector, members, 100 + tenth / 10)
        verdict = Verdict(
            kind="missing", culprits=[1], victims=[0], confidence="low" if tenth < 150 else "high"
        )
        if check is not None and detector.add_verdict(check, verdict):
            reported.append(verdict.confidence)
    assert reported == ["low", "high"]


def test_a_notice_is_not_repeated_until_the_wait_is_twice_as_long() -> None:
    detector = StallDetector(Settings(stall_timeout=10.0))
    group = GroupRef("0", "default_pg", [0, 1])
    told = []
    # a checkpoint in every hundred seconds
    for began, length in ((100.0, 15.0), (200.0, 15.0), (300.0, 40.0)):
        members = [member(1, since_s=began), member(2)]
        for tenth in range(int(length * 10)):
            check = update(detector, members, began + tenth / 10)
            if check is not None and detector.add_verdict(
                check, Verdict(kind="waiting", victims=[0], group=group)
            ):
                told.append(int(check.age_s))
        detector.take_ended([], int((began + length) * S))
        update(detector, [member(1), member(2)], began + length)
    assert len(told) == 2
    assert told[1] >= 2 * told[0]


def test_the_end_of_a_reported_wait_is_seen_once() -> None:
    detector = StallDetector(Settings(stall_timeout=1.0))
    members = [member(1, since_s=100.0), member(2)]
    update(detector, members, 100.4)
    for at_s in (101.0, 101.3):
        check = update(detector, members, at_s)
        assert check is not None
        detector.add_verdict(check, MISSING)
    assert detector.take_ended(waits(members), 102 * S) is None, "it still waits"
    stall = detector.take_ended([], 103 * S)
    assert stall is not None and stall.verdict is MISSING and stall.since_ns == 100 * S
    assert detector.take_ended([], 103 * S) is None


def test_a_process_groups_timeout_is_checked_at_once_and_once() -> None:
    detector = StallDetector(Settings(stall_timeout=60.0))
    members = [member(1, since_s=100.0, timeout_s=20.0), member(2, since_s=100.5, timeout_s=20.0)]
    assert update(detector, members, 117) is None
    check = update(detector, members, 118.1)
    assert check is not None and check.timeout_s == 20.0
    assert detector.add_verdict(check, MISSING), "without confirmation: the timeout ends the job"
    assert update(detector, members, 118.6) is None, (
        "one check does for the ranks that expire together"
    )
    assert (
        update(StallDetector(Settings(stall_timeout=60.0, dump_on_timeout=False)), members, 118.1)
        is None
    )


@pytest.mark.parametrize("alive", [True, False])
def test_when_a_rank_has_finished_the_others_are_checked_soon(alive: bool) -> None:
    detector = StallDetector(Settings(stall_timeout=60.0))
    detector.add_finished_rank(100.0)
    members = [member(1, since_s=100.0, alive=alive)]
    assert update(detector, members, 100.5) is None
    check = update(detector, members, 101.1)
    assert (check is not None) is alive
    if check is not None:
        assert check.rank_finished and not detector.add_verdict(check, MISSING)
        check = update(detector, members, 101.4)
        assert check is not None and detector.add_verdict(check, MISSING)


class StillJob:
    """In place of the looks at a job: it is proven to stand still, or it is not."""

    def __init__(self, *, is_proven: bool) -> None:
        self.is_proven = is_proven

    @property
    def has_begun(self) -> bool:
        """Nothing moved in the last look."""
        return self.is_proven

    def look(self, logs: object, now_s: float, others: object) -> None:
        """Nothing is looked at."""


CYCLE = Verdict(kind="cycle", root_cause=True, certain=True, victims=[0, 1])


def early(
    detector: StallDetector,
    verdict: Verdict,
    *,
    until_s: float,
    limit_s: float = 0.0,
    steps: int = 1,
    is_proven: bool = True,
    logs: Sequence[RankLog] = (),
    rest_s: float = 0.0,
) -> tuple[list[float], list[float], list[float]]:
    """Follow a wait that began at 100 s. Returns after how many seconds checks were made, the
    verdict was reported, and a notice was due.
    """
    members = [member(1, since_s=100.0, steps=steps), member(2, steps=steps)]
    checks, reports, notices = [], [], []
    for tenth in range(int(until_s * 10)):
        waiting = [wait._replace(limit_s=limit_s) for wait in waits(members)]
        check = detector.update(members, waiting, int((100 + tenth / 10) * S))
        if detector.stall is not None:
            detector.stall.standstill = StillJob(is_proven=is_proven)  # type: ignore[assignment]
        if check is None:
            continue
        checks.append(tenth / 10)
        add = detector.add_verdict if not check.is_early else None
        is_new = (
            add(check, verdict) if add else detector.add_early(check, verdict, logs, rest_s=rest_s)
        )
        if is_new:
            reports.append(tenth / 10)
        elif check.is_early and detector.add_notice(check, verdict, logs):
            notices.append(tenth / 10)
    return checks, reports, notices


def test_what_is_proven_is_reported_at_the_learned_limit() -> None:
    checks, reports, notices = early(StallDetector(Settings()), CYCLE, limit_s=6.0, until_s=50)
    assert checks[0] == reports[0] == 6.0 and len(reports) == 1 and not notices


def test_many_nodes_are_looked_at_less_often() -> None:
    looks = early(StallDetector(Settings()), CYCLE, limit_s=6.0, until_s=50, is_proven=False)[0]
    fewer, *_ = early(
        StallDetector(Settings()), CYCLE, limit_s=6.0, until_s=50, is_proven=False, rest_s=8.0
    )
    assert len(fewer) < len(looks)
    assert all(later - at >= 8.0 for at, later in itertools.pairwise(fewer))


def test_nothing_is_proven_by_a_look_that_says_nothing_of_all_ranks() -> None:
    detector = StallDetector(Settings())
    members = [member(1, since_s=100.0, steps=1), member(2, steps=1)]
    check = None
    for tenth in range(200):
        check = detector.update(members, waits(members), int((100 + tenth / 10) * S))
        if check is not None:
            break
    assert check is not None and check.is_early
    assert not detector.add_early(check, None, [])
    assert detector.stall is not None and detector.stall.next_check > check.now
    assert not detector.stall.standstill.has_begun


@pytest.mark.parametrize("steps", [0, 1])
def test_a_place_that_is_not_known_is_looked_at_after_ten_seconds(steps: int) -> None:
    _, reports, _ = early(StallDetector(Settings()), CYCLE, steps=steps, until_s=50)
    assert reports == [stall_module.UNKNOWN_S]


def test_in_the_first_step_nothing_is_learned() -> None:
    _, reports, _ = early(StallDetector(Settings()), CYCLE, limit_s=5.0, steps=0, until_s=50)
    assert reports == [stall_module.UNKNOWN_S]


@pytest.mark.parametrize(
    ("verdict", "is_proven"),
    [
        pytest.param(MISSING, True, id="a rank that may go on"),
        pytest.param(CYCLE, False, id="a job that moves"),
    ],
)
def test_what_is_not_proven_waits_for_the_stall_timeout(verdict: Verdict, is_proven: bool) -> None:
    checks, reports, notices = early(
        StallDetector(Settings()), verdict, limit_s=5.0, until_s=70, is_proven=is_proven
    )
    assert len(reports) == 1 and 59.5 < reports[0] < 61
    assert len(notices) == 1 and 14 <= notices[0] < 15
    assert sum(13 < at < 59 for at in checks) < 14, "a look costs a whole diagnosis"


def test_nothing_is_looked_at_early_if_the_stall_timeout_is_a_number() -> None:
    checks, _, notices = early(
        StallDetector(Settings(stall_timeout=60.0)), CYCLE, limit_s=5.0, until_s=70
    )
    assert checks[0] > 59 and not notices


def test_nothing_is_looked_at_early_on_very_many_nodes() -> None:
    detector = StallDetector(Settings())
    members = [member(1, since_s=100.0), member(2)]
    for second in range(100, 145):
        assert detector.update(members, waits(members), second * S, looks_early=False) is None
    assert detector.stall is None


def test_a_rank_that_works_and_a_place_that_is_not_known_get_no_notice() -> None:
    group = GroupRef("0", "default_pg", [0, 1])
    working = Verdict(kind="waiting", victims=[0], group=group)
    for verdict, limit_s in ((working, 5.0), (Verdict(), 5.0), (MISSING, 0.0)):
        _, _, notices = early(StallDetector(Settings()), verdict, limit_s=limit_s, until_s=50)
        assert not notices


@pytest.mark.parametrize(("stayed_s", "is_noticed"), [(5, False), (7, True)])
def test_a_late_rank_gets_a_notice_once_it_stays_where_it_is(
    stayed_s: int, is_noticed: bool
) -> None:
    logs = Job(4).run(training(at(2, 6, Stay(57, "load_batch")))).logs()  # type: ignore[arg-type]
    last = logs[2].collectives[-1]
    last.returned_ns = last.done_ns = last.wait_ended_ns = logs[2].captured_ns - stayed_s * S
    verdict = diagnose_logs(logs)
    assert verdict.culprits == [2]
    _, _, notices = early(StallDetector(Settings()), verdict, limit_s=5.0, until_s=50, logs=logs)
    assert bool(notices) is is_noticed


@pytest.mark.parametrize(("waits_for", "is_noticed"), [("it sleeps", False), ("", True)])
def test_a_late_rank_that_may_go_on_at_any_moment_gets_no_notice_but_its_verdict(
    waits_for: str, is_noticed: bool
) -> None:
    asleep = Observation(
        End.RUNNING, window_s=5.0, proc_state="S", cpu_s=0.0, stack_moved=False, waits_for=waits_for
    )
    logs = Job(4).run(training(at(2, 6, Stay(57, "load_batch", asleep)))).logs()  # type: ignore[arg-type]
    last = logs[2].collectives[-1]
    last.returned_ns = last.done_ns = last.wait_ended_ns = logs[2].captured_ns - 14 * S
    verdict = diagnose_logs(logs)
    _, reports, notices = early(
        StallDetector(Settings()), verdict, limit_s=5.0, until_s=70, logs=logs
    )
    assert bool(notices) is is_noticed
    assert len(reports) == 1 and 59.5 < reports[0] < 61


def test_a_notice_is_not_repeated_for_a_pause_like_the_one_before() -> None:
    detector = StallDetector(Settings())
    assert len(early(detector, MISSING, limit_s=5.0, until_s=17)[2]) == 1
    detector.update([member(1), member(2)], [], 120 * S)
    assert early(detector, MISSING, limit_s=5.0, until_s=17)[2] == []
    detector.update([member(1), member(2)], [], 120 * S)
    assert len(early(detector, MISSING, limit_s=5.0, until_s=40)[2]) == 1, "it is twice as long"


def test_a_wait_on_another_node_is_looked_at_after_ten_seconds() -> None:
    detector = StallDetector(Settings())
    members = [member(1), member(2)]
    elsewhere = [stall_module.OpenWait(100 * S, -1, "collective")]
    assert detector.update(members, elsewhere, 104 * S) is None and detector.stall is None
    assert detector.update(members, elsewhere, 106 * S) is None and detector.stall is not None
    check = detector.update(members, elsewhere, 111 * S)
    assert check is not None and check.is_early and not check.notice_due


def test_a_wait_on_another_node_is_taken_for_one_in_the_place_where_ranks_wait_here() -> None:
    detector = StallDetector(Settings())
    members = [member(1, since_s=100.0), member(2)]
    waiting = [wait._replace(limit_s=30.0) for wait in waits(members)]
    waiting.append(stall_module.OpenWait(100 * S, -1, "collective"))
    assert detector.update(members, waiting, 112 * S) is None and detector.stall is None
    assert detector.update(members, waiting, 119 * S) is None and detector.stall is not None
    assert detector.update(members, waiting, 131 * S) is not None
