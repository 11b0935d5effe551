"""The bytes through one rank's link."""

from __future__ import annotations

import pytest

from commlens.model.wire_bytes import wire_bytes


@pytest.mark.parametrize(
    ("op", "input_bytes", "output_bytes", "expected"),
    [
        ("all_reduce", 1000, 1000, 1500),
        ("all_gather", 250, 1000, 750),
        ("reduce_scatter", 1000, 250, 750),
        ("all_to_all", 1000, 1000, 750),
        ("broadcast", 1000, 1000, 1000),
        ("send", 1000, 0, 1000),
        ("recv", 0, 1000, 1000),
        ("barrier", 0, 0, 0),
    ],
)
def test_of_four_ranks(op: str, input_bytes: int, output_bytes: int, expected: int) -> None:
    assert wire_bytes(op, 4, input_bytes, output_bytes) == expected
    assert wire_bytes(op, 1, input_bytes, output_bytes) == 0


def test_all_ranks_of_a_rooted_op_move_as_much() -> None:
    """Only the root of a gather has output, only that of a scatter input."""
    assert wire_bytes("gather", 4, 250, 1000) == wire_bytes("gather", 4, 250, 0) == 750
    assert wire_bytes("scatter", 4, 1000, 250) == wire_bytes("scatter", 4, 0, 250) == 750
