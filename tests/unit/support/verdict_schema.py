"""Holds verdicts to their published schema. ``jsonschema.validate`` checks the schema itself in
each call, which takes a hundred times longer than the verdict; a test of the reports checks it once.
Even then most of the time of a test goes into it: so one verdict of each shape is validated.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from typing import Any

import jsonschema
import msgspec

from commlens.model.verdict import Verdict


def schema() -> dict[str, Any]:
    """Return the published schema of verdicts."""
    file = resources.files("commlens.reports").joinpath("schemas", "verdict-2.schema.json")
    return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])


SCHEMA = schema()
_VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
_KNOWN_SHAPES: set[bytes] = set()


def _choices(part: Any) -> Iterator[str]:
    """Yield the strings among which fields choose."""
    if isinstance(part, dict):
        yield from part.get("enum", ())
        yield part.get("const", "")
    for inner in part.values() if isinstance(part, dict) else part:
        if isinstance(inner, (dict, list)):
            yield from _choices(inner)


CHOICES = set(_choices(SCHEMA))
MOST = 3
"""No number and no length above this is a bound in the schema."""


def shape(part: Any) -> Any:
    """Return what of a verdict's JSON the schema looks at: texts are alike, and larger numbers, and
    parts of a list that have one shape.
    """
    match part:
        case dict():
            return {name: shape(value) for name, value in part.items()}
        case list():
            shapes: list[Any] = [min(len(part), MOST)]
            for each in map(shape, part):
                if each not in shapes:
                    shapes.append(each)
            return shapes
        case str():
            return part if part in CHOICES else ""
        case bool() | None:
            return part
    return type(part)(max(-1, min(part, MOST)))


def hold_to_schema(verdict: Verdict) -> None:
    """Raise an error unless the verdict's JSON follows the schema."""
    written = msgspec.json.decode(verdict.to_json())
    known = msgspec.json.encode(shape(written))
    if known not in _KNOWN_SHAPES:
        _VALIDATOR.validate(written)
        _KNOWN_SHAPES.add(known)
