"""How often nodes look at each other's values."""

from __future__ import annotations

import pytest

from commlens.watch.nodes.periods import busy_period_s, lost_after_s, rest_period_s, rests_long


@pytest.mark.parametrize("count", [2, 600, 1250, 12_500])
def test_the_store_is_not_asked_more_often_the_more_nodes_there_are(count: int) -> None:
    assert count / busy_period_s(count) <= 5 * 512 + 1
    assert busy_period_s(count) >= 0.2
    assert count / rest_period_s(count) <= 625
    assert lost_after_s(count) >= max(5.0, 3 * rest_period_s(count))


def test_nodes_rest_as_long_as_ever_unless_they_are_many() -> None:
    assert rest_period_s(600) == 1.0 and lost_after_s(600) == 5.0
    assert not rests_long(1250) and rests_long(1300)
    assert rest_period_s(1250) == 2.0 < rest_period_s(1300)
