"""The mass of each room: its statements, and lists of what makes a room hard to read. Both may only
shrink.

``python tests/unit/test_rooms.py`` writes what has shrunk into rooms.json. A capability that needs
more statements in one room takes them from another: move the ceiling by hand, in the same commit.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

HELD = Path(__file__).with_name("rooms.json")
PACKAGE = Path(__file__).parents[2] / "src" / "commlens"
MOST_DECISIONS = 15
SMALL_LINES = 60
_BRANCHES = (
    ast.If,
    ast.For,
    ast.While,
    ast.IfExp,
    ast.ExceptHandler,
    ast.Assert,
    ast.match_case,
    ast.AsyncFor,
)


@functools.cache
def modules() -> dict[str, tuple[ast.Module, int]]:
    """Return each module's tree and number of lines, by its path within the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        found[str(path.relative_to(PACKAGE))] = (ast.parse(text), text.count("\n"))
    return found


def is_statement(node: ast.AST) -> bool:
    """Return whether a node is a statement. Docstrings are none."""
    return isinstance(node, ast.stmt) and not (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    )


def decisions(function: ast.AST) -> int:
    """Count branches, loops, comprehensions with their conditions, and boolean operators, without
    those of functions inside it.
    """
    count, todo = 1, list(ast.iter_child_nodes(function))
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
        else:
            count += isinstance(node, _BRANCHES)
        todo.extend(ast.iter_child_nodes(node))
    return count


@functools.cache
def measured() -> dict[str, Any]:
    """Return what the source has now, in the form of rooms.json."""
    statements: Counter[str] = Counter()
    above, classes = [], defaultdict(set)
    for path, (tree, _) in modules().items():
        for node in ast.walk(tree):
            statements[path.split("/")[0]] += is_statement(node)
            if isinstance(node, ast.FunctionDef) and decisions(node) > MOST_DECISIONS:
                above.append(f"{path} {node.name}")
            if isinstance(node, ast.ClassDef):
                classes[node.name].add(path)
    return {
        "statements": dict(sorted(statements.items())),
        "functions above 15 decisions": sorted(set(above)),
        "small modules with one importer": small_modules(),
        "class names that stand twice": sorted(
            name for name, paths in classes.items() if len(paths) > 1
        ),
    }


def small_modules() -> list[str]:
    """Return the modules of less than 60 lines that one module imports."""
    importers = defaultdict(set)
    for path, (tree, _) in modules().items():
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
            elif isinstance(node, ast.Import):
                names = [each.name for each in node.names]
            for name in names:
                importers[name].add(path)
    return sorted(
        path
        for path, (_, lines) in modules().items()
        if lines < SMALL_LINES
        and not re.search(r"__(init|main)__\.py$", path)
        and len(importers["commlens." + path[:-3].replace("/", ".")]) == 1
    )


def held() -> dict[str, Any]:
    known: dict[str, Any] = json.loads(HELD.read_text(encoding="utf-8"))
    return known


def test_no_room_has_more_statements_than_its_ceiling() -> None:
    ceilings, now = held()["statements"], measured()["statements"]
    assert {room: n for room, n in now.items() if n > ceilings.get(room, 0)} == {}, (
        "take them from another room, and move both ceilings in rooms.json"
    )


def test_lists_of_what_is_hard_to_read_only_shrink() -> None:
    known, now = held(), measured()
    for name in known:
        if name != "statements":
            assert not set(now[name]) - set(known[name]), name


def test_the_counter_counts_what_a_reader_has_to_decide() -> None:
    for text, count in (
        ("x = [a for a in b if a and c]", 4),
        ("if a or b or c:\n    d = e if f else g", 5),
        ("match a:\n    case 1:\n        b\n    case _:\n        c", 3),
        ("def f():\n    if a: pass", 1),
    ):
        assert decisions(ast.parse(text)) == count


def write() -> None:
    """Lower the ceilings, and shorten the lists; nothing rises."""
    now = dict(measured())
    if HELD.exists() and "--anew" not in sys.argv:
        known = held()
        now["statements"] = {
            room: min(n, known["statements"].get(room, n)) for room, n in now["statements"].items()
        }
        for name in now:
            if name != "statements":
                now[name] = sorted(set(now[name]) & set(known[name]))
    HELD.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
