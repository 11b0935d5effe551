"""Tests of src/commlens/check/agreement.py."""

import math

from commlens.check.agreement import common, disagreeing
from commlens.check.branches import Answers

KEY = "train.py", 81, "bool", ()


def test_a_rank_that_knows_the_value_decides() -> None:
    answers: dict[int, Answers] = {
        0: {KEY: [(False, False), (False, False)]},
        1: {KEY: [(True, True)]},
        2: {KEY: [(True, False), (False, False), (True, False)]},
    }
    agreed = common(answers)
    assert agreed == {KEY: [(True, True), (False, False), (True, False)]}
    assert disagreeing(answers, agreed) == [0]


def test_ranks_that_read_elsewhere_do_not_disagree() -> None:
    answers: dict[int, Answers] = {0: {KEY: [(math.nan, False)]}, 1: {KEY: [(math.nan, False)]}}
    assert disagreeing(answers, common(answers)) == []
    assert disagreeing({2: {}}, common(answers)) == []
