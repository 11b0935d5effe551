"""Phrases about ranks that disagree: the sides, and what separates them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from commlens.diagnosis.align.call_paths import Path, parted
from commlens.diagnosis.causes.context import Context
from commlens.model.collective import Collective, Stack
from commlens.text import (
    args_phrase,
    capital,
    format_ranks,
    frame_phrase,
    group_label,
    joined,
    op_phrase,
    ranks_and_verb,
    ranks_phrase,
)

_SHOWN = 4  # sides
UNDECIDED = "Neither a majority nor their routine tells which side is at fault."


def kind_phrase(op: Collective) -> str:
    """``"all_reduce of group dp"``: of any group with this label; ``"recv from rank 1"``."""
    if op.is_point_to_point:
        return (
            f"{op.op} {'to' if op.op == 'send' else 'from'}"
            f" {'any rank' if op.peer is None else f'rank {op.peer}'}"
        )
    if op.is_setup or op.is_store_wait:
        return op_phrase(op)
    label = group_label(op.channel.group, "")
    return f"{op.op} of {f'group {label}' if label else 'the default group'}"


def describe_sides(sides: Sequence[Sequence[int]], ops: Mapping[int, Collective]) -> str:
    """``"Ranks 0-3 issue all_reduce of the default group at train.py:20 step (float32[4] SUM);
    ranks 4-7 issue ..."``.

    A sentence about several ranks holds for each: ranks of a side whose lines or arguments differ
    are told apart. Of two sides, the call paths are told from where they part.
    """
    paths = _paths(sides, ops)
    told = [
        said
        for ranks in sides
        for said in told_apart(ranks, lambda rank: _at_line(ops[rank], paths.get(ops[rank].stack)))
    ]
    parts = []
    for ranks, where in told[:_SHOWN]:
        parts.append(
            f"{ranks_and_verb(ranks, 'issues', 'issue')}"
            f" {kinds_phrase([ops[rank] for rank in ranks])}{where}"
        )
    more = [rank for ranks, _ in told[_SHOWN:] for rank in ranks]
    return capital("; ".join(parts)) + (f"; {ranks_phrase(more)} issue others." if more else ".")


def told_apart(ranks: Iterable[int], said: Callable[[int], str]) -> list[tuple[list[int], str]]:
    """Return what is said of each rank, and the ranks of which the same is said; most ranks
    first.
    """
    same: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(ranks):
        same[said(rank)].append(rank)
    return sorted(((of, text) for text, of in same.items()), key=lambda one: (-len(one[0]), one[0]))


def kinds_phrase(ops: Sequence[Collective]) -> str:
    """``"all_reduce of group dp"``; ``"all_reduce of their groups 1 [0,2] and 2 [1,3]"`` where the
    groups have no name in common.
    """
    peers = {op.peer for op in ops if op.peer is not None}
    if ops[0].is_point_to_point and len(peers) > 1:
        return f"{ops[0].op} {'to' if ops[0].op == 'send' else 'from'} {ranks_phrase(peers)}"
    groups = {op.channel.key: op.channel.group for op in ops}
    if len({group_label(group, "") for group in groups.values()}) == 1 or ops[0].is_point_to_point:
        return kind_phrase(ops[0])
    names = [
        f"{group_label(group, 'the default group')} [{format_ranks(group.all_ranks)}]"
        for group in groups.values()
    ]
    return f"{ops[0].op} of their groups {joined(names[:_SHOWN])}" + (
        f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)
    )


def _paths(sides: Sequence[Sequence[int]], ops: Mapping[int, Collective]) -> dict[Stack, Path]:
    """Return the call paths of two sides, from where they part, by the stacks of their first ranks;
    nothing if they do not part.
    """
    if len(sides) != 2:
        return {}
    first, second = (ops[min(ranks)].stack for ranks in sides)
    paths = parted(first, second)
    return dict(zip((first, second), paths, strict=True)) if paths is not None else {}


def _at_line(op: Collective, path: Path | None) -> str:
    args, line = args_phrase(op), path.phrase if path is not None else frame_phrase(op.source)
    return f"{f' at {line}' if line else ''}{f' ({args})' if args else ''}"


def tie_step(ops: Sequence[Collective]) -> str:
    """Recommend a step for sides that disagree, with an op of each."""
    lines = list(dict.fromkeys(frame_phrase(op.source) for op in ops if op.source is not None))
    paths = parted(ops[0].stack, ops[1].stack) if len(ops) == 2 else None
    if (
        paths is not None
        and all(path.place for path in paths)
        and any(path.with_caller != path.place for path in paths)
    ):
        here, there = (path.with_caller for path in paths)
        return (
            f"find out why one side comes to {here}, and the other to {there}: compare their"
            " configuration, versions and data"
        )
    if len(lines) > 1:
        return (
            f"compare {joined(lines[:3])}, and the configuration, versions and data that lead the"
            " sides there"
        )
    if len(ops) == 1:
        return (
            "compare the splits that these ranks pass to"
            f" {ops[0].op}{f' at {lines[0]}' if lines else ''}"
        )
    where = f" reach {lines[0]}" if lines else " come"
    return (
        f"find out why the ranks{where} with different calls: compare their configuration, versions"
        " and data"
    )


def separation(context: Context, sides: Sequence[Sequence[int]]) -> str:
    """Say what the ranks of a side have in common: the host, their half, their parity or their
    place in a mesh; empty if nothing.
    """
    if len(sides) < 2:
        return ""
    side_of = {rank: number for number, ranks in enumerate(sides) for rank in ranks}
    ranks = sorted(side_of)
    views = context.job.views
    hosts = {rank: views[rank].log.host for rank in ranks if rank in views}
    if len(set(hosts.values())) > 1 and all(hosts.values()) and _follows(side_of, hosts):
        names = [
            f"{ranks_phrase(side)} {'is' if len(side) == 1 else 'are'} on {_hosts(hosts, side)}"
            for side in sides
        ]
        return f"The sides follow the hosts: {joined(names)}."
    if len(ranks) < 4 or len(sides) > 2:
        return ""
    places: dict[str, dict[str, dict[int, int]]] = defaultdict(lambda: {"place": {}, "group": {}})
    for number, channel in enumerate(context.job.channels.values()):
        if 1 < len(channel.group.ranks) < context.job.size:
            members = {
                rank: place for place, rank in enumerate(channel.group.ranks) if rank in side_of
            }
            found = places[channel.group.label]
            found["place"].update(members)
            found["group"].update(dict.fromkeys(members, number))
    for label, found in sorted(places.items()):
        if len(found["place"]) == len(ranks):
            if len(set(found["place"].values())) > 1 and _follows(side_of, found["place"]):
                return f"The sides follow the ranks' places in the groups {label}."
            if len(set(found["group"].values())) > 1 and _follows(side_of, found["group"]):
                return f"The sides follow the groups {label}."
    if len({side_of[rank] for rank in ranks[: len(sides[side_of[ranks[0]]])]}) == 1:
        return "One side has the lower ranks, the other the higher ones."
    if _follows(side_of, {rank: rank % 2 for rank in ranks}):
        return "One side has the even ranks, the other the odd ones."
    return ""


def _follows(side_of: Mapping[int, int], values: Mapping[int, Hashable]) -> bool:
    """Return whether all ranks with the same value are on the same side."""
    side: dict[Hashable, int] = {}
    return all(
        side.setdefault(value, side_of[rank]) == side_of[rank] for rank, value in values.items()
    )


def _hosts(hosts: Mapping[int, str], side: Iterable[int]) -> str:
    names = sorted({hosts[rank] for rank in side if rank in hosts})
    return joined(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
