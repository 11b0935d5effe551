"""Word the findings of ranks that disagree on a group or mesh, and of ranks that exist twice.

Say rank 3 asks for other ranks than ranks 0-2. Then the summary is "rank 3 asks for ranks [0, 1] in
new_group #2, the others for ranks [0, 2]", and the explanation names the lines: "Ranks 0-2 ask for
ranks [0, 2] at train.py:20 main. Rank 3 asks for ranks [0, 1] at train.py:31 main."
"""

from __future__ import annotations

from commlens.diagnosis.causes.context import Case, Context
from commlens.diagnosis.causes.groups_differ import went_on_to
from commlens.diagnosis.words import phrases
from commlens.diagnosis.words.finding import Words
from commlens.model.cause import Claims, GroupsDiffer, StartedTwice
from commlens.model.collective import Collective
from commlens.model.store_identity import parse_address
from commlens.text import (
    capital,
    count,
    frame_phrase,
    joined,
    op_phrase,
    rank_phrase,
    ranks_and_verb,
    ranks_phrase,
)

_RULE = (
    "All ranks must call new_group in the same order with the same ranks, also for groups that they"
    " are not in."
)
_SHOWN = 4  # sides, groups or processes that a sentence lists
_WAITS_SHOWN = 8
_HASH = 40  # characters of a sha1, the name of a group made with use_local_synchronization


def words(context: Context, case: Case[GroupsDiffer]) -> Words:
    """Return what a finding says about ranks that disagree on a group."""
    if case.cause.difference == "name":
        return _words_of_names(context, case)
    if case.cause.names:
        return _words_of_hand_made(context, case)
    if case.cause.not_called_by:
        return _words_of_skipped_call(context, case)
    return _words_of_requests(context, case)


def _words_of_names(context: Context, case: Case[GroupsDiffer]) -> Words:
    """Of members that call new_group for the same ranks, and wait under names that differ: "the
    members of one group of ranks [0, 3] do not meet: rank 0 waits under the name 9e09e94f... and
    rank 3 waits under the name 1b645389..."
    """
    cause = case.cause
    op = case.ops[min(case.ops)]
    asked, where = _asked(op), frame_phrase(op.source) or "an unknown line"
    under = [
        f"{ranks_and_verb(each.ranks, 'waits', 'wait')} under the name {_short(each.name)}"
        for each in cause.names
    ]
    return Words(
        summary=f"the members of one group of {asked} do not meet: {joined(under)}",
        explanation=phrases.prose(
            f"They wait in new_group at {where}.",
            "With use_local_synchronization, torch makes a group's name of its ranks and of the"
            " number of groups that the process is in.",
            _why_names_differ(cause),
        ),
        next_step=(
            f"make the group of {asked} before groups that only some of these ranks are in, or"
            f" leave out use_local_synchronization at {where}"
        ),
        evidence=_waits(context, cause.waiting),
    )


def _words_of_hand_made(context: Context, case: Case[GroupsDiffer]) -> Words:
    """Of a group that the program makes past new_group, whose members wait for each other in two
    places: "the members of a group that the program makes do not meet: rank 3 waits at
    n1:29601/weights and ranks 0-2 wait at n1:29600/weights"
    """
    cause, (most, odd) = case.cause, case.cause.sides
    sizes = [len(case.ops[side[0]].channel.group.ranks) for side in (most, odd)]
    here, there = (
        frame_phrase(case.ops[side[0]].source) or "an unknown line" for side in (odd, most)
    )
    if cause.difference == "size":
        what = "number of members"
        waits_for = [f"for {count(size, 'member')}" for size in sizes]
    else:
        what = "store's address and prefix"
        waits_for = [f"at {each.name}" for each in cause.names]
    under = [
        f"{ranks_and_verb(side, 'waits', 'wait')} {text}"
        for side, text in zip((odd, most), reversed(waits_for), strict=True)
    ]
    return Words(
        summary=f"the members of a group that the program makes do not meet: {joined(under)}",
        explanation=f"Together they are its {min(sizes)} members.",
        next_step=(
            f"compare the {what} that {ranks_and_verb(odd, 'passes', 'pass')} at {here} with what"
            f" {ranks_and_verb(most, 'passes', 'pass')} at {there}"
        ),
        evidence=[*_waits(context, cause.waiting), *[phrases.UNDECIDED] * (not cause.culprits)],
        would_raise_confidence="The program tells whether these ranks make one group.",
    )


def _why_names_differ(cause: GroupsDiffer) -> str:
    """``"Ranks 0,3 have made one group more (9e09e94f... of ranks [0, 3] at train.py:10), so the
    names differ."`` Empty if the number of groups is unknown or the same.
    """
    numbers = [each.groups_before for each in cause.names if each.groups_before is not None]
    if len(numbers) < len(cause.names) or len(set(numbers)) < 2:
        return ""
    most = max(cause.names, key=lambda each: each.groups_before or 0)
    more = max(numbers) - min(numbers)
    number = "one group" if more == 1 else f"{more} groups"
    if not cause.one_more:
        are = capital(ranks_and_verb(most.ranks, "is", "are"))
        return f"{are} in {number} more, so the names differ."
    made = [
        _short(each.group.name)
        + (f" of ranks {each.group.ranks}" if each.group.ranks else "")
        + (f" at {each.source}" if each.source else "")
        for each in cause.one_more[:_SHOWN]
    ]
    have = capital(ranks_and_verb(most.ranks, "has", "have"))
    return f"{have} made {number} more ({joined(made)}), so the names differ."


def _short(name: str) -> str:
    """Shorten a name that is a hash."""
    return f"{name[:8]}..." if len(name) == _HASH else name


def _words_of_skipped_call(context: Context, case: Case[GroupsDiffer]) -> Words:
    """Of ranks that wait in new_group, and others that went on to a collective without it: "ranks
    1-3 did not call new_group #2 of ranks [0, 1]; rank 0 did"
    """
    (callers,), others = case.cause.sides, case.cause.not_called_by
    later = went_on_to(context, others)
    op = next(op for _, op in sorted(case.ops.items()) if op.in_flight)
    name = f"new_group #{op.sequence_number} of {_asked(op)}"
    where = frame_phrase(op.source) or "an unknown line"
    decided = bool(case.cause.culprits)
    return Words(
        summary=(
            f"{ranks_phrase(callers)} alone called {name}"
            if case.cause.culprits == callers
            else f"{ranks_phrase(others)} did not call {name}; {ranks_phrase(callers)} did"
        ),
        explanation=(
            f"{capital(ranks_phrase(callers))} called it at {where};"
            f" {phrases.name(context, others[0])} waits in {op_phrase(later)} at"
            f" {frame_phrase(later.source) or 'an unknown line'}."
        ),
        next_step=f"find the branch that leads {ranks_phrase(others)} past {where}",
        evidence=[_RULE] if decided else [_RULE, phrases.UNDECIDED],
        would_raise_confidence=(
            None
            if decided
            else "As many ranks called it as did not: the program tells which is meant."
        ),
    )


def _words_of_requests(context: Context, case: Case[GroupsDiffer]) -> Words:
    """Of ranks that met in one call and ask for different groups, as in the module's example."""
    cause, ops, sides = case.cause, case.ops, case.cause.sides
    usual, odd, is_tie = ops[sides[0][0]], ops[sides[1][0]], not cause.culprits
    here, there = (frame_phrase(op.source) or _call(usual) for op in (odd, usual))
    return Words(
        summary=_tie_summary(case) if is_tie else _odd_summary(case),
        explanation=phrases.prose(
            *_requests(case),
            _how_it_differs(case),
            phrases.separation(context, sides) if is_tie else "",
        ),
        next_step=(
            f"compare the arguments of {ranks_phrase(sides[1])} and {ranks_phrase(sides[0])} at"
            f" {there}"
            if here == there
            else f"compare {here} on {ranks_phrase(sides[1])} with {there} on"
            f" {ranks_phrase(sides[0])}"
        ),
        evidence=[
            *["No side has a majority, so the ranks at fault cannot be determined."] * is_tie,
            *[_RULE] * (usual.op == "new_group"),
            *_waits(context, cause.waiting),
        ],
        would_raise_confidence=(
            "No side has a majority: the program tells which is meant." if is_tie else None
        ),
    )


def _call(op: Collective) -> str:
    """``"new_group #2"``; ``"init_process_group"``, which a process usually calls once."""
    return op.op if op.op == "init_process_group" else f"{op.op} #{op.sequence_number}"


def _tie_summary(case: Case[GroupsDiffer]) -> str:
    """``"ranks disagree in new_group #2: ranks [0, 1] (ranks 0-1) against ranks [2, 3] (ranks
    2-3)"``
    """
    ops, sides = case.ops, case.cause.sides
    asked = [f"{_asked(ops[side[0]])} ({ranks_phrase(side)})" for side in sides[:3]]
    return f"ranks disagree in {_call(ops[sides[0][0]])}: {' against '.join(asked)}"


def _odd_summary(case: Case[GroupsDiffer]) -> str:
    """``"rank 3 asks for ranks [0, 1] in new_group #2, the others for ranks [0, 2]"``"""
    ops, (most, *others) = case.ops, case.cause.sides
    odd_ones = [
        f"{ranks_and_verb(side, 'asks', 'ask')} for {_asked(ops[side[0]])}" for side in others[:3]
    ]
    if more := [rank for side in others[3:] for rank in side]:
        odd_ones.append(f"{ranks_and_verb(sorted(more), 'asks', 'ask')} for something else")
    usual = ops[most[0]]
    return f"{joined(odd_ones)} in {_call(usual)}, the others for {_asked(usual)}"


def _requests(case: Case[GroupsDiffer]) -> list[str]:
    """``"Ranks 0-2 ask for ranks [0, 1] at train.py:20 main."``, for each side and line."""
    lines = []
    for side in case.cause.sides[:_SHOWN]:
        for ranks, where in phrases.ranks_by_text(
            side, lambda rank: frame_phrase(case.ops[rank].source) or "an unknown line"
        )[:2]:
            op = case.ops[ranks[0]]
            mesh = f" for {op.module}" if op.op == "new_group" and op.module else ""
            asks = capital(ranks_and_verb(ranks, "asks", "ask"))
            lines.append(f"{asks} for {_asked(op)}{mesh} at {where}.")
    return lines


def _how_it_differs(case: Case[GroupsDiffer]) -> str:
    """``"Rank 3 skipped the group of ranks [0, 2]."``; empty if only the arguments differ."""
    ops, sides = case.ops, case.cause.sides
    usual, odd = _asked(ops[sides[0][0]]), _asked(ops[sides[1][0]])
    how = {
        "order": "made them in another order",
        "skipped": f"skipped the group of {usual}",
        "skipped-first": f"did not begin with the group of {usual}",
        "one-too-many": f"made a group of {odd} too many",
    }.get(case.cause.difference or "")
    return f"{capital(ranks_phrase(sides[1]))} {how}." if how else ""


def _waits(context: Context, ranks: list[int]) -> list[str]:
    """``"rank 1 waits in barrier #3 of group dp [0-3] at train.py:30 main."``"""
    return [
        f"{phrases.name(context, rank)} waits in {op_phrase(block.op)} at"
        f" {frame_phrase(block.op.source) or 'an unknown line'}."
        for rank in ranks[:_WAITS_SHOWN]
        for block in list(context.job.views[rank].blocks.values())[:1]
    ]


def _asked(op: Collective) -> str:
    """Return what a call asks for: ``"ranks [0, 1]"``; in init_process_group ``"4 ranks at port
    29500 with gloo"``.
    """
    group = op.channel.group
    if op.op == "new_group":
        return (
            f"ranks {list(group.asked_for)}"
            if len(group.asked_for) <= 8
            else ranks_phrase(group.asked_for)
        )
    if op.op != "init_process_group":
        return op.module or "an unknown mesh"
    port = parse_address(op.module).port
    at = f" at port {port}" if port else f" at {op.module}" if op.module else ""
    return f"{count(len(group.all_ranks), 'rank')}{at}" + (
        f" with {group.backend}" if group.backend else ""
    )


def words_of_started_twice(context: Context, case: Case[StartedTwice]) -> Words:
    """Return what a finding says about ranks that exist twice."""
    cause, logs = case.cause, [view.log for view in context.job.views.values()]
    script = next((log.script for log in logs if log.script), "")
    script = script.partition(" ")[0].rpartition("/")[2] or "the script"
    processes = [_processes(claims) for claims in cause.claims[:_SHOWN]]
    return Words(
        summary=(
            f"{ranks_and_verb(cause.ranks, 'exists', 'exist')} twice: the launcher starts ranks,"
            " and each of them starts ranks of the same numbers again, which meet at one place"
        ),
        explanation=f"{capital('; '.join(processes))}.",
        next_step=f"start {script} without the launcher, or let it start no processes of its own",
    )


def _processes(claims: Claims) -> str:
    """Return the processes of one rank: ``"rank 0: pid 12, started by pid 10, pid 13, ..."``."""
    pairs = list(zip(claims.pids, claims.started_by, strict=True))[:_SHOWN]
    return f"{rank_phrase(claims.rank)}: " + ", ".join(
        f"pid {pid}, started by pid {by}" for pid, by in pairs
    )
