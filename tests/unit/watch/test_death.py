"""The death detector on members and times that the tests make up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from commlens.processes.process import Handle, ProcessEnding
from commlens.watch.death import DeathDetector, job_was_stopped
from commlens.watch.reporting import lines_at_end
from commlens.watch.roster import Member


def member(pid: int, ending: ProcessEnding | None = None) -> Any:
    made = Member(pid, 0, pid, 3, pid, 0, Handle.invisible(pid))
    made.ending = ending
    return made


KILLED, FAILED, FINISHED, TERMINATED = (
    ProcessEnding(signal="SIGKILL"),
    ProcessEnding(exit_code=3),
    ProcessEnding(exit_code=0),
    ProcessEnding(signal="SIGTERM"),
)
INTERRUPTED = ProcessEnding(signal="SIGINT")


def test_a_death_is_due_shortly_after_and_once() -> None:
    detector = DeathDetector()
    members = [member(1), member(2, KILLED), member(3)]
    assert detector.add([members[1]], members, 10.0)
    assert detector.first is members[1] and detector.is_pending
    assert not detector.take_due(10.01)
    assert detector.take_due(10.06)
    assert not detector.take_due(10.07) and not detector.is_pending


def test_only_the_first_death_is_the_first() -> None:
    detector = DeathDetector()
    members = [member(1, FAILED), member(2, KILLED), member(3)]
    assert detector.add([members[0]], members, 10.0)
    assert not detector.add([members[1]], members, 10.02)
    assert detector.first is members[0]


def test_a_rank_that_finished_is_no_death() -> None:
    detector = DeathDetector()
    members = [member(1, FINISHED), member(2)]
    assert not detector.add([members[0]], members, 10.0)
    assert detector.first is None and not detector.is_pending


def test_when_all_ranks_have_ended_nothing_is_waited_for() -> None:
    detector = DeathDetector()
    members = [member(1, TERMINATED), member(2, FINISHED)]
    detector.add(members, members, 10.0)
    assert detector.take_due(10.0)


def test_a_rank_that_got_a_sigterm_is_not_reported_before_the_others_may_get_theirs() -> None:
    detector = DeathDetector()
    members = [member(1, TERMINATED), member(2), member(3)]
    detector.add([members[0]], members, 10.0)
    assert not detector.take_due(11.0)
    members[1].ending = FAILED
    detector.add([members[1]], members, 11.0)
    assert detector.take_due(11.06), "the job was not stopped as a whole"


def test_a_rank_that_was_stopped_alone_died_though_its_launcher_stops_the_others_then() -> None:
    detector = DeathDetector()
    members = [member(1, TERMINATED), member(2), member(3)]
    detector.add([members[0]], members, 10.0, alone=lambda: True)
    for other in members[1:]:
        other.ending = TERMINATED
    detector.add(members[1:], members, 10.1)
    assert not detector.take_due(10.2), "the launcher's own signal may follow"
    assert detector.take_due(10.4)
    assert not detector.was_job_stopped(members)


def test_a_rank_that_was_stopped_alone_before_the_watcher_was_ready_died() -> None:
    detector = DeathDetector()
    members = [member(1, TERMINATED), member(2, TERMINATED), member(3, TERMINATED)]
    for one, ended_ns in zip(members, (300, 200, 300), strict=True):
        one.ended_ns, one.handle.ended_alone = ended_ns, one is members[1]
    detector.add(members, members, 10.0)
    assert detector.first is members[1] and detector.alone
    assert not detector.was_job_stopped(members)


def test_ranks_that_are_stopped_together_did_not_die() -> None:
    detector = DeathDetector()
    members = [
        member(1, TERMINATED),
        member(2, ProcessEnding(exit_code=143)),
        member(3, TERMINATED),
    ]
    detector.add(members, members, 10.0, alone=lambda: True)
    assert detector.take_due(10.0)
    assert detector.was_job_stopped(members)


def test_a_job_was_stopped_if_all_its_ranks_were() -> None:
    assert job_was_stopped(
        [
            member(1, TERMINATED),
            member(2, ProcessEnding(exit_code=143)),
            member(3, ProcessEnding(signal="SIGINT")),
        ]
    )
    assert not job_was_stopped([member(1, TERMINATED), member(2)])
    assert not job_was_stopped([member(1, TERMINATED), member(2, KILLED)])
    assert not job_was_stopped([member(1, TERMINATED)]), "of a single rank, it may be a death"


def ended(pid: int, ending: ProcessEnding, at_s: float) -> Any:
    made = member(pid, ending)
    made.ended_ns = int(at_s * 1e9)
    return made


@pytest.mark.parametrize(
    ("members", "is_stop"),
    [
        ([ended(1, KILLED, 50.0), ended(2, KILLED, 50.1)], True),  # as torchrun does at last
        ([ended(1, INTERRUPTED, 20.0), ended(2, KILLED, 50.0)], True),
        ([ended(1, INTERRUPTED, 20.0), member(2)], True),  # the other one is in C++
        # a death, and the launcher's signal
        ([ended(1, KILLED, 20.0), ended(2, TERMINATED, 20.1)], False),
        ([ended(1, KILLED, 20.0), member(2)], False),
        ([ended(1, FAILED, 20.0), member(2)], False),
    ],
)
def test_the_end_of_a_job_that_hung(members: list[Any], is_stop: bool) -> None:
    assert job_was_stopped(members, hung=True) is is_stop
    assert not job_was_stopped(members)


def test_ctrl_c_ends_ranks_one_by_one() -> None:
    detector = DeathDetector()
    members = [member(1, INTERRUPTED), member(2), member(3)]
    detector.add([members[0]], members, 10.0, alone=lambda: True)
    assert not detector.alone and detector.was_job_stopped(members)


def test_ranks_that_torchrun_kills_in_turn_are_waited_for() -> None:
    """Each takes two seconds to end, and is killed once the one before has ended."""
    detector = DeathDetector()
    members = [member(1), member(2), member(3)]
    for killed, now in zip(members, (10.0, 12.0, 14.0), strict=True):
        killed.ending = KILLED
        detector.add([killed], members, now, by_torchrun=lambda: True)
        last = killed is members[2]
        assert detector.take_due(now + 0.1, ending=lambda last=last: not last) is last, (
            "it kills the next"
        )
        if not last:
            assert not detector.take_due(now + 1.9, ending=lambda: True)


@pytest.mark.parametrize(("by_torchrun", "at"), [(True, 10.31), (False, 10.06)])
def test_a_kill_that_no_other_follows_is_a_death(by_torchrun: bool, at: float) -> None:
    detector = DeathDetector()
    members = [member(1, KILLED), member(2), member(3)]
    detector.add(members[:1], members, 10.0, by_torchrun=lambda: by_torchrun)
    assert not detector.take_due(at - 0.02)
    assert detector.take_due(at, ending=lambda: not by_torchrun)


def test_a_sigterm_after_a_kill_shows_that_torchrun_reacts_to_a_death() -> None:
    detector = DeathDetector()
    members = [member(1, KILLED), member(2), member(3)]
    detector.add(members[:1], members, 10.0, by_torchrun=lambda: True)
    members[1].ending = TERMINATED
    detector.add(members[1:2], members, 10.2)
    assert detector.take_due(10.26, ending=lambda: True)


@pytest.mark.parametrize("interrupted", [INTERRUPTED, ProcessEnding(exit_code=130)])
def test_a_rank_that_was_interrupted_alone_died_though_its_launcher_ends_the_others_then(
    interrupted: ProcessEnding,
) -> None:
    detector = DeathDetector()
    members = [member(1, interrupted), member(2), member(3)]
    detector.add([members[0]], members, 10.0, alone=lambda: True)
    members[1].ending = members[2].ending = TERMINATED
    detector.add(members[1:], members, 10.2)
    assert detector.take_due(10.2)
    assert not detector.was_job_stopped(members) and detector.alone


def test_where_several_ranks_were_interrupted_the_launcher_ended_the_job() -> None:
    detector = DeathDetector()
    members = [member(1, INTERRUPTED), member(2, INTERRUPTED), member(3, TERMINATED)]
    detector.add(members, members, 10.0, alone=lambda: True)
    assert detector.was_job_stopped(members) and not detector.alone


def test_the_launcher_tells_how_a_rank_ended_that_was_never_seen() -> None:
    detector = DeathDetector()
    seen = member(1, TERMINATED)
    seen.local_size = 2
    detector.add([seen], [seen], 10.0)
    assert not detector.take_due(11.6, [seen]), "it may have been ended because of the other one"
    assert detector.take_due(15.1, [seen]), "but not for ever"
    assert not detector.take_due(15.2, [seen])


def test_ranks_without_a_record_are_named_if_a_job_ends_before_its_ranks_have_met() -> None:
    seen = member(1, TERMINATED)
    seen.box, seen.status = (
        object(),
        SimpleNamespace(initialised=False, left=False, closed=False, exception=0),
    )
    (line,) = lines_at_end([seen])
    assert (
        "rank 1 ended before init_process_group had returned" in line
        and "no record of ranks 0,2" in line
    )
    seen.status.initialised = True
    assert not lines_at_end([seen])
    seen.status.initialised, seen.ending = False, FINISHED
    assert not lines_at_end([seen]), "a program that never meets its peers may end normally"
    assert not lines_at_end([])
