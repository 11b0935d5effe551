"""Assertions on a model's communication, for tests: :func:`assert_collectives` and
:func:`assert_matches_golden`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from commlens.errors import SelectionError
from commlens.model.grouping import natural
from commlens.model.trace import Coverage, Depth, TraceData, TraceEvent
from commlens.text import count, number, size
from commlens.traces import fields, wording
from commlens.traces.trace import Trace

UPDATE_VARIABLE: Final = "COMMLENS_UPDATE_GOLDEN"
"""If set to 1, golden files are written instead of compared."""

UPDATE_OPTION: Final = f"pytest --commlens-update (or {UPDATE_VARIABLE}=1)"

_MAX_SHOWN = 5
_STABLE_FIELDS = (
    "op",
    "api",
    "phase",
    "site",
    "dtype",
    "input_bytes",
    "output_bytes",
    "wire_bytes",
    "reduce_op",
    "root",
    "peer",
    "asynchronous",
    "members",
)


def as_trace(source: Any) -> Trace:
    """Return the trace of a ``Trace``, ``TraceData``, a path, or an object with ``trace()``
    (CommDebugMode) or ``data``.

    Raises:
        SelectionError: the object has no trace.
        FormatError: the file is not a trace.
    """
    if isinstance(source, Trace):
        return source
    if isinstance(source, TraceData):
        return Trace(source)
    if isinstance(source, (str, os.PathLike)):
        return Trace.load(source)
    made = getattr(source, "trace", None)
    if callable(made):
        return as_trace(made())
    data = getattr(source, "data", None)
    if isinstance(data, TraceData):
        return Trace(data)
    raise SelectionError(
        "Expected a trace, the path of a trace file or a CommDebugMode, not"
        f" {type(source).__name__}."
    )


def assert_collectives(
    trace: Any,
    counts: Mapping[Any, int] | int | None = None,
    *,
    by: str | Sequence[str] = "op",
    none_on: str | Iterable[str] | None = None,
    bytes_at_most: int | None = None,
    **only: Any,
) -> None:
    """Assert which collectives a trace contains.

    ``assert_collectives(trace, {"all_reduce": 1})`` passes for exactly one all_reduce and no other
    collective; ``assert_collectives(trace, {("dp", "all_gather"): 5}, by=("mesh_dim", "op"),
    phase="backward")`` checks only backward.

    Args:
        trace: a :class:`commlens.Trace`, the path of a trace file, or a ``commlens.CommDebugMode``.
        counts: the expected number of collectives for each value of ``by``, with no others allowed;
            or one total.
        by: the field, or fields, of the keys of ``counts``.
        none_on: mesh dimensions or groups that must have no collectives.
        bytes_at_most: the maximum bytes on the wire.
        **only: check only collectives with these values; fields as in
            :meth:`commlens.Trace.filter`.

    Raises:
        AssertionError: the trace differs. The message shows the collectives and the lines of code
            that issued them.
        SelectionError: unknown field, or a module, group, mesh dimension, op or phase that does not
            exist: no test passes by a slip.
    """
    __tracebackhide__ = True  # pytest shows the test's own line
    unwanted = [none_on] if isinstance(none_on, str) else list(none_on or [])
    whole = as_trace(trace).data
    _check_names(whole, only, unwanted, counts, by)
    part = Trace(whole).filter(**only)
    data = part.data
    problems: list[str] = []
    if isinstance(counts, Mapping):
        problems += _wrong_counts(part, counts, by)
    elif counts is not None and part.calls != counts:
        problems.append(
            f"expected {count(counts, 'collective')}, found {_number_or_none(part.calls)}:"
            + _event_lines(data, data.events)
        )
    for name in unwanted:
        found = part.filter(group=name).events
        if found:
            calls = sum(event.count for event in found)
            problems.append(
                f"expected no collectives on {name}, found {_number_or_none(calls)}:"
                + _event_lines(data, found)
            )
    if bytes_at_most is not None and part.wire_bytes > bytes_at_most:
        costliest = sorted(data.events, key=lambda event: -event.wire_bytes * event.count)
        over = part.wire_bytes - bytes_at_most
        problems.append(
            f"expected at most {size(bytes_at_most)} on the wire, found {size(part.wire_bytes)} "
            f"({number(over)} bytes too many). The costliest:" + _event_lines(data, costliest)
        )
    lost = data.coverage.dispatched - data.coverage.recorded
    if lost > 0:
        problems.append(f"the trace is incomplete: it lacks {count(lost, 'dispatched collective')}")
    if problems:
        raise AssertionError(_message(problems, only))


def assert_matches_golden(
    trace: Any, path: str | os.PathLike[str], *, update: bool | None = None
) -> None:
    """Assert that a trace matches a golden file.

    The file records the number, kind and place of collectives, without times, lines of code,
    versions or absolute paths, so it changes only with the communication. It is a trace file:
    ``commlens view`` and ``commlens compare`` read it.

    Args:
        trace: a :class:`commlens.Trace`, the path of a trace file, or a ``commlens.CommDebugMode``.
        path: the golden file; compressed if it ends with ``.gz``.
        update: write the file instead of comparing. The default is True if COMMLENS_UPDATE_GOLDEN
            is set and not 0.

    Raises:
        AssertionError: the trace differs, or there is no golden file yet. The message lists the
            changes and how to accept them.
        FormatError: the golden file is damaged.
    """
    __tracebackhide__ = True
    from commlens.formats.trace_json import read_trace, write_trace
    from commlens.traces.diff import compare

    golden, data = Path(path), as_trace(trace).data
    if update is None:
        update = os.environ.get(UPDATE_VARIABLE, "0") not in ("", "0")
    if update:
        write_trace(condense(data), golden)
        return
    if not golden.exists():
        raise AssertionError(
            f"There is no golden file {golden} yet. Run the test once with {UPDATE_OPTION} to write"
            " it, then check and commit it."
        )
    comparison = compare(read_trace(golden), condense(data))
    if comparison:
        changes = "\n".join(f"  - {change.sentence}" for change in comparison.changes)
        raise AssertionError(
            f"The communication differs from the golden file {golden}."
            f" {comparison.answer}\n{changes}\nTo accept the changes, run the test once with"
            f" {UPDATE_OPTION}, which rewrites the file."
        )


def condense(data: TraceData) -> TraceData:
    """Return the trace without what varies between runs, with equal collectives counted together
    and in a stable order.
    """
    groups: dict[tuple[str, tuple[int, ...]], int] = {}
    kept: dict[tuple[Any, ...], TraceEvent] = {}
    condensed = TraceData(
        rank=data.rank, world_size=data.world_size, steps=data.steps, depth=Depth.COLLECTIVES
    )
    for event in data.events:
        group = data.group_of(event)
        if (wording.label(group), group.ranks) not in groups:
            groups[wording.label(group), group.ranks] = len(groups)
            # torch names groups by a counter, which depends on everything else that the process
            # does.
            condensed.groups.append(
                type(group)(
                    name="",
                    ranks=group.ranks,
                    description=wording.label(group),
                    mesh_dim=group.mesh_dim,
                )
            )
        plain = TraceEvent(
            sequence=0,
            count=0,
            group=groups[wording.label(group), group.ranks],
            owner=(
                None
                if event.owner is None
                else type(event.owner)(event.owner.library, event.owner.name)
            ),
            # its text varies with torch
            cause=None if event.cause is None else msgspec.structs.replace(event.cause, mesh=""),
            **{name: getattr(event, name) for name in _STABLE_FIELDS},
        )
        key = (data.is_setup(event), *(getattr(plain, name) for name in plain.__struct_fields__))
        kept.setdefault(key, plain).count += event.count
    # a key begins with whether it is of the setup, which comes first
    in_order = sorted(kept.items(), key=lambda item: (not item[0][0], _stable_order(item[1])))
    order = [event for _, event in in_order]
    if data.setup_until is not None:
        condensed.setup_until = sum(key[0] for key in kept)
    for sequence, event in enumerate(order, start=1):
        event.sequence = sequence
    condensed.events = order
    total = sum(event.count for event in order)
    condensed.coverage = Coverage(
        dispatched=total,
        recorded=total,
        unclassified=sum(event.count for event in order if not event.classified),
    )
    return condensed


def _stable_order(event: TraceEvent) -> tuple[Any, ...]:
    return natural(event.site or ""), str(event.phase), event.op, repr(event)


def _check_names(
    data: TraceData,
    only: Mapping[str, Any],
    unwanted: Iterable[str],
    counts: Mapping[Any, int] | int | None,
    by: str | Sequence[str],
) -> None:
    """Check that everything named exists. A name of nothing has no collectives, whatever the
    program does.
    """
    for name, value in only.items():
        fields.field(name)
        fields.check_exists([data], name, value)
    for group in unwanted:
        fields.check_exists([data], "group", group)
    if isinstance(counts, Mapping):
        for key, expected in counts.items():
            if not expected:  # others are found missing
                for name, value in zip(_names(by), _values(key, by), strict=False):
                    fields.check_exists([data], name, value)


def _wrong_counts(part: Trace, counts: Mapping[Any, int], by: str | Sequence[str]) -> list[str]:
    """Return a sentence for each key of ``counts``, and of the trace, whose number differs."""
    names, data = _names(by), part.data
    actual = part.counts(by=names)
    wanted = {_values(key, by): expected for key, expected in counts.items()}
    getters = [fields.field(name).get for name in names]
    problems = []
    for values in {**wanted, **actual}:
        expected, found = wanted.get(values, 0), actual.get(values, 0)
        if expected == found:
            continue
        words = f"{' '.join(map(str, values))}: expected {_number_or_none(expected)}, found "
        if found:
            events = [
                event
                for event in data.events
                if tuple(get(data.group_of(event), event) for get in getters) == values
            ]
            problems.append(f"{words}{number(found)}:{_event_lines(data, events)}")
        else:
            problems.append(f"{words}none{_similar(values, actual)}")
    return problems


def _names(by: str | Sequence[str]) -> tuple[str, ...]:
    return (by,) if isinstance(by, str) else tuple(by)


def _values(key: Any, by: str | Sequence[str]) -> tuple[Any, ...]:
    """Return the values of the fields of ``by`` that a key of ``counts`` holds."""
    return tuple(getattr(each, "value", each) for each in ((key,) if isinstance(by, str) else key))


def _similar(values: tuple[Any, ...], actual: Iterable[tuple[Any, ...]]) -> str:
    if len(values) != 1 or not isinstance(values[0], str):
        return ""
    known = {str(name).replace("_", ""): name for (name,) in actual}
    close = difflib.get_close_matches(values[0].replace("_", ""), known, n=1, cutoff=0.8)
    return f" (did you mean {known[close[0]]!r}?)" if close else ""


def _number_or_none(calls: int) -> str:
    return number(calls) if calls else "none"


def _event_lines(data: TraceData, events: Sequence[TraceEvent]) -> str:
    lines = [f"\n    {event_words(data, event)}" for event in events[:_MAX_SHOWN]]
    if len(events) > _MAX_SHOWN:
        lines.append(f"\n    ... and {len(events) - _MAX_SHOWN} more")
    return "".join(lines)


def event_words(data: TraceData, event: TraceEvent) -> str:
    """Describe a collective in a line: ``"#3 all_reduce on tp [0-3], forward of MLP.net2, float32
    4.1 kB, at train.py:57"``.
    """
    label = f"#{event.sequence}" if event.count == 1 else f"{number(event.count)} x"
    parts = [
        f"{label} {event.op} on {wording.on_group(data.group_of(event))}",
        wording.place_of(event),
        wording.payload(event),
    ]
    if event.owner is not None:
        parts.append(f"{event.owner.library} {event.owner.name}")
    if event.cause is not None:
        parts.append(wording.cause_words(event.cause))
    where = wording.source_words(event.source, event.through)
    return ", ".join([*(part for part in parts if part), *([f"at {where}"] if where else [])])


def _message(problems: Sequence[str], only: Mapping[str, Any]) -> str:
    filters = ", ".join(
        f"{name}={getattr(value, 'value', value)!s}" for name, value in only.items()
    )
    suffix = f" ({filters})" if filters else ""
    return f"Unexpected collectives{suffix}:" + "".join(f"\n- {problem}" for problem in problems)
