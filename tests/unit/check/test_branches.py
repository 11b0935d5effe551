"""Tests of src/commlens/check/branches.py."""

import math

import pytest

from commlens.check.branches import (
    Answers,
    Branch,
    BranchLine,
    Choice,
    Moment,
    combinations,
    common_answers,
    disagreeing,
    doubtful,
    merged,
    number_of_combinations,
    parse_branch,
    unmet,
)
from commlens.errors import CommandError
from commlens.model.collective import Frame


def frame(line: int, file: str = "/home/me/train.py") -> Frame:
    return Frame(file, line, "main")


def test_a_branch_names_a_line_and_its_answers() -> None:
    assert parse_branch("train.py:81=true,false") == Branch("train.py", 81, (True, False))
    assert parse_branch("./src/moe.py:4=0, 16,1e9") == Branch("src/moe.py", 4, (0, 16, 1e9))
    assert parse_branch("train.py:81=true,true").values == (True,)


@pytest.mark.parametrize("text", ["train.py:81", "train.py=true", "81=true", "a.py:8=perhaps", ""])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(CommandError, match="FILE:LINE"):
        parse_branch(text)


def test_a_choice_is_for_the_end_of_a_path() -> None:
    choice = Choice("train.py", 81, value=True)
    assert choice.is_at("/home/me/train.py", 81)
    assert choice.is_at("train.py", 81)
    assert not choice.is_at("/home/me/pretrain.py", 81)
    assert not choice.is_at("/home/me/train.py", 82)
    assert str(choice) == "train.py:81=true"


def test_combinations_change_one_branch_at_a_time_first() -> None:
    branches = [Branch("a.py", 1, (True, False)), Branch("a.py", 2, (0, 1, 2))]
    found = [tuple(choice.value for choice in each) for each in combinations(branches)]
    assert found == [(True, 0), (False, 0), (True, 1), (True, 2), (False, 1), (False, 2)]
    assert number_of_combinations(branches) == len(found)
    assert list(combinations([])) == [()]


def test_decisions_of_several_runs_are_merged_by_line() -> None:
    found = merged(
        [
            BranchLine(frame(9), "truth", alike=True, taken=(True,)),
            BranchLine(frame(4), "number", alike=True, taken=(1,)),
            BranchLine(frame(9), "truth", alike=False, taken=(False, True)),
        ]
    )
    assert found == [
        BranchLine(frame(4), "number", alike=True, taken=(1,)),
        BranchLine(frame(9), "truth", alike=False, taken=(True, False)),
    ]
    assert [each.certain for each in found] == [False, True]


def test_true_and_one_are_different_answers() -> None:
    decisions = [BranchLine(frame(9), "truth", taken=(each,)) for each in (True, 1)]
    assert merged(decisions)[0].taken == (True, 1)


def test_a_branch_where_nothing_asked_is_not_met() -> None:
    decisions = [BranchLine(frame(9), "truth", forced=True), BranchLine(frame(4), "truth")]
    branches = [Branch("train.py", line, (True,)) for line in (4, 9)]
    assert unmet(branches, decisions) == branches[:1]


def test_values_of_their_own_make_ranks_doubtful_only_if_they_part() -> None:
    same = [[BranchLine(frame(9), "truth", taken=(False,))]] * 2
    apart = [[BranchLine(frame(9), "truth", taken=(each,))] for each in (False, True)]
    alike = [[BranchLine(frame(9), "truth", alike=True, taken=(each,))] for each in (False, True)]
    forced = [[BranchLine(frame(9), "number", forced=True)]] * 2
    assert [each.frame.line for each in doubtful(apart)] == [9]
    assert [each.frame.line for each in doubtful([[BranchLine(frame(9), "number")]])] == [9]
    assert doubtful(same) == doubtful(alike) == doubtful(forced) == []


def asked(*calls: int) -> list[BranchLine]:
    """A rank that asks for the same value after these numbers of calls."""
    moments = tuple(Moment(number, number) for number in calls)
    return [BranchLine(frame(9), "truth", alike=True, taken=(False,), asked=moments)]


@pytest.mark.parametrize(
    ("ranks", "calls", "is_doubtful"),
    [
        ([asked(3, 6, 9), asked(3, 6)], [], False),
        ([asked(3, 6), []], [], False),
        ([asked(5), asked(7)], [], True),
        ([asked(3, 6), asked(3, 7)], [], True),
        ([asked(5), asked(7)], [6, 6], True),
        ([asked(5), asked(7)], [5, 5], False),
    ],
    ids=[
        "one ends early",
        "one rank asks",
        "other moments",
        "other moments later",
        "one reaches it",
        "none reaches it",
    ],
)
def test_what_ranks_have_alike_is_the_same_at_the_same_moments(
    ranks: list[list[BranchLine]], calls: list[float], is_doubtful: bool
) -> None:
    assert bool(doubtful(ranks, calls)) is is_doubtful


def test_a_value_that_some_ranks_received_may_be_known_to_the_others() -> None:
    received = [BranchLine(frame(9), "truth", taken=(False,), received=True)]
    local = [BranchLine(frame(9), "truth", taken=(False,))]
    assert doubtful([[], received])
    assert not doubtful([received, received])
    assert not doubtful([[], local])


def test_a_value_of_its_own_may_differ_from_what_others_have_alike() -> None:
    own = BranchLine(frame(9), "truth", taken=(True,))
    assert doubtful([[own], [BranchLine(frame(9), "truth", alike=True, taken=(False,))]])


KEY = "train.py", 81, "bool", ()


def test_a_rank_that_knows_the_value_decides() -> None:
    answers: dict[int, Answers] = {
        0: {KEY: [(False, False), (False, False)]},
        1: {KEY: [(True, True)]},
        2: {KEY: [(True, False), (False, False), (True, False)]},
    }
    agreed = common_answers(answers)
    assert agreed == {KEY: [(True, True), (False, False), (True, False)]}
    assert disagreeing(answers, agreed) == [0]


def test_ranks_that_read_elsewhere_do_not_disagree() -> None:
    answers: dict[int, Answers] = {0: {KEY: [(math.nan, False)]}, 1: {KEY: [(math.nan, False)]}}
    assert disagreeing(answers, common_answers(answers)) == []
    assert disagreeing({2: {}}, common_answers(answers)) == []
