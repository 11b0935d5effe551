"""``make schemas``: the published JSON schemas, generated from the types that they describe.

A property's description is the comment behind or above its field, a definition's is the docstring
of its class.
"""

from __future__ import annotations

import ast
import functools
import inspect
import io
import json
import re
import tokenize
from pathlib import Path
from typing import Any, get_args

import msgspec

import commlens.reports
from commlens.diagnosis.views import dump_diff
from commlens.model import cause, network, trace, trace_changes, trace_summary, verdict
from commlens.model.collective import Frame, ProcessGroup

FOLDER = Path(commlens.reports.__file__).parent / "schemas"
ABOUT: dict[str, tuple[type[msgspec.Struct], str]] = {
    "verdict": (
        verdict.Verdict,
        "Output of `commlens diagnose --json`. The top level repeats the first finding.",
    ),
    "movement": (dump_diff.Movement, "Output of `commlens compare --json` for two dumps of a job."),
    "comparison": (
        trace_changes.TraceComparison,
        "Output of `commlens compare --json` for two traces.",
    ),
    "trace-summary": (
        trace_summary.Summary,
        "Output of `commlens view --json` for a trace; for several, a list of these.",
    ),
    "trace": (
        trace.TraceData,
        (
            "A trace file: the collectives of one rank. A property that an event omits has its"
            " default."
        ),
    ),
}
VERSIONS = {"verdict": 2}
"""Versions of the schemas; 1 if not listed."""
STABLE = (
    "Later versions of commlens may add properties within version {} only by publishing them here."
)
ALL_REQUIRED = {
    *(kind for kind, _ in ABOUT.values()),
    *get_args(cause.AnyCause),
    cause.Doing,
    verdict.Finding,
    dump_diff.Moved,
}
"""Types whose JSON always has every property. In the others, properties with a default may be
absent.
"""
TYPES = {
    kind.__name__: kind
    for module in (cause, dump_diff, network, trace, trace_changes, trace_summary, verdict)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
} | {"Frame": Frame, "ProcessGroup": ProcessGroup}


@functools.cache
def read_module(path: str) -> tuple[list[str], dict[int, str], dict[str, ast.ClassDef]]:
    """Lines of a module, its comments by line, and its classes by name: read once, since
    ``inspect.getsource`` parses the whole module for each class.
    """
    source = Path(path).read_text(encoding="utf-8")
    by_line = {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    return source.splitlines(), by_line, classes


def comments(kind: type) -> dict[str, str]:
    """The comment behind or above each field of a class, as a sentence."""
    lines, by_line, classes = read_module(inspect.getfile(kind))
    found: dict[str, str] = {}
    for node in classes[kind.__name__].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            above = node.lineno - 1
            while lines[above - 1].lstrip().startswith("#"):
                above -= 1
            comment = by_line.get(node.end_lineno or 0) or " ".join(
                by_line[line] for line in range(above + 1, node.lineno)
            )
            if comment:
                found[node.target.id] = sentence(comment)
    return found


def sentence(comment: str) -> str:
    text = comment[:1].upper() + comment[1:].replace("None", "null")
    text = text.replace("None", "null") if text.startswith("None") else text
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def schema(name: str) -> dict[str, Any]:
    """One schema."""
    root, description = ABOUT[name]
    (_,), definitions = msgspec.json.schema_components([root], ref_template="#/$defs/{name}")
    for title, definition in definitions.items():
        definition.pop("title")
        if "description" in definition:
            # as Python 3.13 compiles docstrings
            text = inspect.cleandoc(definition["description"])
            definition["description"] = re.sub(r"(?<!\n)\n(?!\n)", " ", text)
        if title not in TYPES:
            continue  # an enum
        described: dict[str, str] = {}
        for kind in reversed(TYPES[title].__mro__):
            if issubclass(kind, msgspec.Struct) and kind is not msgspec.Struct:
                described |= comments(kind)
        for key, about in definition["properties"].items():
            if key in described:
                about["description"] = described[key]
        if TYPES[title] in ALL_REQUIRED:
            definition["required"] = list(definition["properties"])
        definition["additionalProperties"] = False
    whole = definitions.pop(root.__name__)
    version = VERSIONS.get(name, 1)
    whole["properties"]["schema"] = {"const": f"commlens.{name}/{version}"}
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:commlens:{name}:{version}",
        "title": f"commlens {name.replace('-', ' ')}, version {version}",
    }
    return (
        head
        | whole
        | {
            "description": f"{description} {STABLE.format(version)}",
            "$defs": dict(sorted(definitions.items())),
        }
    )


def file_of(name: str) -> Path:
    return FOLDER / f"{name}-{VERSIONS.get(name, 1)}.schema.json"


def content_of(name: str) -> str:
    return json.dumps(schema(name), indent=2) + "\n"


if __name__ == "__main__":
    for name in ABOUT:
        file_of(name).write_text(content_of(name), encoding="utf-8")
