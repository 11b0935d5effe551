"""Holds verdicts to their published schema. ``jsonschema.validate`` checks the schema itself in
each call, which takes a hundred times longer than the verdict; a test of the reports checks it once.
"""

from __future__ import annotations

import jsonschema
import msgspec

from commlens.model.verdict import Verdict
from commlens.reports.json_report import schema

_VALIDATOR = jsonschema.Draft202012Validator(schema())


def hold_to_schema(verdict: Verdict) -> None:
    """Raise an error unless the verdict's JSON follows the schema."""
    _VALIDATOR.validate(msgspec.json.decode(verdict.to_json()))
