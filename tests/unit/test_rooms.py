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
from typing import Any, NamedTuple

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


class Module(NamedTuple):
    """What is counted in a module."""

    lines: int
    statements: int
    decisions: dict[str, int]  # the most of a function of that name
    classes: set[str]
    imported: set[str]


@functools.cache
def modules() -> dict[str, Module]:
    """Return what is in each module, by its path within the package."""
    return {
        str(path.relative_to(PACKAGE)): counted(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def counted(text: str) -> Module:
    """Count what is in a module. Docstrings are no statements."""
    tree = ast.parse(text)
    decided: dict[ast.AST, int] = {tree: 1}
    statements, classes, imported = 0, set(), set()
    todo: list[tuple[ast.AST, ast.AST]] = [(tree, tree)]
    while todo:
        node, function = todo.pop()
        if isinstance(node, ast.stmt):
            is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            statements += not is_docstring
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node
            decided[function] = 1
        elif isinstance(node, ast.ClassDef):
            classes.add(node.name)
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Import):
            imported |= {each.name for each in node.names}
        else:
            decided[function] += decisions(node)
        todo += [(child, function) for child in ast.iter_child_nodes(node)]
    most: dict[str, int] = {}
    for function, count in decided.items():
        name = getattr(function, "name", "")
        most[name] = max(count, most.get(name, 0))
    return Module(text.count("\n"), statements, most, classes, imported)


def decisions(node: ast.AST) -> int:
    """Count branches, loops, comprehensions with their conditions, and boolean operators."""
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    if isinstance(node, ast.comprehension):
        return 1 + len(node.ifs)
    return isinstance(node, _BRANCHES)


@functools.cache
def measured() -> dict[str, Any]:
    """Return what the source has now, in the form of rooms.json."""
    statements: Counter[str] = Counter()
    above, classes = [], defaultdict(set)
    for path, module in modules().items():
        statements[path.split("/")[0]] += module.statements
        above += [
            f"{path} {name}"
            for name, count in module.decisions.items()
            if name and count > MOST_DECISIONS
        ]
        for name in module.classes:
            classes[name].add(path)
    return {
        "statements": dict(sorted(statements.items())),
        "functions above 15 decisions": sorted(above),
        "small modules with one importer": small_modules(),
        "class names that stand twice": sorted(
            name for name, paths in classes.items() if len(paths) > 1
        ),
    }


def small_modules() -> list[str]:
    """Return the modules of less than 60 lines that one module imports."""
    importers = Counter(name for module in modules().values() for name in module.imported)
    return sorted(
        path
        for path, module in modules().items()
        if module.lines < SMALL_LINES
        and not re.search(r"__(init|main)__\.py$", path)
        and importers["commlens." + path[:-3].replace("/", ".")] == 1
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
        ("def f():\n    x = [a for a in b if a and c]", 4),
        ("def f():\n    if a or b or c:\n        d = e if f else g", 5),
        (
            "def f():\n    match a:\n        case 1:\n            b\n        case _:\n            c",
            3,
        ),
        ("def f():\n    def inner():\n        if a: pass", 1),
    ):
        assert counted(text).decisions["f"] == count


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
