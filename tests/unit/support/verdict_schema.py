"""Holds verdicts to their published schema. ``jsonschema.validate`` checks the schema itself in
each call, which takes a hundred times longer than the verdict; a test of the reports checks it once.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

import jsonschema
import msgspec

from commlens.model.verdict import Verdict


def schema() -> dict[str, Any]:
    """Return the published schema of verdicts."""
    file = resources.files("commlens.reports").joinpath("schemas", "verdict-2.schema.json")
    return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])


_VALIDATOR = jsonschema.Draft202012Validator(schema())


def hold_to_schema(verdict: Verdict) -> None:
    """Raise an error unless the verdict's JSON follows the schema."""
    _VALIDATOR.validate(msgspec.json.decode(verdict.to_json()))
