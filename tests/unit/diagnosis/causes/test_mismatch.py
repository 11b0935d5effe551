"""Ranks that disagree in one collective or message."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from builders import Job, Step, all_reduce, at, collective, recv, send, training
from goldens import hold
from judging import blame, judge

from commlens.model.collective import Frame, FrameKind, State
from commlens.model.ranklog import End, Observation


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


def test_what_all_other_groups_did_decides_between_two_shifts() -> None:
    """Of two ranks each seems out of step to the other: the first did what all other pairs did."""

    def program(job: Job, rank: int) -> Iterator[object]:
        first = rank // 2 * 2
        pair = job.group(str(1 + rank // 2), (first, first + 1), "tp")
        for i, line in enumerate((20, 21, 22, 23) * 2):
            if (rank, i) == (1, 5):
                yield all_reduce(pair, 4, line=30, reduce_op="MAX")
            yield all_reduce(pair, 4, line=line)

    verdict = judge(Job(8).run(program).logs())
    assert (verdict.culprits, verdict.source) == ([1], "train.py:30")
    kinds = {(each.kind, *each.culprits) for each in verdict.findings}
    assert kinds == {("missing", 1), ("mismatch/reduce-op", 1)}


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


@pytest.mark.parametrize(
    ("error", "line", "is_told"),
    [
        ("RuntimeError: Incorrect input list size 2.", 20, True),
        ("RuntimeError: Connection closed by peer [127.0.0.1]:4", 20, False),
        ("RuntimeError: Incorrect input list size 2.", 19, False),
    ],
)
def test_a_call_that_raised_and_after_which_the_program_went_on(
    error: str, line: int, is_told: bool
) -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(4 if rank else 3):
            yield collective("scatter", job.world, line=20, root=0)
        yield collective("barrier", job.world, line=30)

    logs = Job(3).run(program).logs()
    *_, last, barrier = logs[0].collectives
    failed = msgspec.structs.replace(last, index=4, sequence_number=0, state=State.FAILED)
    failed.error = error
    failed.stack = tuple(
        msgspec.structs.replace(frame, line=line) if frame.line == 20 else frame
        for frame in failed.stack
    )
    barrier.index = logs[0].issued = 5
    logs[0].collectives.insert(-1, failed)
    verdict = judge(logs)
    assert blame(verdict) == ("mismatch/op", "in-collective", [0], "train.py:30")
    assert ("Incorrect input list size" in verdict.explanation) is is_told
    if is_told:
        hold("mismatch/a-call-that-raised", verdict)


@pytest.mark.parametrize("ranks", [[0], [0, 1]])
def test_a_checkpointed_function_that_ran_again_on_some_ranks(ranks: list[int]) -> None:
    again = Frame("/site/torch/utils/checkpoint.py", 1688, "recompute_fn", FrameKind.TORCH)

    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, 4, line=20)
        callers = (again,) if rank in ranks else ()
        yield all_reduce(job.world, 4 + rank, line=7, function="forward", callers=callers)

    evidence = judge(Job(2).run(program).logs()).findings[0].evidence
    told = [text for text in evidence if "checkpoint" in text]
    assert told == [
        "rank 0 issued it as an activation checkpoint ran its function again in backward; the"
        " others did not."
    ] * (ranks == [0])
