"""Read the JSON of CommDebugMode's ``generate_json_dump``, torch's or commlens's: counts by module,
and ops if listed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import msgspec

from commlens.errors import FormatError
from commlens.model.collective import ProcessGroup
from commlens.model.ops import api_wire_op
from commlens.model.trace import (
    Coverage,
    Depth,
    Phase,
    TraceData,
    TracedModule,
    TracedOp,
    TracedParameter,
    TraceEvent,
)

_UNKNOWN: Final = (
    "This trace is from CommDebugMode's JSON, which holds only counts by module: bytes, groups,"
    " order, times, steps, owners, causes and lines of code are unknown. Counts of a module that"
    " are not its children's are taken as its own."
)


class _Op(msgspec.Struct):
    name: str
    input_shape: list[Any] = []
    input_sharding: list[Any] = []
    device_mesh: Any = ""


class _Module(msgspec.Struct):
    fqn: str
    children: list[_Module]
    module_type: str = ""
    parameters: list[tuple[str, Any]] = []
    collectives_forward: list[tuple[str, int]] = []
    collectives_backward: list[tuple[str, int]] = []
    # commlens only; torch includes them in collectives_backward
    collectives_checkpointing: list[tuple[str, int]] = []
    collectives_optimizer: list[tuple[str, int]] = []  # commlens only
    collectives_unclassified: list[tuple[str, int]] = []
    operations_forward: list[_Op] = []
    operations_backward: list[_Op] = []
    operations_checkpointing: list[_Op] = []
    operations_optimizer: list[_Op] = []  # commlens only


def convert(content: bytes, path: Path) -> TraceData:
    """Return a trace with one summarised event per module, phase and op."""
    try:
        root = msgspec.json.decode(content, type=_Module)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise FormatError(
            f"{path} looks like CommDebugMode's JSON but is damaged: {str(error).rstrip('.')}."
        ) from None
    data = TraceData(
        groups=[ProcessGroup("unknown", (), "unknown")], coverage=Coverage(blind=[_UNKNOWN])
    )
    # A module that was called several times is repeated once per call, with all its children. The
    # first copy is complete.
    waiting: list[tuple[_Module, int | None]] = [(root, None)]
    seen: set[str] = set()
    while waiting:
        module, parent = waiting.pop()
        if module.fqn in seen:
            continue
        seen.add(module.fqn)
        site = None if module.fqn == "Global" else module.fqn
        index: int | None = None
        if site is not None:
            index = len(data.modules)
            kind = module.module_type.removeprefix("class '").removesuffix("'")
            parameters = tuple(
                TracedParameter(name, str(placements)) for name, placements in module.parameters
            )
            data.modules.append(
                TracedModule(path=site, type=kind, parent=parent, parameters=parameters)
            )
        children = list({child.fqn: child for child in reversed(module.children)}.values())
        _collectives(data, module, children, site)
        _ops(data, module, site)
        waiting += [(child, index) for child in children]
    data.coverage.dispatched = data.coverage.recorded = sum(event.count for event in data.events)
    data.coverage.unclassified = sum(event.count for event in data.events if not event.classified)
    return data


def _collectives(
    data: TraceData, module: _Module, children: list[_Module], site: str | None
) -> None:
    for phase, field in (
        (Phase.FORWARD, "collectives_forward"),
        (Phase.BACKWARD, "collectives_backward"),
        (Phase.RECOMPUTATION, "collectives_checkpointing"),
        (Phase.OPTIMIZER, "collectives_optimizer"),
        (None, "collectives_unclassified"),
    ):
        below: dict[str, int] = {}
        for child in children:
            for name, number in getattr(child, field):
                below[name] = below.get(name, 0) + number
        for name, number in getattr(module, field):
            own = number - below.get(name, 0)
            if own <= 0:
                continue
            # CommDebugMode counts everything outside modules as forward, even in the optimizer.
            known = None if site is None and phase is Phase.FORWARD else phase
            data.events.append(
                TraceEvent(
                    sequence=len(data.events) + 1,
                    op=api_wire_op(name),
                    api=name,
                    phase=known,
                    group=0,
                    site=site,
                    count=own,
                )
            )


def _ops(data: TraceData, module: _Module, site: str | None) -> None:
    for phase, ops in (
        (Phase.FORWARD, module.operations_forward),
        (Phase.BACKWARD, module.operations_backward),
        (Phase.RECOMPUTATION, module.operations_checkpointing),
        (Phase.OPTIMIZER, module.operations_optimizer),
    ):
        for op in ops:
            data.depth = Depth.OPS
            data.ops.append(
                TracedOp(
                    name=op.name,
                    before_sequence=0,
                    phase=phase,
                    site=site,
                    input_shapes=tuple(
                        tuple(map(int, re.findall(r"\d+", str(shape)))) for shape in op.input_shape
                    ),
                    input_placements=tuple(map(str, op.input_sharding)),
                    mesh=str(op.device_mesh) if op.device_mesh else None,
                )
            )
