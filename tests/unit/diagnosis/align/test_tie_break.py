"""Each kind of evidence decides between sides, or leaves it to the next."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import pytest
from builders import Job, Op, all_reduce, recv, send

from commlens.diagnosis.align.tie_break import (
    UNDECIDED,
    by_arguments,
    by_majority,
    by_midway,
    by_order,
    by_other_groups,
    by_own_routine,
    by_rounds,
    by_routine,
    first_decision,
    sides_of,
)
from commlens.model.cause import Decision


def test_the_first_evidence_that_decides_counts() -> None:
    asked: list[str] = []

    def way(name: str, decision: Decision | None) -> Decision | None:
        asked.append(name)
        return decision

    blamed = Decision((1,), "routine")
    assert (
        first_decision(
            lambda: way("none", None), lambda: way("one", blamed), lambda: way("never", UNDECIDED)
        )
        == blamed
    )
    assert asked == ["none", "one"]
    assert first_decision(lambda: None) == UNDECIDED


def test_all_sides_but_the_majority_are_blamed() -> None:
    assert by_majority([[0, 1, 2], [4], [3]]) == Decision((3, 4), "majority")
    assert by_majority([[4], [0, 1, 2, 3]]) == Decision((4,), "majority")


@pytest.mark.parametrize("sides", [[[0, 1], [2, 3]], [[0], [1], [2]], [[0, 1]], []])
def test_no_majority_decides_nothing(sides: list[list[int]]) -> None:
    assert by_majority(sides) is None


def test_ranks_on_no_side_have_a_vote() -> None:
    assert by_majority([[0, 1], [2]], of=4) is None
    assert by_majority([[0, 1, 3], [2]], of=5) == Decision((2,), "majority")


def test_arguments_that_are_wrong_in_themselves_are_blamed() -> None:
    assert by_arguments([1, 0, 2]) == Decision((0, 1, 2), "arguments")
    assert by_arguments([]) is None


def test_the_side_that_does_as_the_other_groups_is_right() -> None:
    sides = [[0, 1], [2, 3]]
    assert by_other_groups(sides, [sides[1]]) == Decision((0, 1), "other-groups")
    assert by_other_groups(sides, []) is None
    assert by_other_groups(sides, sides) is None


@pytest.mark.parametrize(
    ("odd", "culprits"),
    [([{2}], (2,)), ([{2, 5}, {1, 2}], (2,)), ([{1, 2}], None), ([{1}, {2}], None), ([], None)],
)
def test_ranks_that_did_other_rounds_at_every_line_are_blamed(
    odd: list[set[int]], culprits: tuple[int, ...] | None
) -> None:
    decision = by_rounds([1, 2], odd)
    assert decision == (None if culprits is None else Decision(culprits, "rounds"))


def test_the_only_side_that_keeps_its_routine_is_right() -> None:
    assert by_routine([[0, 1], [2, 3]], left=[3]) == Decision((2, 3), "routine")
    assert by_routine([[0], [1], [2]], left=[1, 2]) == Decision((1, 2), "routine")
    assert by_routine([[0], [1]], left=[]) is None
    assert by_routine([[0], [1]], left=[0, 1]) is None
    assert by_routine([[0], [1], [2]], left=[1]) is None


@pytest.mark.parametrize(
    ("left", "known", "blamed"), [([2, 3], {2}, True), ([2, 3], {0, 1}, False), ([0], (), False)]
)
def test_several_ranks_in_a_new_place_are_not_blamed(
    left: list[int], known: Collection[int], blamed: bool
) -> None:
    decision = by_routine([[0, 1], [2, 3]], left, been_here=lambda rank: rank in known)
    assert (decision is not None) == blamed


def test_one_rank_in_a_new_place_is_blamed() -> None:
    decision = by_routine([[0, 1], [2]], [2], been_here=lambda _: False)
    assert decision == Decision((2,), "routine")


@pytest.mark.parametrize(
    ("midway", "going_on", "blamed"),
    [([1], [0, 1], True), ([], [0, 1], False), ([1], [1], False), ([0, 1], [0, 1], True)],
)
def test_a_rank_that_ended_inside_of_a_loop_is_blamed(
    midway: list[int], going_on: list[int], blamed: bool
) -> None:
    decision = by_midway([1], [0], midway, going_on)
    assert decision == (Decision((1,), "midway") if blamed else None)


def test_an_order_that_differs_from_the_peers_is_blamed() -> None:
    assert by_order([1], left=[]) == Decision((1,), "majority")
    assert by_order([1], left=[1, 2]) == Decision((1,), "routine")
    assert by_order([1, 2], left=[1]) == Decision((1, 2), "majority")
    assert by_order([], left=[1]) is None


def test_most_ranks_may_leave_their_routine_rightly() -> None:
    assert by_own_routine([1], of=2) == Decision((1,), "routine")
    assert by_own_routine([1, 2], of=3) is None
    assert by_own_routine([], of=3) is None


def test_ranks_with_alike_ops_are_a_side() -> None:
    def program(job: Job, rank: int) -> Iterator[Op]:
        yield [
            send(job.world, 1, line=20),
            all_reduce(job.world, line=30),
            recv(job.world, 0, line=30),
            all_reduce(job.world, line=30),
            all_reduce(job.group("7", [3, 4], "dp"), line=30),
        ][rank]

    logs = Job(5).run(program).logs()
    ops = {log.rank: log.collectives[0] for log in logs}
    assert sides_of(ops) == [[1, 3], [0], [2], [4]]
