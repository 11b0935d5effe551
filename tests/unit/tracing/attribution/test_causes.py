"""Tests of src/commlens/tracing/attribution/causes.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from commlens.model.trace import Redistribution
from commlens.tracing.attribution.causes import Causes


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
