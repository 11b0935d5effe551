"""Ranks that disagree in one collective or message."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from builders import Job, Stay, Step, all_reduce, at, collective, recv, send, training
from goldens import hold
from judging import blame, judge

from commlens.model.collective import Frame, FrameKind
from commlens.model.ranklog import End, Observation, ThreadStack


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
    if size == 4:
        hold(kind, verdict)


def test_mismatch_of_roots() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        for i in range(6):
            yield collective(
                "broadcast", job.world, 1, line=10, root=1 if (rank, i) == (2, 4) else 0
            )
            yield all_reduce(job.world, 10, line=11)
            yield Step()

    verdict = judge(Job(4).run(program).logs())
    assert blame(verdict) == ("mismatch/root", "in-collective", [2], "train.py:10")
    hold("mismatch/root", verdict)


def test_a_wrong_reduce_op_hangs_nobody_and_is_found() -> None:
    verdict = judge(
        Job(4)
        .run(training(at(2, 5, lambda job: all_reduce(job.world, 100, line=20, reduce_op="MAX"))))
        .logs()
    )
    assert blame(verdict) == ("mismatch/reduce-op", "in-collective", [2], "train.py:20")
    assert verdict.is_fault


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
    hold("mismatch/shape-that-aborts-a-rank", verdict)


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
    assert verdict.cause.blamed_by == "undecided"
    assert [side.source for side in verdict.cause.issued] == ["train.py:20", "train.py:21"]
    hold("mismatch/shape-of-two-sides", verdict)


def test_skip_then_another_op() -> None:
    for size in (2, 4, 8):
        verdict = judge(Job(size).run(training(at(1, 5))).logs())
        assert blame(verdict) == ("mismatch/op", "skipped", [1], "train.py:30")
        assert verdict.cause.departure == "skipped"
    hold("mismatch/op-after-a-skipped-collective", verdict)


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
    hold("missing/skipped-collective", verdict)


def test_uneven_data_then_a_barrier() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(5 if rank == 1 else 8):
            yield all_reduce(job.world, 100, line=20)
            yield all_reduce(job.world, 10, line=20)
            yield Step()
        yield collective("barrier", job.world, line=40)

    for size in (2, 4):
        assert blame(judge(Job(size).run(program).logs()))[0:3:2] == ("mismatch/op", [1])


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
    hold("mismatch/p2p", verdict)


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
    race = verdict.cause.race
    assert (race and (race.main_source, race.beside_source)) == (
        ("train.py:20", "train.py:70") if on_all else None
    )
    if size == 4:
        hold(f"mismatch/threads{'' if on_all else '-of-one-rank'}", verdict)


@pytest.mark.parametrize("named", [True, False])
def test_threads_that_race_have_names_of_their_own(named: bool) -> None:
    """None of them is the main thread, which waits for both."""
    train, sync = 7777, 8888

    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(3):
            yield all_reduce(job.world, 4, line=20)
        one = {"line": 30, "function": "train", "is_async": True, "handle": "t", "thread": train}
        other = {"line": 40, "function": "sync", "thread": sync}
        if rank == 0:
            yield all_reduce(job.world, 4, **one)
            yield collective("all_gather", job.world, 4, **other)
        else:
            other |= {"is_async": True, "handle": "s"}
            yield collective("all_gather", job.world, 4, **other)
            yield all_reduce(job.world, 4, line=30, function="train", thread=train)

    job = Job(2).run(program)
    logs = job.logs()
    for log in logs:
        for op in log.collectives:
            if op.in_flight and not op.wait_began_ns:
                op.wait_began_ns, op.wait_thread = op.announced_ns, op.issue_thread
        if named:
            log.stacks += [
                ThreadStack(thread, name, log.collectives[0].stack, log.captured_ns)
                for thread, name in ((train, "update_actor"), (sync, "update_weights"))
            ]
    verdict = judge(logs)
    race = verdict.cause.race
    assert race is not None, verdict
    names = {race.main_source: race.main_thread, race.beside_source: race.beside_thread}
    assert names == {
        "train.py:30": "update_actor" if named else "",
        "train.py:40": "update_weights" if named else "",
    }
    assert "main thread" not in verdict.summary
    if named:
        hold("mismatch/threads-with-names", verdict)


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
    hold("mismatch/shape-of-two-call-paths", verdict)


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
    assert (verdict.kind, verdict.culprits, verdict.cause.race) == ("mismatch/op", [1], None)


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
    sides = {(*side.ranks, side.collective.op, side.source) for side in verdict.cause.issued}
    assert sides >= {(1, "broadcast", "train.py:30"), (2, "barrier", "train.py:31")}
    assert sides >= {(rank, "all_reduce", f"train.py:{20 + rank}") for rank in (0, 3, 4)}
    hold("mismatch/op-of-two-culprits", verdict)


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
    race = verdict.cause.race
    assert (race.main_source, race.beside_source) == ("train.py:27", None)
    assert "branch" not in verdict.next_step
    if size == 2:
        hold(f"mismatch/thread-of-a-checkpoint{'-late' if late else ''}", verdict)


@pytest.mark.parametrize(("batches", "odd"), [([16, 13, 13], 0), ([13, 16, 16], 0)])
def test_ranks_with_another_number_of_batches(batches: list[int], odd: int) -> None:
    """Those with fewer go on to a line that is new to them."""

    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(batches[rank]):
            yield all_reduce(job.world, 100, line=20, function="train")
            yield Step()
        yield collective("barrier", job.world, line=30, function="main")

    verdict = judge(Job(3).run(program).logs())
    assert (verdict.kind, verdict.culprits) == ("mismatch/op", [odd])
    rounds = verdict.cause.rounds
    assert (rounds.odd, rounds.went_on, rounds.steps) == ({odd}, "train.py:30 main", 13)
    hold(f"mismatch/{'more' if batches[0] == 16 else 'fewer'}-batches", verdict)
