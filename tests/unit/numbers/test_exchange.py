"""The exchange of reports, at the end of a job."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from commlens.model.numbers import CheckId
from commlens.model.verdict import Verdict
from commlens.numbers import exchange
from commlens.numbers.exchange import Collector, Exchange
from commlens.numbers.inspection import Inspection
from commlens.numbers.measuring import Named
from commlens.numbers.meeting import SharedMemory
from commlens.numbers.replicas import Replicas

STEP_30 = CheckId("optimizer 1", 30)
STEP_31 = CheckId("optimizer 1", 31)

pytestmark = pytest.mark.timeout(60)


class World:
    """A default group."""


class Ranks:
    """The exchanges of three ranks."""

    def __init__(self, folder: Path) -> None:
        self.verdicts: list[Verdict] = []
        self.world = World()
        self.of = [
            Exchange(SharedMemory(folder, rank), rank, range(3), self.verdicts.append, self.world)
            for rank in range(3)
        ]

    def send(self, check: CheckId, values: dict[int, float]) -> None:
        for rank, value in values.items():
            kept_by = (Replicas((0, 1, 2), "equal"),)
            tensor = Named("parameter", "weight", torch.full((4,), value), kept_by)
            self.of[rank].send(check, Inspection([tensor]))

    def close(self, ranks: Sequence[int]) -> float:
        """Leave, at the same time. Return how long rank 0, or the first, took."""
        others = [threading.Thread(target=self.of[rank].close) for rank in ranks[1:]]
        for each in others:
            each.start()
        began = time.monotonic()
        self.of[ranks[0]].close()
        took = time.monotonic() - began
        for each in others:
            each.join()
        return took


@pytest.fixture
def ranks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Ranks:
    caplog.set_level(logging.WARNING, "commlens")
    return Ranks(tmp_path)


def test_the_last_line_says_what_was_compared(
    ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    ranks.send(STEP_30, {0: 1.0, 1: 1.0, 2: 2.0})
    ranks.close([0, 1, 2])
    assert [each.culprits for each in ranks.verdicts] == [[2]]
    assert caplog.messages == [
        "commlens: compared 1 tensor on 3 ranks after step 30: a difference was found at step 30"
    ]


def test_a_report_that_comes_after_the_last_one_of_its_rank_counts(tmp_path: Path) -> None:
    class Overtaken(SharedMemory):
        """Gives the newest report first, alone, as a listing of a folder that is written may."""

        def take(self) -> list[bytes]:
            waiting.extend(super().take())
            return [waiting.pop()] if waiting else []

    waiting: list[bytes] = []
    for rank in range(2):
        exchange = Exchange(SharedMemory(tmp_path, rank), rank, [2], lambda _: None, World())
        kept_by = (Replicas((0, 1), "equal"),)
        tensor = Named("parameter", "weight", torch.full((4,), float(rank)), kept_by)
        exchange.send(STEP_30, Inspection([tensor]))
        exchange.close()
    verdicts: list[Verdict] = []
    collector = Collector(Overtaken(tmp_path, 0), range(2), verdicts.append)
    for now in range(4):
        collector.poll(float(now))
    assert [each.findings[0].cause.ranks for each in verdicts] == [[0, 1]]  # type: ignore[union-attr]


def test_ranks_with_other_numbers_of_steps_do_not_wait_for_each_other(
    ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    ranks.send(STEP_30, {0: 1.0})
    ranks.send(STEP_31, {1: 1.0, 2: 2.0})
    assert ranks.close([0, 1, 2]) < 2.5
    assert [each.culprits for each in ranks.verdicts] == [[]], "of two, none is blamed"
    assert "on 2 ranks after step 31" in caplog.messages[-1]


def test_a_rank_that_takes_no_part_is_not_waited_for(
    ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    ranks.send(STEP_30, {0: 1.0, 1: 1.0})
    assert ranks.close([0, 1, 2]) < 2.5
    assert ranks.verdicts == []
    assert caplog.messages[-1].endswith("on 2 ranks after step 30: no difference was found")


def test_a_rank_that_never_ends_delays_the_end_for_a_while(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "_AT_END_S", 0.5)
    ranks.send(STEP_30, {0: 1.0, 1: 1.0})
    assert 0.4 < ranks.close([0, 1]) < 3.5
    ranks.close([2])


def test_what_comes_after_the_end_is_not_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    late = Exchange(SharedMemory(tmp_path / "gone", 1), 1, range(2), lambda _: None, world)
    late.is_ending = True
    late.send(STEP_30, Inspection())
    late.close()
    assert caplog.messages == []


def test_the_answer_at_the_end_of_the_job_names_no_time_that_has_not_passed(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(exchange, "_AT_END_S", 0.3)
    check = CheckId("commlens.check_numbers()", 1, wait_s=60.0, ranks=(0, 1))
    ranks.send(check, {0: 1.0})
    ranks.close([0])
    (line,) = [each for each in caplog.messages if "check_numbers" in each]
    assert "rank 1 did not reach commlens.check_numbers() before rank 0 ended" in line
    ranks.close([1, 2])
