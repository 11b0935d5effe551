"""Layers point one way: commands -> launch, watch -> diagnose, reports -> formats, compare -> model."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import SOURCE

PACKAGE = SOURCE / "commlens"

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "config": {"errors", "formats"},
    "model": set(),
    "compare": {"model"},
    "formats": {"errors", "model"},
    "diagnose": {"compare", "errors", "formats", "model"},
    "reports": {"compare", "diagnose", "errors", "formats", "model"},
    "watch": {"compare", "config", "diagnose", "errors", "formats", "model", "reports"},
    "native": {"errors", "formats"},
    "capture": {
        "config",
        "errors",
        "formats",
        "model",
        "native",
        "verify",
        "watch",
    },  # its bootstrap starts the verifier; watch: a dump on demand
    "reading": {"errors", "formats", "model", "reports"},
    "verify": {"capture", "compare", "errors", "formats", "model"},
    "trace": {"capture", "errors", "formats", "model", "reading"},
    "launch": {"capture", "config", "errors", "formats", "native", "reading", "reports", "trace", "watch"},
    "scenarios": {"errors", "model"},
    "commands": {
        "compare",
        "config",
        "diagnose",
        "errors",
        "formats",
        "launch",
        "model",
        "native",
        "reading",
        "reports",
        "scenarios",
        "trace",
        "watch",
    },
    "__init__": {"capture", "diagnose", "errors", "model", "reading", "trace", "verify", "watch"},
    "__main__": {"commands"},
}
"""Room or top-level module -> the rooms that it may import, besides itself."""

TORCH_USERS = {"capture", "launch", "native", "scenarios", "trace", "verify"}
STANDARD_LIBRARY_ONLY = [
    "commlens_autoload.py",
    "commlens/config.py",
    "commlens/errors.py",
    "commlens/formats/layout.py",
    "commlens/formats/places.py",
]
FILES = sorted(SOURCE.rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that a file imports, at its top or inside a function, with the line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            module = node.module or ""
            yield from ((f"{module}.{alias.name}" if module == "commlens" else module, node.lineno) for alias in node.names)


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_every_room_has_its_rule():
    assert {room(path) for path in FILES if PACKAGE in path.parents} == set(MAY_IMPORT)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_file_imports_only_what_its_room_may(path):
    if PACKAGE not in path.parents:
        return
    here = room(path)
    for module, line in imports(path):
        top, *rest = module.split(".")
        if top == "commlens":
            there = rest[0] if rest else ""
            assert there in MAY_IMPORT[here] | {here, "__version__", ""}, f"{path}:{line}: {here} may not import {module}"
        elif top == "torch":
            assert here in TORCH_USERS, f"{path}:{line}: {here} may not import torch"


@pytest.mark.parametrize("name", STANDARD_LIBRARY_ONLY)
def test_what_a_worker_always_loads_is_standard_library_only(name):
    allowed = {"commlens.errors", "commlens.formats.layout", "commlens.capture"}  # capture: inside commlens_autoload.start
    for module, line in imports(SOURCE / name):
        if name == "commlens/config.py" and module == "yaml":
            continue  # only when there is a file to read
        assert module.split(".")[0] in sys.stdlib_module_names or module in allowed, f"{name}:{line}: {module}"


def test_the_autoload_module_has_nothing_at_its_top_that_could_fail():
    body = ast.parse((SOURCE / "commlens_autoload.py").read_text()).body
    assert [type(node).__name__ for node in body] == ["Expr", "Import", "Import", "Import", "FunctionDef"]
