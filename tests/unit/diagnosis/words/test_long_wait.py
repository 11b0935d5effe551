"""The line about a wait that is longer than usual."""

from __future__ import annotations

from builders import MS, Job, S, Stay, all_reduce, at, training
from hand_made import as_recorded

from commlens.diagnosis.examine import diagnose_logs
from commlens.diagnosis.words.long_wait import long_wait
from commlens.model.collective import ProcessGroup, State
from commlens.model.ranklog import RankLog, UsualWait

ASLEEP = at(2, 6, Stay(57, "load_batch"))


def timed(logs: list[RankLog]) -> list[RankLog]:
    """A collective takes 10 ms, and a rank needs 200 ms between two."""
    for log in logs:
        for number, op in enumerate(log.collectives):
            op.announced_ns = log.captured_ns - 15 * S + number * 210 * MS
            op.wait_began_ns = op.wait_began_ns and op.announced_ns
            if op.returned_ns:
                op.returned_ns = op.done_ns = op.announced_ns + 10 * MS
                op.wait_ended_ns = op.wait_ended_ns and op.returned_ns
    return logs


def test_a_rank_that_is_late_is_the_suspect() -> None:
    logs = timed(Job(4).run(training(ASLEEP)).logs())  # type: ignore[arg-type]
    assert long_wait(diagnose_logs(logs), logs) == (
        "Rank 2 has been in train.py:57 load_batch for 13 s, usually 200 ms; 3 ranks wait."
    )


def test_a_rank_without_a_history_has_no_usual_time() -> None:
    stay = training(at(2, 1, Stay(57, "load_batch")))
    logs = timed(Job(2 + 1).run(stay).logs())  # type: ignore[arg-type]
    assert long_wait(diagnose_logs(logs), logs) == (
        "Rank 2 has been in train.py:57 load_batch for 15 s; 2 ranks wait."
    )


def inside(program: object) -> list[RankLog]:
    """Both ranks have issued their last collective and wait for it."""
    logs = timed(Job(2).run(program).logs())  # type: ignore[arg-type]
    for log in logs:
        last = log.collectives[-1]
        last.state, last.done_ns, last.wait_ended_ns, last.returned_ns = State.ISSUED, 0, 0, 0
        last.wait_began_ns, last.wait_thread = last.announced_ns, log.pid
        log.observation.usual_wait = UsualWait(9, 0.04, 1.2, 5.0)
    return logs


def test_ranks_inside_of_one_collective_wait_together() -> None:
    def program(job: Job, rank: int) -> object:
        for _ in range(4):
            yield all_reduce(job.world, line=20)
        yield Stay(21, "end")

    logs = inside(program)
    verdict = diagnose_logs(logs)
    assert verdict.kind == "stuck-inside"
    assert long_wait(verdict, logs) == (
        "Ranks 0-1 have been waiting in all_reduce #4 for 14 s, usually 40 ms."
    )


def test_the_duration_is_that_of_the_collective_that_is_named() -> None:
    """An older one of another group, for which no thread waits, has the same number."""

    def program(job: Job, rank: int) -> object:
        yield all_reduce(job.group("1", range(2)), line=19, is_async=True, handle="a")
        for _ in range(20):
            yield all_reduce(job.world, line=20)
        yield Stay(21, "end")

    logs = inside(program)
    for log in logs:
        older = log.collectives[0]
        older.state, older.sequence_number = State.ISSUED, 20
        older.done_ns = older.wait_ended_ns = older.wait_began_ns = 0
        older.returned_ns = older.announced_ns + 1
    verdict = diagnose_logs(logs)
    assert verdict.group is not None and verdict.group.name == "0"
    assert long_wait(verdict, logs) == (
        "Ranks 0-1 have been waiting in all_reduce #20 for 11 s, usually 40 ms."
    )


def test_the_wait_in_a_group_made_by_hand_has_its_duration() -> None:
    """The verdict names such a group by its store, each rank's log by a name of its own."""

    def program(job: Job, rank: int) -> object:
        for _ in range(4):
            yield all_reduce(ProcessGroup("weights", (0, 1)), line=20)
        yield Stay(21, "end")

    logs = as_recorded(inside(program), {"": range(2)}, {"weights": "localhost:29600/weights"})
    verdict = diagnose_logs(logs)
    assert verdict.group is not None and verdict.group.name.endswith(":29600/weights")
    assert long_wait(verdict, logs) == (
        "Ranks 0-1 have been waiting in all_reduce #4 for 14 s, usually 40 ms."
    )


def test_the_verdict_says_what_was_learned() -> None:
    logs = Job(4).run(training(ASLEEP)).logs()  # type: ignore[arg-type]
    said = "This all_reduce usually completes in 40 ms; the longest of 312 took 1.2 s."
    assert said not in diagnose_logs(logs).findings[0].evidence
    logs[0].observation.usual_wait = UsualWait(312, 0.04, 1.2, 5.0)
    logs[1].observation.usual_wait = UsualWait(9, 0.5, 0.5, 5.0)
    assert said in diagnose_logs(logs).findings[0].evidence
