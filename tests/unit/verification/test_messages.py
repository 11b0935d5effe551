"""The facts of a refusal are those of its message."""

from __future__ import annotations

import pytest

from commlens.matching.answer import Disagree, Severity
from commlens.model.collective import CollectiveArgs, TensorSpec
from commlens.model.refusal import RefusedRow
from commlens.verification.arguments import LeafDisagreement
from commlens.verification.messages import Row, Subject, leaves, mismatch

SUBJECT = Subject("dp", (0, 1, 2), 3)


def row(rank: int, size: int) -> Row:
    args = CollectiveArgs("all_reduce", "allreduce_", inputs=(TensorSpec((size,), "float32"),))
    return Row(rank, args, "train.py:21 in main")


def test_ranks_with_the_same_content_share_a_row() -> None:
    rows = [row(0, 2), row(1, 3), row(2, 2)]
    answer = Disagree("shape", Severity.ILLEGAL, (1,), (), "")
    refusal, text = mismatch(answer, SUBJECT, rows)
    assert refusal.heading == "Input shapes"
    assert refusal.rows == (
        RefusedRow((0, 2), ("[2]", "float32"), "train.py:21 in main"),
        RefusedRow((1,), ("[3]", "float32"), "train.py:21 in main"),
    )
    assert text.endswith(
        "Input shapes:\n"
        "  - Processes 0,2: [2]  float32   train.py:21 in main\n"
        "  - Process 1:     [3]  float32   train.py:21 in main"
    )


@pytest.mark.parametrize(("places", "shown", "kept"), [(2, 2, 4), (9, 8, 16)])
def test_each_place_in_the_arguments_has_its_rows(places: int, shown: int, kept: int) -> None:
    differ = {0: ("[2]", "float32"), 1: ("[3]", "float32")}
    answer = LeafDisagreement("shape", [(f"x[{at}]", differ) for at in range(places)])
    rows = [row(0, 2), row(1, 3)]
    refusal, text = leaves(answer, SUBJECT, rows)
    assert [(each.argument, each.ranks, each.cells) for each in refusal.rows] == [
        (f"x[{at}]", (rank,), cells) for at in range(shown) for rank, cells in differ.items()
    ]
    assert len(refusal.rows) == kept
    lines = text.splitlines()
    assert [line for line in lines if line.startswith("Input shapes of ")] == [
        f"Input shapes of x[{at}]:" for at in range(shown)
    ]
    assert ("... and 1 more" in lines) == (places > shown)


def test_arguments_that_are_too_many_to_compare_have_no_rows() -> None:
    refusal, text = leaves(LeafDisagreement("argument", []), SUBJECT, [row(0, 2)])
    assert refusal.rows == ()
    assert "too many elements" in text
