"""Tests of src/commlens/check/rules.py."""

from commlens.check.rules import RULES
from commlens.model.ops import matches_by_tag


def test_the_rules_agree_with_those_of_the_diagnosis() -> None:
    for backend, rules in RULES.items():
        assert rules.backend == backend
        assert rules.meets_by_tag == matches_by_tag(backend)
