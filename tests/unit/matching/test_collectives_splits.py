"""Splits of an all_to_all."""

from __future__ import annotations

import pytest
from builders import asked, spec
from comparing import odd_one

from commlens.matching.answer import Agree, Disagree, Severity, Unknown
from commlens.matching.collectives import compare_collectives
from commlens.model.collective import CollectiveArgs, TensorSpec


def exchange(
    rows: list[list[int]], wrong: tuple[int, int] | None = None
) -> dict[int, CollectiveArgs]:
    """Return an all_to_all in which rank i sends ``rows[i][j]`` rows of 3 elements to rank j."""
    ranks = range(len(rows))
    result = {}
    for rank in ranks:
        into = [rows[other][rank] + (1 if wrong == (other, rank) else 0) for other in ranks]
        result[rank] = asked(
            "all_to_all",
            spec((sum(rows[rank]), 3)),
            outputs=(spec((sum(into), 3)),),
            input_splits=tuple(rows[rank]),
            output_splits=tuple(into),
        )
    return result


def test_splits_are_compared_pair_by_pair() -> None:
    rows = [[1, 2, 3, 4], [5, 6, 7, 8], [1, 1, 1, 1], [2, 0, 2, 0]]
    assert compare_collectives(exchange(rows), range(4)) == Agree()
    answer = compare_collectives(exchange(rows, (1, 3)), range(4))
    assert isinstance(answer, Disagree)
    assert answer.aspect == "splits"
    assert "rank 1 sends 24 elements to rank 3, which expects 27" in answer.detail


def test_one_ranks_splits_are_not_shown_for_all() -> None:
    rows = [[2, 2, 2], [1, 2, 3], [1, 2, 3]]
    by_rank = {
        rank: asked(
            "all_to_all",
            spec(6),
            outputs=(spec(6),),
            input_splits=tuple(row),
            output_splits=(2, 2, 2),
        )
        for rank, row in enumerate(rows)
    }
    answer = compare_collectives(by_rank, range(3))
    assert isinstance(answer, Disagree)
    assert [(party.ranks, party.phrase.rpartition("splits ")[2]) for party in answer.parties] == [
        ((0, 1), "different splits"),
        ((2,), "[1, 2, 3]"),
    ]


@pytest.mark.parametrize(
    ("refused", "culprits"), [((0, 1, 2), None), ((1,), (1,)), ((0, 1), (0, 1))]
)
@pytest.mark.parametrize("wrong", [(3, 3, 3), (6,), (1, 2)], ids=str)
def test_splits_that_the_backend_refuses_are_no_disagreement_unless_a_peer_has_sent(
    refused: tuple[int, ...], culprits: tuple[int, ...] | None, wrong: tuple[int, ...]
) -> None:
    def args(rank: int) -> CollectiveArgs:
        spec = (TensorSpec((6,), "float32", "cpu"),)
        splits = wrong if rank in refused else (2, 2, 2)
        return CollectiveArgs(
            "all_to_all", "alltoall_base_", spec, spec, input_splits=splits, output_splits=(2, 2, 2)
        )

    answer = compare_collectives({rank: args(rank) for rank in range(3)}, (0, 1, 2))
    assert (answer.minority if isinstance(answer, Disagree) else None) == culprits


def test_empty_splits_are_even() -> None:
    one = asked("all_to_all", spec((8, 3)), outputs=(spec((8, 3)),))
    assert odd_one(one, one) == Agree()
    answer = odd_one(one, asked("all_to_all", spec((4, 3)), outputs=(spec((4, 3)),)))
    assert isinstance(answer, Disagree)
    assert answer.minority == (2,)


def all_to_all(sent: int, expected: int, name: str = "all_to_all") -> CollectiveArgs:
    return CollectiveArgs("all_to_all", name, (spec((sent,)),), (spec((expected,)),))


def test_without_splits_the_totals_of_an_all_to_all_must_be_equal() -> None:
    odd = {0: all_to_all(12, 11), 1: all_to_all(12, 14), 2: all_to_all(12, 12)}
    answer = compare_collectives(odd, range(3), splits_known=False)
    assert isinstance(answer, Disagree)
    assert (answer.aspect, answer.severity, answer.minority, answer.tie) == (
        "splits",
        Severity.ILLEGAL,
        (),
        True,
    )
    assert [party.phrase for party in answer.parties] == [
        "together, they send 36 elements and expect 37"
    ]
    assert answer.detail == "rank 0 sends 12 and expects 11; rank 1 sends 12 and expects 14"
    fit = {0: all_to_all(12, 11), 1: all_to_all(12, 13)}
    for by_rank, size in (
        (fit, 2),
        (odd, 4),
        ({rank: all_to_all(12, 11 + rank % 2, "ALLTOALL") for rank in range(3)}, 3),
    ):
        assert compare_collectives(by_rank, range(size), splits_known=False) == Unknown(
            ("splits",)
        ), "no splits, or not all that was sent"


def test_of_one_pair_that_does_not_fit_either_rank_may_be_wrong() -> None:
    answer = compare_collectives(exchange([[3, 5], [4, 4]], (0, 1)), range(2))
    assert isinstance(answer, Disagree)
    assert answer.minority == ()
    assert [party.ranks for party in answer.parties] == [(0,), (1,)]
    rows = [[1, 1, 1, 1]] * 4
    answer = compare_collectives(exchange(rows, (1, 3)), range(4))
    assert isinstance(answer, Disagree)
    assert [party.ranks for party in answer.parties] == [(1,), (3,), (0, 2)]
