"""The comparison of two traces of a rank, in sentences. Times, lines of code and the order of issue
are ignored.

Collectives that both traces have are removed first, by kind. Each remaining collective is paired
with the nearest one of the other trace: the same op, phase, module and group (it changed), the same
op in another place (it moved), or another op in the same place (it was replaced). Collectives that
still remain are new or gone.

The unit of the comparison is a *kind*: all collectives with the same :class:`ComparedFields`. Eight
all_reduces of a layer's backward are one kind with the amount 8. If the other trace has eight
reduce_scatters there, both kinds are paired, and become one change: "replaced".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from commlens.model.grouping import grouped, natural
from commlens.model.trace import Phase, TraceData, TraceEvent
from commlens.model.trace_changes import Change, TraceComparison
from commlens.text import count, joined, number, size, two_sizes
from commlens.traces import wording

_ROOT = "<model>"


@dataclass(frozen=True)
class ComparedFields:
    """The fields of a collective that the comparison considers."""

    op: str
    phase: Phase | None
    site: str | None
    group: str
    group_size: int
    dtype: str
    input_bytes: int
    output_bytes: int
    wire_bytes: int
    reduce_op: str | None
    placements: str
    cause: str
    owner: str
    api: str
    asynchronous: bool | None
    root: int | None


_FEATURES: dict[str, str] = {
    "dtype": "dtype",
    "input_bytes": "bytes in",
    "output_bytes": "bytes out",
    "group_size": "group size",
    "reduce_op": "reduce op",
    "placements": "placements",
    "cause": "cause",
    "owner": "owner",
    "api": "call",
    "asynchronous": "asynchronous",
    "root": "root",
}
"""The fields in which a collective can change without moving, with their names in a sentence."""

Differences = dict[str, tuple[str, str]]
"""By the name of a feature: both values, in words."""

Amounts = dict[ComparedFields, Fraction]
"""Numbers of collectives by kind; fractions where they are averages per step."""


def compare(before: TraceData, after: TraceData) -> TraceComparison:
    """Compare two traces.

    If they cover different numbers of optimizer steps, compare the averages per step, and the setup
    before the first forward on its own.
    """
    steps_before, steps_after = before.steps, after.steps
    per_step = steps_before != steps_after and steps_before > 0 and steps_after > 0
    with_setup = per_step and before.setup_until is not None and after.setup_until is not None
    roots = _renamed(before, after)
    old = _amounts(
        before, steps_before if per_step else 1, roots[0], setup=False if with_setup else None
    )
    new = _amounts(
        after, steps_after if per_step else 1, roots[1], setup=False if with_setup else None
    )
    changes = _changes(old, new)
    if with_setup:
        for change in _changes(
            _amounts(before, 1, roots[0], setup=True), _amounts(after, 1, roots[1], setup=True)
        ):
            change.sentence += ", in the setup"
            changes.append(change)
    if before.world_size != after.world_size:
        sentence = f"the world size is {after.world_size} instead of {before.world_size}"
        changes.insert(0, Change(kind="world-size", sentence=sentence))
    comparison = TraceComparison(
        per_step=per_step,
        calls_before=_plain(sum(old.values())),
        calls_after=_plain(sum(new.values())),
        wire_bytes_before=_plain(_weight(old)),
        wire_bytes_after=_plain(_weight(new)),
        changes=changes,
        notes=_notes(before, after, per_step=per_step, with_setup=with_setup, roots=roots),
    )
    comparison.answer = answer(comparison)
    return comparison


def answer(comparison: TraceComparison) -> str:
    """Return the comparison in one sentence."""
    calls = (
        f"{count(comparison.calls_after, 'collective')}{' per step' if comparison.per_step else ''}"
    )
    was, now = two_sizes(comparison.wire_bytes_before, comparison.wire_bytes_after)
    carried = f"{now} on the wire"
    if not comparison.changes:
        return f"Nothing changed: {calls}{f', {carried}' if comparison.wire_bytes_after else ''}."
    if comparison.calls_before != comparison.calls_after:
        calls += f" instead of {number(comparison.calls_before)}"
    else:
        calls += " as before"
    if comparison.wire_bytes_before != comparison.wire_bytes_after:
        carried += f" instead of {was}"
        if comparison.wire_bytes_before:
            share = comparison.wire_bytes_after / comparison.wire_bytes_before - 1
            carried += f" ({share:+.0%})" if abs(share) >= 0.005 else ""
    else:
        carried += " as before"
    return f"{count(len(comparison.changes), 'change')}: {calls}, {carried}."


def _notes(
    before: TraceData,
    after: TraceData,
    *,
    per_step: bool,
    with_setup: bool,
    roots: tuple[str | None, str | None],
) -> list[str]:
    notes = []
    if per_step:
        has_setup = with_setup and (before.setup_until or after.setup_until)
        apart = "; the setup before the first forward is compared on its own" if has_setup else ""
        notes.append(
            f"The first trace covers {count(before.steps, 'step')}, the second {after.steps};"
            f" figures are per step{apart}."
        )
    elif before.steps != after.steps:
        notes.append(
            f"The first trace covers {count(before.steps, 'optimizer step')}, the second"
            f" {after.steps}."
        )
    if before.rank != after.rank:
        notes.append(
            f"The first trace is from rank {before.rank}, the second from rank {after.rank}."
        )
    for name, data in (("first", before), ("second", after)):
        if lost := data.coverage.dispatched - data.coverage.recorded:
            notes.append(f"The {name} trace lacks {count(lost, 'dispatched collective')}.")
    if roots != (None, None):
        notes.append(
            f"The model's class is {roots[0]} in the first trace and {roots[1]} in the second:"
            " modules are compared without it."
        )
    return notes


def _renamed(before: TraceData, after: TraceData) -> tuple[str | None, str | None]:
    """Return the names of the model's class, if each trace has one and they differ; else None for
    both.
    """
    names = [
        {event.site.split(".")[0] for event in data.events if event.site is not None}
        for data in (before, after)
    ]
    if names[0] == names[1] or not len(names[0]) == len(names[1]) == 1:
        return None, None
    return names[0].pop(), names[1].pop()


def _amounts(data: TraceData, steps: int, root: str | None, *, setup: bool | None) -> Amounts:
    """Return the number of collectives of each kind, per step.

    Args:
        data: the trace.
        steps: its number of steps; 1: the numbers are not averaged.
        root: the name of the model's class, to be left out of paths.
        setup: True: only those before the first forward; False: only the others; None: all.
    """
    amounts: Amounts = defaultdict(Fraction)
    for event in data.events:
        if setup is None or data.is_setup(event) is setup:
            amounts[_kind(data, event, root)] += Fraction(event.count, steps)
    return amounts


def _kind(data: TraceData, event: TraceEvent, root: str | None) -> ComparedFields:
    group, cause, owner = data.group_of(event), event.cause, event.owner

    def path(text: str) -> str:
        return (
            _ROOT + text.removeprefix(root)
            if root is not None and text.split(".")[0] == root
            else text
        )

    return ComparedFields(
        op=event.op,
        phase=event.phase,
        site=None if event.site is None else path(event.site),
        group=wording.label(group),
        group_size=len(group.ranks),
        dtype=event.dtype,
        input_bytes=event.input_bytes,
        output_bytes=event.output_bytes,
        wire_bytes=event.wire_bytes,
        reduce_op=event.reduce_op,
        placements=(
            f"{wording.placements(cause.before)} -> {wording.placements(cause.after)}"
            if cause
            else ""
        ),
        cause=(
            f"{wording.short_op(cause.op or 'DTensor')},"
            f" {'implicit' if cause.implicit else 'explicit'}"
            if cause
            else ""
        ),
        owner=f"{owner.library} {path(owner.name)}" if owner else "",
        api=event.api,
        asynchronous=event.asynchronous,
        root=event.root,
    )


def _plain(value: Fraction | int) -> float:
    return int(value) if Fraction(value).denominator == 1 else float(value)


def _weight(amounts: Mapping[ComparedFields, Fraction]) -> Fraction:
    return sum((kind.wire_bytes * amount for kind, amount in amounts.items()), Fraction())


def _more(one: Amounts, other: Amounts) -> Amounts:
    """Return the collectives that ``one`` has more of."""
    more = {kind: amount - other.get(kind, 0) for kind, amount in one.items()}
    return {kind: amount for kind, amount in more.items() if amount > 0}


def _changes(old: Amounts, new: Amounts) -> list[Change]:
    gone, added = _more(old, new), _more(new, old)
    pairs = [
        (_similarity(name, pair), pair)
        for name, key in _PAIRINGS
        for pair in _take_pairs(gone, added, key)
    ]
    changes = [_pair_change(name, group) for (name, _), group in grouped(pairs).items()]
    changes += [_alone_change("gone", group, old, new) for group in _similar(gone)]
    changes += [_alone_change("new", group, old, new) for group in _similar(added)]
    return sorted(
        changes,
        key=lambda change: (
            -change.weight,
            -max(change.calls_before, change.calls_after),
            change.sentence,
        ),
    )


_PAIRINGS: tuple[tuple[str, Callable[[ComparedFields], Hashable]], ...] = (
    ("changed", lambda kind: (kind.op, kind.phase, kind.site, kind.group)),
    # to another group
    ("moved", lambda kind: (kind.op, kind.phase, kind.site, kind.dtype, kind.input_bytes)),
    # to another phase, then also to another module
    (
        "moved",
        lambda kind: (
            kind.op,
            kind.group,
            kind.dtype,
            kind.input_bytes,
            wording.pattern(kind.site or ""),
        ),
    ),
    ("moved", lambda kind: (kind.op, kind.group, kind.dtype, kind.input_bytes)),
    ("replaced", lambda kind: (kind.phase, kind.site, kind.group)),
)
"""The steps of pairing, in order: what has happened to a pair, and what both of it have in common.
"""


class _Pair(NamedTuple):
    """A kind of the first trace, and the kind of the second that it became."""

    before: ComparedFields
    after: ComparedFields
    amount: Fraction  # of the calls that changed so


def _take_pairs(
    gone: Amounts, added: Amounts, key: Callable[[ComparedFields], Hashable]
) -> Iterator[_Pair]:
    """Take pairs with the same key out of both, the most similar pairs first."""
    candidates = grouped((key(kind), kind) for kind in added)
    for kind in sorted(gone, key=repr):
        others = sorted(
            candidates.get(key(kind), []), key=lambda other: (_distance(kind, other), repr(other))
        )
        for other in others:
            amount = min(gone[kind], added[other])
            if amount > 0:
                gone[kind] -= amount
                added[other] -= amount
                yield _Pair(kind, other, amount)


def _distance(one: ComparedFields, other: ComparedFields) -> int:
    return sum(
        getattr(one, name) != getattr(other, name) for name in ComparedFields.__dataclass_fields__
    )


def _difference(one: ComparedFields, other: ComparedFields) -> Differences:
    changed = {
        title: _shown(name, getattr(one, name), getattr(other, name))
        for name, title in _FEATURES.items()
        if getattr(one, name) != getattr(other, name)
    }
    most, most_after = (max(kind.input_bytes, kind.output_bytes) for kind in (one, other))
    # one size says both
    if "bytes in" in changed and "bytes out" in changed and most != most_after:
        changed = {
            ("size" if name == "bytes in" else name): value
            for name, value in changed.items()
            if name != "bytes out"
        }
        changed["size"] = two_sizes(most, most_after)
    return changed


def _shown(name: str, before: object, after: object) -> tuple[str, str]:
    if name.endswith("bytes") and isinstance(before, int) and isinstance(after, int):
        return two_sizes(before, after)
    one, other = ("none" if value in (None, "") else str(value) for value in (before, after))
    return one, other


def _without_numbers(kind: ComparedFields) -> ComparedFields:
    return replace(
        kind,
        site=None if kind.site is None else wording.pattern(kind.site),
        owner=wording.pattern(kind.owner.replace(" ", ".")),
    )


def _similarity(name: str, pair: _Pair) -> tuple[str, Hashable]:
    """Return a key of the pairs that one sentence describes, which begins with the change."""
    one, other, _ = pair
    alike = (one.site == other.site, one.owner == other.owner)
    return name, (_without_numbers(one), _without_numbers(other), alike)


def _similar(amounts: Amounts) -> Iterable[dict[ComparedFields, Fraction]]:
    """Group by op, place and group, regardless of size. Modules that differ only in a number are
    grouped.
    """
    groups = grouped(
        (
            (kind.op, kind.phase, kind.site and wording.pattern(kind.site), kind.group),
            (kind, amount),
        )
        for kind, amount in amounts.items()
        if amount
    )
    return map(dict, groups.values())


def _site(kinds: Iterable[ComparedFields]) -> tuple[str | None, int]:
    sites = sorted({kind.site for kind in kinds if kind.site is not None}, key=natural)
    return (wording.fold(sites) or None), max(1, len(sites))


def _model(site: str | None) -> str | None:
    """Return the path to show where the models' class names differ."""
    if site == _ROOT:
        return "the model"
    return None if site is None else site.removeprefix(f"{_ROOT}.")


def _pair_change(name: str, group: list[_Pair]) -> Change:
    """Describe collectives that changed, moved or were replaced, all in the same way."""
    amount = sum((pair.amount for pair in group), Fraction())
    one, other, _ = group[0]
    site, modules = _site(pair.before for pair in group)
    where = f" {wording.within(one.phase, _model(site))}"
    differences = _difference(one, other)
    # where it moved to or what replaced it, in words and as a difference; the others come after it
    change, main = "", {}
    if name == "moved":
        differences = _restricted_to(
            differences, ("dtype", "group size", "placements", "reduce op")
        )
        if one.group != other.group:
            change, main = f"now on {other.group}", {"group": (one.group, other.group)}
        else:
            site_after, _ = _site(pair.after for pair in group)
            before = wording.place(one.phase, _model(site))
            after = wording.place(other.phase, _model(site_after))
            where, change, main = "", f"moved from {before} to {after}", {"place": (before, after)}
    elif name == "replaced":
        differences = _restricted_to(differences, ("dtype", "group size", "placements"))
        change, main = f"replaced by {other.op}", {"op": (one.op, other.op)}
        if one.wire_bytes != other.wire_bytes:
            was, now = two_sizes(one.wire_bytes, other.wire_bytes)
            change += f", {now} on the wire instead of {was}"
    words = ", ".join(filter(None, (change, _features(differences))))
    return Change(
        kind=name,
        sentence=f"{number(_plain(amount))} {one.op} on {one.group}{where}: {words}",
        op=one.op,
        phase=wording.phase_name(one.phase),
        module=_model(site),
        group=one.group,
        changed={**main, **differences},
        calls_before=_plain(amount),
        calls_after=_plain(amount),
        wire_bytes_before=_plain(sum((p.before.wire_bytes * p.amount for p in group), Fraction())),
        wire_bytes_after=_plain(sum((p.after.wire_bytes * p.amount for p in group), Fraction())),
        modules=modules,
    )


def _restricted_to(changed: Differences, names: Container[str]) -> Differences:
    return {name: value for name, value in changed.items() if name in names}


def _features(changed: Differences) -> str:
    return joined(
        f"{name} {after} instead of {before}" for name, (before, after) in changed.items()
    )


def _alone_change(
    kind: str, group: Mapping[ComparedFields, Fraction], old: Amounts, new: Amounts
) -> Change:
    """Describe new or missing collectives; if both traces have the same op in the same place, only
    its number changed.
    """
    first = next(iter(group))
    site, modules = _site(group)
    places = {(one.op, one.phase, one.site, one.group) for one in group}

    def there(amounts: Amounts) -> Amounts:
        return {
            one: amount
            for one, amount in amounts.items()
            if (one.op, one.phase, one.site, one.group) in places
        }

    before, after = there(old), there(new)
    calls_before, calls_after = sum(before.values(), Fraction()), sum(after.values(), Fraction())
    difference = number(_plain(sum(group.values(), Fraction())))
    collectives = f"{first.op} on {first.group} {wording.within(first.phase, _model(site))}"
    carried = f"{size(_plain(_weight(group)))} on the wire"
    if before and after:
        kind = "count"
        more = "more" if calls_after > calls_before else "fewer"
        was, now = number(_plain(calls_before)), number(_plain(calls_after))
        sentence = f"{difference} {more} {collectives} ({now} instead of {was}), {carried}"
    else:
        sentence = f"{kind}: {difference} {collectives}, {carried}{_purpose(group)}"
    return Change(
        kind=kind,
        sentence=sentence,
        op=first.op,
        phase=wording.phase_name(first.phase),
        module=_model(site),
        group=first.group,
        calls_before=_plain(calls_before),
        calls_after=_plain(calls_after),
        wire_bytes_before=_plain(_weight(before)),
        wire_bytes_after=_plain(_weight(after)),
        modules=modules,
    )


def _purpose(group: Iterable[ComparedFields]) -> str:
    causes = {kind.placements for kind in group if kind.placements}
    owners = {wording.pattern(kind.owner) for kind in group if kind.owner}
    if len(causes) == 1:
        return f", DTensor {next(iter(causes))}"
    if len(owners) == 1:
        kinds = sorted({kind.owner for kind in group if kind.owner}, key=natural)
        return (
            f", for {kinds[0].replace(_ROOT, 'the model')}"
            if len(kinds) == 1
            else f", for {kinds[0].split(' ')[0]}"
        )
    return ""
