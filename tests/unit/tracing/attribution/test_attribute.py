"""The phase of a collective, where the stack knows more than the modules and autograd show, and its
cause."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from commlens.model.trace import Phase, Redistribution
from commlens.tracing.attribution.attribute import Attribution, Causes
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


class Mesh:
    def __init__(self, text: str) -> None:
        self._text = text

    def __str__(self) -> str:
        return self._text


def cause_on(mesh: Mesh, causes: Causes) -> Redistribution | None:
    spec = SimpleNamespace(placements=("S(0)",), mesh=mesh)
    info: Any = SimpleNamespace(
        markers={"redistribution": ()}, explicit=True, values=lambda *_: (spec, spec, True)
    )
    return causes.find(info, None)


def test_a_mesh_at_the_address_of_an_earlier_one_is_told_from_it() -> None:
    causes, addresses = Causes(), set()
    for number in range(20):
        mesh = Mesh(f"mesh {number}")
        addresses.add(id(mesh))
        cause = cause_on(mesh, causes)
        assert cause is not None and cause.mesh == f"mesh {number}"
        assert cause_on(mesh, causes) is cause
        del mesh
    assert len(addresses) < 20
