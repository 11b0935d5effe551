"""The fields of a collective: what one can filter by, count by, and finds in a row. One list for all three."""

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
    """A field: how to read it from an event and its group, and when an event matches what was asked for."""

    get: Getter
    matches: Matcher
    help: str


def path_matches(path: str | None, wanted: str) -> bool:
    """Whether a module's path is ``wanted`` or below it, with or without the root's class name; ``*`` stands for one part."""
    if path is None:
        return False
    parts, asked = path.split("."), wanted.split(".")
    return any(
        len(parts) - start >= len(asked) and all(fnmatchcase(part, want) for part, want in zip(parts[start:], asked, strict=False))
        for start in (0, 1)
    )


def _equal(get: Getter) -> Field:
    return Field(get, lambda group, event, wanted: bool(get(group, event) == wanted), "")


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


def _name_of_owner(group: ProcessGroup, event: TraceEvent) -> str | None:
    return None if event.owner is None else f"{event.owner.library} {event.owner.name}".strip()


def _name_of_source(group: ProcessGroup, event: TraceEvent) -> str | None:
    return None if event.source is None else event.source.where


FIELDS: Final[dict[str, Field]] = {
    "op": _equal(lambda group, event: event.op),
    "phase": Field(
        lambda group, event: None if event.phase is None else event.phase.value,
        lambda group, event, wanted: event.phase is wanted,
        "forward, backward, recomputation, optimizer, outside, or unclassified",
    ),
    "mesh_dim": _equal(lambda group, event: group.mesh_dim),
    "group": Field(lambda group, event: wording.label(group), _group, "mesh dimension, description or name of the process group"),
    "module": Field(lambda group, event: event.site, _module, "path of a module: it and its children; * stands for one part of a path"),
    "call": _equal(lambda group, event: event.call),
    "owner": Field(_name_of_owner, _owner, "library or wrapped block whose parameters are carried"),
    "cause": Field(
        lambda group, event: None if event.cause is None else wording.cause_words(event.cause),
        _cause,
        "implicit, explicit, the op that needed a redistribution, or placements",
    ),
    "source": Field(_name_of_source, _source, "line of code: train.py:57, train.py, or a function's name"),
    "through": _equal(lambda group, event: event.through),
    "api": _equal(lambda group, event: event.api),
    "dtype": _equal(lambda group, event: event.dtype),
    "step": Field(lambda group, event: event.step, _step, "optimizer step, from 0: a number, or 2:4 for 2 and 3"),
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
    """The field of a name.

    Raises:
        SelectionError: there is none.
    """
    if name not in FIELDS:
        aliases = {"site": "module", "mesh": "mesh_dim", "dim": "mesh_dim", "line": "source", "bytes": "wire_bytes", "size": "wire_bytes"}
        close = [aliases[name]] if name in aliases else difflib.get_close_matches(name, FIELDS, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"The fields are {', '.join(FIELDS)}."
        raise SelectionError(f"A collective has no field {name!r}. {hint}")
    return FIELDS[name]


def wanted_values(name: str, value: Any) -> list[Any]:
    """What was asked for as a list of alternatives, each in the form that events hold.

    Raises:
        SelectionError: no event can have this value.
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
    """The events that have one of the values asked for in every field. A callable is asked with the field's value."""
    tests = [(field(name), wanted_values(name, value)) for name, value in wanted.items()]

    def holds(test: Field, values: Iterable[Any], group: ProcessGroup, event: TraceEvent) -> bool:
        return any(bool(value(test.get(group, event))) if callable(value) else test.matches(group, event, value) for value in values)

    found = []
    for event in data.events:
        group = data.group_of(event)
        if all(holds(test, values, group, event) for test, values in tests):
            found.append(event)
    return found
