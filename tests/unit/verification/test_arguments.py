"""Compare the arguments of functions between ranks."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import numpy as np
import pytest

from commlens.verification.arguments import compare_leaves, describe, pack, unpack

Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Batch:
    tokens: Any
    mask: Any = None


def compared(*values: Any, compare_values: bool = False, shapes: bool = True) -> Any:
    """Return the disagreement of ranks that pass these values: rank 0 the first, rank 1 the second,
    ...
    """
    leaves = {}
    for rank, value in enumerate(values):
        described = describe({"inputs": value}, lambda name: compare_values, shapes=shapes)
        assert unpack(pack(described)) == described
        leaves[rank] = described
    return compare_leaves(leaves)


def ones(*shape: int, dtype: str = "float32") -> Any:
    return np.ones(shape, dtype=dtype)


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        "text",
        [],
        {},
        ones(2),
        [ones(2), (ones(1), {"a": Point(1, ones(3))})],
        Batch(ones(1), [None]),
        {1: ones(1), (2, "b"): 4},
    ],
    ids=repr,
)
def test_equal_arguments_agree(value):
    assert compared(value, value, value) is None


def test_plain_values_are_compared_by_type_only_unless_asked():
    assert compared([1, "a", 2.0], [2, "b", 3.0]) is None
    found = compared([1, "a", 2.0], [1, "b", 2.0], compare_values=True)
    assert (found.aspect, found.at) == ("value", [("inputs[1]", {0: ("'a'", ""), 1: ("'b'", "")})])


@pytest.mark.parametrize(
    ("first", "second", "aspect", "path", "words"),
    [
        (
            {"a": ones(1, 5)},
            {"a": ones(1, 2, 5)},
            "shape",
            'inputs["a"]',
            [("[1, 5]", "float32"), ("[1, 2, 5]", "float32")],
        ),
        (
            [ones(2)],
            [ones(2, dtype="int64")],
            "dtype",
            "inputs[0]",
            [("float32", "[2]"), ("int64", "[2]")],
        ),
        ([1, 2], [1, 2, 3], "structure", "inputs", [("list of 2", ""), ("list of 3", "")]),
        ([1], (1,), "structure", "inputs", [("list of 1", ""), ("tuple of 1", "")]),
        (Batch(1), Batch(None), "structure", "inputs.tokens", [("int", ""), ("None", "")]),
        (
            Point(1, ones(2)),
            Point(1, 2),
            "structure",
            "inputs.y",
            [("tensor [2] float32", ""), ("int", "")],
        ),
        (
            {"a": 1, "b": 2},
            {"b": 2, "a": 1},
            "structure",
            "inputs",
            [("dict with 'a', 'b'", ""), ("dict with 'b', 'a'", "")],
        ),
        (
            {"a": {"b": [1]}},
            {"a": {"b": []}},
            "structure",
            'inputs["a"]["b"]',
            [("list of 1", ""), ("list of 0", "")],
        ),
        ({"a": 1}, {}, "structure", "inputs", [("dict with 'a'", ""), ("empty dict", "")]),
        ("text", b"text", "structure", "inputs", [("str", ""), ("bytes", "")]),
    ],
)
def test_a_difference_is_named_by_its_path(first, second, aspect, path, words):
    found = compared(first, second)
    assert found.aspect == aspect
    assert found.at == [(path, dict(enumerate(words)))]


def test_structure_comes_first_and_hides_differences_inside():
    found = compared([ones(1), [ones(2)]], [ones(9), [ones(2), ones(2)]])
    assert found.aspect == "structure" and [path for path, _ in found.at] == ["inputs[1]"]


def test_all_ranks_are_listed_not_only_the_odd_one():
    found = compared(ones(2), ones(2), ones(3))
    assert found.at == [
        ("inputs", {0: ("[2]", "float32"), 1: ("[2]", "float32"), 2: ("[3]", "float32")})
    ]


def test_without_shapes_only_the_number_of_dimensions_must_agree():
    assert compared(ones(2, 3), ones(5, 1), shapes=False) is None
    assert compared(ones(2, 3), ones(5), shapes=False).aspect == "shape"


def test_a_container_that_contains_itself_is_described():
    endless: list[Any] = [1]
    endless.append(endless)
    assert compared(endless, endless) is None


def test_many_leaves_are_compressed_and_damaged_ones_reported():
    many = describe({"inputs": [ones(1)] * 3000}, lambda name: False)
    assert (
        isinstance(pack(many), str) and len(pack(many)) < 32 * 1024 and unpack(pack(many)) == many
    )
    for damaged in (None, "not packed", [1, 2], "zz" * 30):
        assert unpack(damaged) is None
    assert compare_leaves({0: many, 1: None}).aspect == "argument"
