"""Words about ranks that met in one collective or message but disagree on it, and about ranks that
are out of step or issued collectives in another order: "rank 2 disagrees on the shape of all_reduce
#7 of the default group [0-3]: float32[5], the others float32[4]".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from commlens.diagnosis.align.call_paths import Path, in_package
from commlens.diagnosis.align.out_of_step import Shift
from commlens.diagnosis.causes.context import Case, Context
from commlens.diagnosis.causes.messages import is_repeated
from commlens.diagnosis.causes.mismatch import MismatchCase, SwappedCase, has_one_side
from commlens.diagnosis.words import phrases
from commlens.diagnosis.words.finding import Words
from commlens.diagnosis.words.messages import messages_part, why_astray
from commlens.diagnosis.words.next_steps import mismatch_step, raised_step, tie_step
from commlens.matching.answer import Disagree
from commlens.model.cause import MAIN_THREAD, Mismatch
from commlens.model.collective import Collective, FrameKind
from commlens.text import (
    args_phrase,
    capital,
    count,
    frame_phrase,
    group_phrase,
    joined,
    op_phrase,
    rank_phrase,
    ranks_and_verb,
    ranks_phrase,
    verb,
)

_ASPECTS = {"reduce-op": "reduce op", "layout": "memory layout"}
_EVIDENCE_MAX = 8
_SHOWN = 4  # lines of swapped collectives
_CHECKPOINT = "torch/distributed/checkpoint/"
_DEPARTURES = {
    "skipped": "; it looks like a skipped collective",
    "extra": "; it looks like an extra collective",
    "either": "; that one was skipped, or this one is extra",
}
_DOUBTS = {
    "order-of-threads": (
        "Issue the group's collectives from one thread: with several, their order is uncertain."
    ),
    "splits-unknown": (
        "These records do not tell the splits, which would show the ranks that are wrong;"
        " `commlens launch` records them."
    ),
    "routine-may-change": (
        "The routine decides, not a majority: a program may change its routine on purpose."
    ),
    "groups-may-differ": (
        "Other groups of the kind decide, not a majority: a program may use one group differently."
    ),
    "single-match": "A single collective fits the shift; more of them would make it sure.",
}


def words(context: Context, case: Case[Mismatch]) -> Words:
    """Return what a finding says about ranks that disagree or are out of step, or whose threads use
    a group in any order.
    """
    if not isinstance(case, MismatchCase):
        return _race(context, case)
    evidence, ended = _evidence(case), case.cause.ended_by_it
    room = max(0, _EVIDENCE_MAX - len(evidence))
    died = capital(phrases.ended_like_the_first(context, ended)) if ended else ""
    return Words(
        summary=_summary(case),
        explanation=phrases.prose(
            *_what_they_did(context, case),
            _raised(case),
            _consequence(case),
            f"{died} because of it." if ended else "",
        ),
        next_step=_next_step(case),
        evidence=[*evidence, *(f"The same: {_summary(other)}." for other in case.alike[:room])],
        would_raise_confidence=_what_would_show(case),
    )


# --- the summary


def _summary(case: MismatchCase) -> str:
    mismatch, name, answer = case.mismatch, _name(case), case.mismatch.answer
    if answer is None:
        return _out_of_step_summary(case)
    if mismatch.astray is not None:
        return messages_part(mismatch)
    if mismatch.blamed_by == "arguments":
        return f"{answer.detail} in {name}: {answer.parties[-1].phrase}"
    if mismatch.usual is None:
        sides = " against ".join(
            f"{party.phrase} ({ranks_phrase(party.ranks)})" for party in answer.parties[:3]
        )
        return f"ranks disagree in {name}: {sides}"
    if answer.aspect == "op":
        return _op_summary(case)
    if answer.aspect == "p2p":
        return f"{name} does not match: {answer.detail}"
    return _aspect_summary(case, answer)


def _name(case: MismatchCase) -> str:
    mismatch = case.mismatch
    if mismatch.pair is None:
        return op_phrase(case.op or mismatch.own)
    sent, received = mismatch.pair
    return (
        f"message #{mismatch.number} from {rank_phrase(received.peer)} to"
        f" {rank_phrase(sent.peer)} in"
        f" {group_phrase(mismatch.channel.group)}"
    )


def _aspect_summary(case: MismatchCase, answer: Disagree) -> str:
    culprits, parties = case.mismatch.culprits, answer.parties
    odd = [party for party in parties if set(party.ranks) & set(culprits)] or [parties[-1]]
    theirs = joined([party.phrase for party in parties if party not in odd][:3], "or")
    own = odd[0].phrase
    if len(odd) > 1:
        own = ", ".join(f"{party.phrase} ({ranks_phrase(party.ranks)})" for party in odd[:3])
    aspect = _ASPECTS.get(answer.aspect, answer.aspect)
    skip = _DEPARTURES.get(case.mismatch.departure, "")
    return (
        f"{ranks_and_verb(culprits, 'disagrees', 'disagree')} on the {aspect} of {_name(case)}:"
        f" {own}, the others {theirs}{skip}"
    )


def _op_summary(case: MismatchCase) -> str:
    mismatch, ops = case.mismatch, case.mismatch.ops
    odd = phrases.ranks_by_text(
        [rank for rank in mismatch.culprits if rank in ops], lambda rank: ops[rank].op
    )
    issued = joined([f"{ranks_phrase(ranks)} issued {op}" for ranks, op in odd[:3]])
    theirs = joined(sorted({ops[rank].op for rank in mismatch.others}), "or")
    where = f"#{mismatch.number} of {group_phrase(mismatch.channel.group)}"
    skip = _DEPARTURES.get(mismatch.departure, "")
    return f"{issued} where the others issued {theirs} ({where}){skip}"


def _out_of_step_summary(case: MismatchCase) -> str:
    mismatch, name, shift = case.mismatch, _name(case), case.mismatch.shift
    assert shift is not None
    subject = ranks_phrase(mismatch.culprits)
    if mismatch.tie:
        return (
            f"{subject} are out of step from #{mismatch.number} of"
            f" {group_phrase(mismatch.channel.group)} on"
        )
    if mismatch.departure == "either":
        own = op_phrase(mismatch.own, group=False)
        did = f"either skipped {name} or issued an extra {own}"
    elif shift.by < 0:
        did = f"issued {count(-shift.by, 'collective')} too many, from {name} on"
    else:
        did = f"skipped {name}" + (f" and {shift.by - 1} more" if shift.by > 1 else "")
    return f"{subject} {did}; everything after it pairs up wrongly"


# --- the explanation


def _what_they_did(context: Context, case: MismatchCase) -> list[str]:
    if case.mismatch.tie:
        sides = _sides_of_tie(case)
        return [
            phrases.describe_sides(sides, case.mismatch.ops),
            phrases.separation(context, sides),
        ]
    return _out_of_step(case) if case.mismatch.answer is None else _sides(context, case)


def _sides_of_tie(case: MismatchCase) -> list[list[int]]:
    answer, ops = case.mismatch.answer, case.mismatch.ops
    parties = (
        [party.ranks for party in answer.parties]
        if answer is not None
        else [(rank,) for rank in sorted(ops)]
    )
    return [side for ranks in parties if (side := [rank for rank in ranks if rank in ops])]


def _sides(context: Context, case: MismatchCase) -> list[str]:
    """``["rank 2 (pid 7) issued all_reduce float32[50] SUM at train.py:20 step.", "Ranks 0-1,3
    issued ..."]``.
    """
    mismatch = case.mismatch
    shown = [(rank, mismatch.ops[rank]) for rank in mismatch.culprits[:3] if rank in mismatch.ops]
    odd = "; ".join(
        f"{phrases.name(context, rank)} {_issued(op, mismatch.own, case.paths[0])}"
        for rank, op in shown
    )
    usual = mismatch.usual
    said = phrases.ranks_by_text(
        mismatch.others, lambda rank: _issued(mismatch.ops[rank], usual, case.paths[1])
    )
    others = "; ".join(f"{ranks_phrase(ranks)} {text}" for ranks, text in said[:3])
    return [f"{odd}." if odd else "", f"{capital(others)}." if others else ""]


def _issued(op: Collective, first: Collective | None, path: Path) -> str:
    """Return what a rank issued and where; ``path`` is that of the ``first`` rank of its side."""
    on_path = first is not None and op.source == first.source
    where, args = path.phrase if on_path else frame_phrase(op.source), args_phrase(op)
    peer = (
        f" {'to' if op.op == 'send' else 'from'} {rank_phrase(op.peer)}"
        if op.peer is not None
        else ""
    )
    tag = f" with tag {op.tag}" if op.tag else ""
    return (
        f"issued {op.op}{peer}{tag}{f', {args},' if peer and args else f' {args}' if args else ''}"
        f" at {where or 'an unknown line'}"
    )


def _out_of_step(case: MismatchCase) -> list[str]:
    """Say what shows that the culprits skipped a collective or issued one too many."""
    mismatch, culprits, usual = case.mismatch, case.mismatch.culprits, case.mismatch.usual
    subject, they = ranks_phrase(culprits), verb(culprits, "it", "they")
    own, theirs = (path.phrase for path in case.paths)
    if mismatch.shift is not None:
        return [_shifted(case, mismatch.shift)]
    if mismatch.departure == "skipped":
        return [
            f"Until now, {subject} issued this right after the collective in which the others wait;"
            f" this time, {they} skipped that one."
        ]
    if mismatch.departure or mismatch.pair is not None or usual is None or own == theirs:
        return []
    first = "" if case.been_there else " for the first time"
    return [
        f"{subject} issued {mismatch.own.op} at {own}{first}: it may be extra, or {they} skipped"
        f" the others' {usual.op}."
    ]


def _shifted(case: MismatchCase, shift: Shift) -> str:
    """Return how a rank's collectives match earlier or later ones of the others."""
    number, own = case.mismatch.number, case.paths[0].phrase
    subject = ranks_phrase(case.mismatch.culprits)
    so_on = f", and so on for {count(shift.matches, 'collective')}" if shift.matches > 1 else ""
    if case.mismatch.tie and shift.other is not None:
        other = rank_phrase(shift.other)
        times = count(shift.by, "collective")
        return (
            f"#{number} of {rank_phrase(shift.rank)} matches #{number + shift.by} of"
            f" {other}{so_on}: {rank_phrase(shift.rank)} skipped {times}, or {other} issued"
            f" {times} too many."
        )
    if shift.by > 0:
        return (
            f"#{number} of {subject} ({own}) matches #{number + shift.by} of the others{so_on}; the"
            f" others' #{number} is {shift.skipped.op} at {case.paths[1].phrase}, step"
            f" {shift.skipped.step}."
        )
    match = f"#{number - shift.by} is their #{number}; #{number} at {own} is extra"
    return (
        f"From #{number - shift.by} on, the collectives of {subject} match earlier ones of the"
        f" others: {match}."
    )


def _raised(case: MismatchCase) -> str:
    """Return what the first culprit's call of the others' collective raised."""
    if case.raised is None:
        return ""
    return (
        f"{capital(rank_phrase(case.mismatch.culprits[0]))} called {case.raised.op} there, too;"
        f" that raised {phrases.first_line(case.raised.error or '')}, and its program went on."
    )


def _consequence(case: MismatchCase) -> str:
    if case.cause.silent:
        return "Nothing hung, but the result is wrong."
    held, on = case.cause.held_up, case.cause.gone_on
    return phrases.prose(
        f"{capital(ranks_and_verb(held, 'is', 'are'))} held up by it." if held else "",
        f"{capital(ranks_and_verb(on, 'has', 'have'))} completed that number and gone on; no line"
        " tells with which arguments."
        if on
        else "",
    )


# --- the next step, the evidence, and what would show more


def _next_step(case: MismatchCase) -> str:
    mismatch = case.mismatch
    if mismatch.tie and mismatch.astray is None:
        return tie_step([mismatch.ops[side[0]] for side in _sides_of_tie(case)])
    if case.raised is not None:
        return raised_step(case.raised, mismatch.culprits)
    return mismatch_step(mismatch, case.paths)


def _evidence(case: MismatchCase) -> list[str]:
    mismatch, answer = case.mismatch, case.mismatch.answer
    evidence = why_astray(mismatch)
    if answer is not None and mismatch.astray is None:
        has_splits = answer.aspect == "splits" and mismatch.blamed_by != "arguments"
        if mismatch.tie or len(answer.parties) > 2 or has_splits:  # more than the summary says
            evidence.append(f"{_name(case)}: {answer.detail}.")
    if answer is not None or mismatch.tie:  # else it is the explanation
        evidence += _out_of_step(case)
    evidence += phrases.rounds_told(case.cause.rounds)
    evidence += phrases.steps_at(case.cause.rounds)
    evidence += _steps_ahead(case) + _run_again(mismatch.ops)
    if mismatch.tie and not has_one_side(mismatch):
        evidence.append(phrases.UNDECIDED)
    elif mismatch.blamed_by == "routine" and mismatch.astray is None:
        evidence.append(
            "No side has a majority, but"
            f" {ranks_and_verb(mismatch.culprits, 'departs from its', 'depart from their')} usual"
            " routine here."
        )
    elif mismatch.blamed_by == "other-groups":
        others = ranks_phrase(mismatch.others)
        evidence.append(
            f"No side has a majority, but the other groups of this kind issue here what {others}"
            " issued."
        )
    if mismatch.repeats:
        evidence.append(f"The same happened {count(mismatch.repeats, 'more time')} later.")
    return evidence


def _run_again(ops: Mapping[int, Collective]) -> list[str]:
    again = [rank for rank, op in ops.items() if is_repeated(op)]
    if not again or len(again) == len(ops):
        return []
    return [
        f"{ranks_phrase(again)} issued it as an activation checkpoint ran its function again in"
        " backward; the others did not."
    ]


def _steps_ahead(case: MismatchCase) -> list[str]:
    ahead, mismatch, usual = case.cause.steps_ahead, case.mismatch, case.mismatch.usual
    if usual is None or not ahead:
        return []
    return [
        f"{ranks_phrase(mismatch.culprits)} did {count(abs(ahead), 'optimizer step')}"
        f" {'more' if ahead > 0 else 'fewer'} than the others until then: {mismatch.own.step}, they"
        f" {usual.step}."
    ]


def _what_would_show(case: MismatchCase) -> str | None:
    doubt = case.cause.doubt
    if doubt == "undecided":
        is_first = case.cause.number == 1 and not case.mismatch.own.is_point_to_point
        if is_first and not case.cause.not_seen:
            return "It is the first of its group: no earlier one shows which side is wrong."
        record = "The other ranks' records, or a" if case.cause.not_seen else "A"
        return f"{record} run with more steps before the fault would show which one is wrong."
    return _DOUBTS[doubt] if doubt is not None else None


# --- two threads that use a group in any order


def _race(context: Context, case: Case[Mismatch]) -> Words:
    """Return what a finding says about two threads on each rank whose collectives come in any
    order.
    """
    assert case.mismatch is not None and case.mismatch.racing is not None
    mismatch, race = case.mismatch, case.mismatch.racing
    group, answer = group_phrase(mismatch.channel.group), mismatch.answer
    detail = f": {answer.detail}" if answer is not None else ""
    told = case.cause.race
    names = (told.beside_thread, told.main_thread) if told is not None else ("", "")
    second, main = (
        f"{op.op} at {_thread_line(op)}{_in_thread(name)}"
        for op, name in zip((race.other, race.main), names, strict=True)
    )
    is_checkpoint = _is_of_checkpoint(race.other)
    what, how = (
        ("the checkpoint", "process_group=dist.new_group() of the call that saves")
        if is_checkpoint
        else ("one of the threads", "new_group")
    )
    ends = phrases.exits_alike(context, case.cause.ended_by_it)
    unseen = sorted(set(mismatch.ops) - set(race.ranks))
    every = ", on every rank" if not unseen else ""
    return Words(
        summary=(
            f"two threads use {group} without an order between them{every}: {second} and {main}"
            " come in any order"
        ),
        explanation=phrases.prose(
            f"The ranks disagree in #{mismatch.number}{detail}.",
            (
                f"{capital(ranks_phrase(race.ranks))} had collectives of both threads in flight at"
                " once."
                if race.ranks
                else ""
            ),
            "Which thread comes first changes from run to run, so no rank is at fault.",
            *(f"{capital(each)} because of it." for each in ends[:3]),
        ),
        next_step=(
            "wait for each checkpoint (result() of what async_save returns) before the next one"
            " begins"
            if is_checkpoint and _is_of_checkpoint(race.main)
            else f"give {what} a group of its own ({how}), or issue all collectives of {group} from"
            " one thread"
        ),
        would_raise_confidence=(
            f"{capital(ranks_phrase(unseen))} had not both in flight at once, as far as is"
            " recorded."
            if unseen
            else None
        ),
    )


def _thread_line(op: Collective) -> str:
    """Return the user's line that issued an op; in a thread of torch's, the line that tells its
    purpose.
    """
    if op.source is not None:
        return frame_phrase(op.source)
    frames = [frame for frame in op.stack if frame.kind is FrameKind.TORCH]
    of_checkpoint = [frame for frame in frames if _CHECKPOINT in frame.file]
    if of_checkpoint:
        saves = [frame for frame in of_checkpoint if frame.function.endswith("save")]
        return f"{in_package((saves or of_checkpoint)[0])} (a checkpoint)"
    return in_package(frames[-1]) if frames else "an unknown line"


def _is_of_checkpoint(op: Collective) -> bool:
    return any(_CHECKPOINT in frame.file for frame in op.stack)


def _in_thread(name: str) -> str:
    return " in the main thread" if name == MAIN_THREAD else f" in thread {name}" if name else ""


# --- collectives of one shape in another order


def words_of_swapped(case: SwappedCase) -> Words:
    """Return what a finding says about a rank that issued collectives in another order."""
    cause, swap, first = case.cause, case.swap, case.swap.own[0]
    where = f"{first.op} #{cause.first} to #{cause.last} of {group_phrase(first.channel.group)}"
    line = frame_phrase(first.source)
    return Words(
        summary=(
            f"{rank_phrase(swap.rank)} issued {where} in another order than the others:"
            " its collective at"
            f" {line} met the others' collective at {frame_phrase(swap.others[0].source)},"
            " so their results are mixed up"
        ),
        explanation=(
            f"{capital(rank_phrase(swap.rank))}: {_lines(swap.own)}."
            f" {capital(ranks_phrase(cause.victims))}:"
            f" {_lines(swap.others)}."
            " Ops and shapes are the same, so nothing hangs."
        ),
        next_step=f"find out why {rank_phrase(swap.rank)} reaches {line} first here",
        would_raise_confidence=(
            "Only the source lines show it: the program may issue them in either order on purpose."
        ),
    )


def _lines(ops: Iterable[Collective]) -> str:
    return ", ".join(frame_phrase(op.source) for op in list(ops)[:_SHOWN])
