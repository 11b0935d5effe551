"""Spans of time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from commlens.model.spans import common, length, union


@given(
    *[st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)).map(lambda s: (s[0], s[0] + s[1])))]
    * 2
)
def test_common_spans(first, second):
    one, other = union(first), union(second)
    moments = {m for b, e in first for m in range(b, e)} & {
        m for b, e in second for m in range(b, e)
    }
    assert {m for b, e in common(one, other) for m in range(b, e)} == moments
    assert length(common(one, other)) == len(moments)
