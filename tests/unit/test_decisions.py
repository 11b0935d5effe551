"""Causes, and between sides, are decided in functions that make no words."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from conftest import SOURCE

DIAGNOSIS = SOURCE / "commlens" / "diagnosis"
OUTSIDE = SOURCE / "commlens" / "outside"
DECIDING = [
    *sorted((DIAGNOSIS / "causes").glob("*.py")),
    *sorted((DIAGNOSIS / "align").glob("*.py")),
    *(OUTSIDE / f"{name}.py" for name in ("causes", "seen")),
]
WORDLESS = {
    *DECIDING,
    *(path for room in ("align", "graph", "index") for path in (DIAGNOSIS / room).glob("*.py")),
} - {DIAGNOSIS / "align" / "call_paths.py"}  # which tells where lines are


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
