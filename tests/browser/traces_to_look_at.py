"""Traces for the pages: the small training of the unit tests, with strings that would like to be
markup, and long ones.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import msgspec

from commlens.model.trace import Depth, Phase, Redistribution, TraceData, TracedOp, TracedParameter
from conftest import REPOSITORY

HOSTILE = "<img src=x onerror=alert(1)>"


def _unit_traces() -> ModuleType:
    """tests/unit/support/traces.py, which stands on the path only when the unit tests are collected, too."""
    if "traces" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "traces", REPOSITORY / "tests" / "unit" / "support" / "traces.py"
        )
        assert spec is not None and spec.loader is not None
        module = sys.modules["traces"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["traces"]


def training(rank: int = 0, **options: object) -> TraceData:
    """Steps of an FSDP2 + tensor-parallel MLP, with parameters, DTensor ops and others."""
    data: TraceData = _unit_traces().training(rank, **options)
    mesh = "DeviceMesh((dp=2, tp=4), 'cpu')"
    for module in data.modules:
        if module.type.endswith("Linear"):
            module.parameters = (
                TracedParameter(
                    "weight", "(Shard(dim=0), Shard(dim=1))", (64, 64), "float32", 2048, mesh
                ),
            )
    data.depth = Depth.OPS
    data.ops = []
    for event in data.events:
        site, phase = event.site, event.phase
        if event.cause is not None and event.cause.op is not None:
            placements = (event.cause.before, "(Replicate(),)")
            data.ops.append(
                TracedOp(
                    event.cause.op,
                    event.sequence,
                    phase,
                    site,
                    ((16, 64), (64, 64)),
                    placements,
                    mesh,
                )
            )
            data.ops.append(TracedOp("aten.relu.default", event.sequence, phase, site, ((8, 64),)))
            data.ops.append(
                TracedOp(
                    "aten.detach.default",
                    event.sequence,
                    phase,
                    site,
                    ((8, 64),),
                    ("(Replicate(),)",),
                    mesh,
                )
            )
    return data


def hostile() -> TraceData:
    """The same with every string that a file can hold turned into markup."""
    data = training(layers=2, steps=1)
    data.script = data.torch_version = HOSTILE
    data.groups = [
        msgspec.structs.replace(group, description=HOSTILE, mesh_dim=f"{group.mesh_dim}{HOSTILE}")
        for group in data.groups
    ]
    data.coverage.blind = [HOSTILE]
    for module in data.modules:
        module.path, module.type = f"{module.path}{HOSTILE}", HOSTILE
        module.parameters = (TracedParameter(HOSTILE, HOSTILE, (1,), HOSTILE, 4, HOSTILE),)
    for event in data.events:
        event.op, event.api, event.dtype, event.through = (
            f"{event.op}{HOSTILE}",
            HOSTILE,
            HOSTILE,
            HOSTILE,
        )
        event.site = None if event.site is None else f"{event.site}{HOSTILE}"
        event.cause = Redistribution(HOSTILE, HOSTILE, HOSTILE, implicit=True, mesh=HOSTILE)
        if event.source is not None:
            event.source = type(event.source)(HOSTILE, event.source.line, HOSTILE)
        if event.owner is not None:
            event.owner = type(event.owner)(HOSTILE, HOSTILE, (HOSTILE,))
    data.ops = [
        TracedOp(HOSTILE, 1, Phase.FORWARD, data.modules[0].path, ((1,),), (HOSTILE,), HOSTILE)
    ]
    return data
