"""Ranks that do not arrive where others wait, and those that work and may yet arrive."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from builders import Die, Job, S, Stay, Step, all_reduce, at, collective, recv, training
from goldens import hold
from judging import blame, judge

from commlens.diagnosis.examine import diagnose_logs
from commlens.diagnosis.index.activity import quiet_ns
from commlens.diagnosis.standstill import cannot_go_on
from commlens.model.cause import Missing, Working
from commlens.model.collective import Channel, Frame, FrameKind, LearnedHow, State
from commlens.model.ranklog import End, Observation, RankLog, ThreadStack

SLEEP = Stay(57, "load_batch")


@pytest.mark.parametrize("size", [2, 4, 8])
def test_asleep_in_the_data_loader(size: int) -> None:
    verdict = judge(Job(size).run(training(at(1, 5, SLEEP))).logs())
    assert blame(verdict) == ("missing", "data-loading", [1], "train.py:57")
    assert verdict.victims == [r for r in range(size) if r != 1]
    assert verdict.confidence == "high"
    assert verdict.collective is not None
    assert (verdict.collective.op, verdict.collective.sequence_number) == ("all_reduce", 11)
    if size == 4:
        hold("missing/asleep-in-the-data-loader", verdict)


def test_ranks_that_may_wait_in_a_message_of_unknown_state_are_not_blamed() -> None:
    """With the Python engine, nothing tells whether a batch of nccl2 is complete."""
    logs = Job(4).run(training(at(1, 5, Stay(57, "ring")))).logs()
    for log in logs:
        for op in log.collectives:
            op.channel = Channel(op.channel.group, "cuda", runs_ahead=True, completion="hooks")
        last = log.collectives[-1]
        if log.rank != 1:
            last.learned_how = LearnedHow.NATIVE_RECORDER
            continue
        log.observation = Observation(End.RUNNING, window_s=5, cpu_s=0.0, stack_moved=False)
        last.state, last.learned_how = State.UNKNOWN, LearnedHow.UNKNOWN
        last.sequence_number = 0
        last.args = msgspec.structs.replace(last.args, op="coalesced")
    found = judge(logs)
    assert (found.kind, found.culprits, found.confidence) == ("missing", [], "low")
    hold("missing/may-wait-in-message", found)


def test_the_line_that_starts_a_process_calls_nothing() -> None:
    logs = Job(4).run(training(at(1, 5, SLEEP))).logs()
    (stack,) = logs[1].stacks
    started = Frame("<string>", 1, "<module>")
    logs[1].stacks = [msgspec.structs.replace(stack, frames=(*stack.frames, started))]
    evidence = judge(logs).findings[0].evidence
    assert [text for text in evidence if "called by" in text] == [
        "train.py:57 load_batch on rank 1 was called by train.py:200 main."
    ]


def test_a_reduce_op_that_is_not_read_yet_is_no_difference() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, 8, line=20)
        if rank == 1:
            yield SLEEP
        yield all_reduce(job.world, 8, line=20, reduce_op=None if rank == 0 else "SUM")

    hold("missing/reduce-op-not-read-yet", judge(Job(4).run(program).logs()))


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
    hold(f"missing/{why}", verdict)


@pytest.mark.parametrize(
    ("batches", "of_others", "name"), [(4, 6, "finished-early"), (6, 5, "one-more-batch")]
)
def test_one_rank_has_another_number_of_batches(batches: int, of_others: int, name: str) -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(batches if rank == 2 else of_others):
            yield all_reduce(job.world, 100, line=20)
            yield Step()

    verdict = judge(Job(4).run(program).logs())
    assert blame(verdict) == ("missing", "finished", [2], "train.py:20")
    hold(f"missing/{name}", verdict)


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
    assert (verdict.kind, verdict.culprits) == ("dead" if dies else "missing", [2])
    assert [wait.ranks for wait in verdict.cause.waits] == [[0, 4, 6], [3]]
    hold(f"{verdict.kind}/awaited-in-two-groups", verdict)


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
    hold("missing/two-independent-faults", verdict)


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
                76,
                "unpack",
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
    limited = verdict.cause.patience_s is not None
    assert limited or why in ("compilation", "checkpoint-io"), "these may take any time"
    hold(f"waiting/{stay.function.replace('_', '-')}-{stay.line}", verdict)


@pytest.mark.parametrize(
    "stay",
    [
        Stay(71, "save_checkpoint"),
        Stay(
            73,
            "report",
            Observation(End.RUNNING, window_s=5, cpu_s=0.0, stack_moved=False, unsent_bytes=9000),
        ),
    ],
)
def test_a_wait_for_an_unknown_reason_is_no_fault(stay: Stay) -> None:
    """Nothing shows that a rank that sleeps while it saves is wrong: it may wait for a disk or a
    server.
    """
    job = Job(4).run(training(at(0, 5, stay)))
    verdict = judge(job.logs())
    assert (verdict.kind, verdict.culprits, verdict.confidence) == ("waiting", [], "low")
    assert verdict.cause.activity.unclear
    hold(f"waiting/unknown-reason-{stay.function.replace('_', '-')}", verdict)
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
    assert verdict.cause.works_too_long and verdict.cause.doubt == "may-be-working"
    hold("missing/works-too-long", verdict)
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
    assert verdict.cause.timed_out and verdict.cause.doubt == "may-be-working"
    hold("missing/works-until-the-timeout", verdict)


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
    assert verdict.kind == "waiting" and verdict.cause.expected
    hold("waiting/expected", verdict)


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
    assert (verdict.source, verdict.collective.sequence_number) == ("train.py:19", 5)
    assert verdict.confidence == ("medium" if size == 2 else "high")
    assert "train.py:28" not in verdict.next_step
    if size < 4:
        hold(f"missing/barrier-in-a-branch-of-1-of-{size}", verdict)


def test_a_dump_without_observations_is_of_medium_confidence() -> None:
    logs = Job(4).run(training(at(2, 5, SLEEP))).logs()
    for log in logs:
        log.observation = Observation()
    verdict = judge(logs)
    assert blame(verdict) == ("missing", "data-loading", [2], "train.py:57")
    assert verdict.confidence == "medium"
    hold("missing/not-observed", verdict)


@pytest.mark.parametrize("why_not", ["", "an-op-in-flight", "autograd", "moves"])
def test_a_lock_that_nothing_in_the_process_releases(why_not: str) -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, line=20)
        if rank == 2:
            if why_not == "an-op-in-flight":  # a callback of it may release the lock
                yield all_reduce(job.group("1", [2, 3]), line=25, is_async=True, handle="1")
            yield Stay(40, "save_checkpoint")
        yield all_reduce(job.world, line=30)

    logs = Job(4).run(program).logs()
    [main] = logs[2].stacks
    frames = main.frames
    if why_not == "autograd":
        frames = (*frames, Frame("/site/torch/autograd/graph.py", 9, "_engine_run_backward"))
    logs[2].stacks = [msgspec.structs.replace(main, frames=frames, locked_out=True)]
    logs[2].observation.stack_moved = why_not == "moves"
    verdict = judge(logs)
    assert verdict.certain is not bool(why_not)
    if not why_not:
        assert blame(verdict) == ("missing", "user-code", [2], "train.py:40")
        assert verdict.cause.locked_out == [2]
        assert cannot_go_on(verdict, logs)
        hold("missing/locked-out", verdict)


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
    assert verdict.certain is (holder is not None), "the lock of another process may come free"
    hold(f"missing/lock-of-{'another-process' if holder is None else 'a-waiting-rank'}", verdict)


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
    hold("missing/messages-of-several-ranks", verdict)


@pytest.mark.parametrize("inner", ["asyncio", "serve_forever", ""])
def test_an_idle_server_is_no_fault(inner: str) -> None:
    """The rank that sends the others their commands waits for a request."""
    frames = {
        "asyncio": (Frame("/lib/python3.11/asyncio/base_events.py", 9, "_run_once"),),
        "serve_forever": (Frame("/lib/python3.11/socketserver.py", 9, "serve_forever"),),
        "": (),
    }

    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(6):
            yield collective("broadcast", job.world, line=20, root=0)
            yield all_reduce(job.world, line=21)
        if rank == 0:
            still = Observation(
                End.RUNNING, proc_state="S", window_s=5.0, cpu_s=0.0, stack_moved=False
            )
            yield Stay(40, "main", still, tuple(kind_python(frames[inner])))
        yield collective("broadcast", job.world, line=20, root=0)

    def kind_python(given: tuple[Frame, ...]) -> list[Frame]:
        return [msgspec.structs.replace(frame, kind=FrameKind.PYTHON) for frame in given]

    verdict = judge(Job(3).run(program).logs())
    assert verdict.kind == ("waiting" if inner else "missing")
    assert verdict.culprits == ([] if inner else [0])
    if inner == "asyncio":
        hold("missing/idle-server", verdict)


@pytest.mark.parametrize(
    ("function", "folder", "library"),
    [
        ("main_loop", "/home/me", None),
        ("step", "/home/me/tornado", None),
        ("step", "/home/me", "/home/me/zmq/.venv/lib/python3.11/site-packages/einops/layers.py"),
    ],
)
def test_names_of_the_users_own_are_no_event_loop(
    function: str, folder: str, library: str | None
) -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, line=20)
        if rank == 1:
            still = Observation(End.RUNNING, window_s=5.0, cpu_s=0.0, stack_moved=False)
            yield Stay(40, function, still)
        yield all_reduce(job.world, line=30)

    logs = Job(2).run(program).logs()
    [main] = logs[1].stacks
    frames = tuple(
        msgspec.structs.replace(frame, file=frame.file.replace("/home/me", folder))
        for frame in main.frames
    )
    if library is not None:
        frames = (Frame(library, 9, "forward", FrameKind.LIBRARY), *frames)
    logs[1].stacks = [msgspec.structs.replace(main, frames=frames)]
    assert blame(judge(logs)) == ("missing", "user-code", [1], "train.py:40")


def test_a_rank_that_destroyed_its_group_never_arrives() -> None:
    """However busy it is with something else."""

    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, line=20)
        if rank == 1:
            busy = Observation(
                End.RUNNING, proc_state="R", window_s=5.0, cpu_s=4.0, stack_moved=True
            )
            yield Stay(40, "send_results", busy)
        yield all_reduce(job.world, line=30)

    logs = Job(3).run(program).logs()
    assert judge(logs).kind == "waiting"
    logs[1].left = True
    verdict = judge(logs)
    assert blame(verdict) == ("missing", "user-code", [1], "train.py:40")
    assert verdict.confidence == "high"
    hold("missing/destroyed-its-group", verdict)


@pytest.mark.parametrize("size", [2, 3])
def test_one_round_more_than_ranks_that_destroyed_their_group(size: int) -> None:
    """Most ranks destroyed it where the program ends; of two, either may be wrong."""

    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(6 if rank == size - 1 else 5):
            yield all_reduce(job.world, line=20)
        yield Stay(40, "evaluate")

    logs = Job(size).run(program).logs()
    for log in logs[:-1]:
        log.left = True
    verdict = judge(logs)
    assert (verdict.kind, verdict.culprits) == ("missing", [2] if size == 3 else [])
    assert verdict.confidence == "medium"
    hold(f"missing/one-more-than-destroyed-of-{size}", verdict)


def test_a_heartbeat_of_another_thread_is_no_work_of_the_main_one() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, line=20)
        if rank == 1:
            yield Stay(40, "wait_for")
        yield all_reduce(job.world, line=30)

    job = Job(3)
    logs = job.run(program).logs()
    [main], [last] = logs[1].stacks, logs[1].collectives
    beat = ThreadStack(7, "heartbeat", (Frame("/me/train.py", 5, "beat"),))
    logs[1].stacks = [main, beat]
    now = logs[1].captured_ns
    logs[1].collectives.append(
        msgspec.structs.replace(
            last, index=2, channel=Channel(job.group("1", [0, 1, 2]), "cpu"),
            announced_ns=now - 1, returned_ns=now, done_ns=now, issue_thread=7,
            wait_thread=7, wait_began_ns=now, wait_ended_ns=now,
        )
    )  # fmt: skip
    logs[1].issued = 2
    assert quiet_ns(logs[1]) > 10**9
    assert blame(judge(logs))[:3] == ("missing", "user-code", [1])


@pytest.mark.parametrize("at_the_line", [(1,), (1, 2)])
def test_most_of_the_group_in_one_line_may_be_right(at_the_line: tuple[int, ...]) -> None:
    """They meet there past torch, and the one that waits in the collective has left it out."""

    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, line=20)
        if rank in at_the_line:
            yield Stay(40, "store_barrier")
        yield all_reduce(job.world, line=30)

    logs = Job(3).run(program).logs()
    verdict = judge(logs)
    most = len(at_the_line) == 2
    assert verdict.kind == "missing"
    assert verdict.culprits == ([] if most else [1])
    if most:
        hold("missing/most-in-one-line", verdict)
        logs[2].observation.stack_moved = True
        moved = judge(logs)
        assert moved.culprits == [], "one of them was seen to move"
        assert "rank 1, which stands in" in moved.next_step


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_wait_below_the_line_do_not_stand_there(size: int) -> None:
    """The line takes from a queue that is empty on one rank, and gathers what it takes."""

    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, line=20)
        if rank == 1:
            yield Stay(30, "step")
        yield all_reduce(job.world, line=30)

    verdict = judge(Job(size).run(program).logs())
    assert blame(verdict) == ("missing", "user-code", [1], "train.py:30")
    assert verdict.confidence == "high"


def test_the_line_is_that_of_the_thread_for_which_others_wait() -> None:
    """The main thread trains, and another one reports metrics in a group of its own."""

    def program(job: Job, rank: int) -> Iterator[object]:
        metrics = job.group("1", [0, 1, 2])
        for _ in range(4):
            yield all_reduce(metrics, line=11, function="log_metrics", thread=77)
        if rank == 1:
            yield Stay(40, "train")
        yield all_reduce(metrics, line=11, function="log_metrics", thread=77)

    logs = Job(3).run(program).logs()
    frames = (Frame("/home/me/train.py", 9, "send_metrics"),)
    logs[1].stacks.append(ThreadStack(77, "metrics", frames, logs[1].captured_ns))
    assert blame(judge(logs))[2:] == ([1], "train.py:9")


def test_a_thread_that_nothing_wakes() -> None:
    """The thread that fills a queue has ended."""

    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, line=20)
        if rank == 2:
            yield Stay(40, "take")
        yield all_reduce(job.world, line=30)

    logs = Job(4).run(program).logs()
    [main] = logs[2].stacks
    wait = Frame("/usr/lib/python3.11/threading.py", 327, "wait", FrameKind.PYTHON)
    logs[2].stacks = [msgspec.structs.replace(main, frames=(wait, *main.frames), locked_out=True)]
    verdict = judge(logs)
    assert verdict.cause is not None
    assert verdict.cause.locked_out == [2]  # type: ignore[union-attr]
    hold("missing/nothing-wakes-it", verdict)


@pytest.mark.parametrize(
    "file", ["/site-packages/filelock/_api.py", "/site-packages/torch/utils/file_baton.py"]
)
def test_a_lock_that_is_polled_may_be_held_by_a_rank_that_waits(file: str) -> None:
    """Rank 0 waits in a barrier while it holds the lock of a file: the other one is not to blame."""
    library = Frame(file, 9, "acquire", FrameKind.LIBRARY)

    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, line=20)
        if rank == 1:
            yield Stay(40, "prepare_dataset", None, (library,))
        yield collective("barrier", job.world, line=41)

    verdict = judge(Job(2).run(program).logs())
    assert (verdict.kind, verdict.culprits) == ("missing", [])
    hold("missing/polls-a-lock", verdict)


def test_a_rank_that_ends_in_a_job_without_optimizer_steps() -> None:
    """A server's worker: there is no data that could be uneven."""

    def program(job: Job, rank: int) -> Iterator[object]:
        for i in range(6):
            yield collective("broadcast", job.world, line=20, root=0)
            if (rank, i) == (2, 3):
                return
            yield all_reduce(job.world, line=21)

    verdict = judge(Job(3).run(program).logs())
    assert blame(verdict)[2:] == ([2], "train.py:20")
    assert "Join" not in verdict.next_step
    hold("missing/ends-without-steps", verdict)


def listening() -> list[RankLog]:
    """Threads of ranks 1 and 2 wait for a command of rank 0, which loads data; the main threads
    train.
    """

    def program(job: Job, rank: int) -> Iterator[object]:
        control = job.group("control", [0, 1, 2])
        if rank:
            yield collective(
                "broadcast", control, line=7, root=0, is_async=True, handle="c", thread=77
            )
        for i in range(5):
            if (rank, i) == (0, 4):
                yield SLEEP
            yield all_reduce(job.world, line=20)

    logs = Job(3).run(program).logs()
    for log in logs[1:]:
        command = log.collectives[0]
        command.announced_ns -= 600 * S
        command.wait_began_ns, command.wait_thread = command.announced_ns, 77
    return logs


def test_a_thread_that_waits_for_a_command_holds_up_nothing() -> None:
    verdict = judge(listening())
    assert blame(verdict) == ("missing", "data-loading", [0], "train.py:57")
    assert verdict.collective is not None and verdict.collective.op == "all_reduce"
    assert isinstance(verdict.cause, Missing)
    assert verdict.cause.held_up_s is not None and verdict.cause.held_up_s < 100
    hold("missing/beside-a-thread-that-waits", verdict)


def test_a_rank_that_works_is_not_late_for_a_command() -> None:
    logs = listening()
    logs[0].observation = msgspec.structs.replace(
        logs[0].observation, cpu_s=4.0, window_s=5.0, stack_moved=True
    )
    verdict = judge(logs)
    assert isinstance(verdict.cause, Working)
    assert verdict.cause.held_up_s is not None and verdict.cause.held_up_s < 100


@pytest.mark.parametrize(
    ("wakes_in_s", "sleeps_s", "kind"),
    [
        pytest.param(20.0, 40.0, "waiting", id="one-sleep"),
        pytest.param(2.0, 3.0, "missing", id="a-loop-of-sleeps"),
        pytest.param(3000.0, 3020.0, "missing", id="for-too-long"),
    ],
)
def test_a_rank_that_sleeps_until_a_known_time(
    wakes_in_s: float, sleeps_s: float, kind: str
) -> None:
    logs = Job(4).run(training(at(1, 5, Stay(57, "throttle")))).logs()
    logs[1].observation = msgspec.structs.replace(
        logs[1].observation, wakes_in_s=wakes_in_s, sleeps_s=sleeps_s, waits_for="it sleeps"
    )
    verdict = judge(logs)
    assert verdict.kind == kind
    if kind == "waiting":
        hold("waiting/asleep", verdict)


def test_a_rank_that_polls_while_another_one_works_is_not_missing() -> None:
    """Rank 1 compiles an extension, rank 2 polls until the file of its lock is gone."""

    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, line=20)
        if rank in (1, 2):
            yield Stay(57 + rank, "load_extension")
        yield all_reduce(job.world, line=30)

    logs = Job(3).run(program).logs()
    logs[2].observation = msgspec.structs.replace(
        logs[2].observation, wakes_in_s=0.05, sleeps_s=0.1, waits_for="it sleeps"
    )
    assert judge(logs).kind == "missing"
    logs[1].observation = msgspec.structs.replace(logs[1].observation, children_cpu_s=4.0)
    verdict = judge(logs)
    assert verdict.kind == "waiting"
    assert not any(finding.culprits for finding in verdict.findings)


def test_a_rank_that_saves_and_shows_no_work_waits_for_its_child() -> None:
    logs = Job(4).run(training(at(1, 5, Stay(71, "save_checkpoint")))).logs()
    waits = "it waits for its child process 9 (tar c out)"
    logs[1].observation = msgspec.structs.replace(logs[1].observation, waits_for=waits)
    verdict = judge(logs)
    assert verdict.kind == "waiting"
    assert verdict.summary.endswith(f"so far: {waits}")


def test_the_thread_that_was_to_wake_a_rank_raised() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, line=20)
        if rank == 2:
            yield Stay(40, "next_batch")
        yield all_reduce(job.world, line=30)

    logs = Job(4).run(program).logs()
    [main] = logs[2].stacks
    wait = Frame("/usr/lib/python3.11/threading.py", 327, "wait", FrameKind.PYTHON)
    logs[2].stacks = [msgspec.structs.replace(main, frames=(wait, *main.frames), locked_out=True)]
    logs[2].thread_exception = "ValueError: bad sample (in thread loader)"
    logs[2].thread_exception_stack = (Frame("/home/me/train.py", 9, "load"),)
    verdict = judge(logs)
    assert blame(verdict) == ("missing", "user-code", [2], "train.py:40")
    hold("missing/its-thread-raised", verdict)


def test_a_child_process_that_is_stopped_is_told() -> None:
    logs = Job(4).run(training(at(1, 5, SLEEP))).logs()
    lost = "its child process 9 (pt_data_worker) is stopped"
    logs[1].observation = msgspec.structs.replace(logs[1].observation, lost_child=lost)
    assert any(lost in text for text in judge(logs).findings[0].evidence)


def test_a_rank_that_left_without_its_exit_handlers() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, line=20)
        if rank == 1:
            yield Die(Observation(End.CLEAN, 0))
        yield all_reduce(job.world, line=30)

    evidence = judge(Job(3).run(program).logs()).findings[0].evidence
    assert "rank 1: its process ended with status 0, without its exit handlers." in evidence


@pytest.mark.parametrize("times", [1, 2])
def test_a_rank_that_passed_another_group_once(times: int) -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        alone = job.group(f"alone-{rank}", [rank])
        for i in range(6):
            strays = rank == 1 and i in range(3, 3 + times)
            yield all_reduce(alone if strays else job.world, line=20)
            yield all_reduce(alone, line=21)

    evidence = judge(Job(3).run(program).logs()).findings[0].evidence
    told = [text for text in evidence if "once at" in text]
    assert len(told) == (times == 1)
    assert not told or told[0].startswith("Rank 1 issued all_reduce #4 of group alone-1")
