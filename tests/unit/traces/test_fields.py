"""Fields by which traces are filtered."""

from __future__ import annotations

from traces import trace

from commlens.traces.fields import FIELDS


def test_every_field_filters_by_what_it_counts():
    for name in FIELDS:
        counts = trace().counts(by=name)
        assert sum(counts.values()) == 32
        if name == "cause":
            continue  # counted in words
        for value, number in counts.items():
            found = trace().filter(**{name: value}).calls
            assert found == number or (name == "module" and found >= number)
