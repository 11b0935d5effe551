"""How long ranks usually wait at a place."""

from __future__ import annotations

import msgspec
from builders import MS, SCRIPT, Job, S, Step, all_reduce, training
from paced_jobs import ten_seconds_apart

from commlens.model.collective import Collective, Frame, State
from commlens.model.ranklog import RankLog
from commlens.speed.usual import (
    RECENT_S,
    Durations,
    UsualWaits,
    place_of,
    time_inside_s,
    usual_gap_s,
)

EVALUATE = Frame(SCRIPT, 90, "evaluate")


def log_of(*ops: Collective) -> RankLog:
    return RankLog(0, 2, pid=1000, collectives=list(ops))


def ops_at(line: int, seconds: list[float]) -> list[Collective]:
    """Completed collectives of one line, one every ten seconds, which took these times."""

    def program(job: Job, rank: int) -> object:
        for _ in seconds:
            yield all_reduce(job.world, line=line)

    found = Job(2).run(program).logs()[0].collectives  # type: ignore[arg-type]
    return ten_seconds_apart(found, seconds)


def test_a_place_is_known_after_three_collectives() -> None:
    usual = UsualWaits()
    ops = ops_at(20, [0.04, 0.04, 1.2])
    place = place_of(ops[0])
    usual.add_records(log_of(*ops[:2]), 0.0)
    assert usual.known(place) is None
    usual.add_records(log_of(*ops), 1.0)
    known = usual.known(place)
    assert known is not None and known.times == 3, "none is counted twice"
    assert known.median_s == 0.04
    assert known.longest_s(1.0) == 1.2


def test_the_first_step_is_left_out() -> None:
    usual = UsualWaits()
    ops = ops_at(20, [30.0, 0.04, 0.04, 0.04])
    ops[0].step = 0
    usual.add_records(log_of(*ops), 0.0)
    known = usual.known(place_of(ops[0]))
    assert known is not None and (known.times, known.longest_s(0.0)) == (3, 0.04)


def test_call_paths_tell_phases_apart() -> None:
    [op] = ops_at(20, [0.04])
    elsewhere = msgspec.structs.replace(op, stack=(*op.stack, EVALUATE))
    assert place_of(op) != place_of(elsewhere)
    usual = UsualWaits()
    usual.add_records(log_of(*ops_at(20, [0.04] * 9)), 0.0)
    assert usual.known(place_of(op)) is not None
    assert usual.known(place_of(elsewhere)) is None


def test_only_recent_waits_count() -> None:
    durations = Durations(0.0)
    durations.add(40.0, 10.0)
    durations.add(0.1, 0.6 * RECENT_S)
    assert durations.longest_s(0.9 * RECENT_S) == 40.0
    assert durations.longest_s(1.2 * RECENT_S) == 0.1
    assert durations.longest_s(9 * RECENT_S) == 0.0


def test_a_collective_without_an_end_has_no_duration() -> None:
    [op] = ops_at(20, [0.04])
    assert time_inside_s(op) == 0.04
    assert time_inside_s(msgspec.structs.replace(op, state=State.ISSUED)) is None
    assert time_inside_s(msgspec.structs.replace(op, state=State.FAILED)) is None


def test_the_gap_before_a_place_is_that_of_the_rank_itself() -> None:
    logs = Job(2).run(training(lambda job, rank, step: None)).logs()  # type: ignore[arg-type]
    awaited = logs[0].collectives[-2]
    assert awaited.op == "all_reduce"
    for number, op in enumerate(logs[1].collectives):
        op.announced_ns = (10 * number + (2 if op.op == "all_reduce" else 0)) * MS
        op.returned_ns = op.wait_ended_ns = op.done_ns = op.announced_ns + 1 * MS
    assert usual_gap_s(logs[1], awaited) == 0.011
    young = log_of(*logs[1].collectives[:4])
    young.steps = 2
    assert usual_gap_s(young, awaited) is None, "it came there once"


def test_a_gap_within_a_step_is_not_one_between_steps() -> None:
    """Each step averages three gradients at one line, without a pause, and then loads a batch."""

    def program(job: Job, rank: int) -> object:
        for _ in range(6):
            for _ in range(3):
                yield all_reduce(job.world, line=20)
            yield Step()

    logs = Job(2).run(program).logs()  # type: ignore[arg-type]
    for number, op in enumerate(logs[1].collectives):
        op.announced_ns = S + (10 * number + 500 * op.step) * MS
        op.returned_ns = op.wait_ended_ns = op.done_ns = op.announced_ns + 9 * MS
    awaited = logs[0].collectives[0]
    assert usual_gap_s(logs[1], awaited) == 0.501
    logs[1].steps = 5
    assert usual_gap_s(logs[1], awaited) == 0.001
