"""Words about ranks that wait for each other: "rank 1 moved on to all_reduce #7 of group tp [0-1],
not to all_reduce of group dp [0-1] as before; ranks 0-1 wait for each other".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from commlens.diagnosis.align.call_paths import issued_by_library, parting_paths, path_of
from commlens.diagnosis.align.tie_break import sides_of
from commlens.diagnosis.causes.context import Context
from commlens.diagnosis.causes.cycle import CycleCase, Departures, Unmet
from commlens.diagnosis.words import phrases
from commlens.diagnosis.words.finding import Words
from commlens.diagnosis.words.next_steps import (
    at,
    cycle_step,
    left_out,
    parting_step,
    receives_step,
    recomputed_step,
    rounds_step,
    tie_step,
    unmet_step,
)
from commlens.diagnosis.words.phrases import (
    UNDECIDED,
    describe_sides,
    kind_phrase,
    kinds_phrase,
    prose,
    separation,
)
from commlens.model.cause import AwaitedResult, Cycle, Rounds
from commlens.model.collective import Collective
from commlens.text import (
    capital,
    count,
    duration,
    frame_phrase,
    group_phrase,
    joined,
    numbered,
    op_phrase,
    rank_phrase,
    ranks_phrase,
    verb,
)

_MORE_STEPS = (
    "A run with some successful steps before the fault would show which rank departs from its"
    " routine."
)
_BY_CHANCE = (
    "Which thread takes a lock first changes from run to run, so no rank is more at fault than"
    " another."
)


def words(context: Context, case: CycleCase) -> Words:
    """Return what a finding says about ranks that wait for each other."""
    if not case.path:
        return _words_of_moved_on(context, case)
    return (
        _words_of_left_order(context, case)
        if case.cause.culprits
        else _words_of_undecided(context, case)
    )


def _words_of_moved_on(context: Context, case: CycleCase) -> Words:
    """Return what a finding says about ranks that moved on to another collective than usual."""
    culprits, absent = case.cause.culprits, case.cause.perhaps_come
    op, usual = case.departures[culprits[0]]
    return Words(
        summary=_moved_on(case.cause, case.departures),
        explanation=phrases.waits_and_blocked(context, case.edges, case.blocked),
        next_step=cycle_step(culprits, op, usual),
        evidence=[
            *_how_decided(case.cause),
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


def _words_of_left_order(context: Context, case: CycleCase) -> Words:
    cause = case.cause
    return Words(
        summary=f"{_what_was_left(case)}; {ranks_phrase(cause.ranks)} wait for each other",
        explanation=_ring(context, case),
        next_step=_step_of_culprits(case),
        evidence=[
            *_how_decided(cause),
            *([f"{_counts(case.unmet)}."] if case.unmet is not None else []),
            *_steps_as_evidence(case),
        ],
        would_raise_confidence=_MORE_STEPS if cause.blamed_by in ("majority", "rounds") else None,
    )


def _step_of_culprits(case: CycleCase) -> str:
    culprits = case.cause.culprits
    if case.cause.recomputed is not None:
        return recomputed_step(case.cause.recomputed)
    if case.cause.rounds is not None and case.cause.rounds.went_on:
        return rounds_step(case.cause.rounds)
    op, usual = case.departures.get(culprits[0], (case.ops[culprits[0]], None))
    others = next((side for side in sides_of(case.ops) if not {*side} & {*culprits}), None)
    left = next(iter(case.cause.left_order), None)
    is_new = left is None or left.one_more or left.new_line
    if others is not None and is_new and not (usual is not None and left_out(op, usual)):
        return _parting(culprits, op, others, case.ops[others[0]])
    return cycle_step(culprits, op, usual)


def _parting(ranks: list[int], op: Collective, others: list[int], met: Collective) -> str:
    paths = parting_paths(op.stack, met.stack) or (path_of(op), path_of(met))
    return parting_step(ranks, op, met, paths, others)


def _words_of_undecided(context: Context, case: CycleCase) -> Words:
    ranks, ops, unmet = case.cause.ranks, case.ops, case.unmet
    sides, awaited = sides_of(ops), case.cause.awaited_result
    across = " across groups" if _is_across_groups(case) else ""
    summary = f"{ranks_phrase(ranks)} wait for each other{across}"
    step, locks = _step(ranks, ops, sides, unmet), case.locks
    if unmet is not None:
        summary = _unmet_summary(unmet)
    elif awaited is not None:
        summary, step = _awaited_result(awaited)
    elif locks:
        step = (
            "find the lock that a thread holds during its collective while another thread needs it"
            f" for its own: {joined(sorted({frame_phrase(each.source) for _, each in locks}))}"
        )
    return Words(
        summary=summary,
        explanation=prose(
            describe_sides(sides, ops), separation(context, sides), _ring(context, case)
        ),
        next_step=step,
        evidence=[
            *([f"{_counts(unmet)}."] if unmet is not None else []),
            *(
                f"Thread {each.name} of {rank_phrase(rank)} waits for a lock (threading.Lock) at"
                f" {frame_phrase(each.source)}."
                for rank, each in locks
            ),
            *([] if locks else [UNDECIDED]),
            *_steps_as_evidence(case),
        ],
        would_raise_confidence=_BY_CHANCE if locks else _MORE_STEPS,
    )


def _awaited_result(awaited: AwaitedResult) -> tuple[str, str]:
    asker, writer, key = rank_phrase(awaited.rank), rank_phrase(awaited.writer), awaited.key
    op = numbered(awaited.command.op, awaited.command.sequence_number)
    return (
        f"{asker} waits for {writer} to write the key {key!r}, and {writer} waits for {op} of"
        f" {asker}",
        f"find out whether {asker} asks for the result of a command that it never sent, or"
        f" {writer} left out the answer to one",
    )


def _step(
    ranks: list[int], ops: Mapping[int, Collective], sides: list[list[int]], unmet: Unmet | None
) -> str:
    if unmet is not None:
        paths = parting_paths(unmet.op.stack, unmet.stands_in.stack)
        # the program cannot move a message that a library sends, nor one of a function left out
        is_left_out = paths is not None and paths[0].caller not in ("", paths[0].place)
        if is_left_out or issued_by_library(unmet.op.stack):
            return _parting([unmet.rank], unmet.op, [unmet.op.peer or 0], unmet.stands_in)
        return unmet_step(unmet.op, unmet.rank, unmet.stands_in)
    firsts = [ops[side[0]] for side in sides]
    if {op.op for op in ops.values()} in ({"recv"}, {"send"}):
        return receives_step(ranks, firsts)
    return tie_step(firsts)


def _ring(context: Context, case: CycleCase) -> str:
    ranks = case.cause.ranks
    waited = context.longest_wait(ranks)
    return prose(
        f"{capital('; '.join(_steps(case)))}.",
        f"The longest wait is {duration(waited)}." if waited else "",
        phrases.blocked_behind(ranks, case.blocked),
    )


def _steps_as_evidence(case: CycleCase) -> list[str]:
    return [f"{step}." for step in _steps(case)]


def _steps(case: CycleCase) -> list[str]:
    """``"rank 1 waits in barrier #3 of group dp [0-3] (train.py:30) for rank 2"``."""
    across = _is_across_groups(case)
    return [
        f"{rank_phrase(node.rank)} waits in {op_phrase(edge.op)}"
        + (
            f" of {group_phrase(edge.op.channel.group)}"
            if across and edge.op.is_point_to_point
            else ""
        )
        + (f" ({edge.op.source.where})" if edge.op.source is not None else "")
        + ("" if edge.op.peer == target.rank else f" for {rank_phrase(target.rank)}")
        for node, target, edge in case.path
    ]


def _is_across_groups(case: CycleCase) -> bool:
    return len({edge.instance.key for _, _, edge in case.path}) > 1


def _unmet_summary(unmet: Unmet) -> str:
    op, peer = unmet.op, unmet.op.peer
    lacks = "receives" if op.op == "send" else "sends"
    return (
        f"{rank_phrase(unmet.rank)} waits in {op_phrase(op)}, which {rank_phrase(peer)}"
        f" {lacks} only after"
        f" {op_phrase(unmet.stands_in)}, if at all; {rank_phrase(peer)} waits there for"
        f" {rank_phrase(unmet.rank)}"
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
        f"{capital(rank_phrase(unmet.rank))} issued {count(op.sequence_number, did)}"
        f" {'to' if did == 'send' else 'from'} {rank_phrase(peer)} up to then"
    )
    direction = "to" if other == "send" else "from"
    return (
        f"{one}, {rank_phrase(peer)} issued {count(unmet.issued, other)} {direction}"
        f" {rank_phrase(unmet.rank)} {before}"
    )


def _what_was_left(case: CycleCase) -> str:
    cause = case.cause
    if cause.recomputed is not None:
        return phrases.issued_again(cause.recomputed)
    if cause.rounds is not None:
        return _uneven(cause.culprits, cause.rounds)
    op, usual = case.departures[cause.culprits[0]]
    if (
        cause.blamed_by == "routine"
        and len(cause.culprits) == 1
        and usual is not None
        and usual.peer in cause.ranks
        and left_out(op, usual)
    ):
        did = "send to" if usual.op == "send" else "receive from"
        return (
            f"{rank_phrase(cause.culprits[0])} did not {did} {rank_phrase(usual.peer)}"
            " this time, as it always"
            " had before"
        )
    return _moved_on(cause, case.departures)


def _uneven(culprits: list[int], rounds: Rounds) -> str:
    """``"rank 0 issued recv #10 at train.py:20 step, where the last of ranks 1-2 is #9"``."""
    most = rounds.last[-1]
    own = max(at.number for at in rounds.last if {*at.ranks} & {*culprits})
    ahead, behind = ranks_phrase(culprits), ranks_phrase(most.ranks)
    if own < most.number:
        ahead, behind = behind, ahead
    more, less = max(own, most.number), min(own, most.number)
    others = f"the last of {behind} is #{less}" if less else f"{behind} never came"
    return f"{ahead} issued {rounds.op} #{more} at {rounds.line}, where {others}"


def _moved_on(cause: Cycle, departures: Departures) -> str:
    """``"rank 1 moved on to all_reduce #7 of group dp [0-3], not to all_gather of group tp [0-1] as
    before"``.
    """
    own, usual = zip(*(departures[rank] for rank in cause.culprits), strict=True)
    subject, op = ranks_phrase(cause.culprits), own[0]
    if cause.left_order[0].one_more:
        return (
            f"{subject} issued one {op.op} more, #{op.sequence_number} of"
            f" {group_phrase(op.channel.group)}{at(op)}; the others did not come to it"
        )
    same = len({(op.channel.key, op.op, op.peer, op.sequence_number) for op in own}) == 1
    name = op_phrase(op) if same else _kinds(own)
    before = [op for op in usual if op is not None]
    if len(before) < len(usual) or len({op.op for op in before}) > 1:
        return f"{subject} moved on to {name}"
    alike = len({(op.channel.key, op.peer) for op in before}) == 1
    there = _without_number(before[0]) if alike else kinds_phrase(before)
    if same and there == _without_number(op):  # then only the lines differ
        there, name = f"the one{at(before[0])}", name + at(op)
    if cause.blamed_by == "routine":
        return f"{subject} moved on to {name}, not to {there} as before"
    return f"{subject} moved on to {name} where the others issued {there}"


def _kinds(ops: Sequence[Collective]) -> str:
    if len({op.op for op in ops}) == 1:
        return kinds_phrase(ops)
    return joined(sorted(set(map(kind_phrase, ops)))[:3])


def _how_decided(cause: Cycle) -> list[str]:
    subject = ranks_phrase(cause.culprits)
    if cause.blamed_by == "routine":
        return [
            f"{capital(subject)} {verb(cause.culprits, 'departs from its', 'depart from their')}"
            " usual routine here; the others keep to theirs."
        ]
    if cause.rounds is not None:
        return phrases.steps_at(cause.rounds)
    if cause.recomputed is not None:
        return []
    return [f"The order of {subject} differs from that of most others."]


def _without_number(op: Collective) -> str:
    """``"all_reduce of group dp [0-3]"``, ``"recv from rank 1"``."""
    return (
        kind_phrase(op) if op.is_point_to_point else f"{op.op} of {group_phrase(op.channel.group)}"
    )
