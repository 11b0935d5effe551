"""The fields by which collectives are filtered and counted.

``trace.filter(module="layers.0", phase=["forward", "backward"])`` keeps the events that match one
wanted value of each of the two fields: :func:`matching` looks up ``FIELDS["module"]`` and
``FIELDS["phase"]``, and calls their ``matches``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from commlens.errors import SelectionError
from commlens.model.collective import ProcessGroup
from commlens.model.ops import WIRE_OPS
from commlens.model.steps import parse_steps
from commlens.model.trace import Phase, TraceData, TraceEvent
from commlens.traces import wording

Getter = Callable[[ProcessGroup, TraceEvent], Any]
Matcher = Callable[[ProcessGroup, TraceEvent, Any], bool]


@dataclass(frozen=True)
class Field:
    """How to read a field from an event and its group, and whether an event matches a wanted
    value.
    """

    get: Getter
    matches: Matcher


def path_matches(path: str | None, wanted: str) -> bool:
    """Match a module's path to ``wanted`` or below it, with or without the root's class name; ``*``
    matches one part.
    """
    if path is None:
        return False
    parts, asked = path.split("."), wanted.split(".")
    return any(
        len(parts) - start >= len(asked)
        and all(fnmatchcase(part, want) for part, want in zip(parts[start:], asked, strict=False))
        for start in (0, 1)
    )


def _equal(get: Getter) -> Field:
    return Field(get, lambda group, event, wanted: bool(get(group, event) == wanted))


def _module(group: ProcessGroup, event: TraceEvent, wanted: Any) -> bool:
    return path_matches(event.site, wanted) if isinstance(wanted, str) else event.site == wanted


def _mesh_dim(group: ProcessGroup, event: TraceEvent, wanted: Any) -> bool:
    """Match a mesh dimension; for a group without a mesh dimension, its name in tables, such as
    ``default``.
    """
    return bool(wanted == group.mesh_dim) or (
        group.mesh_dim is None and wanted is not None and wanted == wording.label(group)
    )


def _group(group: ProcessGroup, event: TraceEvent, wanted: Any) -> bool:
    return wanted in (wording.label(group), group.label, group.name, group.description) or (
        isinstance(wanted, tuple) and wanted == group.ranks
    )


def _owner(group: ProcessGroup, event: TraceEvent, wanted: Any) -> bool:
    owner = event.owner
    if owner is None or not isinstance(wanted, str):
        return bool(owner == wanted)
    return wanted in (
        owner.library,
        owner.name,
        f"{owner.library} {owner.name}",
        *owner.parameters,
    ) or path_matches(owner.name, wanted)


def _cause(group: ProcessGroup, event: TraceEvent, wanted: Any) -> bool:
    cause = event.cause
    if cause is None or not isinstance(wanted, str):
        return bool(cause == wanted)
    change = wording.cause_words(cause)
    return (
        wanted == ("implicit" if cause.implicit else "explicit")
        or (
            cause.op is not None
            and wanted in (cause.op, cause.op.rsplit(".", 1)[0], wording.short_op(cause.op))
        )
        or wanted in (cause.before, cause.after, f"{cause.before} -> {cause.after}")
        or ("->" in wanted and wanted in change)
    )


def _source(group: ProcessGroup, event: TraceEvent, wanted: Any) -> bool:
    frame = event.source
    if frame is None or not isinstance(wanted, str):
        return bool(frame == wanted)
    full = f"{frame.file}:{frame.line}"
    return wanted in (frame.function, event.through) or any(
        text == wanted or text.endswith("/" + wanted) for text in (full, frame.file)
    )


def _step(group: ProcessGroup, event: TraceEvent, wanted: Any) -> bool:
    last = event.step if event.last_step is None else event.last_step
    if isinstance(wanted, range):
        return event.step in wanted and last in wanted and (wanted.step == 1 or event.step == last)
    return bool(event.step == wanted == last)


FIELDS: Final[dict[str, Field]] = {
    "op": _equal(lambda group, event: event.op),
    "phase": Field(
        lambda group, event: None if event.phase is None else event.phase.value,
        lambda group, event, wanted: event.phase is wanted,
    ),
    "mesh_dim": Field(lambda group, event: group.mesh_dim, _mesh_dim),
    "group": Field(lambda group, event: wording.label(group), _group),
    "module": Field(lambda group, event: event.site, _module),
    "call": _equal(lambda group, event: event.call),
    "microbatch": _equal(lambda group, event: event.microbatch),
    "owner": Field(
        lambda group, event: (
            f"{event.owner.library} {event.owner.name}".strip() if event.owner else None
        ),
        _owner,
    ),
    "cause": Field(
        lambda group, event: None if event.cause is None else wording.cause_words(event.cause),
        _cause,
    ),
    "source": Field(lambda group, event: event.source.where if event.source else None, _source),
    "through": _equal(lambda group, event: event.through),
    "api": _equal(lambda group, event: event.api),
    "dtype": _equal(lambda group, event: event.dtype),
    "step": Field(lambda group, event: event.step, _step),
    "sequence": _equal(lambda group, event: event.sequence),
    "input_bytes": _equal(lambda group, event: event.input_bytes),
    "output_bytes": _equal(lambda group, event: event.output_bytes),
    "wire_bytes": _equal(lambda group, event: event.wire_bytes),
    "group_size": _equal(lambda group, event: len(group.ranks)),
    "ranks": _equal(lambda group, event: group.ranks),
    "reduce_op": _equal(lambda group, event: event.reduce_op),
    "root": _equal(lambda group, event: event.root),
    "peer": _equal(lambda group, event: event.peer),
    "tag": _equal(lambda group, event: event.tag),
    "asynchronous": _equal(lambda group, event: event.asynchronous),
    "thread": _equal(lambda group, event: event.thread),
    "members": _equal(lambda group, event: event.members),
}


def field(name: str) -> Field:
    """Return a field by its name."""
    if name not in FIELDS:
        aliases = {
            "site": "module",
            "mesh": "mesh_dim",
            "dim": "mesh_dim",
            "line": "source",
            "bytes": "wire_bytes",
            "size": "wire_bytes",
        }
        hint = _hint(aliases.get(name, name), FIELDS, f"The fields are {', '.join(FIELDS)}.")
        raise SelectionError(f"A collective has no field {name!r}. {hint}")
    return FIELDS[name]


def _hint(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return a question with the known name that is most similar; ``otherwise`` if none is."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {close[0]!r}?" if close else otherwise


def wanted_values(name: str, value: Any) -> list[Any]:
    """Return the wanted values as a list, each in the form that events use.

    Raises:
        SelectionError: unknown phase, or not a step.
    """
    alternatives = (
        list(value)
        if isinstance(value, (list, set, frozenset))
        or (isinstance(value, tuple) and name != "ranks")
        else [value]
    )
    if name == "phase":
        return [_phase(item) for item in alternatives]
    if name == "step":
        return [_steps(item) for item in alternatives]
    return alternatives


def _phase(value: Any) -> Any:
    if value is None or isinstance(value, Phase) or callable(value) or value == "unclassified":
        return None if value == "unclassified" else value
    try:
        return Phase(value)
    except ValueError:
        names = [*(phase.value for phase in Phase), "unclassified"]
        hint = _hint(str(value), names, f"The phases are {', '.join(names)}.")
        raise SelectionError(f"There is no phase {value!r}. {hint}") from None


def _steps(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_steps(value)
    except ValueError:
        raise SelectionError(f"{value!r} is not a step or a range of steps such as 2:4.") from None


def check_exists(traces: Sequence[TraceData], name: str, wanted: Any) -> None:
    """Check that a wanted module, group, op or phase exists in the program of one of the traces,
    whether or not it communicated.

    Raises:
        SelectionError: it does not; the message names similar ones.
    """
    if name not in _EXISTING:
        return
    what, known_of, matches = _EXISTING[name]
    known = list(dict.fromkeys(item for data in traces for item in known_of(data)))
    for value in wanted_values(name, wanted):
        if (
            not isinstance(value, str)
            or isinstance(value, Phase)
            or any(matches(item, value) for item in known)
        ):
            continue
        # a module's path is also meant without the model's class
        below = [path.partition(".")[2] for path in known if name == "module" and "." in path]
        there = f"There are {wording.some_of(known, 12)}" if known else "There is none at all."
        hint = _hint(value, dict.fromkeys([*known, *below]), there)
        raise SelectionError(
            f"{'The trace has' if len(traces) == 1 else 'The traces have'} no {what} {value!r}."
            f" {hint}"
        )


def _known_modules(data: TraceData) -> list[str]:
    sites = (event.site for event in data.events if event.site is not None)
    paths = [
        *(path for module in data.modules for path in (module.path, *module.other_paths)),
        *sites,
    ]
    return list(dict.fromkeys(prefix for path in paths for prefix in wording.prefixes(path)))


def _known_groups(data: TraceData) -> list[str]:
    names = (
        name
        for group in data.groups
        for name in (wording.label(group), group.label, group.name, group.description)
    )
    return list(dict.fromkeys(name for name in names if name))


_EXISTING: Final[
    dict[str, tuple[str, Callable[[TraceData], list[str]], Callable[[str, str], bool]]]
] = {
    "module": ("module", _known_modules, path_matches),
    "group": ("group", _known_groups, str.__eq__),
    "mesh_dim": (
        "mesh dimension",
        lambda data: list(dict.fromkeys(map(wording.label, data.groups))),
        str.__eq__,
    ),
    "op": (
        "op",
        lambda data: sorted({*WIRE_OPS.values(), *(event.op for event in data.events)}),
        str.__eq__,
    ),
}
"""By field: the field in words, the values that exist in a trace, and whether one of them is meant
by a wanted value.
"""


def values_in(data: TraceData, name: str, wanted: Any) -> list[Any]:
    """Return the wanted values, as :func:`wanted_values` does, and the paths under which shared
    modules are recorded that also have a wanted path.
    """
    values = wanted_values(name, wanted)
    if name == "module":
        paths = [path for path in values if isinstance(path, str)]
        values += [
            module.path
            for module in data.modules
            if any(path_matches(other, path) for other in module.other_paths for path in paths)
        ]
    return values


def matching(data: TraceData, wanted: dict[str, Any]) -> list[TraceEvent]:
    """Return the events that match one wanted value of every field. A callable receives the field's
    value.
    """
    tests = [(field(name), values_in(data, name, value)) for name, value in wanted.items()]

    def holds(test: Field, values: Iterable[Any], event: TraceEvent) -> bool:
        group = data.group_of(event)
        return any(
            (
                bool(value(test.get(group, event)))
                if callable(value)
                else test.matches(group, event, value)
            )
            for value in values
        )

    return [
        event for event in data.events if all(holds(test, values, event) for test, values in tests)
    ]
