"""A rank leaves the path of the others: it skips a collective or issues an extra one, and the line
is the one where their paths part.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from builders import SCRIPT, Job, Op, Stay, Step, all_reduce, collective

from commlens.diagnosis.align.call_paths import branch_in_one_function, parting_paths
from commlens.diagnosis.examine import diagnose_logs
from commlens.model.collective import Frame, FrameKind
from commlens.model.ranklog import ThreadStack
from commlens.model.verdict import Verdict

MAIN = Frame(SCRIPT, 90, "<module>")
LEADER = Frame(SCRIPT, 95, "<module>")


def path(*lines: tuple[int, str], outermost: Frame = MAIN) -> tuple[Frame, ...]:
    return (*(Frame(SCRIPT, line, function) for line, function in lines), outermost)


def gradients(job: Job, outermost: Frame = MAIN) -> Op:
    return all_reduce(
        job.world,
        100,
        line=5,
        function="reduce",
        callers=path((33, "backward"), (60, "train"), outermost=outermost),
    )


def logged(job: Job, line: int = 61, outermost: Frame = MAIN) -> Op:
    return collective(
        "all_gather",
        job.world,
        1,
        line=7,
        function="log",
        callers=path((line, "train"), outermost=outermost),
    )


def judge(
    size: int,
    *extra: object,
    rank: int = 1,
    skip: bool = False,
    steps: bool = True,
    leader: bool = False,
) -> Verdict:
    """A rank issues ``extra`` ops after step 5, or skips the gradients of that step."""

    def program(job: Job, here: int) -> Iterator[object]:
        outermost = LEADER if leader and here == rank else MAIN
        for i in range(8):
            if not (skip and (here, i) == (rank, 5)):
                yield gradients(job, outermost)
            yield logged(job, outermost=outermost)
            if steps:
                yield Step()
            if (here, i) == (rank, 5):
                yield from (make(job, outermost) for make in extra)

    verdict = diagnose_logs(Job(size).run(program).logs())
    assert verdict.culprits == [rank]
    return verdict


def evaluated(shape: int) -> object:
    lines = (44, "evaluate"), (62, "train")
    return lambda job, outermost: all_reduce(
        job.world, shape, line=5, function="reduce", callers=path(*lines, outermost=outermost)
    )


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("steps", [True, False])
def test_a_skipped_collective(size: int, steps: bool) -> None:
    verdict = judge(size, skip=True, steps=steps)
    assert (verdict.kind, verdict.why) == ("mismatch/op", "skipped")
    assert "looks like a skipped collective" in verdict.summary
    assert "skipped all_reduce at train.py:5 reduce" in verdict.next_step


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("steps", [True, False])
@pytest.mark.parametrize("leader", [True, False])
def test_a_rank_that_evaluates_alone_is_not_said_to_have_skipped(
    size: int, steps: bool, leader: bool
) -> None:
    verdict = judge(size, evaluated(1), steps=steps, leader=leader)
    assert (verdict.kind, verdict.why, verdict.source) == (
        "mismatch/shape",
        "in-collective",
        "train.py:44",
    )
    assert "train.py:62 train -> train.py:44 evaluate -> train.py:5 reduce" in verdict.explanation
    assert "train.py:60 train -> train.py:33 backward -> train.py:5 reduce" in verdict.explanation
    told = verdict.summary + "".join(verdict.findings[0].evidence)
    assert "extra" in told and "skipped" in told


@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("every", [4, 7])
def test_ranks_that_come_to_a_new_place_together_may_be_right(
    halves: bool, micro_batches: int, every: int
) -> None:
    """They save for the first time. Or do the others, which go on, skip their first save?"""

    def program(job: Job, rank: int) -> Iterator[object]:
        neighbours = job.group(f"pair {rank // 2}", range(rank // 2 * 2, rank // 2 * 2 + 2))
        for i in range(10):
            yield gradients(job)
            yield Step()
            for _ in range(micro_batches):
                yield all_reduce(neighbours, 6, line=50, callers=path((58, "train")))
                yield all_reduce(neighbours, 6, line=54, callers=path((58, "train")))
            if i % every == every - 1 and rank >= (2 if halves else 3):
                yield collective(
                    "barrier", job.world, line=70, function="save", callers=path((59, "train"))
                )

    verdict = diagnose_logs(Job(4).run(program).logs())
    assert verdict.culprits == ([] if halves else [3])
    assert "train.py:70 save" in verdict.explanation


@pytest.mark.parametrize("size", [2, 4])
def test_a_second_call_from_another_line_may_be_extra(size: int) -> None:
    verdict = judge(size, lambda job, _: logged(job, 63))
    assert (verdict.why, verdict.source) == ("in-collective", "train.py:63")
    assert "that one was skipped, or this one is extra" in verdict.summary


@pytest.mark.parametrize("size", [2, 4])
def test_an_extra_collective_that_pairs_up_unnoticed_is_known_by_what_follows(size: int) -> None:
    """It has the arguments of the one that the others wait in: its own gradients then meet their
    logging.
    """
    verdict = judge(size, evaluated(100))
    assert (verdict.kind, verdict.why, verdict.source) == ("missing", "extra", "train.py:44")
    assert "issued an extra all_reduce at train.py:44 evaluate" in verdict.next_step


def test_an_extra_collective_before_the_step_is_known_by_the_steps() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        for i in range(6):
            yield gradients(job)
            if (rank, i) == (0, 4):
                yield all_reduce(job.world, 1, line=70, function="evaluate", callers=(MAIN,))
            yield Step()

    verdict = diagnose_logs(Job(4).run(program).logs())
    assert (verdict.why, verdict.culprits, verdict.source) == ("extra", [0], "train.py:70")
    assert (
        "rank 0 did 1 optimizer step fewer than the others until then: 4, they 5."
        in verdict.findings[0].evidence
    )


def test_ranks_in_one_line_of_a_trainer_part_in_the_library() -> None:
    def library(file: str, line: int, function: str) -> Frame:
        return Frame(
            f"/v/lib/python3.12/site-packages/lightning/{file}", line, function, FrameKind.LIBRARY
        )

    fit = (
        library("loop.py", 9, "run"),
        library("trainer.py", 5, "fit"),
        Frame(SCRIPT, 80, "main"),
        MAIN,
    )
    other = (library("loop.py", 12, "run"), *fit[1:])
    mine, theirs = parting_paths(
        (library("save.py", 4, "save"), *fit), (library("strategy.py", 7, "backward"), *other)
    ) or ((), ())
    assert mine[:3] == (fit[2], *["train.py:80 main -> lightning/save.py:4 save"] * 2)
    assert theirs[:3] == (fit[2], *["train.py:80 main -> lightning/strategy.py:7 backward"] * 2)
    hook = Frame(SCRIPT, 30, "validation_step")
    mine, theirs = parting_paths((hook, *fit), (library("strategy.py", 7, "backward"), *other)) or (
        (),
        (),
    )
    assert (mine.line, theirs.line) == (hook, fit[2])
    assert parting_paths(fit, fit) is None
    assert parting_paths((hook,), fit) is None


def test_an_absent_rank_in_the_same_line_of_a_trainer_is_told_by_the_library_s_lines() -> None:
    site = "/v/lib/python3.12/site-packages/lightning/"
    fit = (Frame(f"{site}trainer.py", 5, "fit", FrameKind.LIBRARY), Frame(SCRIPT, 80, "main"), MAIN)

    def program(job: Job, rank: int) -> Iterator[object]:
        for i in range(5):
            if (rank, i) == (1, 4):
                yield Stay(80, "main")
            yield gradients(job)

    logs = Job(3).run(program).logs()
    for log in logs:
        for op in log.collectives:
            op.stack = (Frame(f"{site}strategy.py", 7, "backward", FrameKind.LIBRARY), *fit)
    inside = (Frame(f"{site}save.py", 4, "save_checkpoint", FrameKind.LIBRARY), *fit)
    logs[1].stacks = [ThreadStack(logs[1].pid, "MainThread", inside, logs[1].captured_ns, True)]
    (finding,) = diagnose_logs(logs).findings
    main = "train.py:80 main -> lightning"
    assert (
        f"rank 1 is in {main}/save.py:4 save_checkpoint, ranks 0,2 in {main}/strategy.py:7"
        " backward." in finding.evidence
    )


@pytest.mark.parametrize("skips", [True, False])
def test_a_line_is_new_only_if_the_rank_has_not_been_there(skips: bool) -> None:
    """A rank that leaves out a batch comes to the gradients' line again, where the others sum a
    metric.
    """

    def program(job: Job, rank: int) -> Iterator[object]:
        for i in range(15):
            if (rank, i) == (2, 9) and skips:
                continue
            yield all_reduce(job.world, 64, line=17, function="average")
            yield all_reduce(job.world, 8, line=17, function="average")
            yield Step()
            if (rank, i) == (2, 9):
                yield all_reduce(job.world, 3, line=30, function="clip")
            if i % 5 == 4:
                yield all_reduce(job.world, 1, line=50, function="metric")

    verdict = diagnose_logs(Job(4).run(program).logs())
    assert verdict.culprits == [2]
    told = [text for text in verdict.findings[0].evidence if "it may be extra" in text]
    assert len(told) == 1
    assert ("for the first time" in told[0]) is not skips


@pytest.mark.parametrize(
    ("line", "culprits"), [(((90, "<module>"),), []), (((33, "log"), (70, "train")), [1])]
)
def test_what_the_main_program_does_after_its_loop_is_no_departure(
    line: tuple[tuple[int, str], ...], culprits: list[int]
) -> None:
    """Rank 0 did a round more or rank 1 one fewer. A call from a new line within the loop is
    another matter.
    """
    loop = Frame(SCRIPT, 80, "<module>")

    def program(job: Job, rank: int) -> Iterator[object]:
        for i in range(9):
            if (rank, i) == (1, 8):
                outermost = [Frame(SCRIPT, at, name) for at, name in line]
                yield all_reduce(
                    job.world,
                    1,
                    line=outermost[0].line,
                    function=outermost[0].function,
                    callers=(*outermost[1:], *((loop,) if len(line) > 1 else ())),
                )
            yield all_reduce(
                job.world,
                100,
                line=5,
                function="reduce",
                callers=path((33, "backward"), (60, "train"), outermost=loop),
            )
            yield collective(
                "all_gather",
                job.world,
                1,
                line=7,
                function="log",
                callers=path((61, "train"), outermost=loop),
            )
            yield Step()

    assert diagnose_logs(Job(2).run(program).logs()).culprits == culprits


@pytest.mark.parametrize(
    ("own", "other", "known"),
    [
        (path((61, "train")), path((65, "train")), True),
        (path((7, "log"), (61, "train")), path((65, "train")), True),
        (path((7, "log")), path((65, "train")), False),  # <module> called another function
        (path(), path((65, "train")), False),
        (path((61, "train")), path((61, "train")), False),
    ],
)
def test_a_branch_is_known_where_two_lines_of_one_function_part(
    own: tuple[Frame, ...], other: tuple[Frame, ...], known: bool
) -> None:
    assert branch_in_one_function(own, other) == known


@pytest.mark.parametrize("steps", [True, False])
def test_the_other_ranks_never_get_the_path_of_a_branch_that_they_do_not_take(steps: bool) -> None:
    """``if rank == 0: first() else: others()``, and rank 0 then leaves its routine."""

    def program(job: Job, rank: int) -> Iterator[object]:
        function, line = ("first", 60) if rank == 0 else ("others", 62)
        for i in range(8):
            yield all_reduce(
                job.world, 100, line=line + 20, function=function, callers=path((line, "train"))
            )
            if steps:
                yield Step()
            if (rank, i) == (0, 5):
                yield all_reduce(
                    job.world,
                    1,
                    line=5,
                    function="reduce",
                    callers=path((44, "evaluate"), (70, "train")),
                )

    verdict = diagnose_logs(Job(4).run(program).logs())
    assert verdict.culprits == [0]
    assert "SUM at train.py:62 train -> train.py:82 others" in verdict.explanation
    assert "first" not in verdict.explanation + verdict.next_step
