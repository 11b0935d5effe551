"""Two threads of a rank that issue collectives of one group in any order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from builders import Job, Stay, all_reduce, collective
from goldens import hold
from judging import judge

from commlens.model.collective import Frame, FrameKind
from commlens.model.ranklog import ThreadStack


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
