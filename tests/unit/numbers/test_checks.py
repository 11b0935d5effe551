"""Checks at a place of the user's choice, as one rank sees them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from commlens.model.numbers import CheckId
from commlens.numbers import checks
from commlens.numbers.exchange import Exchange
from commlens.numbers.inspection import Inspection
from commlens.numbers.meeting import SharedMemory


class World:
    """A default group."""


@pytest.mark.timeout(30)
def test_a_rank_that_has_stopped_comparing_does_not_blame_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    exchange = Exchange(SharedMemory(tmp_path / "gone", 1), 1, [0, 1], lambda _: None, world)
    check = CheckId("commlens.check_numbers()", 1, wait_s=60.0, ranks=(0, 1))
    with caplog.at_level(logging.WARNING, "commlens"):
        exchange.send(check, Inspection())
        verdict = exchange.verdict_on(check)
    exchange.close()
    assert verdict.kind == "undetermined"
    assert "rank 0" not in verdict.summary
    assert verdict.summary == "commlens has stopped comparing numbers; the log says why"
    assert ["commlens stops comparing" in each for each in caplog.messages] == [True]


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.timeout(30)
def test_a_check_of_all_ranks_waits_for_all_though_a_groups_check_came_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks.dist, "get_world_size", lambda: 4)
    made: list[Sequence[int]] = []

    def make(meeting: object, rank: int, ranks: Sequence[int], *_: object) -> SimpleNamespace:
        made.append(ranks)
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(checks, "Exchange", make)
    checks.exchange_of((0, 1))
    checks.finish()
    assert [list(ranks) for ranks in made] == [[0, 1, 2, 3]]
