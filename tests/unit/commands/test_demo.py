"""``commlens demo`` where not all of its scenarios can run."""

from __future__ import annotations

import dataclasses

import pytest

from commlens.commands import demo, main
from commlens.scenarios import DEFAULT, SCENARIOS


@pytest.fixture
def without_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with torch 2.6, whose ``fully_shard`` does not run on the CPU."""
    some = [
        (
            dataclasses.replace(each, impossible=lambda: "It needs a newer torch.")
            if each.name == DEFAULT
            else each
        )
        for each in SCENARIOS
    ]
    monkeypatch.setattr(demo, "SCENARIOS", some)
    monkeypatch.setattr(demo, "find", lambda name: next(each for each in some if each.name == name))


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_another_scenario_runs_in_place_of_the_default(
    world_size: int, without_the_default: None
) -> None:
    chosen = demo.first_possible(world_size)
    assert chosen.name != DEFAULT and chosen.fault is not None and world_size in chosen.worlds


def test_a_scenario_that_is_asked_for_by_name_runs_or_is_refused(
    without_the_default: None, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    assert main(["demo", DEFAULT]) == 2
    assert (
        f"The scenario {DEFAULT} cannot run here. It needs a newer torch."
        in capsys.readouterr().err
    )
