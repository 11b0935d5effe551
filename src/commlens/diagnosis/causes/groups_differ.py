"""Groups and meshes on which ranks disagree, which the wait-for graph does not show."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass

from commlens.diagnosis.align.tie_break import UNDECIDED, by_majority
from commlens.diagnosis.causes.context import Context
from commlens.model.cause import GroupDifference, GroupsDiffer
from commlens.model.collective import Collective, State

_Calls = dict[tuple[int, str, int], dict[int, Collective]]
"""The calls that make groups: incarnation, op and number -> rank -> call."""


@dataclass
class FoundGroupsDiffer:
    """Ranks that disagree on a group, and the evidence."""

    cause: GroupsDiffer
    ops: dict[int, Collective]  # the calls, by rank
    later: Collective | None = None  # in which the first rank waits that did not call it


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
    if not _add_first_that_differs(context, calls, held):
        _add_first_not_called(context, calls, held)


def _add_first_that_differs(context: Context, calls: _Calls, held: list[int]) -> bool:
    """Add the first call in which ranks ask for different groups; return whether there is one."""
    for (_, name, _), ops in sorted(
        calls.items(), key=lambda item: min(op.announced_ns for op in item[1].values())
    ):
        sides: dict[Hashable, list[int]] = defaultdict(list)
        for rank, op in sorted(ops.items()):
            sides[_request(op)].append(rank)
        if len(sides) > 1 and (name != "init_process_group" or not _all_completed(ops)):
            _add_sides(context, ops, sorted(sides.values(), key=len, reverse=True), held)
            return True
    return False


def _add_first_not_called(context: Context, calls: _Calls, held: list[int]) -> None:
    """Add the first call of new_group that some ranks wait in, while others went on without it."""
    views = context.job.views
    for (_, name, _), ops in sorted(calls.items()):
        others = [
            rank for rank in held if rank not in ops and rank in views and _went_on(context, rank)
        ]
        if name == "new_group" and others and any(op.in_flight for op in ops.values()):
            _add_went_on(context, ops, others)
            return


def _calls(context: Context) -> _Calls:
    calls: _Calls = defaultdict(dict)
    for rank, view in context.job.views.items():
        for op in view.log.setups:
            # else made by its members alone
            if op.op != "new_group" or op.channel.group.name.isdecimal():
                calls[(op.channel.group.incarnation, op.op, op.sequence_number)][rank] = op
    return calls


def _all_completed(ops: dict[int, Collective]) -> bool:
    return all(op.state is State.COMPLETED for op in ops.values())


def _went_on(context: Context, rank: int) -> bool:
    """Return whether a rank waits in collectives, and not in a call that makes groups."""
    blocks = context.job.views[rank].blocks.values()
    return bool(blocks) and not any(block.op.is_setup for block in blocks)


def _add_went_on(context: Context, ops: dict[int, Collective], others: list[int]) -> None:
    """Add a call that makes a group, which some ranks of the job did not make: they wait in a later
    collective.
    """
    op = next(op for _, op in sorted(ops.items()) if op.in_flight)
    callers = sorted(ops)
    decision = by_majority([callers, others]) or UNDECIDED
    odd = list(decision.culprits)
    later = next(iter(context.job.views[others[0]].blocks.values())).op
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
    context.add(
        FoundGroupsDiffer(cause, ops, later),
        op,
        later.source if odd == others else op.source,
        blocked=len(context.job.views),
        order=(0,),
    )


def _request(op: Collective) -> Hashable:
    """Return what a call asks for."""
    group = op.channel.group
    if op.op == "new_group":
        return group.all_ranks
    if op.op != "init_process_group":
        return op.module
    return len(group.all_ranks), meeting_port(op) or op.module, group.backend


def meeting_port(op: Collective) -> str:
    """Return the port at which a call of ``init_process_group`` meets the others: hosts have
    several names. Empty if it meets them otherwise.
    """
    port = op.module.rpartition("/")[2].rpartition(":")[2] if op.module else ""
    return port if port.isdecimal() else ""


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
    found = FoundGroupsDiffer(cause, ops)
    context.add(found, odd, odd.source, blocked=len(context.job.views), order=(0,))


def _difference(
    context: Context, usual: Collective, odd: Collective, sides: list[list[int]]
) -> GroupDifference | None:
    """Return in which way the odd ranks' groups differ from the others', if the next groups show
    it.
    """
    if usual.op != "new_group":
        return None
    next_of_most, next_of_odd = (_next_ranks(context, usual, side) for side in sides[:2])
    follows = odd.channel.group.all_ranks in next_of_most
    precedes = usual.channel.group.all_ranks in next_of_odd
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
        op.channel.group.all_ranks
        for op in made
        if (op.channel.group.incarnation, op.sequence_number) == (incarnation, number)
    }
