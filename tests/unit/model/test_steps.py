"""Ranges of optimizer steps."""

from __future__ import annotations

import pytest

from commlens.model.steps import ALL, parse_steps


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("2", range(2, 3)),
        ("2:4", range(2, 4)),
        (" :4 ", range(4)),
        ("2:", range(2, ALL.stop)),
        (":", ALL),
    ],
)
def test_a_range(text: str, steps: range) -> None:
    assert parse_steps(text) == steps


@pytest.mark.parametrize("text", ["", "x", "-1", "-1:2", "4:2", "2:2", "1:2:3", "1-3", "9" * 5000])
def test_what_is_no_range(text: str) -> None:
    with pytest.raises(ValueError):
        parse_steps(text)
