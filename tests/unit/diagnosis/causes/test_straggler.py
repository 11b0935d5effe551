"""Where a slow rank spends its time, and what holds it back, as data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec
import pytest
from builders import SCRIPT
from paced_jobs import job
from paced_samples import late

from commlens.diagnosis.causes.straggler import StragglerCase, find_straggler
from commlens.model.cause import HotLine
from commlens.model.collective import Frame, Stack
from commlens.model.ranklog import RankLog
from commlens.speed.pace import SlowRanks

LOAD, MAIN = Frame(SCRIPT, 7, "load_batch"), Frame(SCRIPT, 30, "main")
SLOW = SlowRanks([2], cost=0.33, steps=50, step_s=0.153, no_cpu=0.0, no_cpu_others=0.0)


def straggler(
    logs: list[RankLog] | None = None,
    profiles: Mapping[int, Mapping[Stack, int]] | None = None,
    slow: SlowRanks = SLOW,
) -> StragglerCase:
    return find_straggler(slow, logs or job(4, 50, late), profiles or {}, range(4))


@pytest.mark.parametrize("how", ["wait", "cpp"])
def test_the_stretch_is_found(how: str) -> None:
    found = straggler(job(4, 50, late, how=how))
    stretch = found.cause.stretch
    assert stretch is not None and found.ends is not None
    assert [op.source and op.source.line for op in found.ends] == [20, 10]
    assert stretch.extra_s == pytest.approx(0.050, abs=0.002)


def test_records_alone_show_a_stretch() -> None:
    found = straggler()
    cause = found.cause
    assert (cause.kind, cause.why, cause.culprits, cause.victims) == (
        "straggler",
        "user-code",
        [2],
        [0, 1, 3],
    )
    assert (cause.cost, cause.held_back, cause.hot_line) == (0.33, None, None)
    assert cause.stretch is not None
    assert (cause.stretch.phase, cause.stretch.before_source) == (
        "before-the-backward",
        "train.py:10",
    )
    assert found.frame is not None and found.frame.where == "train.py:10"


@pytest.mark.parametrize(("there", "told"), [(2, True), (35, False)])
def test_a_line_in_which_the_other_rank_is_as_often_is_not_told(there: int, told: bool) -> None:
    profiles = {
        2: Counter({(LOAD, MAIN): 40, (MAIN,): 60}),
        0: Counter({(LOAD, MAIN): there, (MAIN,): 100 - there}),
    }
    cause = straggler(profiles=profiles).cause
    assert cause.hot_line == (HotLine("train.py:7", 0.4, 0, 0.02) if told else None)
    assert (cause.stretch is None) == told


def test_a_line_alone_is_told_and_is_no_place_to_look_at() -> None:
    found = straggler(profiles={2: Counter({(LOAD, MAIN): 40, (): 60})})
    assert found.cause.hot_line == HotLine("train.py:7", 0.4, None, 0.0)
    assert found.frame is None


@pytest.mark.parametrize(
    ("observed", "why", "share"),
    [
        ({"throttled_fraction": 0.4}, "throttled", 0.4),
        ({"memory_pressure": 25.0}, "memory-pressure", 0.25),
        ({"memory_pressure": 1.0}, "user-code", None),
    ],
)
def test_what_holds_the_process_back(
    observed: dict[str, float], why: str, share: float | None
) -> None:
    logs = job(4, 50, late)
    logs[2].observation = msgspec.structs.replace(logs[2].observation, **observed)
    cause = straggler(logs).cause
    assert (cause.why, cause.held_back) == (why, share)


def test_a_process_without_a_cpu() -> None:
    cause = straggler(slow=SLOW._replace(no_cpu=0.3, no_cpu_others=0.01)).cause
    assert (cause.why, cause.held_back) == ("no-cpu", 0.3)
