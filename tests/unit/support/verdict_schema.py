"""Holds verdicts to their published schema. ``jsonschema.validate`` checks the schema itself in
each call, which takes a hundred times longer than the verdict; a test of the reports checks it once.
"""

from __future__ import annotations

import jsonschema
import msgspec

from commlens.model.verdict import Verdict
from conftest import SOURCE

_SCHEMA = SOURCE / "commlens" / "reports" / "schemas" / "verdict-2.schema.json"
_VALIDATOR = jsonschema.Draft202012Validator(msgspec.json.decode(_SCHEMA.read_bytes()))


def hold_to_schema(verdict: Verdict) -> None:
    """Raise an error unless the verdict's JSON follows the schema."""
    _VALIDATOR.validate(msgspec.json.decode(verdict.to_json()))
