"""The loop that a rank was in at its last collective or message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from builders import SCRIPT, Job, Op, Step, all_reduce, asked, collective, recv, send, spec
from judging import judge

from commlens.diagnosis.align.routine import ever_leaves_routine, find_loop, follows_history
from commlens.diagnosis.examine import diagnose_logs, examine_dumps
from commlens.diagnosis.index.columns import reduce_all
from commlens.diagnosis.index.log_index import index_logs
from commlens.formats.rank_log_columns import columns_from_log
from commlens.model.collective import Frame
from commlens.model.verdict import Finding

PING, PONG = ("send", 10), ("recv", 11)


def message(job: Job, kind: str, peer: int, line: int) -> Op:
    return (send if kind == "send" else recv)(job.world, peer, line=line)


def pair(mine: Sequence[tuple[str, int]], its: Sequence[tuple[str, int]]) -> Job:
    """Two ranks that send and receive at these lines."""

    def program(job: Job, rank: int) -> Iterator[Op]:
        for kind, line in (mine, its)[rank]:
            yield message(job, kind, 1 - rank, line)

    return Job(2).run(program)


def cause_of(job: Job) -> Finding:
    [finding] = [one for one in diagnose_logs(job.logs()).findings if one.root_cause]
    return finding


def test_a_loop_and_the_place_in_it() -> None:
    job = pair([PING, PONG] * 2 + [PING], [("recv", 20), ("send", 21)] * 3)
    indexed = index_logs(job.logs(), 1.0)
    loops = [find_loop(indexed.views[rank]) for rank in (0, 1)]
    assert [loop and (loop.rounds, loop.more) for loop in loops] == [(2, 1), (3, 0)]
    assert loops[0] is not None
    assert [op.op for op in loops[0].round] == ["send", "recv"]
    assert loops[0].next.op == "recv"


@pytest.mark.parametrize(
    "calls",
    [
        [PING] * 6,  # no place in it
        [PING, PONG, PING],  # only once
        [PING, PING, PONG] * 3,  # a loop inside may end anywhere
        [PING, PONG, PING, PONG, ("send", 30)],  # after it
    ],
)
def test_no_loop(calls: list[tuple[str, int]]) -> None:
    job = pair(calls, [("recv" if kind == "send" else "send", 50) for kind, _ in calls])
    assert find_loop(index_logs(job.logs(), 1.0).views[0]) is None


@pytest.mark.parametrize("apart", [0, 10])
def test_a_rank_that_receives_and_sends_no_answer(apart: int) -> None:
    """In a loop, and in a program whose lines all differ."""

    def lines(*kinds: str) -> list[tuple[str, int]]:
        return [(kind, 20 + i % 2 + apart * i) for i, kind in enumerate(kinds)]

    both = lines("send", "recv", "send", "recv", "send", "recv")
    its = lines("recv", "send", "recv", "send", "recv")
    finding = cause_of(pair(both, its))
    assert (finding.kind, finding.culprits, finding.confidence) == ("missing", [1], "medium")
    assert finding.cause is not None
    assert finding.cause.blamed_by == "midway"


def test_a_round_more_or_less_blames_none() -> None:
    finding = cause_of(pair([PONG, PING] * 4, [("send", 20), ("recv", 21)] * 3))
    assert (finding.kind, finding.culprits) == ("missing", [])


@pytest.mark.parametrize(("steps", "culprits"), [(True, [1]), (False, [])])
def test_a_step_that_is_broken_off(steps: bool, culprits: list[int]) -> None:
    """Without optimizer steps, two lines may take turns from round to round."""

    def program(job: Job, rank: int) -> Iterator[object]:
        for i in range(3):
            yield all_reduce(job.world, line=20)
            if (rank, i) == (1, 2):
                return
            yield all_reduce(job.world, 4, line=21)
            if steps:
                yield Step()

    assert cause_of(Job(2).run(program)).culprits == culprits


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


def test_a_step_without_the_events_of_other_steps_does_not_leave_the_routine() -> None:
    """Every second step evaluates (e), and every third one saves (s): the fifth is the first after
    another that does neither.
    """
    step = "aaabbcbcc"
    history = "".join(["s" * (i % 3 == 2) + "eee" * (i % 2) + step for i in range(4)])
    assert follows_history(history + step, len(history)) is not False
    assert follows_history(history + "b", len(history)) is not True
    assert follows_history(step * 4 + "b", 4 * len(step)) is False


def test_an_all_to_all_of_another_size_in_each_step_does_not_leave_the_routine() -> None:
    def program(job: Job, _: int) -> Iterator[object]:
        for step in range(10):
            for layer in range(10):
                yield all_reduce(job.world, 8 + layer, line=20 + layer)
            tokens = spec(100 + step)
            yield Op(job.world, asked("all_to_all", tokens, outputs=(tokens,)), 40)
            yield Step()

    views = index_logs(Job(2).run(program).logs(), 1.0).views
    assert not any(map(ever_leaves_routine, views.values()))


def test_a_dump_shows_the_routine_where_steps_are_called_from_several_lines() -> None:
    """In a few steps, no way to a line is repeated often."""

    def program(job: Job, rank: int) -> Iterator[object]:
        first, second = job.group("1", [0, 1]), job.group("2", [0, 1])
        for step in range(8):
            caller = (Frame(SCRIPT, 100 + step % 3, "run"),)
            calls = [
                all_reduce(first, line=30, callers=caller),
                all_reduce(second, line=31, callers=caller),
            ]
            yield from calls[::-1] if (rank, step) == (1, 7) else calls
            yield Step()

    dumps = reduce_all(map(columns_from_log, Job(2).run(program).logs()))
    verdict = examine_dumps(dumps).verdict
    assert (verdict.kind, verdict.culprits) == ("cycle", [1])
