"""Groups and meshes on which ranks disagree, which the wait-for graph does not show, and ranks that
exist twice.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Hashable

from commlens.diagnosis.align.tie_break import UNDECIDED, by_majority
from commlens.diagnosis.causes.context import Case, Context, group_of, source_of
from commlens.model.cause import (
    Claims,
    GroupDifference,
    GroupName,
    GroupsDiffer,
    MadeGroup,
    StartedTwice,
)
from commlens.model.collective import Collective, State
from commlens.model.grouping import grouped
from commlens.model.store_identity import parse_address

_GROUPS_MAX = 4096  # of one process, whose names are tried

_Calls = dict[tuple[int, str, int], dict[int, Collective]]
"""The calls that make groups: incarnation, op and number -> rank -> call."""


def find_groups_that_differ(context: Context) -> None:
    """Find the first call that makes groups or a mesh in which ranks that wait, or did so until
    they failed, ask for different ones.
    """
    views = context.job.views
    held = sorted(
        {node.rank for node in context.graph.blocks}
        | {rank for rank, view in views.items() if view.exit.failed}
    )
    calls = _calls(context) if held else {}
    (
        _add_first_that_differs(context, calls, held)
        or _add_other_names(context, held)
        or _add_halves(context, held)
        or _add_first_not_called(context, calls, held)
    )


def calls_that_differ(context: Context) -> set[int]:
    """Return the identities of the calls whose groups are found to differ: that is why they do not
    meet, and no other reason counts.
    """
    return {
        id(op)
        for case in context.cases
        if isinstance(case.cause, GroupsDiffer)
        for op in case.ops.values()
    }


def _add_first_that_differs(context: Context, calls: _Calls, held: list[int]) -> bool:
    """Add the first call in which ranks ask for different groups; return whether there is one."""
    for (_, name, _), ops in sorted(
        calls.items(), key=lambda item: min(op.announced_ns for op in item[1].values())
    ):
        sides = grouped((_request(op), rank) for rank, op in sorted(ops.items()))
        all_completed = all(op.state is State.COMPLETED for op in ops.values())
        if len(sides) > 1 and not (name == "init_process_group" and all_completed):
            _add_sides(context, ops, sorted(sides.values(), key=len, reverse=True), held)
            return True
    return False


def _add_first_not_called(context: Context, calls: _Calls, held: list[int]) -> bool:
    """Add the first call of new_group in which some ranks wait although others went on without
    it.
    """
    views = context.job.views
    for (_, name, _), ops in sorted(calls.items()):
        others = [
            rank for rank in held if rank not in ops and rank in views and _went_on(context, rank)
        ]
        if name == "new_group" and others and any(op.in_flight for op in ops.values()):
            _add_went_on(context, ops, others)
            return True
    return False


def _add_other_names(context: Context, held: list[int]) -> bool:
    """Add a group whose members wait for each other under different names; return whether there is
    one. No rank is to blame: only the number of groups that it is in tells a rank's name.
    """
    waiting: dict[tuple[int, ...], dict[str, dict[int, Collective]]] = defaultdict(dict)
    for rank in held:
        for op in context.job.views[rank].log.setups[-1:]:
            group = op.channel.group
            if (
                op.op == "new_group"
                and op.state is not State.COMPLETED
                and not group.name.isdecimal()
                and rank in group.all_ranks
            ):
                waiting[group.all_ranks].setdefault(group.name, {})[rank] = op
    by_name = next((names for names in waiting.values() if len(names) > 1), None)
    if by_name is None:
        return False
    names = [
        GroupName(sorted(ops), name, _groups_before(name, next(iter(ops.values()))))
        for name, ops in sorted(by_name.items(), key=lambda item: (-len(item[1]), min(item[1])))
    ]
    ops = {rank: op for each in by_name.values() for rank, op in each.items()}
    cause = GroupsDiffer(
        kind="mismatch/group",
        why="initialising",
        root_cause=True,
        blamed_by="nobody",
        victims=held,
        confidence="high",
        sides=[each.ranks for each in names],
        waiting=held,
        difference="name",
        names=names,
        one_more=_made_by_one_side(context, names),
    )
    op, weight = ops[min(ops)], len(context.job.views)
    context.cases.append(Case(cause, op, op.source, ops=ops, weight=weight, order=(0,)))
    return True


def _add_halves(context: Context, held: list[int]) -> bool:
    """Add a group made by hand whose members wait for each other at different addresses, or for
    different numbers of members; return whether there is one.
    """
    halves = _halves(context, held)
    if halves is None:
        return False
    most, odd = map(sorted, halves)
    decision = by_majority([most, odd]) or UNDECIDED
    culprits = list(decision.culprits)
    ops, weight = halves[0] | halves[1], len(context.job.views)
    usual, other = (ops[side[0]].channel.group for side in (most, odd))
    cause = GroupsDiffer(
        kind="mismatch/group",
        why="initialising",
        root_cause=True,
        culprits=culprits,
        blamed_by=decision.by,
        victims=sorted({*most, *odd} - set(culprits)),
        confidence="medium" if culprits else "low",
        sides=[most, odd],
        waiting=held,
        difference="store" if len(usual.ranks) == len(other.ranks) else "size",
        names=[GroupName(most, usual.name), GroupName(odd, other.name)],
    )
    op = ops[odd[0]]
    context.cases.append(Case(cause, op, op.source, ops=ops, weight=weight, order=(0,)))
    return True


def _halves(
    context: Context, held: list[int]
) -> tuple[dict[int, Collective], dict[int, Collective]] | None:
    """Return the calls by which processes wait in two groups made by hand, each of which has the
    members that the other one lacks; None if they do not. The groups have one store, or all
    processes wait in them.
    """
    waiting = _waits_for_members(context, held)
    if len(waiting) != 2:
        return None
    most, odd = sorted(waiting.values(), key=lambda calls: (-len(calls), min(calls)))
    ops = most | odd
    places = sorted(op.channel.group.ranks.index(rank) for rank, op in ops.items())
    names, sizes = zip(*waiting, strict=True)
    are_one = names[0] == names[1] or len(ops) == context.job.size
    in_flight = any(op.in_flight for op in ops.values())
    return (most, odd) if are_one and in_flight and places == [*range(min(sizes))] else None


def _waits_for_members(
    context: Context, held: list[int]
) -> dict[tuple[str, int], dict[int, Collective]]:
    """Return the calls that made the groups in which ranks wait for members without a record, by
    the groups' names and sizes.
    """
    views = context.job.views
    waiting: dict[tuple[str, int], dict[int, Collective]] = defaultdict(dict)
    for rank in held:
        for op in views[rank].log.setups[-1:]:
            group = op.channel.group
            if _waits_in(context, rank, op) and not views.keys() >= set(group.ranks):
                waiting[group.name, len(group.ranks)][rank] = op
    return waiting


def _waits_in(context: Context, rank: int, made: Collective) -> bool:
    """Return whether a rank waits in a call that makes a group, or in a collective of that group:
    gloo makes it as soon as all members that a process was told have come, whatever size these were
    told.
    """
    blocks = context.job.views[rank].blocks.values()
    return made.in_flight or any(block.op.channel.group == made.channel.group for block in blocks)


def _groups_before(name: str, op: Collective) -> int | None:
    """Return the number of groups of which torch made a name (2.6 to 2.15); None if it did not."""
    for number in range(_GROUPS_MAX):
        text = "_".join(map(str, (*op.channel.group.all_ranks, number)))
        if hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest() == name:
            return number
    return None


def _made_by_one_side(context: Context, names: list[GroupName]) -> list[MadeGroup]:
    """Return the groups that the ranks in the most groups have made and a rank in the fewest has
    not; none if they do not account for the numbers in the names.
    """
    known = [(each.groups_before, each.ranks) for each in names if each.groups_before is not None]
    if len(known) < len(names):
        return []
    (fewest, few_ranks), (most, many_ranks) = min(known), max(known)
    others = [_own_groups(context, rank) for rank in few_ranks]
    found: dict[str, tuple[Collective, list[int]]] = {}
    for rank in many_ranks:
        extra = _extra_groups(_own_groups(context, rank), others)
        if len(extra) != most - fewest:
            return []
        for name, op in extra.items():
            found.setdefault(name, (op, []))[1].append(rank)
    return [
        MadeGroup(made_by, group, source_of(op))
        for op, made_by in found.values()
        if (group := group_of(op)) is not None
    ]


def _extra_groups(
    own: dict[str, Collective], others: list[dict[str, Collective]]
) -> dict[str, Collective]:
    """Return the groups that a rank is in beside all of the first other rank that it shares all
    with.
    """
    less = next((theirs for theirs in others if theirs.keys() <= own.keys()), own)
    return {name: op for name, op in own.items() if name not in less}


def _own_groups(context: Context, rank: int) -> dict[str, Collective]:
    """Return the groups that a rank has made and is in, by name. A helper of torch may make one
    without telling its ranks.
    """
    made = [op for op in context.job.views[rank].log.setups if op.op == "new_group"]
    return {
        op.channel.group.name: op
        for op in made
        if op.state is State.COMPLETED and rank in (op.channel.group.asked_for or (rank,))
    }


def _calls(context: Context) -> _Calls:
    calls: _Calls = defaultdict(dict)
    for rank, view in context.job.views.items():
        for op in view.log.setups:
            # else made by its members alone
            if op.op != "new_group" or op.channel.group.name.isdecimal():
                calls[(op.channel.group.incarnation, op.op, op.sequence_number)][rank] = op
    return calls


def _went_on(context: Context, rank: int) -> bool:
    """Return whether a rank waits in collectives, not in a call that makes groups or in a store."""
    blocks = context.job.views[rank].blocks.values()
    return bool(blocks) and not any(block.op.is_setup or block.op.is_store_wait for block in blocks)


def _add_went_on(context: Context, ops: dict[int, Collective], others: list[int]) -> None:
    """Add a call that makes a group, which some ranks of the job did not make: they wait in a later
    collective.
    """
    op = next(op for _, op in sorted(ops.items()) if op.in_flight)
    callers = sorted(ops)
    decision = by_majority([callers, others]) or UNDECIDED
    odd = list(decision.culprits)
    cause = GroupsDiffer(
        kind="mismatch/group",
        why="skipped" if odd == others else "initialising",
        root_cause=True,
        culprits=odd,
        blamed_by=decision.by,
        victims=sorted({*callers, *others} - set(odd)),
        confidence="high" if odd else "low",
        sides=[callers],
        not_called_by=others,
        waiting=sorted({*callers, *others}),
    )
    frame = went_on_to(context, others).source if odd == others else op.source
    weight = len(context.job.views)
    context.cases.append(Case(cause, op, frame, ops=ops, weight=weight, order=(0,)))


def went_on_to(context: Context, ranks: list[int]) -> Collective:
    """Return the collective in which the first of the ranks waits that went on without a group."""
    return next(iter(context.job.views[ranks[0]].blocks.values())).op


def _request(op: Collective) -> Hashable:
    """Return what a call asks for."""
    group = op.channel.group
    if op.op == "new_group":
        return group.asked_for
    if op.op != "init_process_group":
        return op.module
    return len(group.all_ranks), parse_address(op.module).port or op.module, group.backend


def _add_sides(
    context: Context, ops: dict[int, Collective], sides: list[list[int]], held: list[int]
) -> None:
    odd = ops[sides[1][0]]
    decision = by_majority(sides) or UNDECIDED
    culprits = list(decision.culprits)
    difference = _difference(context, ops[sides[0][0]], odd, sides)
    cause = GroupsDiffer(
        kind="mismatch/group",
        why="skipped" if difference is not None else "initialising",
        root_cause=True,
        culprits=culprits,
        blamed_by=decision.by,
        victims=sorted({*held, *ops} - set(culprits)),
        confidence="high" if culprits else "low",
        sides=sides,
        waiting=held,
        difference=difference,
    )
    weight = len(context.job.views)
    context.cases.append(Case(cause, odd, odd.source, ops=ops, weight=weight, order=(0,)))


def _difference(
    context: Context, usual: Collective, odd: Collective, sides: list[list[int]]
) -> GroupDifference | None:
    """Return in which way the odd ranks' groups differ from the others', if the next groups show
    it.
    """
    if usual.op != "new_group":
        return None
    next_of_most, next_of_odd = (_next_ranks(context, usual, side) for side in sides[:2])
    follows = odd.channel.group.asked_for in next_of_most
    precedes = usual.channel.group.asked_for in next_of_odd
    if follows and precedes:
        return "order"
    if follows:
        return "skipped" if next_of_odd else "skipped-first"
    return "one-too-many" if precedes else None


def _next_ranks(context: Context, call: Collective, side: list[int]) -> set[tuple[int, ...]]:
    """Return the ranks of the groups that these ranks make with the next call."""
    incarnation, number = call.channel.group.incarnation, call.sequence_number + 1
    made = [op for rank in side for op in context.job.views[rank].log.setups if op.op == call.op]
    return {
        op.channel.group.asked_for
        for op in made
        if (op.channel.group.incarnation, op.sequence_number) == (incarnation, number)
    }


def find_started_twice(context: Context) -> None:
    """Find the ranks that several processes have, if anything is wrong: all else is then a
    consequence.

    Where nothing is wrong, the processes may have met one after the other.
    """
    views = context.job.views
    claims = [
        Claims(rank, [pid for pid, _ in view.log.twins], [by for _, by in view.log.twins])
        for rank, view in sorted(views.items())
        if len(view.log.twins) > 1
    ]
    if not claims or not any(case.cause.root_cause for case in context.cases):
        return
    cause = StartedTwice(
        kind="mismatch/group",
        why="initialising",
        root_cause=True,
        blamed_by="nobody",
        victims=sorted(views),
        confidence="high",
        ranks=[one.rank for one in claims],
        claims=claims,
    )
    for case in context.cases:
        case.cause.root_cause = False
    context.cases.append(Case(cause, weight=len(views)))
