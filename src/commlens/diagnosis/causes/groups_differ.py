"""Groups and meshes on which ranks disagree, and ranks that exist twice.

The wait-for graph does not show these faults: the ranks wait in calls of different groups. Looked
for, in this order:

1. ranks that ask for different groups in one call: rank 3 calls ``new_group([0, 1])`` where the
   others call ``new_group([0, 2])``;
2. members of one group that wait for it under different names, which
   ``use_local_synchronization=True`` makes of the number of groups that a process is in;
3. members of a group made by hand that wait at different addresses, or for different numbers of
   members;
4. ranks that wait in ``new_group`` while others went on without that call.
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
"""The calls that make groups: by incarnation, op and number, and then by rank. ``new_group #2`` of
rank 3, in the first default group, is ``calls[0, "new_group", 2][3]``.
"""


def find_groups_that_differ(context: Context) -> None:
    """Find the first call that makes groups or a mesh in which ranks that wait, or did so until
    they failed, ask for different ones.
    """
    failed = {rank for rank, view in context.job.views.items() if view.exit.failed}
    waiting = sorted({node.rank for node in context.graph.blocks} | failed)
    if not waiting:
        return
    calls = _calls(context)
    case = (
        _first_that_differs(context, calls, waiting)
        or _other_names(context, waiting)
        or _two_halves(context, waiting)
        or _first_not_called(context, calls, waiting)
    )
    if case is not None:
        context.cases.append(case)


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


def _calls(context: Context) -> _Calls:
    """Return the calls that all ranks must make alike."""
    calls: _Calls = defaultdict(dict)
    for rank, view in context.job.views.items():
        for op in view.log.setups:
            # torch numbers these groups; the others are made by their members alone
            if op.op != "new_group" or op.channel.group.name.isdecimal():
                calls[(op.channel.group.incarnation, op.op, op.sequence_number)][rank] = op
    return calls


def _case(
    context: Context, cause: GroupsDiffer, ops: dict[int, Collective], shown: Collective
) -> Case[GroupsDiffer]:
    """Return the case of calls that differ: it comes before all others, and blocks the whole
    job.
    """
    weight = len(context.job.views)
    return Case(cause, shown, shown.source, ops=ops, weight=weight, order=(0,))


# --- 1. ranks that ask for different groups in one call


def _first_that_differs(
    context: Context, calls: _Calls, waiting: list[int]
) -> Case[GroupsDiffer] | None:
    for (_, name, _), ops in sorted(
        calls.items(), key=lambda item: min(op.announced_ns for op in item[1].values())
    ):
        by_request = grouped((_request(op), rank) for rank, op in sorted(ops.items()))
        all_completed = all(op.state is State.COMPLETED for op in ops.values())
        # in an init_process_group that completed they have met, whatever addresses they passed
        if len(by_request) > 1 and not (name == "init_process_group" and all_completed):
            sides = sorted(by_request.values(), key=len, reverse=True)
            return _case_of_sides(context, ops, sides, waiting)
    return None


def _request(op: Collective) -> Hashable:
    """Return what a call asks for."""
    group = op.channel.group
    if op.op == "new_group":
        return group.asked_for
    if op.op != "init_process_group":
        return op.module
    return len(group.all_ranks), parse_address(op.module).port or op.module, group.backend


def _case_of_sides(
    context: Context, ops: dict[int, Collective], sides: list[list[int]], waiting: list[int]
) -> Case[GroupsDiffer]:
    usual, odd = (ops[side[0]] for side in sides[:2])
    decision = by_majority(sides) or UNDECIDED
    culprits = list(decision.culprits)
    difference = _difference(context, usual, odd, sides)
    cause = GroupsDiffer(
        kind="mismatch/group",
        why="skipped" if difference is not None else "initialising",
        root_cause=True,
        culprits=culprits,
        blamed_by=decision.by,
        victims=sorted({*waiting, *ops} - set(culprits)),
        confidence="high" if culprits else "low",
        sides=sides,
        waiting=waiting,
        difference=difference,
    )
    return _case(context, cause, ops, odd)


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


# --- 2. members of one group that wait for it under different names


def _other_names(context: Context, waiting: list[int]) -> Case[GroupsDiffer] | None:
    """Return a group whose members wait for each other under different names. No rank is to blame:
    only the number of groups that it is in tells a rank's name.
    """
    by_ranks: dict[tuple[int, ...], dict[str, dict[int, Collective]]] = defaultdict(dict)
    for rank in waiting:
        for op in context.job.views[rank].log.setups[-1:]:
            group = op.channel.group
            if (
                op.op == "new_group"
                and op.state is not State.COMPLETED
                and not group.name.isdecimal()
                and rank in group.all_ranks
            ):
                by_ranks[group.all_ranks].setdefault(group.name, {})[rank] = op
    by_name = next((names for names in by_ranks.values() if len(names) > 1), None)
    if by_name is None:
        return None
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
        victims=waiting,
        confidence="high",
        sides=[each.ranks for each in names],
        waiting=waiting,
        difference="name",
        names=names,
        one_more=_made_by_one_side(context, names),
    )
    return _case(context, cause, ops, ops[min(ops)])


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
    of_few = [_own_groups(context, rank) for rank in few_ranks]
    found: dict[str, tuple[Collective, list[int]]] = {}
    for rank in many_ranks:
        own = _own_groups(context, rank)
        # a rank of the fewest groups that shares all of them with this one
        shared = next((theirs for theirs in of_few if theirs.keys() <= own.keys()), own)
        extra = {name: op for name, op in own.items() if name not in shared}
        if len(extra) != most - fewest:
            return []
        for name, op in extra.items():
            found.setdefault(name, (op, []))[1].append(rank)
    return [
        MadeGroup(made_by, group, source_of(op))
        for op, made_by in found.values()
        if (group := group_of(op)) is not None
    ]


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


# --- 3. members of a group made by hand that wait in two places


def _two_halves(context: Context, waiting: list[int]) -> Case[GroupsDiffer] | None:
    """Return a group made by hand whose members wait for each other at different addresses, or for
    different numbers of members.
    """
    halves = _halves(context, waiting)
    if halves is None:
        return None
    most, odd = map(sorted, halves)
    decision = by_majority([most, odd]) or UNDECIDED
    culprits = list(decision.culprits)
    ops = halves[0] | halves[1]
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
        waiting=waiting,
        difference="store" if len(usual.ranks) == len(other.ranks) else "size",
        names=[GroupName(most, usual.name), GroupName(odd, other.name)],
    )
    return _case(context, cause, ops, ops[odd[0]])


def _halves(
    context: Context, waiting: list[int]
) -> tuple[dict[int, Collective], dict[int, Collective]] | None:
    """Return the calls by which processes wait in two groups made by hand, each of which has the
    members that the other one lacks; None if they do not. The groups have one store, or all
    processes wait in them.
    """
    calls = _calls_without_members(context, waiting)
    if len(calls) != 2:
        return None
    most, odd = sorted(calls.values(), key=lambda made: (-len(made), min(made)))
    ops = most | odd
    places = sorted(op.channel.group.ranks.index(rank) for rank, op in ops.items())
    names, sizes = zip(*calls, strict=True)
    are_one = names[0] == names[1] or len(ops) == context.job.size
    in_flight = any(op.in_flight for op in ops.values())
    return (most, odd) if are_one and in_flight and places == [*range(min(sizes))] else None


def _calls_without_members(
    context: Context, waiting: list[int]
) -> dict[tuple[str, int], dict[int, Collective]]:
    """Return the calls that made the groups in which ranks wait for members without a record, by
    the groups' names and sizes.
    """
    views = context.job.views
    calls: dict[tuple[str, int], dict[int, Collective]] = defaultdict(dict)
    for rank in waiting:
        for op in views[rank].log.setups[-1:]:
            group = op.channel.group
            # gloo makes a group as soon as all members that a process was told have come, whatever
            # size these were told: then the ranks wait in a collective of the group
            blocks = views[rank].blocks.values()
            waits = op.in_flight or any(block.op.channel.group == group for block in blocks)
            if waits and not views.keys() >= set(group.ranks):
                calls[group.name, len(group.ranks)][rank] = op
    return calls


# --- 4. ranks that went on without a call in which others wait


def _first_not_called(
    context: Context, calls: _Calls, waiting: list[int]
) -> Case[GroupsDiffer] | None:
    """Return the first call of new_group in which some ranks wait, while others wait in a later
    collective.
    """
    for (_, name, _), ops in sorted(calls.items()):
        others = [rank for rank in waiting if rank not in ops and _went_on(context, rank)]
        shown = next((op for _, op in sorted(ops.items()) if op.in_flight), None)
        if name != "new_group" or not others or shown is None:
            continue
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
        case = _case(context, cause, ops, shown)
        case.frame = went_on_to(context, others).source if odd == others else shown.source
        return case
    return None


def _went_on(context: Context, rank: int) -> bool:
    """Return whether a rank waits in collectives, not in a call that makes groups or in a store."""
    ops = [block.op for block in context.job.views[rank].blocks.values()]
    return bool(ops) and not any(op.is_setup or op.is_store_wait for op in ops)


def went_on_to(context: Context, ranks: list[int]) -> Collective:
    """Return the collective in which the first of the ranks waits that went on without a group."""
    return next(iter(context.job.views[ranks[0]].blocks.values())).op


# --- ranks that exist twice


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
