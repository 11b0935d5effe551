"""Words about ranks that wait for each other."""

from __future__ import annotations

from commlens.diagnosis.causes.context import Context
from commlens.diagnosis.causes.cycle import Departures, FoundCycle, FoundDeparture, Unmet
from commlens.diagnosis.words import phrases
from commlens.diagnosis.words.finding import Words
from commlens.diagnosis.words.next_steps import cycle_step, left_out, receives_step, unmet_step
from commlens.diagnosis.words.phrases import prose
from commlens.diagnosis.words.sides import (
    UNDECIDED,
    describe_sides,
    kind_phrase,
    kinds_phrase,
    separation,
    tie_step,
)
from commlens.model.cause import Cycle
from commlens.model.collective import Collective
from commlens.text import (
    capital,
    count,
    duration,
    frame_phrase,
    group_phrase,
    joined,
    op_phrase,
    ranks_phrase,
    verb,
)

_MORE_STEPS = (
    "A run with some successful steps before the fault would show which rank departs from its"
    " routine."
)


def words(context: Context, found: FoundCycle) -> Words:
    """Return what a finding says about ranks that wait for each other."""
    return _left(context, found) if found.cause.culprits else _undecided(context, found)


def words_of_departure(context: Context, found: FoundDeparture) -> Words:
    """Return what a finding says about ranks that moved on to another collective than usual."""
    culprits, absent = found.cause.culprits, found.cause.perhaps_come
    op, usual = found.departures[culprits[0]]
    return Words(
        summary=_moved_on(found.cause, found.departures),
        explanation=prose(
            phrases.waiting(context, found.edges),
            phrases.waiting_behind(
                context, sorted({edge.rank for edge in found.edges}), found.blocked
            ),
        ),
        next_step=cycle_step(culprits, op, usual),
        evidence=[
            _how_decided(found.cause),
            (
                f"Whether {ranks_phrase(absent)} came is not known: the"
                f" {verb(absent, 'dump', 'dumps')} may be older than the others."
            ),
        ],
        would_raise_confidence=(
            "Dumps of all ranks from one moment, while the job hangs, would show whether the ranks"
            " wait for each other."
        ),
    )


def _left(context: Context, found: FoundCycle) -> Words:
    cause = found.cause
    return Words(
        summary=f"{_what_was_left(found)}; {ranks_phrase(cause.ranks)} wait for each other",
        explanation=_ring(context, found),
        next_step=cycle_step(cause.culprits, *found.departures[cause.culprits[0]]),
        evidence=[_how_decided(cause), *_steps_as_evidence(found)],
        would_raise_confidence=None if cause.blamed_by == "routine" else _MORE_STEPS,
    )


def _undecided(context: Context, found: FoundCycle) -> Words:
    ranks, ops, unmet = found.cause.ranks, found.ops, found.unmet
    sides = found.sides
    across = " across groups" if _is_across_groups(found) else ""
    return Words(
        summary=(
            _unmet_summary(unmet)
            if unmet is not None
            else f"{ranks_phrase(ranks)} wait for each other{across}"
        ),
        explanation=prose(
            describe_sides(sides, ops), separation(context, sides), _ring(context, found)
        ),
        next_step=_step(ranks, ops, sides, unmet),
        evidence=[
            *([f"{_counts(unmet)}."] if unmet is not None else []),
            UNDECIDED,
            *_steps_as_evidence(found),
        ],
        would_raise_confidence=_MORE_STEPS,
    )


def _step(
    ranks: list[int], ops: dict[int, Collective], sides: list[list[int]], unmet: Unmet | None
) -> str:
    if unmet is not None:
        return unmet_step(unmet.op, unmet.rank, unmet.stands_in)
    firsts = [ops[side[0]] for side in sides]
    if {op.op for op in ops.values()} in ({"recv"}, {"send"}):
        return receives_step(ranks, firsts)
    return tie_step(firsts)


def _ring(context: Context, found: FoundCycle) -> str:
    ranks = found.cause.ranks
    waited = context.longest_wait(ranks)
    return prose(
        f"{capital('; '.join(_steps(found)))}.",
        f"The longest wait is {duration(waited)}." if waited else "",
        phrases.waiting_behind(context, ranks, found.blocked),
    )


def _steps_as_evidence(found: FoundCycle) -> list[str]:
    return [f"{step}." for step in _steps(found)]


def _steps(found: FoundCycle) -> list[str]:
    """``"rank 1 waits in barrier #3 of group dp [0-3] (train.py:30) for rank 2"``."""
    across = _is_across_groups(found)
    return [
        f"rank {node.rank} waits in {op_phrase(edge.op)}"
        + (
            f" of {group_phrase(edge.op.channel.group)}"
            if across and edge.op.is_point_to_point
            else ""
        )
        + (f" ({edge.op.source.where})" if edge.op.source is not None else "")
        + ("" if edge.op.peer == target.rank else f" for rank {target.rank}")
        for node, target, edge in found.path
    ]


def _is_across_groups(found: FoundCycle) -> bool:
    return len({edge.instance.key for _, _, edge in found.path}) > 1


def _unmet_summary(unmet: Unmet) -> str:
    op, peer = unmet.op, unmet.op.peer
    lacks = "receives" if op.op == "send" else "sends"
    return (
        f"rank {unmet.rank} waits in {op_phrase(op)}, which rank {peer} {lacks} only after"
        f" {op_phrase(unmet.stands_in)}, if at all; rank {peer} waits there for rank {unmet.rank}"
    )


def _counts(unmet: Unmet) -> str:
    op, peer = unmet.op, unmet.op.peer
    did, other = ("send", "receive") if op.op == "send" else ("receive", "send")
    before = (
        f"before {unmet.stands_in.op} at {frame_phrase(unmet.stands_in.source)}"
        if unmet.stands_in.source
        else "before it waited"
    )
    one = (
        f"Rank {unmet.rank} issued {count(op.sequence_number, did)}"
        f" {'to' if did == 'send' else 'from'} rank {peer} up to then"
    )
    return (
        f"{one}, rank {peer} {count(unmet.issued, other)} {'to' if other == 'send' else 'from'}"
        f" rank {unmet.rank} {before}"
    )


def _what_was_left(found: FoundCycle) -> str:
    cause = found.cause
    op, usual = found.departures[cause.culprits[0]]
    if (
        cause.blamed_by == "routine"
        and len(cause.culprits) == 1
        and usual is not None
        and usual.peer in cause.ranks
        and left_out(op, usual)
    ):
        did = "send to" if usual.op == "send" else "receive from"
        return (
            f"rank {cause.culprits[0]} did not {did} rank {usual.peer} this time, as it always"
            " had before"
        )
    return _moved_on(cause, found.departures)


def _moved_on(cause: Cycle, departures: Departures) -> str:
    """``"rank 1 moved on to all_reduce #7 of group dp [0-3], not to all_gather of group tp [0-1] as
    before"``.
    """
    own, usual = (
        [departures[rank][0] for rank in cause.culprits],
        [departures[rank][1] for rank in cause.culprits],
    )
    kinds = {kind_phrase(op) for op in own}
    same = len({(op.channel.key, op.op, op.peer, op.sequence_number) for op in own}) == 1
    name = (
        op_phrase(own[0])
        if same
        else kinds_phrase(own)
        if len({op.op for op in own}) == 1
        else joined(sorted(kinds)[:3])
    )
    instead = ""
    before = [op for op in usual if op is not None]
    if before and len(before) == len(usual) and len({op.op for op in before}) == 1:
        alike = len({(op.channel.key, op.peer) for op in before}) == 1
        instead = (
            f", not to {_without_number(before[0]) if alike else kinds_phrase(before)} as before"
            if cause.blamed_by == "routine"
            else f" where the others issued {kinds_phrase(before)}"
        )
    return f"{ranks_phrase(cause.culprits)} moved on to {name}{instead}"


def _how_decided(cause: Cycle) -> str:
    subject = ranks_phrase(cause.culprits)
    if cause.blamed_by == "routine":
        return (
            f"{capital(subject)} {verb(cause.culprits, 'departs from its', 'depart from their')}"
            " usual routine here; the others keep to theirs."
        )
    return f"The order of {subject} differs from that of most others."


def _without_number(op: Collective) -> str:
    """``"all_reduce of group dp [0-3]"``, ``"recv from rank 1"``."""
    return (
        kind_phrase(op) if op.is_point_to_point else f"{op.op} of {group_phrase(op.channel.group)}"
    )
