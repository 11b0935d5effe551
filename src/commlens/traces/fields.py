"""The fields by which collectives are filtered and counted."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from commlens.errors import SelectionError
from commlens.model.collective import ProcessGroup
from commlens.model.trace import Phase, TraceData, TraceEvent
from commlens.traces import wording

Getter = Callable[[ProcessGroup, TraceEvent], Any]
Matcher = Callable[[ProcessGroup, TraceEvent, Any], bool]


@dataclass(frozen=True)
class Field:
    """How to read a field from an event and its group, and whether an event matches a wanted value."""

    get: Getter
    matches: Matcher


def path_matches(path: str | None, wanted: str) -> bool:
    """Match a module's path to ``wanted`` or below it, with or without the root's class name; ``*`` matches one part."""
    if path is None:
        return False
    parts, asked = path.split("."), wanted.split(".")
    return any(
        len(parts) - start >= len(asked) and all(fnmatchcase(part, want) for part, want in zip(parts[start:], asked, strict=False))
        for start in (0, 1)
    )


def _equal(get: Getter) -> Field:
    return Field(get, lambda group, event, wanted: bool(get(group, event) == wanted))


def _module(group: ProcessGroup, event: TraceEvent, wanted: Any) -> bool:
    return path_matches(event.site, wanted) if isinstance(wanted, str) else event.site == wanted


def _group(group: ProcessGroup, event: TraceEvent, wanted: Any) -> bool:
    return wanted in (wording.label(group), group.label, group.name, group.description) or (
        isinstance(wanted, tuple) and wanted == group.ranks
    )


def _owner(group: ProcessGroup, event: TraceEvent, wanted: Any) -> bool:
    owner = event.owner
    if owner is None or not isinstance(wanted, str):
        return bool(owner == wanted)
    return wanted in (owner.library, owner.name, f"{owner.library} {owner.name}", *owner.parameters) or path_matches(owner.name, wanted)


def _cause(group: ProcessGroup, event: TraceEvent, wanted: Any) -> bool:
    cause = event.cause
    if cause is None or not isinstance(wanted, str):
        return bool(cause == wanted)
    change = wording.cause_words(cause)
    return (
        wanted == ("implicit" if cause.implicit else "explicit")
        or (cause.op is not None and wanted in (cause.op, cause.op.rsplit(".", 1)[0], wording.short_op(cause.op)))
        or wanted in (cause.before, cause.after, f"{cause.before} -> {cause.after}")
        or ("->" in wanted and wanted in change)
    )


def _source(group: ProcessGroup, event: TraceEvent, wanted: Any) -> bool:
    frame = event.source
    if frame is None or not isinstance(wanted, str):
        return bool(frame == wanted)
    full = f"{frame.file}:{frame.line}"
    return wanted in (frame.function, event.through) or any(text == wanted or text.endswith("/" + wanted) for text in (full, frame.file))


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
    "mesh_dim": _equal(lambda group, event: group.mesh_dim),
    "group": Field(lambda group, event: wording.label(group), _group),
    "module": Field(lambda group, event: event.site, _module),
    "call": _equal(lambda group, event: event.call),
    "owner": Field(lambda group, event: f"{event.owner.library} {event.owner.name}".strip() if event.owner else None, _owner),
    "cause": Field(lambda group, event: None if event.cause is None else wording.cause_words(event.cause), _cause),
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
        aliases = {"site": "module", "mesh": "mesh_dim", "dim": "mesh_dim", "line": "source", "bytes": "wire_bytes", "size": "wire_bytes"}
        close = [aliases[name]] if name in aliases else difflib.get_close_matches(name, FIELDS, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"The fields are {', '.join(FIELDS)}."
        raise SelectionError(f"A collective has no field {name!r}. {hint}")
    return FIELDS[name]


def wanted_values(name: str, value: Any) -> list[Any]:
    """Return the wanted values as a list, each in the form that events use.

    Raises:
        SelectionError: unknown phase, or not a step.
    """
    alternatives = list(value) if isinstance(value, (list, set, frozenset)) or (isinstance(value, tuple) and name != "ranks") else [value]
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
        close = difflib.get_close_matches(str(value), names, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"The phases are {', '.join(names)}."
        raise SelectionError(f"There is no phase {value!r}. {hint}") from None


def _steps(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    first, colon, end = value.partition(":")
    try:
        start = int(first) if first or not colon else 0
        if not colon:
            return start
        return range(start, int(end) if end else 1 << 62)
    except ValueError:
        raise SelectionError(f"{value!r} is not a step or a range of steps such as 2:4.") from None


def matching(data: TraceData, wanted: dict[str, Any]) -> list[TraceEvent]:
    """Return the events that match one wanted value of every field. A callable receives the field's value."""
    tests = [(field(name), wanted_values(name, value)) for name, value in wanted.items()]

    def holds(test: Field, values: Iterable[Any], group: ProcessGroup, event: TraceEvent) -> bool:
        return any(bool(value(test.get(group, event))) if callable(value) else test.matches(group, event, value) for value in values)

    found = []
    for event in data.events:
        group = data.group_of(event)
        if all(holds(test, values, group, event) for test, values in tests):
            found.append(event)
    return found
