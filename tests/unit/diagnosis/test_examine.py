"""One test for each finding, and for each case that is easily got wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator

import jsonschema
import msgspec
import pytest
from builders import Die, Job, S, Stay, Step, Wait, all_reduce, at, collective, recv, send, training

from commlens.diagnosis.examine import diagnose_logs
from commlens.diagnosis.live import find_disagreements
from commlens.model.collective import Channel, Frame, FrameKind, LearnedHow, State
from commlens.model.ranklog import End, Observation, RankLog
from commlens.model.verdict import Verdict
from commlens.reports.json_report import schema
from commlens.reports.terminal import render

SCHEMA = schema()


def judge(logs: list[RankLog], **options: object) -> Verdict:
    """Diagnose; hold the result to the schema, the terminal, and the order of the logs."""
    verdict = diagnose_logs(logs, **options)
    jsonschema.validate(msgspec.json.decode(verdict.to_json()), SCHEMA)
    assert all(
        finding.confidence == "high" or finding.would_raise_confidence
        for finding in verdict.findings
    ), "no reason is given"
    shuffled = list(logs)
    random.Random(3).shuffle(shuffled)
    assert diagnose_logs(shuffled, **options) == verdict
    text = render(verdict)
    print(text)
    assert max(map(len, text.splitlines())) <= 80
    return verdict


def blame(verdict: Verdict) -> tuple[str, str, list[int], str | None]:
    return verdict.kind, verdict.why, verdict.culprits, verdict.source


SLEEP = Stay(57, "load_batch")


# --- healthy


def test_a_job_that_ran_to_its_end_is_healthy() -> None:
    verdict = judge(Job(4).run(training(lambda *_: None)).logs())
    assert (verdict.kind, verdict.culprits, verdict.is_fault) == ("healthy", [], False)


def test_a_collective_in_flight_for_a_moment_is_healthy() -> None:
    logs = Job(4).run(training(at(2, 5, SLEEP))).logs(after_s=0.3)
    assert judge(logs).kind == "healthy"


def test_no_logs() -> None:
    assert judge([]).missing_evidence


# --- missing


@pytest.mark.parametrize("size", [2, 4, 8])
def test_asleep_in_the_data_loader(size: int) -> None:
    verdict = judge(Job(size).run(training(at(1, 5, SLEEP))).logs())
    assert blame(verdict) == ("missing", "data-loading", [1], "train.py:57")
    assert verdict.victims == [r for r in range(size) if r != 1]
    assert verdict.confidence == "high"
    assert verdict.collective is not None
    assert (verdict.collective.op, verdict.collective.sequence_number) == ("all_reduce", 11)
    if size == 4:
        assert (
            verdict.summary
            == "rank 1 never reached all_reduce #11 of the default group [0-3]; ranks 0,2-3 wait"
            " for it"
        )


def test_a_reduce_op_that_is_not_read_yet_is_no_difference() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, 8, line=20)
        if rank == 1:
            yield SLEEP
        yield all_reduce(job.world, 8, line=20, reduce_op=None if rank == 0 else "SUM")

    verdict = judge(Job(4).run(program).logs())
    assert (
        "Ranks 0,2-3 have been waiting for 30 s at train.py:20 step, float32[8] SUM."
        in verdict.explanation
    )


def test_waits_in_cpp_have_no_record_but_a_stack() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        for i in range(5):
            if (rank, i) == (2, 3):
                yield SLEEP
            yield all_reduce(job.world, 100, line=20, cpp=True)
            yield Step()

    assert blame(judge(Job(4).run(program).logs())) == (
        "missing",
        "data-loading",
        [2],
        "train.py:57",
    )


@pytest.mark.parametrize(
    ("observation", "why"),
    [
        (Observation(End.RUNNING, window_s=5, proc_state="T", stopped_fraction=1.0), "stopped"),
        (
            Observation(End.RUNNING, window_s=5, proc_state="R", holds_gil=True, cpu_s=5.0),
            "holding-gil",
        ),
        (
            Observation(
                End.RUNNING, window_s=5, proc_state="S", throttled_fraction=0.98, cpu_s=0.05
            ),
            "throttled",
        ),
        (
            Observation(
                End.RUNNING, window_s=5, proc_state="D", cpu_s=0.0, io_bytes=0, stack_moved=False
            ),
            "uninterruptible-io",
        ),
        (
            Observation(
                End.RUNNING,
                window_s=5,
                proc_state="S",
                memory_pressure=60.0,
                cpu_s=0.0,
                stack_moved=False,
            ),
            "memory-pressure",
        ),
        (
            Observation(End.RUNNING, window_s=5, proc_state="S", cpu_s=0.0, stack_moved=False),
            "user-code",
        ),
    ],
)
def test_why_from_the_process(observation: Observation, why: str) -> None:
    verdict = judge(Job(4).run(training(at(2, 5, Stay(61, "tune", observation)))).logs())
    assert blame(verdict) == ("missing", why, [2], "train.py:61")


def test_finished_early() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(4 if rank == 2 else 6):
            yield all_reduce(job.world, 100, line=20)
            yield Step()

    verdict = judge(Job(4).run(program).logs())
    assert (verdict.kind, verdict.why, verdict.culprits) == ("missing", "finished", [2])


def test_one_rank_alone_has_one_more_batch() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(6 if rank == 2 else 5):
            yield all_reduce(job.world, 100, line=20)
            yield Step()

    verdict = judge(Job(4).run(program).logs())
    assert blame(verdict) == ("missing", "finished", [2], "train.py:20")


@pytest.mark.parametrize("dies", [True, False])
def test_each_rank_waits_in_its_own_collective(dies: bool) -> None:
    fault = Die(Observation(End.KILLED, signal="SIGKILL")) if dies else SLEEP

    def program(job: Job, rank: int) -> Iterator[object]:
        row = job.group(f"row{rank // 2}", [rank // 2 * 2, rank // 2 * 2 + 1], "tp")
        column = job.group(f"col{rank % 2}", range(rank % 2, 8, 2), "dp")
        for i in range(6):
            if (rank, i) == (2, 4):
                yield fault
            both = [all_reduce(row, 4, line=50), collective("all_gather", column, 8, line=60)]
            yield from both if rank == 3 else reversed(both)
            yield Step()

    verdict = judge(Job(8).run(program).logs())
    assert verdict.culprits == [2]
    if dies:
        assert (
            "ranks 0,4,6 were waiting for it in all_gather #5 of group dp [0-6:2], rank 3 in"
            " all_reduce #5 of" in verdict.summary
        )
    else:
        assert verdict.summary.endswith("ranks 0,4,6 wait for it")
        assert (
            "Rank 3 waits for it in all_reduce #5 of group tp [2-3]. Ranks 1,5,7 wait behind them."
            in verdict.explanation
        )


def test_a_mesh_cascade_has_one_root() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        row = job.group(f"row{rank // 2}", [rank // 2 * 2, rank // 2 * 2 + 1], "tp")
        column = job.group(f"col{rank % 2}", [rank % 2, rank % 2 + 2], "dp")
        for i in range(6):
            if (rank, i) == (2, 4):
                yield Stay(44, "record_metrics")
            yield all_reduce(row, 4, line=50)
            yield all_reduce(column, 40, line=51)
            yield Step()

    verdict = judge(Job(4).run(program).logs())
    assert blame(verdict) == ("missing", "user-code", [2], "train.py:44")
    assert verdict.victims == [0, 1, 3]
    assert verdict.group is not None
    assert verdict.group.ranks == [2, 3]
    assert [f.root_cause for f in verdict.findings] == [True]


def test_two_independent_faults_are_two_roots_the_larger_first() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        small, large = job.group("a", [0, 1]), job.group("b", [2, 3, 4, 5])
        for i in range(6):
            if i == 4 and rank == 1:
                yield Stay(44, "load_batch")
            if i == 4 and rank == 3:
                yield Stay(45, "evaluate")
            yield all_reduce(small if rank < 2 else large, 4, line=50)
            yield Step()

    verdict = judge(Job(6).run(program).logs())
    assert [(f.culprits, f.root_cause) for f in verdict.findings] == [([3], True), ([1], True)]


# --- waiting


@pytest.mark.parametrize(
    ("stay", "why"),
    [
        (
            Stay(
                70,
                "train",
                Observation(End.RUNNING, window_s=5, proc_state="R", cpu_s=4.0, stack_moved=False),
            ),
            "user-code",
        ),
        (
            Stay(
                70,
                "load_batch",
                Observation(End.RUNNING, window_s=5, proc_state="S", cpu_s=0.0, stack_moved=True),
            ),
            "data-loading",
        ),
        (
            Stay(
                73,
                "send_results",
                Observation(
                    End.RUNNING, window_s=5, cpu_s=0.0, stack_moved=False, net_bytes=50_000
                ),
            ),
            "user-code",
        ),
        (
            Stay(
                74,
                "pack",
                Observation(
                    End.RUNNING, window_s=5, cpu_s=0.0, stack_moved=False, children_cpu_s=3.0
                ),
            ),
            "user-code",
        ),
        (
            Stay(
                74,
                "pack",
                Observation(
                    End.RUNNING,
                    window_s=5,
                    stack_moved=False,
                    children_cpu_s=0.1,
                    children_running_fraction=1,
                ),
            ),
            "user-code",
        ),
        (
            Stay(
                75,
                "train",
                Observation(
                    End.RUNNING, window_s=5, cpu_s=0.2, stack_moved=False, running_fraction=0.9
                ),
            ),
            "user-code",
        ),
        (
            Stay(
                71,
                "save_checkpoint",
                Observation(End.RUNNING, window_s=5, proc_state="D", cpu_s=0.0, io_bytes=9_000_000),
            ),
            "checkpoint-io",
        ),
        (
            Stay(
                72,
                "step",
                Observation(End.RUNNING, window_s=9, proc_state="S", cpu_s=0.0, stack_moved=False),
                (Frame("/x/torch/_dynamo/convert_frame.py", 1, "compile", FrameKind.TORCH),),
            ),
            "compilation",
        ),
    ],
)
def test_waiting_for_a_rank_that_works_is_no_fault(stay: Stay, why: str) -> None:
    verdict = judge(Job(4).run(training(at(2, 5, stay))).logs())
    assert (verdict.kind, verdict.why, verdict.culprits, verdict.is_fault) == (
        "waiting",
        why,
        [],
        False,
    )
    assert verdict.victims == [0, 1, 3]
    limited = "Rank 2 counts as stuck if that lasts 8 min." in verdict.explanation
    assert limited or why in ("compilation", "checkpoint-io"), "these may take any time"


@pytest.mark.parametrize(
    ("stay", "words"),
    [
        (Stay(71, "save_checkpoint"), "is saving or loading and shows no work"),
        (
            Stay(
                73,
                "report",
                Observation(
                    End.RUNNING, window_s=5, cpu_s=0.0, stack_moved=False, unsent_bytes=9000
                ),
            ),
            "that nobody takes",
        ),
    ],
)
def test_a_wait_for_an_unknown_reason_is_no_fault(stay: Stay, words: str) -> None:
    """Nothing shows that a rank that sleeps while it saves is wrong: it may wait for a disk or a
    server.
    """
    job = Job(4).run(training(at(0, 5, stay)))
    verdict = judge(job.logs())
    assert (verdict.kind, verdict.culprits, verdict.confidence) == ("waiting", [], "low")
    assert words in verdict.summary
    assert "the reason is unknown" in verdict.summary
    assert judge(job.logs(after_s=900)).kind == "waiting"
    assert blame(judge(job.logs(after_s=1000)))[::2] == ("missing", [0])


TIMED_OUT = (
    "RuntimeError: [unbound_buffer.cc:78] Timed out waiting 60000ms for recv operation to complete"
)
ENDLESS = Stay(
    70, "retry", Observation(End.RUNNING, window_s=9, proc_state="R", cpu_s=9.0, stack_moved=False)
)


def test_a_rank_that_works_for_too_long_may_be_in_an_endless_loop() -> None:
    logs = Job(4).run(training(at(2, 5, ENDLESS))).logs(after_s=500)
    verdict = judge(logs)
    assert (*blame(verdict), verdict.confidence) == (
        "missing",
        "user-code",
        [2],
        "train.py:70",
        "low",
    )
    assert "has been in train.py:70 retry for 8 min 20 s" in verdict.explanation
    assert any("Before, rank 2 spent at most" in text for text in verdict.findings[0].evidence)
    logs[0].stall_timeout_s = 90.0
    assert judge(logs).kind == "waiting"
    logs[0].stall_timeout_s = 0.0
    logs[2].expecting = "a long search"
    assert judge(logs).kind == "waiting"


def test_a_rank_that_others_awaited_until_the_timeout_is_named_although_it_works() -> None:
    logs = Job(4).run(training(at(2, 5, ENDLESS))).logs(after_s=60)
    assert judge(logs).kind == "waiting"
    for log in logs:
        if log.rank != 2:
            op = log.collectives[-1]
            op.state, op.error, op.done_ns = (
                State.FAILED,
                TIMED_OUT,
                op.announced_ns + 60_000_000_000,
            )
            log.exception, log.observation = TIMED_OUT, Observation(End.FAILED, exit_code=1)
    verdict = judge(logs)
    assert (*blame(verdict), verdict.confidence) == (
        "missing",
        "user-code",
        [2],
        "train.py:70",
        "low",
    )
    assert "ranks 0-1,3 waited for it until the timeout" in verdict.summary
    assert "give the process group a longer timeout" in (
        verdict.findings[0].would_raise_confidence or ""
    )


def test_a_rank_that_was_as_slow_before_is_not_in_an_endless_loop() -> None:
    job = Job(4)

    def program(job: Job, rank: int) -> Iterator[object]:
        for i in range(6):
            if i == 3:
                job.now += 200_000_000_000
            if (rank, i) == (2, 5):
                yield ENDLESS
            yield all_reduce(job.world, 100, line=20)
            yield Step()

    assert judge(job.run(program).logs(after_s=500)).kind == "waiting"


def test_a_compilation_may_take_any_time() -> None:
    compiling = Stay(
        72,
        "step",
        ENDLESS.observation,
        (Frame("/x/torch/_dynamo/convert_frame.py", 1, "compile", FrameKind.TORCH),),
    )
    assert judge(Job(4).run(training(at(2, 5, compiling))).logs(after_s=5000)).kind == "waiting"


def test_expect_slow_is_no_fault() -> None:
    logs = Job(4).run(training(at(2, 5, Stay(70, "build")))).logs()
    logs[2].expecting = "building the index"
    verdict = judge(logs)
    assert verdict.kind == "waiting"
    assert "building the index" in verdict.summary


def test_a_root_need_not_wait() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        for i in range(5):
            if i == 3 and rank:
                yield Stay(12, "agree", Observation(End.RUNNING, window_s=5, cpu_s=3.0))
            yield collective("broadcast", job.world, 1, line=10, root=0)
            yield Step()
        yield Stay(99, "idle")

    assert not judge(Job(4).run(program).logs()).is_fault


# --- no rank moves


def all_stay(stay: Stay, also: Stay | None = None) -> Callable[[Job, int], Iterator[object]]:
    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, 100, line=20)
        yield also if also is not None and rank == 1 else stay

    return program


def test_ranks_that_stand_still_outside_of_collectives() -> None:
    """In a file lock that nobody gives back, for example."""
    verdict = judge(Job(4).run(all_stay(Stay(40, "build"), Stay(44, "load"))).logs(after_s=200))
    assert (*blame(verdict), verdict.confidence) == ("missing", "user-code", [], None, "low")
    assert (
        verdict.summary
        == "no rank has moved for 3 min 20 s, and none is in a collective: ranks 0,2-3 are in"
        " train.py:40 build, rank 1 is in train.py:44 load"
    )
    assert verdict.victims == [0, 1, 2, 3]


WORKS = Observation(
    End.RUNNING, window_s=9, proc_state="S", cpu_s=0.0, stack_moved=False, children_cpu_s=8.0
)
IDLE = (
    Frame("/lib/selectors.py", 468, "select", FrameKind.PYTHON),
    Frame("/lib/asyncio/a.py", 6, "run_forever", FrameKind.PYTHON),
)


@pytest.mark.parametrize("also", [Stay(44, "build", WORKS), Stay(44, "main", None, IDLE), None])
def test_a_job_may_stand_still(also: Stay | None) -> None:
    """For a while, while a rank works, or while it waits for requests; and a rank elsewhere may
    work.
    """
    logs = (
        Job(4).run(all_stay(Stay(40, "build"), also)).logs(after_s=200 if also is not None else 170)
    )
    assert judge(logs).kind == "healthy"
    assert judge(logs[:1] + logs[2:]).kind != "missing"


# --- dead


@pytest.mark.parametrize(
    ("device", "waited_s", "kind", "culprits"),
    [("cuda", 600, "missing", [1]), ("cuda", 300, "dead", [2]), ("cpu", 600, "dead", [2])],
)
def test_nccls_watchdog_aborts_the_ranks_that_waited_for_their_groups_timeout(
    device: str, waited_s: int, kind: str, culprits: list[int]
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


def test_a_rank_that_exits_because_of_a_peer_is_a_victim() -> None:
    """torch.multiprocessing.spawn catches the exception of a child, and exits with status 1."""
    job = Job(2).run(training(at(1, 5, Die(Observation(End.KILLED, signal="SIGKILL")))))
    logs = job.logs()
    logs[0].exception, logs[0].closed = "SystemExit: 1", True
    logs[0].observation = Observation(End.FAILED, 1, ended_ns=job.now - 5_000_000)
    assert blame(judge(logs)) != (
        "dead",
        "killed",
        [1],
        "train.py:30",
    ), "it ended first, for no known reason"
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


def test_ranks_whose_wait_fails_while_a_peer_shuts_down_waited_for_it() -> None:
    """Rank 3 left out a step and is still exiting when its closed connections have ended the
    others.
    """

    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(7 if rank == 3 else 8):
            yield all_reduce(job.world, line=40)
            yield Step()

    job = Job(4).run(program)
    logs = job.logs()
    for log in logs[:3]:
        failed = log.collectives[-1]
        failed.state, failed.error = (
            State.FAILED,
            "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4242",
        )
        log.exception, log.observation = (
            f"RuntimeError: {failed.error}",
            Observation(End.FAILED, 1, ended_ns=job.now),
        )
    logs[3].closed, logs[3].observation = True, Observation(End.RUNNING)
    logs[3].captured_ns = logs[3].heartbeat_ns = job.now
    verdict = judge(logs)
    assert (verdict.kind, verdict.why, verdict.culprits, verdict.confidence) == (
        "missing",
        "finished",
        [3],
        "high",
    )
    assert "waited" in verdict.explanation and "until it failed" in verdict.explanation
    assert (
        "The exit status of rank 3 is not known yet: the launcher reports one that is not 0."
        in verdict.findings[0].evidence
    )


def test_what_a_rank_did_in_several_steps_is_routine_also_right_after_the_setup() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        yield collective("broadcast", job.world, 4, line=10, root=0)
        for number in range(5):
            yield all_reduce(
                job.world, line=40, dtype="float64" if number == 4 and rank == 0 else "float32"
            )
            yield all_reduce(job.world, line=50)
            yield Step()

    verdict = judge(Job(2).run(program).logs())
    assert (verdict.kind, verdict.culprits) == ("mismatch/dtype", [0])


@pytest.mark.parametrize(("waited_s", "culprits"), [(2, [1]), (30, [2])])
def test_a_rank_that_was_ended_with_the_others_may_only_have_been_late(
    waited_s: int, culprits: list[int]
) -> None:
    """Rank 1 is killed unseen while it waits for rank 2, and the launcher ends the others."""

    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, line=40)
        if rank == 2:
            yield SLEEP
        yield all_reduce(job.world, line=50)

    job = Job(3).run(program)
    logs = job.logs()
    for log in logs:
        log.captured_ns = logs[0].collectives[-1].announced_ns + waited_s * S
        log.observation = (
            Observation(End.GONE)
            if log.rank == 1
            else Observation(End.KILLED, signal="SIGTERM", ended_ns=job.now)
        )
    assert judge(logs).culprits == culprits


def test_ranks_that_are_already_in_the_next_collective_count_for_the_majority() -> None:
    """Rank 1 does one round fewer. Ranks 0 and 3 wait for it in the first collective of the round,
    ranks 2 and 4 in the second.
    """

    def program(job: Job, rank: int) -> Iterator[object]:
        for number in range(8 if rank == 1 else 9):
            yield all_reduce(job.world, 2, line=40, is_async=number == 8 and rank in (2, 4))
            yield all_reduce(job.world, 30, line=40)

    logs = Job(5).run(program).logs()
    for rank in (2, 4):  # a rooted collective can complete on some ranks without the others
        logs[rank].collectives[-2].state = State.COMPLETED
    logs[1].closed, logs[1].observation = True, Observation(End.CLEAN, 0)
    verdict = judge(logs)
    assert (verdict.kind, verdict.why, verdict.culprits) == ("missing", "finished", [1])


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


@pytest.mark.parametrize(
    ("left", "said"), [(False, "destroy_process_group"), (True, "look at the output of rank 1")]
)
def test_a_crash_while_exiting(left: bool, said: str) -> None:
    job = Job(2).run(training(at(-1, 0)))
    logs = job.logs()
    for log in logs:
        log.closed, log.observation, log.left = True, Observation(End.CLEAN, 0), left
    logs[1].observation = Observation(End.KILLED, signal="SIGABRT", ended_ns=job.now)
    verdict = judge(logs)
    assert (verdict.kind, verdict.culprits, verdict.summary) == (
        "dead",
        [1],
        "rank 1 died of SIGABRT while it was exiting",
    )
    assert said in verdict.next_step


@pytest.mark.parametrize("readable", [0, 6])
def test_a_rank_whose_newest_records_are_unreadable_may_have_arrived(readable: int) -> None:
    logs = Job(4).run(training(at(2, 5, SLEEP))).logs()
    logs[1].collectives = logs[1].collectives[:readable]
    logs[1].problems = ["the others are damaged"]
    assert blame(judge(logs)) == ("missing", "data-loading", [2], "train.py:57")


def test_nobody_is_blamed_because_its_newest_records_are_unreadable() -> None:
    logs = Job(4).run(training(at(2, 5, SLEEP))).logs()
    logs[2].collectives = logs[2].collectives[:5]
    verdict = judge(logs)
    assert (verdict.culprits, verdict.confidence) == ([], "low")
    assert "the newest records of rank 2 are unreadable" in verdict.summary


def test_nobody_saw_how_it_ended() -> None:
    logs = Job(4).run(training(at(2, 5, Die(Observation(End.GONE))))).logs()
    verdict = judge(logs)
    assert (verdict.kind, verdict.why, verdict.culprits, verdict.confidence) == (
        "dead",
        "unknown",
        [2],
        "medium",
    )


def test_an_unseen_end_that_nobody_waits_for_is_no_death() -> None:
    logs = Job(4).run(training(at(-1, 0))).logs()
    for log in logs:
        log.observation = Observation(End.GONE, ended_ns=log.captured_ns)
    assert judge(logs).kind == "healthy"


@pytest.mark.parametrize(("earlier_ns", "culprits"), [(0, []), (3 * S, [2])])
def test_of_ranks_that_all_ended_unseen_the_last_sign_of_life_tells_which_was_first(
    earlier_ns: int, culprits: list[int]
) -> None:
    """The others waited for rank 2, but any of them may have been killed."""
    logs = Job(4).run(training(at(2, 5, Die(Observation(End.GONE))))).logs()
    for log in logs:
        log.observation = Observation(End.GONE, ended_ns=log.captured_ns)
        log.heartbeat_ns = log.captured_ns - earlier_ns * (log.rank == 2)
    verdict = judge(logs)
    assert (verdict.kind, verdict.culprits) == ("dead", culprits)
    assert culprits or (
        "ranks 0-3 are gone" in verdict.summary
        and "ranks 0-1,3 were waiting for rank 2" in verdict.summary
    )


@pytest.mark.parametrize("end", [Observation(End.GONE), Observation(End.FAILED, 1)])
def test_an_end_without_exit_handlers_after_the_last_group_is_a_clean_one(end: Observation) -> None:
    logs = Job(2).run(training(at(-1, 0))).logs()
    for log in logs:
        log.observation, log.left, log.closed = end, True, False
    assert judge(logs).kind == "healthy"


def test_stuck_until_the_timeout_then_ended_by_the_launcher() -> None:
    """The one that the launcher stopped slept; those that failed first waited for it."""
    job = Job(4).run(training(at(2, 5, SLEEP)))
    logs = job.logs()
    for log in logs:
        last = log.collectives[-1]
        if log.rank == 2:
            log.observation = Observation(
                End.KILLED, signal="SIGTERM", ended_ns=job.now + 26_000_000_000
            )
        else:
            last.state, last.error = (
                type(last.state).FAILED,
                "RuntimeError: Timed out waiting 25000ms for recv operation to complete",
            )
            last.done_ns = job.now + 25_000_000_000
            log.exception = last.error
            log.observation = Observation(End.FAILED, 1, ended_ns=job.now + 25_000_000_000)
    assert blame(judge(logs)) == ("missing", "data-loading", [2], "train.py:57")


def test_a_rank_without_a_log_among_others_left_no_record() -> None:
    logs = Job(4).run(training(at(2, 5, SLEEP))).logs()
    verdict = judge([log for log in logs if log.rank != 2])
    assert (verdict.kind, verdict.culprits) == ("dead", [2])
    assert any("left no record" in text for text in verdict.missing_evidence)
    assert render(verdict).count("left no record") == 1


def test_another_nodes_ranks_are_not_known() -> None:
    logs = Job(8).run(training(at(6, 5, SLEEP))).logs()
    verdict = judge(logs[:4])
    assert verdict.confidence == "low"
    assert verdict.culprits == []
    assert any("another node" in text for text in verdict.missing_evidence)


# --- mismatch


@pytest.mark.parametrize(
    ("action", "kind", "line"),
    [
        (lambda job: collective("all_gather", job.world, 100, line=22), "mismatch/op", 22),
        (lambda job: all_reduce(job.world, 96, line=20), "mismatch/shape", 20),
        (lambda job: all_reduce(job.world, 100, line=20, dtype="bfloat16"), "mismatch/dtype", 20),
        (
            lambda job: all_reduce(job.world, 100, line=20, reduce_op="MAX"),
            "mismatch/reduce-op",
            20,
        ),
    ],
)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_mismatch(action: object, kind: str, line: int, size: int) -> None:
    verdict = judge(Job(size).run(training(at(1, 5, action))).logs())
    assert blame(verdict) == (kind, "in-collective", [1], f"train.py:{line}")
    assert verdict.collective is not None
    assert verdict.collective.sequence_number == 11


def test_mismatch_of_roots() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        for i in range(6):
            yield collective(
                "broadcast", job.world, 1, line=10, root=1 if (rank, i) == (2, 4) else 0
            )
            yield all_reduce(job.world, 10, line=11)
            yield Step()

    assert blame(judge(Job(4).run(program).logs())) == (
        "mismatch/root",
        "in-collective",
        [2],
        "train.py:10",
    )


def test_a_wrong_reduce_op_hangs_nobody_and_is_found() -> None:
    verdict = judge(
        Job(4)
        .run(training(at(2, 5, lambda job: all_reduce(job.world, 100, line=20, reduce_op="MAX"))))
        .logs()
    )
    assert blame(verdict) == ("mismatch/reduce-op", "in-collective", [2], "train.py:20")
    assert verdict.is_fault


def test_an_unread_reduce_op_is_no_disagreement() -> None:
    verdict = judge(
        Job(4)
        .run(training(at(2, 5, lambda job: all_reduce(job.world, 100, line=20, reduce_op=None))))
        .logs()
    )
    assert verdict.kind == "healthy"


def test_a_size_that_does_not_fit_aborts_another_rank() -> None:
    """gloo aborts the receiver of the odd tensor. The record says who it was."""
    job = Job(4).run(training(at(2, 5, lambda job: all_reduce(job.world, 96, line=20))))
    logs = job.logs()
    logs[3].observation = Observation(End.KILLED, signal="SIGABRT", ended_ns=job.now)
    for rank in (0, 1, 2):
        logs[rank].exception = "RuntimeError: Connection closed by peer"
        logs[rank].observation = Observation(End.FAILED, 1, ended_ns=job.now + 10_000_000)
    verdict = judge(logs)
    assert blame(verdict) == ("mismatch/shape", "in-collective", [2], "train.py:20")
    assert verdict.victims == [0, 1, 3]
    assert [f.kind for f in verdict.findings if f.root_cause] == ["mismatch/shape"]


def test_a_tie_is_said_to_be_a_tie() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, 100 if rank == 0 else 96, line=20 + rank)

    verdict = judge(Job(2).run(program).logs())
    assert (verdict.kind, verdict.culprits, verdict.victims, verdict.confidence) == (
        "mismatch/shape",
        [],
        [0, 1],
        "low",
    )
    assert any(
        text.startswith("Neither a majority nor their routine")
        for text in verdict.findings[0].evidence
    )
    assert (
        "Rank 0 issues all_reduce of the default group at train.py:20 step (float32[100] SUM);"
        " rank 1" in verdict.explanation
    )
    assert "compare train.py:20 step and train.py:21 step" in verdict.next_step


def test_skip_then_another_op() -> None:
    for size in (2, 4, 8):
        verdict = judge(Job(size).run(training(at(1, 5))).logs())
        assert blame(verdict) == ("mismatch/op", "skipped", [1], "train.py:30")
        assert "looks like a skipped collective" in verdict.summary


def test_skip_then_the_same_op_is_found_by_lines_and_steps() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        for i in range(12):
            if (rank, i) != (1, 6):
                yield all_reduce(job.world, 100, line=20)
            yield Step()
        yield collective("barrier", job.world, line=40)

    for size in (2, 4):
        verdict = judge(Job(size).run(program).logs())
        assert (verdict.kind, verdict.why, verdict.culprits, verdict.source) == (
            "missing",
            "skipped",
            [1],
            "train.py:20",
        )
        assert verdict.collective is not None
        assert verdict.collective.sequence_number == 7


def test_lines_may_differ_legally() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(8):
            yield collective("broadcast", job.world, 1, line=10 if rank == 0 else 12, root=0)
            yield all_reduce(job.world, 1, line=13)
            yield all_reduce(job.world, 1, line=14 if rank % 2 else 15)
            yield Step()

    for size in (2, 4):
        assert judge(Job(size).run(program).logs()).kind == "healthy"


def test_uneven_data_then_a_barrier() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(5 if rank == 1 else 8):
            yield all_reduce(job.world, 100, line=20)
            yield all_reduce(job.world, 10, line=20)
            yield Step()
        yield collective("barrier", job.world, line=40)

    for size in (2, 4):
        assert blame(judge(Job(size).run(program).logs()))[0:3:2] == ("mismatch/op", [1])


# --- cycles


@pytest.mark.parametrize("size", [2, 4, 8])
def test_order_swapped_across_two_groups(size: int) -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        a, b = job.group("1", range(size), "gradients"), job.group("2", range(size), "statistics")
        for i in range(8):
            order = [(b, 31), (a, 30)] if (rank, i) == (1, 6) else [(a, 30), (b, 31)]
            for group, line in order:
                yield all_reduce(group, 4, line=line)
            yield Step()

    verdict = judge(Job(size).run(program).logs())
    assert blame(verdict) == ("cycle", "in-collective", [1], "train.py:31")
    assert verdict.victims == [r for r in range(size) if r != 1]


def test_order_swapped_across_three_groups() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        edges = [(1, 2), (1, 3), (2, 3)]
        groups = [job.group(f"e{a}{b}", (a, b), f"edge-{a}-{b}") for a, b in edges]
        for i in range(8):
            mine = [g for g in groups if rank in g.ranks]
            for group in reversed(mine) if (rank, i) == (2, 6) else mine:
                yield all_reduce(group, 4, line=30)
            yield all_reduce(job.world, 4, line=31)
            yield Step()

    verdict = judge(Job(4).run(program).logs())
    assert (verdict.kind, verdict.culprits, verdict.source) == ("cycle", [2], "train.py:30")
    assert len([text for text in verdict.findings[0].evidence if " waits in " in text]) == 3


def test_a_receive_that_nobody_sends() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        partner = rank ^ 1
        for i in range(8):
            if rank % 2 == 0:
                yield send(job.world, partner, line=30)
                yield recv(job.world, partner, line=31)
            else:
                yield recv(job.world, partner, line=33)
                yield send(job.world, partner, line=34)
            if (rank, i) == (2, 6):
                yield recv(job.world, partner, line=36)
            yield all_reduce(job.world, 100, line=40)
            yield Step()

    verdict = judge(Job(4).run(program).logs())
    assert blame(verdict) == ("cycle", "in-collective", [2], "train.py:36")
    assert verdict.victims == [0, 1, 3]


def test_both_receive_first() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        partner = rank ^ 1
        for i in range(8):
            if rank % 2 == 0 and (rank, i) != (2, 6):
                yield send(job.world, partner, line=30)
                yield recv(job.world, partner, line=31)
            else:
                yield recv(job.world, partner, line=33)
                yield send(job.world, partner, line=34)
            yield all_reduce(job.world, 100, line=40)
            yield Step()

    assert blame(judge(Job(8).run(program).logs())) == (
        "cycle",
        "in-collective",
        [2],
        "train.py:33",
    )
    assert judge(Job(4).run(program).logs()).culprits == [2]


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_a_pipeline_with_a_lost_send(size: int) -> None:
    bad = size // 2

    def program(job: Job, rank: int) -> Iterator[object]:
        for i in range(7):
            for _ in range(2):
                if rank:
                    yield recv(job.world, rank - 1, line=20)
                if rank < size - 1:
                    yield send(job.world, rank + 1, line=21)
            for micro in range(2):
                if rank < size - 1:
                    yield recv(job.world, rank + 1, line=22)
                if rank and not (rank == bad and i == 5 and micro == 1):
                    yield send(job.world, rank - 1, line=23)
            yield Step()

    verdict = judge(Job(size).run(program).logs())
    assert (verdict.kind, verdict.culprits) == ("cycle", [bad])
    assert f"rank {bad} did not send to rank {bad - 1}" in verdict.summary


def test_a_batch_without_its_send() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        for i in range(8):
            if (rank, i) != (2, 6):
                yield send(job.world, (rank + 1) % 4, line=30)
            yield recv(job.world, (rank - 1) % 4, line=30)
            yield all_reduce(job.world, 100, line=40)
            yield Step()

    assert (lambda v: (v.kind, v.culprits))(judge(Job(4).run(program).logs())) == ("cycle", [2])


def test_messages_that_do_not_fit() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        for i in range(6):
            if rank == 0:
                yield send(job.world, 1, 7 if i == 4 else 8, line=30)
            else:
                yield recv(job.world, 0, 8, line=31)
            yield all_reduce(job.world, 10, line=40)
            yield Step()

    verdict = judge(Job(2).run(program).logs())
    assert blame(verdict) == ("mismatch/p2p", "in-collective", [0], "train.py:30")


# --- stuck inside


def stuck_inside(size: int = 4) -> list[RankLog]:
    logs = Job(size).run(training(lambda *_: None)).logs()
    for log in logs:
        del log.collectives[11:]
        log.issued = 11
        last = log.collectives[-1]
        last.state, last.done_ns, last.wait_ended_ns = type(last.state).ISSUED, 0, 0
        log.closed = False
        log.observation = Observation(End.RUNNING, window_s=5, cpu_s=0.0, stack_moved=False)
    return logs


def test_all_arrived_and_nobody_completes() -> None:
    verdict = judge(stuck_inside())
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("stuck-inside", [], [0, 1, 2, 3])


def test_stopped_inside() -> None:
    logs = stuck_inside()
    logs[1].observation = Observation(End.RUNNING, window_s=5, proc_state="T", stopped_fraction=1.0)
    verdict = judge(logs)
    assert (verdict.kind, verdict.why, verdict.culprits) == ("stuck-inside", "stopped", [1])


# --- threads, several jobs, wrapped rings


def test_a_thread_that_waits_does_not_excuse_the_main_one() -> None:
    """Rank 1's side thread waits for rank 0, rank 0 waits for rank 1's main thread: no cycle, rank
    1 sleeps.
    """

    def program(job: Job, rank: int) -> Iterator[object]:
        side = job.group("side", [0, 1])
        for i in range(5):
            if (rank, i) == (1, 4):
                yield all_reduce(side, 4, line=70, is_async=True, handle="x", thread=7777)
                yield Stay(57, "load_batch")
            yield all_reduce(job.world, 4, line=20)
            yield Step()

    job = Job(2).run(program)
    waiting = job.ranks[1].log.collectives[-1]
    waiting.wait_began_ns, waiting.wait_thread = waiting.announced_ns, 7777
    assert blame(judge(job.logs())) == ("missing", "data-loading", [1], "train.py:57")


@pytest.mark.parametrize(("size", "on_all"), [(2, True), (4, True), (4, False)])
def test_two_threads_that_race_on_a_group(size: int, on_all: bool) -> None:
    """No rank is at fault if each runs both threads; if one rank alone does, it is."""
    side = 7777

    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(3):
            yield all_reduce(job.world, 4, line=20)
        own = {"line": 20, "handle": "own"}
        if rank == 0:
            yield collective(
                "all_gather",
                job.world,
                4,
                line=70,
                function="log",
                is_async=True,
                handle="side",
                thread=side,
            )
            yield all_reduce(job.world, 4, line=20)
        elif on_all:
            yield all_reduce(job.world, 4, is_async=True, **own)
            yield collective("all_gather", job.world, 4, line=70, function="log", thread=side)
        else:
            yield all_reduce(job.world, 4, line=20)

    job = Job(size).run(program)
    for one in job.ranks:
        for op in one.log.collectives:
            if op.in_flight and not op.wait_began_ns:
                op.wait_began_ns, op.wait_thread = op.announced_ns, op.issue_thread
    verdict = judge(job.logs())
    assert (verdict.kind, verdict.culprits) == ("mismatch/op", [] if on_all else [0])
    assert ("two threads use the default group" in verdict.summary) is on_all
    if on_all:
        assert (
            "all_gather at train.py:70 log and, in the main thread, all_reduce at train.py:20 step"
            in verdict.summary
        )
        assert "from one thread" in verdict.next_step


@pytest.mark.parametrize("first", ["send", "recv"])
def test_a_message_that_the_other_side_issues_only_after_a_collective(first: str) -> None:
    """Five messages of one side in front of a collective, four of the other: no rank is to blame,
    but the fifth is named.
    """
    mine, theirs = (send, recv) if first == "send" else (recv, send)

    def program(job: Job, rank: int) -> Iterator[object]:
        make = mine if rank == 0 else theirs
        for _ in range(5 if rank == 0 else 4):
            yield make(job.world, 1 - rank, line=8)
        yield all_reduce(job.world, 1, line=25)

    job = Job(2).run(program)
    if first == "send":  # gloo's sends of small tensors do not wait, those of large ones do
        job = Job(2)

        def blocked(job: Job, rank: int) -> Iterator[object]:
            yield from (
                program(job, rank) if rank else [send(job.world, 1, line=8) for _ in range(5)]
            )
            yield Stay(8, "exchange")

        job.run(blocked)
        last = job.ranks[0].log.collectives[-1]
        last.state, last.done_ns, last.wait_ended_ns = State.ISSUED, 0, 0
        last.wait_began_ns, last.wait_thread = last.announced_ns, last.issue_thread
    verdict = judge(job.logs())
    assert (verdict.kind, verdict.culprits) == ("cycle", [])
    lacks = "receives" if first == "send" else "sends"
    assert (
        f"which rank 1 {lacks} only after all_reduce #1 of the default group [0-1]"
        in verdict.summary
    )
    assert any(
        text.startswith(f"Rank 0 issued 5 {first.replace('recv', 'receive')}s")
        for text in verdict.findings[0].evidence
    )
    assert "before all_reduce at train.py:25" in verdict.next_step


def test_two_sides_are_told_with_their_call_paths() -> None:
    """The innermost lines are the model's: where the ranks part is further out."""

    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, 4, line=20)
        main, generate = (
            (Frame("/home/me/train.py", line, name),)
            for line, name in ((60 + rank, "main"), (45, "generate"))
        )
        inner = {"line": 31, "function": "forward"}
        yield collective(
            "all_gather",
            job.world,
            8 + rank,
            callers=generate + main if rank == 0 else main,
            **inner,
        )  # type: ignore[arg-type]

    verdict = judge(Job(2).run(program).logs())
    assert verdict.culprits == []
    assert (
        "at train.py:60 main -> train.py:45 generate -> train.py:31 forward" in verdict.explanation
    )
    assert "at train.py:61 main -> train.py:31 forward" in verdict.explanation
    assert "called at train.py:60 main" in verdict.next_step


@pytest.mark.parametrize(("size", "savers"), [(2, [0]), (3, [0]), (4, [0]), (4, [0, 1, 3])])
def test_a_barrier_in_a_branch_meets_that_of_another_line(size: int, savers: list[int]) -> None:
    """Only the lines show it: the barrier that is left over is at a line that all ranks reach."""

    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(4):
            yield all_reduce(job.world, 4, line=14)
        if rank in savers:
            caller = (Frame("/home/me/train.py", 27, "main"),)
            yield collective(
                "barrier", job.world, line=19, function="save_checkpoint", callers=caller
            )
        yield collective("barrier", job.world, line=28, function="main")

    verdict = judge(Job(size).run(program).logs())
    others = sorted(set(range(size)) - set(savers))
    assert verdict.culprits == (
        [] if size == 2 else savers if len(savers) < len(others) else others
    )
    assert (
        "barrier #5 of the default group" in verdict.summary
        and "train.py:19 save_checkpoint" in verdict.summary
    )
    assert (
        "train.py:19 save_checkpoint" in verdict.next_step
        and "train.py:28" not in verdict.next_step
    )
    assert (verdict.source, verdict.collective.sequence_number) == ("train.py:19", 5)
    assert verdict.confidence == ("medium" if size == 2 else "high")


def test_one_more_round_of_the_same_lines_has_no_line_of_its_own() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(4 + (rank == 0)):
            yield all_reduce(job.world, 4, line=14)
            yield collective("barrier", job.world, line=28)

    verdict = judge(Job(3).run(program).logs())
    assert "alone issued" not in verdict.summary and verdict.source == "train.py:14"


def test_a_thread_of_the_backward_pass_is_no_race() -> None:
    """On a device, hooks run in the threads of the autograd engine, for which the main thread
    waits: rank 1 skipped its backward pass.
    """
    hook = (
        Frame(
            "/env/lib/torch/distributed/fsdp/_param_group.py", 600, "post_backward", FrameKind.TORCH
        ),
    )

    def program(job: Job, rank: int) -> Iterator[object]:
        for i in range(6):
            yield collective("all_gather", job.world, 8, line=20)
            if (rank, i) != (1, 5):
                yield collective("reduce_scatter", job.world, 8, line=21, thread=7777)
        yield collective("all_gather", job.world, 8, line=40, function="evaluate")

    job = Job(3).run(program)
    for one in job.ranks:
        for op in one.log.collectives:
            if op.issue_thread == 7777:
                op.stack = hook
    verdict = judge(job.logs())
    assert (verdict.kind, verdict.culprits) == (
        "mismatch/op",
        [1],
    ) and "two threads" not in verdict.summary


def test_what_is_said_of_several_ranks_holds_for_each() -> None:
    """The sides of a cycle are in groups of the same kind, which have numbers for names."""

    def program(job: Job, rank: int) -> Iterator[object]:
        column = job.group(str(rank % 2 + 1), [rank % 2, rank % 2 + 2])
        if rank >= 2:
            yield all_reduce(column, 4, line=17, function="reduce_tracker")
        yield all_reduce(job.world, 1, line=45, function="main")

    verdict = judge(Job(4).run(program).logs())
    assert (verdict.kind, verdict.culprits) == ("cycle", [])
    assert (
        "anks 2-3 issue all_reduce of their groups 1 [0,2] and 2 [1,3] at train.py:17"
        " reduce_tracker" in verdict.explanation
    )
    assert (
        "anks 0-1 issue all_reduce of the default group at train.py:45 main" in verdict.explanation
    )


def test_culprits_that_differ_are_told_apart() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(3):
            yield all_reduce(job.world, 4, line=20)
        if rank == 1:
            yield collective("broadcast", job.world, 4, line=30, root=0)
        elif rank == 2:
            yield collective("barrier", job.world, line=31)
        else:
            yield all_reduce(job.world, 4, line=20 + rank)

    verdict = judge(Job(6).run(program).logs())
    assert (verdict.kind, verdict.culprits) == ("mismatch/op", [1, 2])
    assert verdict.summary.startswith(
        "rank 1 issued broadcast and rank 2 issued barrier where the others issued all_reduce"
    )
    for rank in (0, 3, 4):
        assert (
            f"ank {rank} issued all_reduce float32[4] SUM at train.py:{20 + rank}"
            in verdict.explanation
        )


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("size", "first"), [(2, [0]), (3, [0, 2]), (3, [1]), (4, [0, 1])])
def test_a_checkpoints_thread_on_the_main_threads_group(
    size: int, first: list[int], late: bool
) -> None:
    """The thread has no line of the user. On the ranks ``first`` it comes first, on the others the
    main thread does.

    Args:
        size: number of ranks.
        first: ranks.
        late: on the others, the thread has not come yet.
    """
    library = "/env/lib/python3.11/site-packages/torch/distributed/"
    files = [
        ("distributed_c10d.py", 3631, "gather_object"),
        ("checkpoint/utils.py", 135, "gather_object"),
        ("checkpoint/state_dict_saver.py", 196, "save"),
        ("checkpoint/_async_thread_executor.py", 30, "save_wrapper"),
    ]
    frames = [
        Frame(library + file, line, function, FrameKind.TORCH) for file, line, function in files
    ]
    stack = (*frames, Frame("/usr/lib/python3.11/threading.py", 975, "run", FrameKind.PYTHON))

    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(3):
            yield all_reduce(job.world, 4, line=20)
        saved = collective(
            "all_gather",
            job.world,
            1,
            line=1,
            dtype="int64",
            is_async=True,
            handle="saved",
            thread=7777,
        )
        trained = collective("all_gather", job.world, 100, line=27, is_async=True, handle="trained")
        yield from [saved, trained] if rank in first else [trained] if late else [trained, saved]
        yield Stay(27, "main")

    job = Job(size).run(program)
    for one in job.ranks:
        for op in one.log.collectives[3:]:
            op.wait_began_ns, op.wait_thread = op.announced_ns, op.issue_thread
            if op.issue_thread == 7777:
                op.stack = stack
    verdict = judge(job.logs())
    assert (verdict.kind, verdict.culprits, verdict.confidence) == (
        "mismatch/shape",
        [],
        "medium" if late else "high",
    )
    every = "" if late else ", on every rank"
    assert verdict.summary.startswith(
        f"two threads use the default group [0-{size - 1}] without an order between them{every}: "
    )
    assert (
        "torch/distributed/checkpoint/state_dict_saver.py:196 save (a checkpoint)"
        in verdict.summary
    )
    assert "train.py:27" in verdict.summary and "branch" not in verdict.next_step
    assert verdict.next_step.startswith("give the checkpoint a group of its own")


def test_asynchronous_orders_are_legal() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        a, b = job.group("1", range(4)), job.group("2", range(4))
        for _ in range(5):
            for name in "ab" if rank % 2 else "ba":
                yield all_reduce(
                    a if name == "a" else b,
                    4,
                    line=20 if name == "a" else 21,
                    is_async=True,
                    handle=name,
                )
            for name in "ab" if rank % 3 else "ba":
                yield Wait(name)
            yield Step()

    assert judge(Job(4).run(program).logs()).kind == "healthy"


def test_other_jobs_are_left_out_and_named() -> None:
    logs = Job(4).run(training(at(2, 5, SLEEP))).logs()
    other = Job(2, job="old").run(training(lambda *_: None)).logs()
    verdict = judge([*other, *logs])
    assert verdict.culprits == [2]
    assert any("old" in text for text in verdict.missing_evidence)


def test_the_newer_of_two_logs_of_a_rank_counts() -> None:
    logs = Job(4).run(training(at(2, 5, SLEEP))).logs()
    older = msgspec.structs.replace(
        logs[0], collectives=logs[0].collectives[:3], issued=3, heartbeat_ns=1, pid=4
    )
    verdict = judge([older, *logs])
    assert verdict.culprits == [2]
    assert any("2 logs of rank 0" in text for text in verdict.missing_evidence)


def test_wrapped_rings_do_not_make_ranks_missing() -> None:
    logs = Job(4).run(training(at(2, 7, SLEEP))).logs()
    for log in logs:
        log.collectives = log.collectives[-(3 + log.rank) :]
    assert blame(judge(logs)) == ("missing", "data-loading", [2], "train.py:57")


def test_a_dump_without_observations_is_of_medium_confidence() -> None:
    logs = Job(4).run(training(at(2, 5, SLEEP))).logs()
    for log in logs:
        log.observation = Observation()
    verdict = judge(logs)
    assert blame(verdict) == ("missing", "data-loading", [2], "train.py:57")
    assert verdict.confidence == "medium"
    assert verdict.findings[0].would_raise_confidence


def test_pairs_that_disagree_at_the_same_lines_are_one_fault_also_while_the_job_runs() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        pair = job.group(f"tp{rank // 2}", [rank // 2 * 2, rank // 2 * 2 + 1], "tp")
        yield all_reduce(pair, line=20)
        yield all_reduce(pair, line=30, reduce_op="SUM" if rank % 2 else "MAX")
        yield Stay(57, "load_batch")

    logs = Job(4).run(program).logs()
    [(finding, _)] = find_disagreements(logs)
    assert (finding.kind, finding.culprits, finding.victims) == (
        "mismatch/reduce-op",
        [],
        [0, 1, 2, 3],
    )
    assert [one.kind for one in diagnose_logs(logs).findings if one.root_cause] == [
        "mismatch/reduce-op"
    ]


def gone(logs: list[RankLog], alive: Collection[int] = ()) -> list[RankLog]:
    """Nobody saw how the ranks ended, all in one moment."""
    for log in logs:
        if log.rank not in alive:
            log.observation = Observation(End.GONE, ended_ns=log.captured_ns)
    return logs


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
    assert verdict.summary.startswith(
        "ranks 0-3 are gone; how they ended was not observed; rank 1 was waiting for rank 0"
    )
    assert verdict.next_step == "look at the output of ranks 0-3"


def test_of_ranks_that_all_ended_unseen_a_refusal_names_the_first() -> None:
    logs = gone(Job(4).run(ring).logs())
    logs[1].exception = (
        "DistributedOperationException: Cannot apply desired operation: rank 0 has ended and will"
        " not take part."
    )
    verdict = judge(logs)
    assert (verdict.kind, verdict.culprits) == ("dead", [0])


def test_two_halves_of_which_one_finished_name_nobody() -> None:
    """One round too many on one side, or one too few on the other."""
    verdict = judge(
        Job(2)
        .run(lambda job, rank: (all_reduce(job.world, line=20) for _ in range(5 + rank)))
        .logs()
    )
    assert (verdict.kind, verdict.why, verdict.culprits, verdict.is_fault) == (
        "missing",
        "finished",
        [],
        True,
    )
    assert verdict.next_step.startswith("make all ranks run as many iterations")


@pytest.mark.parametrize("odd", [0, 1])
def test_of_two_halves_of_which_one_finished_the_one_that_left_its_routine_is_named(
    odd: int,
) -> None:
    """Broadcasts hold nobody up, so the ranks part at the collective that one skips, and the others
    hang at the end.
    """

    def program(job: Job, rank: int) -> Iterator[object]:
        for i in range(8):
            yield collective("broadcast", job.world, 1, line=19, root=0)
            if (rank, i) != (odd, 4):
                yield all_reduce(job.group("tp", [0, 1]), line=20)
            yield Step()

    verdict = judge(Job(2).run(program).logs())
    assert verdict.culprits == [odd]


@pytest.mark.parametrize("seconds", [0, 30])
def test_a_hung_job_that_is_interrupted_and_then_killed_did_not_die(seconds: int) -> None:
    """Ctrl-C ends the ranks that run Python; torchrun kills those in C++ half a minute later."""
    logs = Job(4).run(training(at(2, 5, SLEEP))).logs()
    for log in logs:
        log.observation = Observation(
            End.KILLED, signal="SIGKILL", ended_ns=log.captured_ns + seconds * S
        )
    logs[2].exception = "KeyboardInterrupt"
    logs[2].observation = Observation(End.FAILED, 1, ended_ns=logs[2].captured_ns)
    verdict = judge(logs)
    assert (verdict.kind, verdict.culprits) == ("missing", [2])
    assert not any(finding.kind == "dead" and finding.root_cause for finding in verdict.findings)


def test_ranks_that_were_all_killed_in_one_moment_were_ended_from_outside() -> None:
    logs = Job(4).run(training(lambda *_: None)).logs()
    for log in logs:
        log.closed = False
        log.observation = Observation(End.KILLED, signal="SIGKILL", ended_ns=log.captured_ns)
    verdict = judge(logs)
    assert (verdict.kind, verdict.culprits) == ("dead", [])


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
    assert "ranks 0-1,3 were ended by SIGTERM" in verdict.summary


def test_ranks_that_ctrl_c_ends_in_a_wait_were_waiting() -> None:
    """The one that does not end, in C++, does not wait for them."""
    job = Job(4)
    again = job.group("again", range(4))

    def program(job: Job, rank: int) -> Iterator[object]:
        for i in range(6):
            yield all_reduce(again, line=19)
            if (rank, i) != (3, 4):
                yield all_reduce(job.world, line=20)
            yield Step()

    logs = job.run(program).logs()
    for log in logs[:3]:
        log.collectives[-1].state, log.collectives[-1].error = State.FAILED, "KeyboardInterrupt:"
        log.exception = "KeyboardInterrupt"
    assert judge(logs).culprits == [3]


@pytest.mark.parametrize("holder", [3, None])
def test_a_lock_that_a_waiting_rank_holds(holder: int | None) -> None:
    """A rank waits for a file's lock, and the rank that holds it is already in the collective, or
    the holder is no rank.
    """

    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, line=20)
        if rank == 2:
            yield Stay(40, "prepare")
        yield all_reduce(job.world, line=30)

    logs = Job(4).run(program).logs()
    seen = logs[2].observation
    seen.waits_for, seen.waits_for_pid = (
        "it waits for the lock of /data/x.lock",
        (logs[holder].pid if holder is not None else 99_999),
    )
    seen.stack_moved, seen.cpu_s, seen.window_s = False, 0.0, 3.0
    verdict = diagnose_logs(logs)
    assert (verdict.kind, verdict.culprits) == ("missing", [2])
    told = " ".join(verdict.findings[0].evidence)
    assert "it waits for the lock of /data/x.lock" in told
    assert (
        "is rank 3, which waits for rank 2 in all_reduce #2 of the default group [0-3]: neither can"
        " go on." in told
    ) is (holder is not None)
    assert verdict.next_step.startswith(
        "release the lock on rank 3 before all_reduce at train.py:30"
        if holder is not None
        else "look at prepare"
    )


def test_messages_of_one_number_to_several_ranks_name_all_of_these() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        if rank < 2:
            yield recv(job.world, rank + 2, line=30)
            return
        if rank < 4:
            yield Stay(57, "load_batch")
        yield all_reduce(job.group("last", range(2, 6)), line=20)

    verdict = judge(Job(6).run(program).logs())
    assert verdict.culprits == [2, 3]
    assert verdict.explanation.startswith(
        "Like rank 3, rank 2 (host n03, pid 1002) is in train.py:57 load_batch; it never issued a"
        " collective."
    )
    assert "Ranks 0-1 wait for them in recv #1 from ranks 2-3." in verdict.explanation


def test_overwritten_records_are_called_so() -> None:
    logs = Job(4).run(training(at(2, 5, Stay(57, "load_batch")))).logs()
    for log in logs:
        log.collectives = log.collectives[2:]
    assert judge(logs).missing_evidence == ["Ranks 0-3: the oldest 2 records are overwritten."]
