"""The summary of a trace: breakdowns, the tree of modules, the costliest reasons, and the
self-check in words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

from commlens.model.collective import ProcessGroup
from commlens.model.grouping import grouped, natural
from commlens.model.network import Network
from commlens.model.ops import BARRIERS, POINT_TO_POINT
from commlens.model.trace import Phase, TraceData, TraceEvent
from commlens.model.trace_summary import ModuleTotal, Summary, Total, Why
from commlens.text import count, hazard_phrase, joined, number, ranks_phrase, size
from commlens.traces import wording
from commlens.traces.network import estimate
from commlens.traces.times import Time, time_of, times

MAX_REASONS = 10
_FOLD_FROM = 3  # this many modules that differ only in a number, or more, share a row
_ORDER = [*(phase.value for phase in Phase), "unclassified"]


def summarise(
    data: TraceData, *, unfiltered: int | None = None, network: Network | None = None
) -> Summary:
    """Summarise a trace.

    ``unfiltered`` is the number of collectives before filtering, if the trace was filtered;
    ``network`` one to estimate times for.
    """
    whole, setup = _amount(data.events), _setup(data)
    coverage, complete = _coverage(data)
    return Summary(
        answer=answer(data, unfiltered),
        rank=data.rank,
        world_size=data.world_size,
        steps=data.steps,
        calls=whole.calls,
        wire_bytes=whole.wire_bytes,
        bytes_known=_bytes_known(data, whole),
        setup_calls=setup.calls,
        setup_bytes=setup.wire_bytes,
        by_mesh_dim=(
            _totals_by(data, lambda group, event: wording.label(group), sizes=True)
            if _groups_known(data)
            else []
        ),
        by_phase=sorted(
            _totals_by(data, lambda group, event: wording.phase_name(event.phase)),
            key=lambda row: _ORDER.index(row.name),
        ),
        by_op=_totals_by(data, lambda group, event: event.op),
        by_module=modules(data),
        why=reasons(data)[:MAX_REASONS],
        estimate=None if network is None or not _groups_known(data) else estimate(data, network),
        times=times(data, network),
        # of each pair of lines, the first hazard
        hazards=[
            f"{hazard_phrase(first)}."
            for first, *_ in grouped((each.lines, each) for each in data.hazards).values()
        ],
        coverage=coverage,
        complete=complete,
        blind=list(data.coverage.blind),
    )


class _Amount(NamedTuple):
    calls: int
    wire_bytes: int

    def __str__(self) -> str:
        return f"{count(self.calls, 'collective')} and {size(self.wire_bytes)}"


def _amount(events: Iterable[TraceEvent]) -> _Amount:
    calls = wire_bytes = 0
    for event in events:
        calls += event.count
        wire_bytes += event.wire_bytes * event.count
    return _Amount(calls, wire_bytes)


def _bytes_known(data: TraceData, whole: _Amount) -> bool:
    """Return whether the trace says how many bytes its collectives carry. Barriers carry none."""
    none_has_sizes = whole.calls and not whole.wire_bytes
    return not none_has_sizes or any(each.dtype or each.op in BARRIERS for each in data.events)


def answer(data: TraceData, unfiltered: int | None = None) -> str:
    """Return only the summary's first sentence, which is cheap. The arguments are those of
    :func:`summarise`.
    """
    whole = _amount(data.events)
    rank = f"rank {data.rank} of {data.world_size}{', a preview' if data.preview else ''}"
    collectives = (
        count(whole.calls, "collective")
        if unfiltered is None
        else f"{number(whole.calls)} of {count(unfiltered, 'collective')}"
    )
    over = _steps_and_amounts(data) if unfiltered is None else ""
    if not whole.calls and unfiltered is None:
        return f"No collectives{over}, {rank}."
    carried = f", {size(whole.wire_bytes)} on the wire" if _bytes_known(data, whole) else ""
    if not _groups_known(data):
        return f"{collectives}, by CommDebugMode's count."
    return f"{collectives}{carried}{over}, {rank}."


def _groups_known(data: TraceData) -> bool:
    """Tell whether the trace has groups; one read from CommDebugMode's JSON has none."""
    return not data.events or any(group.ranks for group in data.groups)


def _steps_and_amounts(data: TraceData) -> str:
    """Return the number of steps, the amount that each issued if all issued the same, and the
    amount of the setup before them.
    """
    if not data.steps:
        return ""
    before = _setup(data)
    setup = f" and the setup before them ({before})" if before.calls else ""
    return f", over {count(data.steps, 'optimizer step')}{_amount_of_each_step(data)}{setup}"


def _amount_of_each_step(data: TraceData) -> str:
    if any(event.last_step not in (None, event.step) for event in data.events):
        return ""
    steps = grouped((event.step, event) for event in data.events if not data.is_setup(event))
    amounts = set(map(_amount, steps.values()))
    if data.steps < 2 or len(steps) != data.steps or len(amounts) > 1:
        return ""
    return f" ({amounts.pop()} each)"


def _setup(data: TraceData) -> _Amount:
    """Return the amount before the first forward."""
    return _amount(event for event in data.events if data.is_setup(event))


def _totals_by(
    data: TraceData, key: Callable[[ProcessGroup, TraceEvent], str], *, sizes: bool = False
) -> list[Total]:
    rows: dict[str, Total] = {}
    for event in data.events:
        group = data.group_of(event)
        name = key(group, event)
        if name not in rows:
            rows[name] = Total(name, group_size=len(group.ranks) if sizes else 0)
        row = rows[name]
        row.calls += event.count
        row.wire_bytes += event.wire_bytes * event.count
        _add_time(row, time_of(data, event))
        if row.group_size != len(group.ranks):  # groups of several sizes share the row
            row.group_size = 0
    return sorted(rows.values(), key=lambda row: (-row.wire_bytes, -row.calls, row.name))


def _add_time(row: Total | ModuleTotal, time: Time | None) -> None:
    if time is not None:
        row.timed += 1
        row.time_ns = (row.time_ns or 0) + time.total
        if time.waited is not None:
            row.wait_known += 1
            row.waited_ns = (row.waited_ns or 0) + time.waited


def folded(paths: Iterable[str]) -> dict[str, str]:
    """Map each path to its row. Three or more paths that differ only in numbers share a row."""
    by_pattern = grouped((wording.pattern(path), path) for path in dict.fromkeys(paths))
    names = {}
    for pattern, members in by_pattern.items():
        together = len(members) >= _FOLD_FROM and "#" in pattern
        shared = wording.fold(sorted(members, key=natural)) if together else ""
        names.update({path: shared or path for path in members})
    return names


def modules(data: TraceData) -> list[ModuleTotal]:
    """Return own and inclusive totals of each module that has collectives, its own or its
    children's.
    """
    at_site = grouped((event.site, event) for event in data.events if event.site is not None)
    called = {module.path for module in data.modules}
    shared = {module.path: module.other_paths for module in data.modules if module.other_paths}
    order = _call_order(data)
    events_inside = grouped(
        (path, event)
        for site, events in at_site.items()
        for path in wording.prefixes(site)
        # a container that is never called, such as a ModuleList, gets no row
        if path in called or path == site or "." not in path
        for event in events
    )
    names = folded(events_inside)
    rows: dict[str, ModuleTotal] = {}
    first: dict[str, str] = {}  # a row's name -> the path of its module that was called first
    for path in sorted(events_inside, key=lambda path: _sort_key(path, order)):
        name = names[path]
        row = rows.setdefault(name, ModuleTotal(name, modules=0))
        first.setdefault(name, path)
        row.modules += 1
        if path.rpartition(".")[0] not in shared:  # else the parent's row names the other paths
            row.other_paths.extend(shared.get(path, ()))
        own, inclusive = _amount(at_site.get(path, ())), _amount(events_inside[path])
        row.own_calls += own.calls
        row.own_bytes += own.wire_bytes
        row.calls += inclusive.calls
        row.wire_bytes += inclusive.wire_bytes
        for event in events_inside[path]:
            _add_time(row, time_of(data, event))
    return _in_tree(rows, first, names)


def _call_order(data: TraceData) -> dict[str, int]:
    """Return each path's position in the order of first calls; a parent takes that of its first
    called child.
    """
    last_first = reversed(list(enumerate(data.modules)))  # so that the first call stays
    return {path: place for place, one in last_first for path in wording.prefixes(one.path)}


def _sort_key(path: str, places: dict[str, int]) -> list[tuple[int, object]]:
    """Return a sort key: modules in the order of their first calls, parents before children,
    uncalled paths last.
    """
    return [
        (0, places[part]) if part in places else (1, natural(part.rpartition(".")[2]))
        for part in wording.prefixes(path)
    ]


def _in_tree(
    rows: dict[str, ModuleTotal], first: dict[str, str], names: dict[str, str]
) -> list[ModuleTotal]:
    """Return the rows in tree order, each below the row of its nearest ancestor.

    ``first``: by row, the path of its first module; ``names``: by path, its row.
    """
    children: dict[str | None, list[str]] = {}
    for name, path in first.items():
        ancestors = reversed(wording.prefixes(path)[:-1])
        parent = next(
            (names[other] for other in ancestors if other in names and names[other] != name), None
        )
        children.setdefault(parent, []).append(name)
    ordered: list[ModuleTotal] = []
    todo = [(name, 0) for name in reversed(children.get(None, []))]
    while todo:
        name, depth = todo.pop()
        rows[name].depth = depth
        ordered.append(rows[name])
        todo += [(child, depth + 1) for child in reversed(children.get(name, []))]
    return ordered


def reasons(data: TraceData) -> list[Why]:
    """Group collectives by place, cause, owner and line, costliest first. Modules that differ only
    in a number are grouped.
    """
    alike = grouped((_reason_key(data, event), event) for event in data.events)
    found = []
    for events in alike.values():
        amount = _amount(events)
        found.append(Why(_reason(data, events, amount.calls), *amount))
    return sorted(found, key=lambda why: (-why.wire_bytes, -why.calls))


def _reason_key(data: TraceData, event: TraceEvent) -> Hashable:
    owner = event.owner
    return (
        event.op,
        event.phase,
        wording.pattern(event.site) if event.site is not None else None,
        event.cause,
        (owner.library, wording.pattern(owner.name)) if owner is not None else None,
        event.source,
        event.through,
        wording.label(data.group_of(event)),
    )


def _reason(data: TraceData, events: Sequence[TraceEvent], calls: int) -> str:
    first = events[0]
    group = data.group_of(first)
    sizes = {len(data.group_of(event).ranks) for event in events}
    of_ranks = f" ({count(next(iter(sizes)), 'rank')})" if len(sizes) == 1 and group.ranks else ""
    sites = sorted({event.site for event in events if event.site is not None}, key=natural)
    text = (
        f"{number(calls)} {first.op} on {wording.label(group)}{of_ranks}:"
        f" {wording.place(first.phase, wording.fold(sites) or None)}"
    )
    if first.owner is not None:
        text += f", {owner_words(events)}"
    if first.cause is not None:
        text += f", {wording.cause_words(first.cause)}"
    if first.op in POINT_TO_POINT:
        peers = sorted({event.peer for event in events if event.peer is not None})
        if peers:
            text += f", {'to' if first.op == 'send' else 'from'} {ranks_phrase(peers)}"
    where = wording.source_words(first.source, first.through)
    return f"{text}, at {where}" if where else text


def owner_words(events: Sequence[TraceEvent]) -> str:
    """Return ``"for FSDP2's parameters of layers.0-31"``. The model's class is left out if the
    place already names it.
    """
    owner = events[0].owner
    assert owner is not None
    names = sorted({event.owner.name for event in events if event.owner is not None}, key=natural)
    if owner.library == "DDP":
        return f"for DDP's {_buckets(names, owner.parameters)}"
    sites = {event.site for event in events}
    if sites == set(names):
        return f"for {'its' if len(names) == 1 else 'their'} own {owner.library} parameters"
    models = {site.split(".")[0] for site in sites if site is not None}
    if len(models) == 1:
        names = [name.removeprefix(f"{next(iter(models))}.") for name in names]
    return f"for {owner.library}'s parameters of {wording.fold(names)}"


def _buckets(names: Sequence[str], parameters: Sequence[str]) -> str:
    """Return ``"bucket 0 (bias, weight and 3 more)"``, or the number of buckets."""
    if len(names) > 1:
        return f"{len(names)} buckets"
    if not parameters:
        return names[0]
    more = f" and {len(parameters) - 2} more" if len(parameters) > 2 else ""
    return f"{names[0]} ({', '.join(parameters[:2])}{more})"


def why(event: TraceEvent) -> str:
    """Return why a collective was issued; empty if the program simply called it."""
    parts = [owner_words([event])] if event.owner is not None else []
    if event.cause is not None:
        parts.append(wording.cause_words(event.cause))
    return ", ".join(parts)


def _coverage(data: TraceData) -> tuple[str, bool]:
    """Return the self-check in words, and whether it found that nothing is missing."""
    if not _groups_known(data):
        return "CommDebugMode's JSON has no self-check.", False
    seen, kept = data.coverage.dispatched, data.coverage.recorded
    if not seen and not kept:
        return "No collective was dispatched, so none is missing.", True
    if seen != kept:
        text = f"{number(kept)} of {number(seen)} dispatched collectives are recorded"
    elif seen > 1:
        text = f"All {number(seen)} dispatched collectives are recorded"
    else:
        text = "The one dispatched collective is recorded"
    if data.coverage.unclassified:
        return f"{text}; {_unclassified(data)}.", False
    return f"{text} and classified.", seen == kept


def _unclassified(data: TraceData) -> str:
    places: Counter[str] = Counter()
    for event in data.events:
        if not event.classified:
            where = wording.source_words(event.source, event.through)
            at = f"at {where}" if where else f"of {wording.label(data.group_of(event))}"
            places[f"{event.op} {at}"] += event.count
    named = [f"{place} ({number(calls)})" for place, calls in places.most_common(3)]
    if len(places) > 3:
        named.append(count(len(places) - 3, "other place"))
    words = f"{number(data.coverage.unclassified)} unclassified"
    return f"{words}: {joined(named)}" if named else words
