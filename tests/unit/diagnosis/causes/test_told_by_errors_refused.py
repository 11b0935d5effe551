"""What strict verification refused is told by its cause, once; the exception that it raised on
every rank is never the cause.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from builders import Die, Job, S, Stay, all_reduce, collective, recv
from goldens import hold
from refused_jobs import EXCEPTION, refuse

from commlens.diagnosis.examine import diagnose_logs
from commlens.model.collective import State
from commlens.model.ranklog import End, Observation
from commlens.model.refusal import Refusal, RefusedWait
from commlens.model.verdict import Verdict


def refused(verdict: Verdict) -> list[str]:
    assert len([finding for finding in verdict.findings if finding.root_cause]) == 1, [
        f.summary for f in verdict.findings
    ]
    assert all(
        "\n" not in text
        for finding in verdict.findings
        for text in (finding.summary, finding.explanation, *finding.evidence)
    )
    return [text for text in verdict.findings[0].evidence if "Strict verification refused" in text]


def test_a_mismatch() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(3):
            yield all_reduce(job.world, 8, line=10)
        yield all_reduce(job.world, 9 if rank == 2 else 8, line=10)

    verdict = diagnose_logs(refuse(Job(4).run(program).logs()))
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("mismatch/shape", [2], [0, 1, 3])
    assert verdict.cause.held_up == [], "they raised, too"
    assert verdict.cause.refused and len(refused(verdict)) == 1
    hold("mismatch/shape-refused", verdict)


def test_one_that_would_have_hung_nobody() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, 8, line=10, reduce_op="MAX" if rank == 1 else "SUM")

    logs = Job(4).run(program).logs()
    for log in logs:
        log.collectives[-1].state = State.ISSUED
        log.closed = False
    verdict = diagnose_logs(refuse(logs))
    assert (verdict.kind, verdict.culprits) == ("mismatch/reduce-op", [1])
    assert refused(verdict)


def test_a_rank_that_was_late_elsewhere_is_no_cause() -> None:
    """A refusal ends all waits, also that of a root whose gather a slower rank was about to join."""

    def program(job: Job, rank: int) -> Iterator[object]:
        yield collective("gather", job.world, 8, line=10, root=0)
        if rank == 1:
            yield Stay(20, "load")
        # only the root waits
        yield collective("gather", job.world, 8, line=10, root=0, is_async=rank > 1)
        yield collective(
            "all_gather" if rank == 2 else "gather",
            job.world,
            8,
            line=11 if rank == 2 else 10,
            root=None if rank == 2 else 0,
        )

    logs = refuse(Job(4).run(program).logs())
    logs[1].exception, logs[1].observation = None, Observation(End.RUNNING)
    verdict = diagnose_logs(logs)
    assert (verdict.kind, [finding.kind for finding in verdict.findings if finding.root_cause]) == (
        "mismatch/op",
        ["mismatch/op"],
    )
    assert any(
        finding.kind == "missing" and finding.culprits == [1] for finding in verdict.findings
    )


def test_a_mismatch_that_was_caught_is_over() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, 9 if rank == 2 else 8, line=10)

    logs = refuse(Job(4).run(program).logs(), raises=False)
    for log in logs:
        log.observation = Observation(End.CLEAN, 0)
        log.closed = True
    assert diagnose_logs(logs).kind == "healthy"


@pytest.mark.parametrize(
    ("refusal", "kind", "culprits"),
    [
        (
            Refusal(
                "mismatch/shape", "shape", "shape mismatches", "`train.gather`  (#1)", (0, 1, 2)
            ),
            "mismatch/shape",
            [],
        ),
        (
            Refusal(
                "mismatch/structure", "structure", "structure mismatches", "`train.gather`  (#1)"
            ),
            "mismatch/op",
            [],
        ),
        (
            Refusal(
                "mismatch/device", "device", "device mismatches", "`train.gather`  (#1)", (0, 1, 2)
            ),
            "mismatch/device",
            [],
        ),
        (
            Refusal(
                "mismatch/layout", "layout", "layout mismatches", "`train.gather`  (#1)", (0, 1, 2)
            ),
            "mismatch/layout",
            [],
        ),
        (
            Refusal("missing", reason="rank 3 did not take part within 4 s", absent=(3,)),
            "missing",
            [3],
        ),
        (
            Refusal("mismatch/p2p", "peer", "rank 1 sends to rank 9", "`send`", culprits=(1,)),
            "mismatch/p2p",
            [1],
        ),
    ],
)
def test_a_refusal_that_no_record_explains_is_the_verdict(
    refusal: Refusal, kind: str, culprits: list[int]
) -> None:
    """Its fields decide: the text of the exception may be any."""

    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, 8, line=10)

    logs = Job(3).run(program).logs()
    for log in logs:
        log.exception, log.refusal = "DistributedOperationException: some words", refusal
        log.observation = Observation(End.FAILED, 1, ended_ns=S)
    verdict = diagnose_logs(logs)
    as_json = verdict.to_json()
    assert diagnose_logs(logs).to_json() == as_json
    assert (verdict.kind, verdict.culprits) == (kind, culprits)
    assert verdict.victims == [rank for rank in range(3) if rank not in culprits]
    if not culprits:
        assert refusal.reason in verdict.summary
        assert "`train.gather`" in verdict.findings[0].explanation
    hold(f"{kind}/told-by-a-refusal", verdict)


def test_a_refused_cycle_that_the_records_do_not_show_is_the_verdict() -> None:
    """The ring has lost the waits, and one rank ended before it reached the others' broadcast."""

    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, 8, line=10)
        if rank != 1:
            yield collective("broadcast", job.world, 8, line=12, root=0)

    logs = refuse(Job(3).run(program).logs())
    waits = (
        RefusedWait(0, "all_reduce #7 of group a", (1,), "train.py:7 in main"),
        RefusedWait(1, "all_reduce #9 of group b", (0,), "train.py:8 in main"),
    )
    for log in logs:
        log.exception = "DistributedOperationException: some words"
        log.refusal = Refusal("cycle", waits=waits, ranks=(0, 1, 2))
        log.observation = Observation(End.FAILED, 1, ended_ns=log.captured_ns)
    verdict = diagnose_logs(logs)
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("cycle", [], [0, 1, 2])
    hold("cycle/told-by-a-refusal", verdict)


def test_a_rank_that_raised_a_refusal_is_never_the_cause_of_it() -> None:
    """Rank 2 came when rank 0 had given up: both had been refused since rank 1 had ended."""

    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, 8, line=10)
        if rank != 1:
            yield all_reduce(job.world, 8, line=11)

    logs = Job(3).run(program).logs()
    logs[2].collectives[-1].announced_ns += 5 * S
    first = logs[0].collectives[-1].announced_ns
    refuse([logs[0]], at_ns=first + 3 * S)
    refuse([logs[2]])
    for rank in (0, 2):
        logs[rank].refusal = Refusal("dead", absent=(1,), ranks=(0, 1, 2))
    verdict = diagnose_logs(logs)
    assert verdict.culprits == [1], verdict.summary


def test_a_rank_that_carries_on_alone_is_the_cause_though_a_refusal_names_another() -> None:
    """A refusal names the first of the ranks that have finished."""

    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, 8, line=10)
        if rank == 1:
            yield all_reduce(job.world, 8, line=11)

    logs = Job(4).run(program).logs()
    for log in logs:
        log.observation, log.closed = Observation(End.CLEAN, 0), True
    refuse([logs[1]])
    logs[1].refusal, logs[1].closed = Refusal("dead", absent=(0,), ranks=(1,)), False
    verdict = diagnose_logs(logs)
    assert (verdict.kind, verdict.why, verdict.culprits) == ("missing", "finished", [1])
    assert len(refused(verdict)) == 1


def test_a_call_that_the_backend_refused_on_one_rank_counts_for_nobody() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, 8, line=10)
        if rank == 1:
            yield collective("all_to_all", job.world, 8, line=11)

    logs = Job(2).run(program).logs()
    for log in logs:
        for op in log.collectives:
            if op.in_flight:
                op.state, op.error, op.done_ns = (
                    State.FAILED,
                    "RuntimeError: Split sizes doesn't match total dim 0 size",
                    op.announced_ns,
                )
        log.observation = Observation(End.CLEAN, 0)
        log.closed = True
    assert diagnose_logs(logs).kind == "healthy"


def test_a_rank_that_never_came() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, 8, line=10)
        if rank == 2:
            yield Stay(57, "load_batch")
        yield all_reduce(job.world, 8, line=10)

    verdict = diagnose_logs(refuse(Job(4).run(program).logs()))
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("missing", [2], [0, 1, 3])
    assert len(refused(verdict)) == 1
    hold("missing/refused", verdict)


def test_a_rank_that_works_has_come_too_late_all_the_same() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, 8, line=10)
        if rank == 2:
            yield Stay(
                57,
                "load_batch",
                Observation(End.RUNNING, window_s=10.0, cpu_s=9.0, stack_moved=True),
            )
        yield all_reduce(job.world, 8, line=10)

    verdict = diagnose_logs(refuse(Job(4).run(program).logs()))
    assert (verdict.kind, verdict.culprits) == ("missing", [2])


def test_a_rank_that_came_when_the_others_had_given_up() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, 8, line=10)
        yield collective("barrier", job.world, line=11)

    logs = Job(4).run(program).logs()
    for log in logs:
        op = log.collectives[-1]
        op.state, log.closed = State.ISSUED, False
        op.announced_ns += 5 * S if log.rank == 1 else 0
    first = min(log.collectives[-1].announced_ns for log in logs)
    for log in logs:
        log.collectives[-1].done_ns = 0
    refuse([logs[0], logs[2], logs[3]], at_ns=first + 3 * S)
    refuse([logs[1]])
    verdict = diagnose_logs(logs)
    assert (verdict.kind, verdict.culprits) == ("missing", [1])
    assert refused(verdict)


def test_a_rank_that_was_killed() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, 8, line=10)
        if rank == 3:
            yield Die(Observation(End.KILLED, signal="SIGKILL"))
        yield all_reduce(job.world, 8, line=10)

    verdict = diagnose_logs(refuse(Job(4).run(program).logs()))
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("dead", [3], [0, 1, 2])
    assert len(refused(verdict)) == 1


def test_ranks_that_wait_for_each_other() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, 8, line=10)
        yield recv(job.world, 1 - rank, line=20)

    verdict = diagnose_logs(refuse(Job(2).run(program).logs()))
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("cycle", [], [0, 1])
    assert refused(verdict)


@pytest.mark.parametrize("op", ["send", "recv"])
def test_the_advice_for_ranks_that_all_begin_alike(op: str) -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        yield recv(job.world, 1 - rank, line=20)

    logs = Job(2).run(program).logs()
    for log in logs:
        last = log.collectives[-1]
        last.args = msgspec.structs.replace(last.args, op=op)
    verdict = diagnose_logs(logs)
    assert verdict.kind == "cycle"
    hold(f"cycle/all-begin-with-{op}", verdict)


def test_a_rank_that_ended_before_and_is_not_seen_to_have_ended() -> None:
    """Its process hangs at its exit, and the others' refusals say that it has ended; one of them
    waited for another of them.
    """

    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(4):
            yield all_reduce(job.world, 8, line=10)

    logs = Job(4).run(program).logs()
    for log in logs:
        log.closed = log.rank == 1
        log.observation = Observation(End.RUNNING)
        if log.rank != 1:
            log.exception = "DistributedOperationException: some words"
            log.refusal = Refusal("dead", absent=(3,) if log.rank == 2 else (1,))
            log.observation = Observation(End.FAILED, 1, ended_ns=log.captured_ns)
    verdict = diagnose_logs(logs)
    assert (verdict.kind, verdict.why, verdict.culprits, verdict.victims) == (
        "dead",
        "finished",
        [1],
        [0, 2, 3],
    )


@pytest.mark.parametrize(("closed", "why"), [((1, 2), "finished"), ((1,), "unknown")])
def test_ranks_have_finished_only_if_each_of_them_is_known_to(
    closed: tuple[int, ...], why: str
) -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(4):
            yield all_reduce(job.world, 8, line=10)

    logs = Job(4).run(program).logs()
    for log in logs:
        log.closed = log.rank in closed
        log.observation = Observation(End.RUNNING)
        if log.rank not in (1, 2):
            log.exception = "DistributedOperationException: some words"
            log.refusal = Refusal("dead", absent=(1, 2))
            log.observation = Observation(End.FAILED, 1, ended_ns=log.captured_ns)
    verdict = diagnose_logs(logs)
    assert (verdict.kind, verdict.culprits, verdict.why) == ("dead", [1, 2], why)


def test_a_rank_that_a_refusal_ended_is_not_the_one_that_others_wait_for() -> None:
    """Rank 2 raised the refusal of a message, while rank 0 still waits in a collective."""

    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(4):
            yield all_reduce(job.world, 8, line=10)
        if rank == 2:
            yield Stay(48, "ring")
        yield all_reduce(job.world, 8, line=11)

    logs = Job(3).run(program).logs()
    logs[2].exception = EXCEPTION
    verdict = diagnose_logs(logs)
    assert (verdict.culprits, verdict.confidence) == ([], "low")
