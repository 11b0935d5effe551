"""The setting ``check_numbers``."""

from __future__ import annotations

import pytest

from commlens.model.number_checks import NumberChecks, parse_number_checks


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("on", NumberChecks(100)),
        ("1", NumberChecks(100)),
        ("every 20 steps", NumberChecks(20)),
        ("every 1 step", NumberChecks(1)),
        ("Every 7", NumberChecks(7)),
        ("50", NumberChecks(50)),
        ("nan", NumberChecks(100, nan=True)),
        ("every-op", NumberChecks(1, every_op=True)),
        ("every-op,every 5 steps", NumberChecks(5, every_op=True)),
        ("tolerance=1e-6", NumberChecks(100, tolerance=1e-6)),
        ("every 5 steps, nan, tolerance=0.01", NumberChecks(5, True, tolerance=0.01)),
    ],
)
def test_accepted(text: str, expected: NumberChecks) -> None:
    assert parse_number_checks(text) == expected
    assert parse_number_checks(str(expected)) == expected


@pytest.mark.parametrize(
    "text", ["", "sometimes", "every 0 steps", "every -3", "tolerance=x", "tolerance=2", "nan,"]
)
def test_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_number_checks(text)
