"""The calls in which ranks wait."""

from __future__ import annotations

import pytest

from commlens.watch.open_waits import timeout_lead_s


@pytest.mark.parametrize(("timeout_s", "lead_s"), [(600, 15), (30, 3), (10, 2), (4, 1)])
def test_the_dump_is_made_shortly_before_the_timeout(timeout_s: float, lead_s: float) -> None:
    assert timeout_lead_s(timeout_s) == lead_s
