"""Causes, and between sides, are decided in small functions that make no words."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import SOURCE

DIAGNOSIS = SOURCE / "commlens" / "diagnosis"
OUTSIDE = SOURCE / "commlens" / "outside"
DECIDING = [
    *sorted((DIAGNOSIS / "causes").glob("*.py")),
    *sorted((DIAGNOSIS / "align").glob("*.py")),
    *(OUTSIDE / f"{name}.py" for name in ("causes", "seen", "waits")),
]
WORDLESS = {
    *DECIDING,
    *(path for room in ("align", "graph", "index") for path in (DIAGNOSIS / room).glob("*.py")),
} - {DIAGNOSIS / "align" / "call_paths.py"}  # which tells where lines are
MOST_DECISIONS = 15

_BRANCHES = (
    ast.If,
    ast.IfExp,
    ast.For,
    ast.While,
    ast.ExceptHandler,
    ast.Assert,
    ast.match_case,
    ast.comprehension,
)


def decisions(function: ast.AST) -> int:
    """Branches, loops, comprehensions with their conditions, and boolean operators."""
    found = 0
    for node in ast.walk(function):
        if isinstance(node, _BRANCHES):
            found += 1
        if isinstance(node, ast.comprehension):
            found += len(node.ifs)
        if isinstance(node, ast.BoolOp):
            found += len(node.values) - 1
    return found


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            yield node


def test_the_counter_counts_what_a_reader_has_to_decide() -> None:
    assert decisions(ast.parse("x = [a for a in b if a and c]")) == 3
    assert decisions(ast.parse("if a or b or c:\n    d = e if f else g")) == 4
    assert decisions(ast.parse("match a:\n    case 1:\n        b\n    case _:\n        c")) == 2


@pytest.mark.parametrize("path", DECIDING, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_no_function_decides_too_much(path: Path) -> None:
    too_many = {
        function.name: count
        for function in functions(path)
        if (count := decisions(function)) > MOST_DECISIONS
    }
    assert not too_many


@pytest.mark.parametrize(
    "path", sorted(WORDLESS), ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_what_decides_makes_no_words(path: Path) -> None:
    lines = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.JoinedStr)
    ]
    assert not lines, (
        f"f-strings in lines {lines}: words are made in diagnosis/words or outside/words"
    )
