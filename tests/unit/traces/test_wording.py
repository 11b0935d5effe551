"""What a trace says in words."""

from __future__ import annotations

import pytest

from commlens.traces import wording


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("(Shard(dim=0),)", "Shard(0)"),
        ("(Shard(dim=0), Replicate())", "(Shard(0), Replicate())"),
        ("(Partial(sum),)", "Partial(sum)"),
    ],
)
def test_placements(text, shown):
    assert wording.placements(text) == shown


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (99_949, "99.9 kB"),
        (999_500, "1.0 MB"),
        (16_777_216, "16.8 MB"),
    ],
)
def test_sizes(amount, text):
    assert wording.size(amount) == text
