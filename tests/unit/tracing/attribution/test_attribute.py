"""The phase of a collective, where the stack knows more than the modules and autograd show."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from commlens.model.trace import Phase
from commlens.tracing.attribution.attribute import Attribution
from commlens.tracing.attribution.modules import ModuleTracker
from commlens.tracing.attribution.stacks import StackInfo
from commlens.tracing.raw_event import RawEvent


@pytest.mark.parametrize(
    ("shown", "phase"),
    [
        (Phase.OPTIMIZER, Phase.OPTIMIZER),
        (Phase.RECOMPUTATION, Phase.RECOMPUTATION),
        (Phase.BACKWARD, Phase.BACKWARD),
        (None, None),  # C++ issues it, in a thread of its own
    ],
)
def test_outside_of_modules_the_stack_shows_the_phase(shown: Any, phase: Any) -> None:
    event: Any = RawEvent()
    event.args = SimpleNamespace(op="all_reduce", first_tensor=(4, "float32"))
    event.info = StackInfo(0, None, None, False)
    event.info.phase = shown
    Attribution(ModuleTracker()).attribute(event, None)
    assert (event.phase, event.path, event.owner, event.is_bucket) == (phase, None, None, False)
