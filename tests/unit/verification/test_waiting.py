"""For how long a rank waits before a collective that it may issue before the others arrive."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commlens.verification.waiting import Waiting

S = 1_000_000_000


@pytest.mark.parametrize(
    ("waited_s", "had_a_core", "is_over"),
    [
        pytest.param(0.9, True, False, id="in time"),
        pytest.param(1.1, True, True, id="late"),
        pytest.param(1.1, False, False, id="it had no core"),
    ],
)
def test_a_rank_that_has_no_core_gets_its_chance_to_arrive_before_a_broadcast_is_issued(
    waited_s: float, had_a_core: bool, is_over: bool
) -> None:
    def is_over_of_clock(limit_ns: float, pids: list[int], passed_ns: float) -> bool:
        assert (limit_ns, pids) == (S, [12])
        return had_a_core and passed_ns > limit_ns

    peers: Any = SimpleNamespace(pids_here=lambda ranks: [10 + rank for rank in ranks])
    nothing: Any = None
    late: Any = SimpleNamespace(clock=lambda _: SimpleNamespace(is_over=is_over_of_clock))
    waiting = Waiting(Path(), nothing, nothing, peers, nothing, nothing, late)
    pending: Any = SimpleNamespace(absent=[2])
    found = waiting._goes_on(pending, [2], int(waited_s * S), S, releases=False)
    assert found == is_over
