"""The words of every kind of cause are held in a golden file, and every golden file by a test."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import get_args

import goldens

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


def names_held() -> Iterator[str]:
    """Yield the first argument of each ``hold(...)`` in the tests, with * for what is computed."""
    for path in UNIT.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
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
