"""Words about ranks that wait for each other: "rank 1 moved on to all_reduce #7 of group tp [0-1],
not to all_reduce of group dp [0-1] as before; ranks 0-1 wait for each other".
"""

from __future__ import annotations

from collections.abc import Sequence

from commlens.diagnosis.align.call_paths import issued_by_library, parting_paths, path_of
from commlens.diagnosis.align.tie_break import sides_of
from commlens.diagnosis.causes.context import Context
from commlens.diagnosis.causes.cycle import CycleCase, Unmet
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
    if not case.cause.culprits:
        return _words_of_tie(context, case)
    if not case.path:
        return _words_of_perhaps_come(context, case)
    return _words_of_culprits(context, case)


# --- the cycle


def _ring(context: Context, case: CycleCase, steps: Sequence[str]) -> str:
    ranks = case.cause.ranks
    waited = context.longest_wait(ranks)
    return phrases.prose(
        f"{capital('; '.join(steps))}.",
        f"The longest wait is {duration(waited)}." if waited else "",
        phrases.blocked_behind(ranks, case.blocked),
    )


def _steps(case: CycleCase) -> list[str]:
    """``"rank 1 waits in barrier #3 of group dp [0-3] (train.py:30) for rank 2"``."""
    across = _is_across_groups(case)
    steps = []
    for node, target, edge in case.path:
        op = edge.op
        group = f" of {group_phrase(op.channel.group)}" * (across and op.is_point_to_point)
        line = f" ({op.source.where})" if op.source is not None else ""
        awaited = "" if op.peer == target.rank else f" for {rank_phrase(target.rank)}"
        steps.append(f"{rank_phrase(node.rank)} waits in {op_phrase(op)}{group}{line}{awaited}")
    return steps


def _is_across_groups(case: CycleCase) -> bool:
    return len({edge.instance.key for _, _, edge in case.path}) > 1


# --- ranks to blame: what they did, and the next step


def _words_of_culprits(context: Context, case: CycleCase) -> Words:
    cause, steps = case.cause, _steps(case)
    evidence = [f"{step}." for step in steps]
    if case.unmet is not None:
        evidence.insert(0, f"{_counts(case.unmet)}.")
    if cause.recomputed is not None:
        did, next_step = phrases.issued_again(cause.recomputed), recomputed_step(cause.recomputed)
    elif cause.rounds is not None:
        did, next_step = _uneven(cause.culprits, cause.rounds), _step_of_order(case)
        if cause.rounds.went_on:
            next_step = rounds_step(cause.rounds)
        evidence = phrases.steps_at(cause.rounds) + evidence
    else:
        did, next_step = _left_out_or_moved_on(case), _step_of_order(case)
        evidence.insert(0, _how_decided(cause))
    return Words(
        summary=f"{did}; {ranks_phrase(cause.ranks)} wait for each other",
        explanation=_ring(context, case, steps),
        next_step=next_step,
        evidence=evidence,
        would_raise_confidence=_MORE_STEPS if cause.blamed_by in ("majority", "rounds") else None,
    )


def _words_of_perhaps_come(context: Context, case: CycleCase) -> Words:
    """Return the words on dumps of several moments: the ranks that close the cycle may have come
    after theirs.
    """
    culprits, absent = case.cause.culprits, case.cause.perhaps_come
    op, usual = case.departures[culprits[0]]
    dumps = verb(absent, "dump", "dumps")
    return Words(
        summary=_moved_on(case),
        explanation=phrases.waits_and_blocked(context, case.edges, case.blocked),
        next_step=cycle_step(culprits, op, usual),
        evidence=[
            _how_decided(case.cause),
            (
                f"Whether {ranks_phrase(absent)} came is not known: the {dumps} may be older than"
                " the others."
            ),
        ],
        would_raise_confidence=(
            "Dumps of all ranks from one moment, while the job hangs, would show whether the ranks"
            " wait for each other."
        ),
    )


def _how_decided(cause: Cycle) -> str:
    culprits = ranks_phrase(cause.culprits)
    if cause.blamed_by == "routine":
        departs = verb(cause.culprits, "departs from its", "depart from their")
        return f"{capital(culprits)} {departs} usual routine here; the others keep to theirs."
    return f"The order of {culprits} differs from that of most others."


def _step_of_order(case: CycleCase) -> str:
    """Recommend to compare the lines of the culprits and of another side, or the order of groups:
    where the culprits stand at lines that they came to before, the lines tell nothing.
    """
    cause, ops = case.cause, case.ops
    op, usual = case.departures.get(cause.culprits[0], (ops[cause.culprits[0]], None))
    others = next((side for side in sides_of(ops) if {*side}.isdisjoint(cause.culprits)), None)
    knows_lines = any(not (left.one_more or left.new_line) for left in cause.left_order[:1])
    if others is None or knows_lines or (usual is not None and left_out(op, usual)):
        return cycle_step(cause.culprits, op, usual)
    return _parting(cause.culprits, op, others, ops[others[0]])


def _parting(ranks: list[int], op: Collective, others: list[int], met: Collective) -> str:
    paths = parting_paths(op.stack, met.stack) or (path_of(op), path_of(met))
    return parting_step(ranks, op, met, paths, others)


def _left_out_or_moved_on(case: CycleCase) -> str:
    cause = case.cause
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
            f"{ranks_phrase(cause.culprits)} did not {did} {rank_phrase(usual.peer)} this time, as"
            " it always had before"
        )
    return _moved_on(case)


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


def _moved_on(case: CycleCase) -> str:
    """``"rank 1 moved on to all_reduce #7 of group dp [0-3], not to all_gather of group tp [0-1] as
    before"``.
    """
    cause = case.cause
    own, usual = zip(*(case.departures[rank] for rank in cause.culprits), strict=True)
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
    there = _without_number(before[0]) if alike else phrases.kinds_phrase(before)
    if same and there == _without_number(op):  # then only the lines differ
        there, name = f"the one{at(before[0])}", name + at(op)
    if cause.blamed_by == "routine":
        return f"{subject} moved on to {name}, not to {there} as before"
    return f"{subject} moved on to {name} where the others issued {there}"


def _kinds(ops: Sequence[Collective]) -> str:
    if len({op.op for op in ops}) == 1:
        return phrases.kinds_phrase(ops)
    return joined(sorted(set(map(phrases.kind_phrase, ops)))[:3])


def _without_number(op: Collective) -> str:
    """``"all_reduce of group dp [0-3]"``, ``"recv from rank 1"``."""
    return (
        phrases.kind_phrase(op)
        if op.is_point_to_point
        else f"{op.op} of {group_phrase(op.channel.group)}"
    )


# --- nobody to blame


def _words_of_tie(context: Context, case: CycleCase) -> Words:
    cause, unmet, locks, steps = case.cause, case.unmet, case.locks, _steps(case)
    sides = sides_of(case.ops)
    across = " across groups" if _is_across_groups(case) else ""
    summary = f"{ranks_phrase(cause.ranks)} wait for each other{across}"
    if unmet is not None:
        summary, next_step = _unmet_summary(unmet), _step_of_unmet(unmet)
    elif cause.awaited_result is not None:
        summary, next_step = _awaited_result(cause.awaited_result)
    elif locks:
        lines = joined(sorted({frame_phrase(each.source) for _, each in locks}))
        next_step = (
            "find the lock that a thread holds during its collective while another thread needs it"
            f" for its own: {lines}"
        )
    else:
        firsts = [case.ops[side[0]] for side in sides]
        are_alike = {op.op for op in case.ops.values()} in ({"recv"}, {"send"})
        next_step = receives_step(cause.ranks, firsts) if are_alike else tie_step(firsts)
    return Words(
        summary=summary,
        explanation=phrases.prose(
            phrases.describe_sides(sides, case.ops),
            phrases.separation(context, sides),
            _ring(context, case, steps),
        ),
        next_step=next_step,
        evidence=[
            *([f"{_counts(unmet)}."] if unmet is not None else []),
            *(
                f"Thread {each.name} of {rank_phrase(rank)} waits for a lock (threading.Lock) at"
                f" {frame_phrase(each.source)}."
                for rank, each in locks
            ),
            *([] if locks else [phrases.UNDECIDED]),
            *(f"{step}." for step in steps),
        ],
        would_raise_confidence=_BY_CHANCE if locks else _MORE_STEPS,
    )


def _awaited_result(awaited: AwaitedResult) -> tuple[str, str]:
    """Return the summary and the next step for a rank that waits for a result that another rank
    writes, which waits for its next command.
    """
    asker, writer, key = rank_phrase(awaited.rank), rank_phrase(awaited.writer), awaited.key
    op = numbered(awaited.command.op, awaited.command.sequence_number)
    return (
        f"{asker} waits for {writer} to write the key {key!r}, and {writer} waits for {op} of"
        f" {asker}",
        f"find out whether {asker} asks for the result of a command that it never sent, or"
        f" {writer} left out the answer to one",
    )


def _unmet_summary(unmet: Unmet) -> str:
    rank, peer = rank_phrase(unmet.rank), rank_phrase(unmet.peer)
    lacks = "receives" if unmet.op.op == "send" else "sends"
    return (
        f"{rank} waits in {op_phrase(unmet.op)}, which {peer} {lacks} only after"
        f" {op_phrase(unmet.stands_in)}, if at all; {peer} waits there for {rank}"
    )


def _step_of_unmet(unmet: Unmet) -> str:
    op, stands_in = unmet.op, unmet.stands_in
    paths = parting_paths(op.stack, stands_in.stack)
    # the program cannot move a message that a library sends, nor one of a function left out
    is_left_out = paths is not None and paths[0].caller not in ("", paths[0].place)
    if is_left_out or issued_by_library(op.stack):
        return _parting([unmet.rank], op, [unmet.peer], stands_in)
    return unmet_step(op, unmet.rank, stands_in)


def _counts(unmet: Unmet) -> str:
    """``"Rank 0 issued 5 sends to rank 1 up to then, rank 1 issued 4 receives from rank 0 before
    all_reduce at train.py:25 step"``.
    """
    op, stands_in = unmet.op, unmet.stands_in
    rank, peer = rank_phrase(unmet.rank), rank_phrase(unmet.peer)
    own, other = ("send", "receive") if op.op == "send" else ("receive", "send")
    to, back = ("to", "from") if op.op == "send" else ("from", "to")
    place = frame_phrase(stands_in.source)
    before = f"before {stands_in.op} at {place}" if place else "before it waited"
    return (
        f"{capital(rank)} issued {count(op.sequence_number, own)} {to} {peer} up to then,"
        f" {peer} issued {count(unmet.issued, other)} {back} {rank} {before}"
    )
