"""A launcher's children that are ranks."""

from __future__ import annotations

import pytest

from commlens.processes import process
from commlens.processes.process import Stat
from commlens.watch.roster import children_workers

OF_TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"}


def test_a_rank_that_ends_while_it_is_looked_at_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    states = iter("SZ")
    monkeypatch.setattr(process, "children", lambda _: [7])
    monkeypatch.setattr(process, "environment", lambda _: OF_TORCHRUN)
    monkeypatch.setattr(process, "read_stat", lambda _: Stat(100, next(states), 0.0))
    workers = children_workers(1)
    for _ in range(2):
        (worker,) = workers()
        assert (worker.rank, worker.pid, worker.start_ticks, worker.world_size) == (3, 7, 100, 4)
