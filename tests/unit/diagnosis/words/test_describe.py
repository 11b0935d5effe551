"""The words of every kind of cause are held in a golden file, and every golden file by a test."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import get_args

import goldens
import pytest
from two_sides import same_on_both_sides, split

from commlens.model.cause import AnyCause, Kind

UNIT = Path(__file__).parents[2]
GOLDENS = {
    path.relative_to(goldens.FOLDER).with_suffix("").as_posix(): path.read_text(encoding="utf-8")
    for path in goldens.FOLDER.rglob("*.txt")
}


def facts(name: str) -> set[str]:
    """Return the values of a field in all golden files."""
    return {
        value for text in GOLDENS.values() for value in re.findall(rf'^{name}: "(.*)"$', text, re.M)
    }


def test_every_kind_of_cause_has_a_golden_file() -> None:
    classes = {cause.__struct_config__.tag for cause in get_args(AnyCause)}
    assert classes - facts("type") == set()
    assert set(get_args(Kind)) - facts("kind") == set()


def sentences() -> Iterator[str]:
    """Yield the sentences of all golden files."""
    for text in GOLDENS.values():
        words = re.split(r"\n(?:type|kind): ", text)[0]
        for part in re.split(r"\n\n|\n(?=[A-Z]{3,} )|\n  - ", words):
            yield from split(" ".join(part.split()))


def test_no_sentence_names_two_sides_with_the_same_words() -> None:
    assert not same_on_both_sides(sentences())


@pytest.mark.parametrize(
    ("said", "is_empty"),
    [
        ("rank 0 moved on to all_gather #8 of group dp [0-2], not to the one at a.py:3", False),
        ("rank 0 moved on to send #8 to rank 1, not to send to rank 2 as before", False),
        ("rank 0 moved on to barrier #8 of group dp, not to barrier of group dp as before", True),
        ("find out why rank 3 comes to all_reduce where the others come to all_reduce", True),
        ("compare a.py:5 build on rank 2 with a.py:5 build on ranks 0-1,3", True),
        ("one side comes to a.py:5 build, and the other to a.py:5 build", True),
        ("Rank 0 waits in recv #1 from rank 1; rank 1 waits in recv #1 from rank 0", False),
        ("Ranks 0-1 issue all_reduce (64 elements); ranks 2-3 issue all_reduce", False),
        ("float32[8] (rank 0) against float32[8] (rank 1)", True),
    ],
)
def test_the_search_for_sides_with_the_same_words(said: str, is_empty: bool) -> None:
    assert bool(same_on_both_sides([said])) == is_empty


def names_held() -> Iterator[str]:
    """Yield the first argument of each ``hold(...)`` in the tests, with * for what is computed."""
    sources = (path.read_text(encoding="utf-8") for path in UNIT.rglob("test_*.py"))
    for source in sources:
        for node in ast.walk(ast.parse(source)) if "hold(" in source else ():
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "hold":
                name = node.args[0]
                parts = name.values if isinstance(name, ast.JoinedStr) else [name]
                yield "".join(
                    getattr(part, "value", "*") if isinstance(part, ast.Constant) else "*"
                    for part in parts
                )


def test_every_golden_file_is_compared() -> None:
    names = set(names_held())
    assert {name for name in GOLDENS if not any(fnmatch(name, held) for held in names)} == set()
