"""How often nodes look at each other's values."""

from __future__ import annotations

import pytest

from commlens.watch.nodes.periods import busy_period_s, rest_period_s


@pytest.mark.parametrize("count", [2, 600, 1250, 12_500])
def test_the_store_is_not_asked_more_often_the_more_nodes_there_are(count: int) -> None:
    assert count / busy_period_s(count) <= 5 * 512 + 1
    assert busy_period_s(count) >= 0.2
    assert rest_period_s(count) >= 1.0
