"""Ranks that died, and those that ended because of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from builders import Die, Job, S, Stay, Step, all_reduce, at, recv, send, training
from goldens import hold
from judging import blame, judge

from commlens.model.collective import Channel, LearnedHow, State
from commlens.model.ranklog import End, Observation, RankLog

SLEEP = Stay(57, "load_batch")


@pytest.mark.parametrize(
    ("device", "waited_s", "gave_up_s", "kind", "culprits"),
    [
        ("cuda", 600, 0, "missing", [1]),
        ("cuda", 300, 0, "dead", [2]),
        ("cpu", 600, 0, "dead", [2]),
        ("cuda", 300, 285, "missing", [1]),  # its abort hook told, 15 seconds before
        ("cuda", 300, 10, "dead", [2]),  # an earlier abort, which the process outlived
    ],
)
def test_nccls_watchdog_aborts_the_ranks_that_waited_for_their_groups_timeout(
    device: str, waited_s: int, gave_up_s: int, kind: str, culprits: list[int]
) -> None:
    logs = Job(4).run(training(at(1, 5, Stay(40, "load_batch")))).logs()
    for log in logs:
        log.timeout_s = 600.0
        for op in log.collectives:
            op.channel = Channel(op.channel.group, device, runs_ahead=device != "cpu")
            op.learned_how = LearnedHow.NATIVE_RECORDER if op.channel.runs_ahead else op.learned_how
        ended = logs[0].collectives[-1].announced_ns + waited_s * S
        log.observation = Observation(End.KILLED, signal="SIGTERM", ended_ns=ended + S)
        if log.rank == 2:
            log.observation = Observation(End.KILLED, signal="SIGABRT", ended_ns=ended + S // 2)
            if gave_up_s:
                log.gave_up_ns = ended - (waited_s - gave_up_s) * S
    verdict = judge(logs)
    assert (verdict.kind, verdict.culprits) == (kind, culprits)


@pytest.mark.parametrize(
    ("death", "why", "source"),
    [
        (
            Die(
                Observation(End.FAILED, 1), "ValueError: loss is not finite", 61, "check_loss", True
            ),
            "exception",
            "train.py:61",
        ),
        (Die(Observation(End.FAILED, 3), closed=True), "exit", "train.py:30"),
        (Die(Observation(End.FAILED, 3)), "exit", "train.py:30"),
        (Die(Observation(End.KILLED, signal="SIGKILL")), "killed", "train.py:30"),
        (Die(Observation(End.KILLED, signal="SIGABRT")), "killed", "train.py:30"),
        (
            Die(Observation(End.KILLED, signal="SIGKILL", oom_killed=True)),
            "out-of-memory",
            "train.py:30",
        ),
    ],
)
@pytest.mark.parametrize("size", [2, 4])
def test_death_and_its_victims(death: Die, why: str, source: str, size: int) -> None:
    job = Job(size).run(training(at(1, 5, death)))
    logs = job.logs()
    for log in logs:  # gloo tells the others, torchrun ends them
        if log.rank == 0:
            log.exception = (
                "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer"
                " [127.0.0.1]:4242"
            )
            log.closed = True
            log.observation = Observation(End.FAILED, 1, ended_ns=job.now + 5_000_000)
        elif log.rank != 1:
            log.observation = Observation(
                End.KILLED, signal="SIGTERM", ended_ns=job.now + 900_000_000
            )
    verdict = judge(logs)
    assert blame(verdict) == ("dead", why, [1], source)
    assert verdict.victims == [r for r in range(size) if r != 1]
    if size == 4:
        how = death.observation.signal or ("said-goodbye" if death.closed else "failed")
        hold(f"dead/{why}-{how}".lower(), verdict)


def test_a_rank_that_exits_because_of_a_peer_is_a_victim() -> None:
    """torch.multiprocessing.spawn catches the exception of a child, and exits with status 1."""
    job = Job(2).run(training(at(1, 5, Die(Observation(End.KILLED, signal="SIGKILL")))))
    logs = job.logs()
    logs[0].exception, logs[0].closed = "SystemExit: 1", True
    logs[0].observation = Observation(End.FAILED, 1, ended_ns=job.now - 5_000_000)
    assert blame(judge(logs)) != ("dead", "killed", [1], "train.py:30"), (
        "it ended first, for no known reason"
    )
    last = logs[0].collectives[-1]
    last.state, last.error = (
        State.FAILED,
        "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4242",
    )
    assert blame(judge(logs)) == ("dead", "killed", [1], "train.py:30")


def test_a_rank_that_fails_because_a_peer_finished_is_a_victim() -> None:
    """Rank 2 ends well after 5 steps, and rank 3 waits for its message. Rank 1 gets an error and
    shuts down, so rank 0 waits for rank 1.
    """

    def program(job: Job, rank: int) -> Iterator[object]:
        halves = job.group("1", range(3), "tp") if rank < 3 else job.group("2", range(3, 6), "tp")
        for _ in range(5 if rank == 2 else 8):
            yield send(job.world, (rank + 1) % 6, line=30)
            yield recv(job.world, (rank - 1) % 6, line=31)
            yield all_reduce(halves, line=40)
            yield Step()

    logs = Job(6).run(program).logs()
    one = logs[1]
    one.collectives.pop()
    one.issued -= 1
    failed = one.collectives[-2]  # the send to rank 2
    failed.state, failed.error = (
        State.FAILED,
        "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4242",
    )
    one.exception, one.closed, one.observation = (
        f"RuntimeError: {failed.error}",
        True,
        Observation(End.RUNNING),
    )
    verdict = judge(logs)
    assert (verdict.why, verdict.culprits) == ("finished", [2])
    assert [finding.culprits for finding in verdict.findings if finding.root_cause] == [[2]]


@pytest.mark.parametrize(("stall_timeout_s", "roots"), [(10_000.0, [[1]]), (0.1, [[1], [2]])])
def test_a_rank_that_has_not_arrived_when_another_dies_is_only_late(
    stall_timeout_s: float, roots: list[list[int]]
) -> None:
    """Rank 1 is killed while rank 0 waits for ranks 1 and 2."""

    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, line=40)
        if rank:
            yield SLEEP
        yield all_reduce(job.world, line=50)

    job = Job(3).run(program)
    logs = job.logs()
    for log in logs:
        log.stall_timeout_s = stall_timeout_s
    logs[1].observation = Observation(End.KILLED, signal="SIGKILL", ended_ns=job.now)
    verdict = judge(logs)
    assert sorted(finding.culprits for finding in verdict.findings if finding.root_cause) == roots


@pytest.mark.parametrize("left", [False, True])
def test_a_crash_while_exiting(left: bool) -> None:
    job = Job(2).run(training(at(-1, 0)))
    logs = job.logs()
    for log in logs:
        log.closed, log.observation, log.left = True, Observation(End.CLEAN, 0), left
    logs[1].observation = Observation(End.KILLED, signal="SIGABRT", ended_ns=job.now)
    verdict = judge(logs)
    assert (verdict.kind, verdict.culprits) == ("dead", [1])
    hold(f"dead/while-exiting-{'after' if left else 'without'}-destroy-process-group", verdict)


def test_nobody_saw_how_it_ended() -> None:
    logs = Job(4).run(training(at(2, 5, Die(Observation(End.GONE))))).logs()
    verdict = judge(logs)
    assert (verdict.kind, verdict.why, verdict.culprits, verdict.confidence) == (
        "dead",
        "unknown",
        [2],
        "medium",
    )
    hold("dead/end-unseen", verdict)


def gone(logs: list[RankLog]) -> list[RankLog]:
    """Nobody saw how the ranks ended, all in one moment."""
    for log in logs:
        log.observation = Observation(End.GONE, ended_ns=log.captured_ns)
    return logs


def test_an_unseen_end_that_nobody_waits_for_is_no_death() -> None:
    assert judge(gone(Job(4).run(training(at(-1, 0))).logs())).kind == "healthy"


@pytest.mark.parametrize(("earlier_ns", "culprits"), [(0, []), (3 * S, [2])])
def test_of_ranks_that_all_ended_unseen_the_last_sign_of_life_tells_which_was_first(
    earlier_ns: int, culprits: list[int]
) -> None:
    """The others waited for rank 2, but any of them may have been killed."""
    logs = gone(Job(4).run(training(at(2, 5, Die(Observation(End.GONE))))).logs())
    for log in logs:
        log.heartbeat_ns = log.captured_ns - earlier_ns * (log.rank == 2)
    verdict = judge(logs)
    assert (verdict.kind, verdict.culprits) == ("dead", culprits)
    hold(f"dead/all-ends-unseen-{'one-earlier' if culprits else 'at-once'}", verdict)


@pytest.mark.parametrize("end", [Observation(End.GONE), Observation(End.FAILED, 1)])
def test_an_end_without_exit_handlers_after_the_last_group_is_a_clean_one(end: Observation) -> None:
    logs = Job(2).run(training(at(-1, 0))).logs()
    for log in logs:
        log.observation, log.left, log.closed = end, True, False
    assert judge(logs).kind == "healthy"


def ring(job: Job, rank: int) -> Iterator[object]:
    """A ring, in which rank 0 ends before its send of step 3; ranks 0 and 3 then do not wait for
    anybody.
    """
    for i in range(5):
        if (rank, i) == (0, 3):
            yield Die(Observation(End.GONE))
        yield send(job.world, (rank + 1) % 4, line=20)
        if (rank, i) == (3, 3):
            yield Stay(21, "step")
        yield recv(job.world, (rank - 1) % 4, line=22)


def test_of_ranks_that_all_ended_unseen_none_is_named_if_several_waited_for_nobody() -> None:
    verdict = judge(gone(Job(4).run(ring).logs()))
    assert 0 in verdict.victims or verdict.culprits == [0]
    assert verdict.culprits in ([], [0])


def test_of_ranks_that_all_ended_unseen_the_awaited_one_need_not_be_the_first() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        if rank == 1:
            yield recv(job.world, 0, line=30)
        yield Stay(31, "step")

    verdict = judge(gone(Job(4).run(program).logs()))
    assert (verdict.kind, verdict.culprits, verdict.confidence) == ("dead", [], "low")
    assert [(wait.ranks, wait.collective.peer) for wait in verdict.cause.waits] == [([1], 0)]
    hold("dead/all-ends-unseen-one-awaited", verdict)


def test_of_ranks_that_all_ended_unseen_a_refusal_names_the_first() -> None:
    logs = gone(Job(4).run(ring).logs())
    logs[1].exception = (
        "DistributedOperationException: Cannot apply desired operation: rank 0 has ended and will"
        " not take part."
    )
    verdict = judge(logs)
    assert (verdict.kind, verdict.culprits) == ("dead", [0])


def test_a_rank_that_failed_because_of_a_death_is_not_missing_by_itself() -> None:
    """Rank 1 dies before a ring, which rank 0 learns from an error; rank 3 waits for rank 0 in the
    next collective.
    """

    def program(job: Job, rank: int) -> Iterator[object]:
        if rank == 1:
            yield Stay(70, "load")
        yield send(job.world, (rank + 1) % 4, line=20)
        if rank == 0:
            yield Stay(40, "train_step")
        yield recv(job.world, (rank - 1) % 4, line=22)
        yield all_reduce(job.world, line=30)

    logs = Job(4).run(program).logs()
    logs[1].observation = Observation(End.KILLED, signal="SIGKILL", ended_ns=logs[1].captured_ns)
    logs[0].exception = "RuntimeError: Connection closed by peer [127.0.0.1]:30868"
    logs[0].collectives[-1].state = State.COMPLETED
    assert [(each.kind, each.culprits) for each in judge(logs).findings if each.root_cause] == [
        ("dead", [1])
    ]


def test_a_rank_that_is_gone_before_the_launcher_ends_the_others() -> None:
    """Before any collective, so nobody waits for it."""
    logs = Job(4).run(lambda job, rank: iter([Stay(5, "main")])).logs()
    for log in logs:
        log.observation = Observation(End.KILLED, signal="SIGTERM", ended_ns=log.captured_ns)
    logs[2].observation = Observation(End.GONE, ended_ns=logs[2].captured_ns)
    verdict = judge(logs)
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("dead", [2], [0, 1, 3])
    hold("dead/gone-before-the-others-were-terminated", verdict)
