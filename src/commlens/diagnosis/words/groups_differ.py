"""Words about groups and meshes on which ranks disagree."""

from __future__ import annotations

from commlens.diagnosis.causes.context import Context
from commlens.diagnosis.causes.groups_differ import FoundGroupsDiffer, meeting_port
from commlens.diagnosis.words import phrases
from commlens.diagnosis.words.finding import Words
from commlens.diagnosis.words.phrases import prose
from commlens.diagnosis.words.sides import UNDECIDED, separation, told_apart
from commlens.model.collective import Collective
from commlens.text import (
    capital,
    count,
    frame_phrase,
    joined,
    op_phrase,
    ranks_and_verb,
    ranks_phrase,
)

_RULE = (
    "All ranks must call new_group in the same order with the same ranks, also for groups that they"
    " are not in."
)
_SHOWN = 4  # sides
_WAITS_MAX = 8


def words(context: Context, found: FoundGroupsDiffer) -> Words:
    """Return what a finding says about ranks that disagree on a group."""
    return _went_on(context, found) if found.cause.not_called_by else _sides(context, found)


def _went_on(context: Context, found: FoundGroupsDiffer) -> Words:
    later, (callers,), others = found.later, found.cause.sides, found.cause.not_called_by
    assert later is not None
    op = next(op for _, op in sorted(found.ops.items()) if op.in_flight)
    name = f"new_group #{op.sequence_number} of {_asked(op)}"
    where = frame_phrase(op.source) or "an unknown line"
    decided = bool(found.cause.culprits)
    return Words(
        summary=(
            f"{ranks_phrase(callers)} alone called {name}"
            if found.cause.culprits == callers
            else f"{ranks_phrase(others)} did not call {name}; {ranks_phrase(callers)} did"
        ),
        explanation=(
            f"{capital(ranks_phrase(callers))} called it at {where};"
            f" {phrases.name(context, others[0])} waits in {op_phrase(later)} at"
            f" {frame_phrase(later.source) or 'an unknown line'}."
        ),
        next_step=f"find the branch that leads {ranks_phrase(others)} past {where}",
        evidence=[_RULE] if decided else [_RULE, UNDECIDED],
        would_raise_confidence=(
            None
            if decided
            else "As many ranks called it as did not: the program tells which is meant."
        ),
    )


def _sides(context: Context, found: FoundGroupsDiffer) -> Words:
    cause, ops, sides = found.cause, found.ops, found.cause.sides
    usual, odd, is_tie = ops[sides[0][0]], ops[sides[1][0]], not cause.culprits
    name = _call(usual)
    return Words(
        summary=_tie_summary(found) if is_tie else _odd_summary(found),
        explanation=prose(
            *_requests(found),
            _how_it_differs(found),
            separation(context, sides) if is_tie else "",
        ),
        next_step=(
            f"compare {frame_phrase(odd.source) or name} on {ranks_phrase(sides[1])} with"
            f" {frame_phrase(usual.source) or name} on {ranks_phrase(sides[0])}"
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
    return op.op if op.op == "init_process_group" else f"{op.op} #{op.sequence_number}"


def _tie_summary(found: FoundGroupsDiffer) -> str:
    ops, sides = found.ops, found.cause.sides
    asked = [f"{_asked(ops[side[0]])} ({ranks_phrase(side)})" for side in sides[:3]]
    return f"ranks disagree in {_call(ops[sides[0][0]])}: {' against '.join(asked)}"


def _odd_summary(found: FoundGroupsDiffer) -> str:
    ops, (most, *others) = found.ops, found.cause.sides
    odd_ones = [
        f"{ranks_and_verb(side, 'asks', 'ask')} for {_asked(ops[side[0]])}" for side in others[:3]
    ]
    usual = ops[most[0]]
    return f"{joined(odd_ones)} in {_call(usual)}, the others for {_asked(usual)}"


def _requests(found: FoundGroupsDiffer) -> list[str]:
    """``"Ranks 0-2 ask for ranks [0, 1] at train.py:20 main."``, for each side and line."""
    lines = []
    for side in found.cause.sides[:_SHOWN]:
        for ranks, where in told_apart(
            side, lambda rank: frame_phrase(found.ops[rank].source) or "an unknown line"
        )[:2]:
            op = found.ops[ranks[0]]
            mesh = f" for {op.module}" if op.op == "new_group" and op.module else ""
            asks = capital(ranks_and_verb(ranks, "asks", "ask"))
            lines.append(f"{asks} for {_asked(op)}{mesh} at {where}.")
    return lines


def _how_it_differs(found: FoundGroupsDiffer) -> str:
    ops, sides = found.ops, found.cause.sides
    usual, odd = _asked(ops[sides[0][0]]), _asked(ops[sides[1][0]])
    how = {
        None: "",
        "order": "made them in another order",
        "skipped": f"skipped the group of {usual}",
        "skipped-first": f"did not begin with the group of {usual}",
        "one-too-many": f"made a group of {odd} too many",
    }[found.cause.difference]
    return f"{capital(ranks_phrase(sides[1]))} {how}." if how else ""


def _waits(context: Context, ranks: list[int]) -> list[str]:
    """``"rank 1 waits in barrier #3 of group dp [0-3] at train.py:30 main."``"""
    return [
        f"{phrases.name(context, rank)} waits in {op_phrase(block.op)} at"
        f" {frame_phrase(block.op.source) or 'an unknown line'}."
        for rank in ranks[:_WAITS_MAX]
        for block in list(context.job.views[rank].blocks.values())[:1]
    ]


def _asked(op: Collective) -> str:
    """Return what a call asks for, in the words of reports."""
    group = op.channel.group
    if op.op == "new_group":
        return (
            f"ranks {list(group.all_ranks)}"
            if len(group.all_ranks) <= 8
            else ranks_phrase(group.all_ranks)
        )
    if op.op != "init_process_group":
        return op.module or "an unknown mesh"
    port = meeting_port(op)
    at = f" at port {port}" if port else f" at {op.module}" if op.module else ""
    return f"{count(len(group.all_ranks), 'rank')}{at}" + (
        f" with {group.backend}" if group.backend else ""
    )
