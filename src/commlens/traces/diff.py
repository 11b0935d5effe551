"""What is different between two traces of a rank, in words. Times, lines of code and the order of issue are no difference.

What both traces have is taken away first, kind by kind of collective. What is left is paired with the nearest of the other trace: of the
same op, phase, module and group (it changed), of the same op in another place (it moved), of another op in the same place (it was
replaced). What then is left came or went.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from commlens.model.trace import TraceData, TraceEvent
from commlens.model.trace_changes import Change, Comparison
from commlens.traces import wording

_ROOT = "<model>"


@dataclass(frozen=True)
class Kind:
    """Everything of a collective that counts in a comparison."""

    op: str
    phase: str
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
"""What may change of a collective that stays where it is, and its name in a sentence."""

Amounts = dict[Kind, Fraction]


def compare(before: TraceData, after: TraceData) -> Comparison:
    """Say how ``after`` differs from ``before``.

    Args:
        before: a trace.
        after: another one, of the same rank of the same program as a rule. Where they cover different numbers of optimizer
            steps, what a step issues is compared.
    """
    notes = _notes(before, after)
    steps_before, steps_after = before.steps, after.steps
    per_step = steps_before != steps_after and steps_before > 0 and steps_after > 0
    if per_step:
        notes.insert(0, f"The first covers {wording.count(steps_before, 'step')}, the second {steps_after}: figures are those of a step.")
    elif steps_before != steps_after:
        notes.insert(0, f"The first covers {wording.count(steps_before, 'optimizer step')}, the second {steps_after}.")
    root_before, root_after = _root(before), _root(after)
    renamed = root_before != root_after and root_before is not None and root_after is not None
    if renamed:
        notes.append(f"The model's class is {root_before} in the first and {root_after} in the second; modules are compared without it.")
    old = _amounts(before, steps_before if per_step else 1, root_before if renamed else None)
    new = _amounts(after, steps_after if per_step else 1, root_after if renamed else None)
    changes = _changes(old, new)
    if before.world_size != after.world_size:
        changes.insert(
            0,
            Change(
                kind="world-size", sentence=f"the world has {wording.count(after.world_size, 'rank')}, where it had {before.world_size}"
            ),
        )
    comparison = Comparison(
        per_step=per_step,
        calls_before=_plain(sum(old.values())),
        calls_after=_plain(sum(new.values())),
        wire_bytes_before=_plain(_weight(old)),
        wire_bytes_after=_plain(_weight(new)),
        changes=changes,
        notes=notes,
    )
    comparison.answer = answer(comparison)
    return comparison


def answer(comparison: Comparison) -> str:
    """The comparison in one sentence."""
    a_step = " a step" if comparison.per_step else ""
    if not comparison.changes:
        calls = f"{wording.count(comparison.calls_after, 'collective')}{a_step}"
        carried = f", {wording.size(comparison.wire_bytes_after)} on the wire" if comparison.wire_bytes_after else ""
        return f"Nothing changed: {calls}{carried}."
    calls = f"{wording.count(comparison.calls_after, 'collective')}{a_step}"
    if comparison.calls_before != comparison.calls_after:
        calls += f" instead of {wording.number(comparison.calls_before)}"
    else:
        calls += " as before"
    size = f"{wording.size(comparison.wire_bytes_after)} on the wire"
    if comparison.wire_bytes_before != comparison.wire_bytes_after:
        size += f" instead of {wording.size(comparison.wire_bytes_before)}"
        if comparison.wire_bytes_before:
            share = comparison.wire_bytes_after / comparison.wire_bytes_before - 1
            size += f" ({share:+.0%})" if abs(share) >= 0.005 else ""
    else:
        size += " as before"
    return f"{wording.count(len(comparison.changes), 'change')}: {calls}, {size}."


def kinds(data: TraceData) -> Amounts:
    """How many collectives of each kind a trace has."""
    return _amounts(data, 1, None)


def _notes(before: TraceData, after: TraceData) -> list[str]:
    notes = []
    if before.rank != after.rank:
        notes.append(f"The first is of rank {before.rank}, the second of rank {after.rank}.")
    for name, data in (("first", before), ("second", after)):
        lost = data.coverage.dispatched - data.coverage.recorded
        if lost:
            notes.append(f"The {name} trace lacks {wording.count(lost, 'collective')} that were dispatched.")
    return notes


def _root(data: TraceData) -> str | None:
    roots = {event.site.split(".")[0] for event in data.events if event.site is not None}
    return next(iter(roots)) if len(roots) == 1 else None


def _amounts(data: TraceData, steps: int, root: str | None) -> Amounts:
    amounts: Amounts = defaultdict(Fraction)
    for event in data.events:
        amounts[_kind(data, event, root)] += Fraction(event.count, steps)
    return amounts


def _kind(data: TraceData, event: TraceEvent, root: str | None) -> Kind:
    group, cause, owner = data.group_of(event), event.cause, event.owner

    def path(text: str) -> str:
        return _ROOT + text.removeprefix(root) if root is not None and text.split(".")[0] == root else text

    return Kind(
        op=event.op,
        phase=wording.phase_name(event.phase),
        site=None if event.site is None else path(event.site),
        group=wording.label(group),
        group_size=len(group.ranks),
        dtype=event.dtype,
        input_bytes=event.input_bytes,
        output_bytes=event.output_bytes,
        wire_bytes=event.wire_bytes,
        reduce_op=event.reduce_op,
        placements=f"{wording.placements(cause.before)} -> {wording.placements(cause.after)}" if cause else "",
        cause=""
        if cause is None
        else f"{wording.short_op(cause.op) if cause.op else 'DTensor'}, {'implicit' if cause.implicit else 'explicit'}",
        owner=f"{owner.library} {path(owner.name)}" if owner else "",
        api=event.api,
        asynchronous=event.asynchronous,
        root=event.root,
    )


def _plain(value: Fraction | int) -> float:
    return int(value) if Fraction(value).denominator == 1 else float(value)


def _weight(amounts: Mapping[Kind, Fraction]) -> Fraction:
    return sum((kind.wire_bytes * number for kind, number in amounts.items()), Fraction())


def _changes(old: Amounts, new: Amounts) -> list[Change]:
    common = {kind: min(number, new[kind]) for kind, number in old.items() if kind in new}
    gone = {kind: number - common.get(kind, 0) for kind, number in old.items() if number > common.get(kind, 0)}
    came = {kind: number - common.get(kind, 0) for kind, number in new.items() if number > common.get(kind, 0)}
    steps: list[tuple[str, Callable[[Kind], Hashable]]] = [
        ("changed", lambda kind: (kind.op, kind.phase, kind.site, kind.group)),
        ("moved", lambda kind: (kind.op, kind.phase, kind.site, kind.dtype, kind.input_bytes)),  # to another group
        ("moved", lambda kind: (kind.op, kind.group, kind.dtype, kind.input_bytes, wording.pattern(kind.site or ""))),  # to another phase
        ("moved", lambda kind: (kind.op, kind.group, kind.dtype, kind.input_bytes)),
        ("replaced", lambda kind: (kind.phase, kind.site, kind.group)),
    ]
    pairs: list[tuple[str, Kind, Kind, Fraction]] = []
    for name, key in steps:
        pairs += [(name, *pair) for pair in _pair(gone, came, key)]
    changes = [_pair_change(name, group) for name, group in _alike_pairs(pairs)]
    changes += [_alone_change("gone", group, old, new) for group in _alike(gone)]
    changes += [_alone_change("new", group, old, new) for group in _alike(came)]
    return sorted(changes, key=lambda change: (-change.weight, -max(change.calls_before, change.calls_after), change.sentence))


def _pair(gone: Amounts, came: Amounts, key: Callable[[Kind], Hashable]) -> Iterable[tuple[Kind, Kind, Fraction]]:
    """Take pairs with the same key out of both, those first that differ in least."""
    candidates: dict[Hashable, list[Kind]] = defaultdict(list)
    for kind in came:
        candidates[key(kind)].append(kind)
    pairs = []
    for kind in sorted(gone, key=_stable):
        others = sorted(candidates.get(key(kind), []), key=lambda other: (_distance(kind, other), _stable(other)))
        for other in others:
            number = min(gone.get(kind, Fraction()), came.get(other, Fraction()))
            if number <= 0:
                continue
            pairs.append((kind, other, number))
            for amounts, taken in ((gone, kind), (came, other)):
                amounts[taken] -= number
                if amounts[taken] == 0:
                    del amounts[taken]
    return pairs


def _stable(kind: Kind) -> str:
    return repr(kind)


def _distance(one: Kind, other: Kind) -> int:
    return sum(getattr(one, name) != getattr(other, name) for name in Kind.__dataclass_fields__)


def _difference(one: Kind, other: Kind) -> dict[str, tuple[str, str]]:
    changed = {
        said: (_shown(name, getattr(one, name)), _shown(name, getattr(other, name)))
        for name, said in _FEATURES.items()
        if getattr(one, name) != getattr(other, name)
    }
    if "bytes in" in changed and "bytes out" in changed:  # one follows from the other
        sizes = [wording.size(max(kind.input_bytes, kind.output_bytes)) for kind in (one, other)]
        changed = {("size" if name == "bytes in" else name): value for name, value in changed.items() if name != "bytes out"}
        changed["size"] = (sizes[0], sizes[1])
    return changed


def _shown(name: str, value: object) -> str:
    if name.endswith("bytes") and isinstance(value, int):
        return wording.size(value)
    return "none" if value in (None, "") else str(value)


def _without_numbers(kind: Kind) -> Kind:
    return replace(
        kind, site=None if kind.site is None else wording.pattern(kind.site), owner=wording.pattern(kind.owner.replace(" ", "."))
    )


Pair = tuple[Kind, Kind, Fraction]


def _alike_pairs(pairs: list[tuple[str, Kind, Kind, Fraction]]) -> Iterable[tuple[str, list[Pair]]]:
    groups: dict[Hashable, list[Pair]] = {}
    for name, one, other, number in pairs:
        key = (name, _without_numbers(one), _without_numbers(other), one.site == other.site, one.owner == other.owner)
        groups.setdefault(key, []).append((one, other, number))
    return [(key[0], group) for key, group in groups.items()]  # type: ignore[index]


def _alike(amounts: Amounts) -> list[dict[Kind, Fraction]]:
    """By op, place and group, whatever the sizes; modules that differ in a number together."""
    groups: dict[Hashable, dict[Kind, Fraction]] = {}
    for kind, number in amounts.items():
        key = (kind.op, kind.phase, None if kind.site is None else wording.pattern(kind.site), kind.group)
        groups.setdefault(key, {})[kind] = number
    return list(groups.values())


def _site(kinds: Iterable[Kind]) -> tuple[str | None, int]:
    sites = sorted({kind.site for kind in kinds if kind.site is not None}, key=wording.natural)
    return (wording.fold(sites) or None), max(1, len(sites))


def _place(phase: str, site: str | None) -> str:
    if phase in ("optimizer", "outside"):
        text = "the optimizer's step" if phase == "optimizer" else "outside of every module"
        return f"{text}, in {_model(site)}" if site is not None else text
    phase = "an unknown phase" if phase == "unclassified" else phase
    return f"{phase} of {_model(site)}" if site is not None else f"{phase}, module unknown"


def _within(phase: str, site: str | None) -> str:
    text = _place(phase, site)
    return text if phase == "outside" else f"in {text}"


def _model(site: str) -> str:
    return "the model" if site == _ROOT else site.removeprefix(f"{_ROOT}.")


def _pair_change(name: str, group: list[Pair]) -> Change:
    ones, others = [one for one, _, _ in group], [other for _, other, _ in group]
    number = sum((number for _, _, number in group), Fraction())
    one, other = ones[0], others[0]
    site, modules = _site(ones)
    site_after, _ = _site(others)
    before, after = _place(one.phase, site), _place(other.phase, site_after)
    what = f"{wording.number(_plain(number))} {one.op} on {one.group}"
    changed = _difference(one, other)
    if name == "moved":
        changed = {key: value for key, value in changed.items() if key in ("dtype", "group size", "placements", "reduce op")}
        if one.group != other.group:
            sentence = f"{what} {_within(one.phase, site)}: now on {other.group}"
            changed = {"group": (one.group, other.group), **changed}
        else:
            sentence = f"{what}: moved from {before} to {after}"
            changed = {"place": (before, after), **changed}
    elif name == "replaced":
        sentence = f"{what} {_within(one.phase, site)}: replaced by {other.op}"
        changed = {
            "op": (one.op, other.op),
            **{key: value for key, value in changed.items() if key in ("dtype", "group size", "placements")},
        }
        if one.wire_bytes != other.wire_bytes:
            sentence += f", {wording.size(other.wire_bytes)} on the wire instead of {wording.size(one.wire_bytes)}"
    else:
        sentence = f"{what} {_within(one.phase, site)}: {_features(changed)}"
    rest = {key: value for key, value in changed.items() if key not in ("group", "place", "op")}
    if name != "changed" and rest:
        sentence += f", {_features(rest)}"
    return Change(
        kind=name,
        sentence=sentence,
        op=one.op,
        phase=one.phase,
        module=None if site is None else _model(site),
        group=one.group,
        changed=changed,
        calls_before=_plain(number),
        calls_after=_plain(number),
        wire_bytes_before=_plain(sum((kind.wire_bytes * n for kind, _, n in group), Fraction())),
        wire_bytes_after=_plain(sum((kind.wire_bytes * n for _, kind, n in group), Fraction())),
        modules=modules,
    )


def _features(changed: Mapping[str, tuple[str, str]]) -> str:
    return wording.joined(f"{name} {after} instead of {before}" for name, (before, after) in changed.items())


def _alone_change(kind: str, group: Mapping[Kind, Fraction], old: Amounts, new: Amounts) -> Change:
    """Something came or went; where the same op stays in the same place it is a change of number."""
    first = next(iter(group))
    site, modules = _site(group)
    places = {(one.op, one.phase, one.site, one.group) for one in group}

    def there(amounts: Amounts) -> tuple[Fraction, Fraction]:
        same = {one: number for one, number in amounts.items() if (one.op, one.phase, one.site, one.group) in places}
        return sum(same.values(), Fraction()), _weight(same)

    (calls_before, bytes_before), (calls_after, bytes_after) = there(old), there(new)
    moved_in = sum(group.values(), Fraction())
    what = f"{first.op} on {first.group}"
    where = _within(first.phase, site)
    carried = wording.size(_plain(_weight(group)))
    if kind == "new" and not calls_before:
        sentence = f"new: {wording.number(_plain(moved_in))} {what} {where}, {carried} on the wire{_for(group)}"
    elif kind == "gone" and not calls_after:
        sentence = f"gone: {wording.number(_plain(moved_in))} {what} {where}, {carried} on the wire{_for(group)}"
    else:
        kind = "count"
        more = "more" if calls_after > calls_before else "fewer"
        sentence = (
            f"{wording.number(_plain(moved_in))} {more} {what} {where} "
            f"({wording.number(_plain(calls_after))} instead of {wording.number(_plain(calls_before))}), {carried} on the wire"
        )
    return Change(
        kind=kind,
        sentence=sentence,
        op=first.op,
        phase=first.phase,
        module=None if site is None else _model(site),
        group=first.group,
        calls_before=_plain(calls_before),
        calls_after=_plain(calls_after),
        wire_bytes_before=_plain(bytes_before),
        wire_bytes_after=_plain(bytes_after),
        modules=modules,
    )


def _for(group: Iterable[Kind]) -> str:
    causes = {kind.placements for kind in group if kind.placements}
    owners = {wording.pattern(kind.owner) for kind in group if kind.owner}
    if len(causes) == 1:
        return f", DTensor {next(iter(causes))}"
    if len(owners) == 1:
        kinds = sorted({kind.owner for kind in group if kind.owner}, key=wording.natural)
        return f", for {kinds[0].replace(_ROOT, 'the model')}" if len(kinds) == 1 else f", for {kinds[0].split(' ')[0]}"
    return ""
