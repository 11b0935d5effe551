"""Imports point one way, between rooms and between files: no circle, not even through an import
inside a function.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from conftest import REPOSITORY, SOURCE

PACKAGE = SOURCE / "commlens"

MAY_IMPORT: dict[str, set[str]] = {
    "version": set(),
    "errors": set(),
    "error_file": set(),
    "atomic_write": {"errors"},
    "helper_process": set(),
    "launchers": set(),
    "config": {"blackbox", "errors", "model"},
    "model": set(),
    "text": {"model"},
    "matching": {"model", "text"},
    "blackbox": {"errors", "launchers", "model", "text"},
    "boards": {"blackbox"},
    "speed": {"model", "text"},
    "formats": {"atomic_write", "errors", "model", "text"},
    "dumps": {"blackbox", "boards", "errors", "formats", "helper_process", "model", "text"},
    "diagnosis": {"dumps", "errors", "formats", "matching", "model", "speed", "text"},
    "traces": {"atomic_write", "errors", "formats", "model", "reports", "text"},
    "reports": {"diagnosis", "errors", "formats", "model", "speed", "text", "version"},
    "processes": {"blackbox", "launchers", "model", "text"},
    "health": {"errors", "model", "processes", "text"},
    "watch": {
        "blackbox",
        "config",
        "diagnosis",
        "dumps",
        "error_file",
        "errors",
        "health",
        "launchers",
        "matching",
        "model",
        "processes",
        "reports",
        "speed",
        "text",
    },
    "outside": {
        "blackbox",
        "diagnosis",
        "errors",
        "health",
        "launchers",
        "model",
        "processes",
        "text",
        "watch",
    },
    "native": {"blackbox", "boards", "errors", "helper_process"},
    "tap": {"blackbox", "matching", "model", "text"},
    "capture": {
        "blackbox",
        "config",
        "error_file",
        "errors",
        "helper_process",
        "launchers",
        "model",
        "native",
        "tap",
        "text",
        "version",
    },
    "verification": {
        "blackbox",
        "boards",
        "errors",
        "helper_process",
        "launchers",
        "matching",
        "model",
        "processes",
        "tap",
        "text",
    },
    "tracing": {"errors", "model", "native", "tap", "traces", "version"},
    "launch": {
        "blackbox",
        "capture",
        "config",
        "diagnosis",
        "error_file",
        "errors",
        "helper_process",
        "launchers",
        "matching",
        "model",
        "native",
        "numbers",
        "processes",
        "reports",
        "tap",
        "text",
        "traces",
        "tracing",
        "verification",
        "version",
        "watch",
    },
    "numbers": {"blackbox", "diagnosis", "errors", "launchers", "model", "tap", "text"},
    "check": {
        "blackbox",
        "diagnosis",
        "errors",
        "launchers",
        "matching",
        "model",
        "tap",
        "text",
        "tracing",
    },
    "scenarios": {"errors", "model"},
    "testing": {
        "blackbox",
        "check",
        "config",
        "diagnosis",
        "dumps",
        "errors",
        "helper_process",
        "launch",
        "model",
        "numbers",
        "reports",
        "text",
        "traces",
        "tracing",
        "watch",
    },
    "commands": {
        "atomic_write",
        "check",
        "config",
        "diagnosis",
        "dumps",
        "errors",
        "formats",
        "health",
        "helper_process",
        "launch",
        "model",
        "native",
        "outside",
        "processes",
        "reports",
        "scenarios",
        "speed",
        "text",
        "traces",
        "tracing",
        "version",
        "watch",
    },
    "__init__": {
        "diagnosis",
        "errors",
        "launch",
        "model",
        "numbers",
        "traces",
        "tracing",
        "verification",
        "version",
        "watch",
    },
    "__main__": {"commands"},
}
"""Room or top-level module -> the rooms that it may import, besides itself."""

TORCH_USERS = {
    "capture",
    "check",
    "launch",
    "native",
    "numbers",
    "scenarios",
    "tap",
    "testing",
    "tracing",
    "verification",
}
STANDARD_LIBRARY_ONLY = [
    "commlens_autoload.py",
    "commlens/config.py",
    "commlens/errors.py",
    "commlens/helper_process.py",
    "commlens/launchers.py",
    "commlens/version.py",
    "commlens/blackbox/layout.py",
    "commlens/blackbox/job_dirs.py",
    "commlens/model/number_checks.py",
    "commlens/model/steps.py",
    "commlens/numbers/job_folder.py",
]
FILES = sorted(SOURCE.rglob("*.py"))


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path) for path in FILES}


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> list[tuple[str, int]]:
    """Every module that a file imports, at its top or inside a function, with the line."""
    return all_imports(path)[0]


def imported_at_the_top(path: Path) -> list[str]:
    """The modules that an import of this file imports, but for those that only types need."""
    return all_imports(path)[1]


@functools.cache  # and no tree: each later collection of garbage would look through all of them
def all_imports(path: Path) -> tuple[list[tuple[str, int]], list[str]]:
    tree = tree_of(path)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            module = node.module or ""
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                found.append((inner if inner in MODULES else module, node.lineno))
    tops = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom | ast.Try)]
    lines = {line for node in tops for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    return found, [module for module, line in found if line in lines]


def test_reports_import_only_types_of_the_diagnosis():
    """A report draws an examined job, perhaps in the words of the diagnosis; it does not
    diagnose.
    """
    functions = [
        f"{path}:{node.lineno}: {alias.name}"
        for path in sorted((PACKAGE / "reports").rglob("*.py"))
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith("commlens.diagnosis")
        and not (node.module or "").startswith("commlens.diagnosis.words")
        for alias in node.names
        if not alias.name[0].isupper()
    ]
    assert not functions, "\n".join(functions)


def room(module: str) -> str:
    """The room of one of our modules; the package's own ``__init__`` and ``__main__`` count as
    rooms.
    """
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """The strongly connected components of more than one node (Tarjan)."""
    found: list[list[str]] = []
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    path: list[str] = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        path.append(node)
        for other in graph.get(node, ()):
            if other not in order:
                visit(other)
            if other in path:
                low[node] = min(low[node], low[other])
        if low[node] == order[node]:
            component = path[path.index(node) :]
            del path[path.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in graph:
        if node not in order:
            visit(node)
    return found


def our_imports() -> dict[str, set[str]]:
    return {
        module_name(path): {
            module
            for module, _ in imports(path)
            if module in MODULES and module != module_name(path)
        }
        for path in FILES
    }


ROOMS = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}


def test_the_map_of_rooms_in_contributing_is_true():
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| .* \| ([\w, ]*) ?\| (.*) \|$", text, flags=re.MULTILINE)
    written = {name: set(re.findall(r"\w+", imported)) for name, imported, _ in rows}
    assert written == {name: MAY_IMPORT[name] & ROOMS for name in ROOMS}, (
        "CONTRIBUTING.md, the column 'may import'"
    )
    for name, _, files in rows:
        for file in re.findall(r"`([^`]+)`", files):
            assert (PACKAGE / name / file).exists(), f"CONTRIBUTING.md: {name}/{file}"


def test_imports_point_down_in_the_picture_of_development():
    picture = (REPOSITORY / "docs" / "development.md").read_text().split("```")[1]
    line_of = {
        name: number for number, line in enumerate(picture.splitlines()) for name in line.split()
    }
    assert set(line_of) == ROOMS
    for name in ROOMS:
        for other in MAY_IMPORT[name] & ROOMS - {name}:
            assert line_of[other] > line_of[name], f"docs/development.md: {name} imports {other}"


def test_every_room_has_its_rule():
    assert {room(module_name(path)) for path in FILES if PACKAGE in path.parents} == set(MAY_IMPORT)


def refused(path: Path) -> Iterator[str]:
    """Every import of a file that its room may not have."""
    here = room(module_name(path))
    for module, line in imports(path):
        top = module.split(".")[0]
        if module == "commlens":
            # the scenarios are user programs: only they import the public names
            allowed = here == "scenarios"
        elif top == "commlens":
            allowed = room(module) in MAY_IMPORT[here] | {here}
        else:
            allowed = top != "torch" or here in TORCH_USERS
        if not allowed:
            yield f"{path}:{line}: {here} may not import {module}"


def test_a_file_imports_only_what_its_room_may():
    found = [text for path in FILES if PACKAGE in path.parents for text in refused(path)]
    assert not found, "\n".join(found)


# Still to be cut; nothing may be added.
KNOWN_FILE_CIRCLES: list[set[str]] = []
KNOWN_ROOM_CIRCLES: list[set[str]] = []


def test_no_circle_between_files():
    for circle in circles(our_imports()):
        assert any(
            {name.removeprefix("commlens.") for name in circle} <= known
            for known in KNOWN_FILE_CIRCLES
        ), circle


def test_no_circle_between_rooms():
    rooms: dict[str, set[str]] = {}
    for module, others in our_imports().items():
        if module.startswith("commlens"):
            rooms.setdefault(room(module), set()).update(
                room(other) for other in others if room(other) != room(module)
            )
    for circle in circles(rooms):
        assert any(set(circle) <= known for known in KNOWN_ROOM_CIRCLES), circle


def test_no_file_looks_up_our_own_modules():
    """A look-up in ``sys.modules`` is an import that the tests above cannot see."""
    look_up = re.compile(r"""sys\.modules(\.get\(|\[)\s*["']commlens""")
    found = [str(path) for path in FILES if look_up.search(path.read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", STANDARD_LIBRARY_ONLY)
def test_what_a_worker_always_loads_is_standard_library_only(name):
    # the last: inside commlens_autoload.start
    allowed = {
        "commlens.errors",
        "commlens.launchers",
        "commlens.blackbox.layout",
        "commlens.model.number_checks",
        "commlens.model.steps",
        "commlens.launch.recording",
    }
    for module, line in imports(SOURCE / name):
        if name == "commlens/config.py" and module == "yaml":
            continue  # only when there is a file to read
        assert module.split(".")[0] in sys.stdlib_module_names or module in allowed, (
            f"{name}:{line}: {module}"
        )


def test_the_autoload_module_has_nothing_at_its_top_that_could_fail():
    body = ast.parse((SOURCE / "commlens_autoload.py").read_text()).body
    assert [type(node).__name__ for node in body] == [
        "Expr",
        "Import",
        "Import",
        "Import",
        "FunctionDef",
    ]


def test_a_watcher_at_rest_needs_no_numpy():
    """It runs beside each job, and diagnoses only when something is wrong."""
    files = {module_name(path): path for path in FILES}
    todo, seen = ["commlens.watch.watcher"], set[str]()
    while todo:
        module = todo.pop()
        if module not in seen:
            seen.add(module)
            todo += imported_at_the_top(files[module]) if module in files else ()
            todo += [module.rpartition(".")[0]] if "." in module else ()
    assert "commlens.diagnosis.live" in seen
    assert not {"numpy", "torch", "rich", "opentelemetry"} & seen
