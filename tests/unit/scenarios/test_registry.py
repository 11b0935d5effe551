"""The list of scenarios."""

from __future__ import annotations

import pytest
from more_scenarios import SCENARIOS, find

from commlens.errors import CommandError
from commlens.scenarios.registry import Ending


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.name)
def test_each_tells_the_truth_for_its_worlds(scenario) -> None:
    assert find(scenario.name) is scenario
    for size in scenario.worlds:
        truth = scenario.truth(size)
        assert truth.kinds and set(truth.culprits) <= set(range(size))
        assert (truth.kinds == ("healthy",)) == (scenario.fault is None)
        assert scenario.fault is not None or scenario.ending is Ending.ENDS


def test_an_unknown_one_is_refused_with_a_suggestion() -> None:
    with pytest.raises(CommandError, match="Did you mean data-loader"):
        find("data-loadre")
