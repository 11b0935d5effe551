"""Words about ranks that met in one collective or message but disagree on it, and about ranks that
are out of step.
"""

from __future__ import annotations

from commlens.diagnosis.align.call_paths import in_package
from commlens.diagnosis.causes.context import Context
from commlens.diagnosis.causes.mismatch import FoundMismatch, FoundRace, has_one_side
from commlens.diagnosis.words import phrases
from commlens.diagnosis.words.astray import messages_part, why_astray
from commlens.diagnosis.words.finding import Words
from commlens.diagnosis.words.next_steps import mismatch_step
from commlens.diagnosis.words.phrases import prose
from commlens.diagnosis.words.sides import (
    UNDECIDED,
    describe_sides,
    separation,
    tie_step,
    told_apart,
)
from commlens.matching.answer import Disagree
from commlens.model.collective import Collective, FrameKind
from commlens.text import (
    args_phrase,
    capital,
    count,
    frame_phrase,
    group_phrase,
    joined,
    op_phrase,
    ranks_and_verb,
    ranks_phrase,
    verb,
)

_ASPECTS = {"reduce-op": "reduce op", "layout": "memory layout"}
_EVIDENCE_MAX = 8
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


def words(context: Context, found: FoundMismatch) -> Words:
    """Return what a finding says about ranks that disagree or are out of step."""
    mismatch = found.mismatch
    evidence = _evidence(found)
    for other in found.alike:
        if len(evidence) < _EVIDENCE_MAX:
            evidence.append(f"The same: {_summary(other)}.")
    return Words(
        summary=_summary(found),
        explanation=prose(
            *_what_they_did(context, found),
            _consequence(found),
            _aborted(context, found),
        ),
        next_step=(
            tie_step([mismatch.ops[side[0]] for side in _sides_of_tie(found)])
            if mismatch.tie and mismatch.astray is None
            else mismatch_step(mismatch, found.op, found.usual, found.paths)
        ),
        evidence=evidence,
        would_raise_confidence=_what_would_show(found),
    )


def words_of_race(context: Context, found: FoundRace) -> Words:
    """Return what a finding says about two threads on each rank whose collectives come in any
    order.
    """
    mismatch, race = found.mismatch, found.race
    group, answer = group_phrase(mismatch.channel.group), mismatch.answer
    detail = f": {answer.detail}" if answer is not None else ""
    second, main = (f"{op.op} at {_thread_line(op)}" for op in (race.other, race.main))
    is_checkpoint = any(_CHECKPOINT in frame.file for frame in race.other.stack)
    unseen = sorted(set(mismatch.ops) - set(race.ranks))
    every = ", on every rank" if not unseen else ""
    return Words(
        summary=(
            f"two threads use {group} without an order between them{every}: {second} and, in the"
            f" main thread, {main} come in any order"
        ),
        explanation=prose(
            f"The ranks disagree in #{mismatch.number}{detail}.",
            (
                f"{capital(ranks_phrase(race.ranks))} had collectives of both threads in flight at"
                " once."
                if race.ranks
                else ""
            ),
            "Which thread comes first changes from run to run, so no rank is at fault.",
            *_aborted_by_race(context, found),
        ),
        next_step=(
            f"give {'the checkpoint' if is_checkpoint else 'one of the threads'} a group of its"
            " own "
        )
        + (
            "(process_group=dist.new_group() of the call that saves)"
            if is_checkpoint
            else "(new_group)"
        )
        + f", or issue all collectives of {group} from one thread",
        would_raise_confidence=(
            f"{capital(ranks_phrase(unseen))} had not both in flight at once, as far as is"
            " recorded."
            if unseen
            else None
        ),
    )


def _aborted_by_race(context: Context, found: FoundRace) -> list[str]:
    """``["Rank 0 died of SIGABRT because of it."]``."""
    ends = phrases.exits_alike(context, found.cause.ended_by_it)
    return [f"{capital(end)} because of it." for end in ends[:3]]


def _thread_line(op: Collective) -> str:
    """Return the user's line that issued an op; in a thread of torch's, the line that tells its
    purpose.
    """
    if op.source is not None:
        return frame_phrase(op.source)
    frames = [frame for frame in op.stack if frame.kind is FrameKind.TORCH]
    told = [frame for frame in frames if _CHECKPOINT in frame.file] or frames
    if not told:
        return "an unknown line"
    place = (
        told[-1]
        if _CHECKPOINT not in told[-1].file
        else next((one for one in told if one.function.endswith("save")), told[0])
    )
    return f"{in_package(place)}{' (a checkpoint)' * (_CHECKPOINT in place.file)}"


def _name(found: FoundMismatch) -> str:
    mismatch = found.mismatch
    if mismatch.pair is None:
        return op_phrase(found.shown)
    sent, received = mismatch.pair
    return (
        f"message #{mismatch.number} from rank {received.peer} to rank {sent.peer} in"
        f" {group_phrase(mismatch.channel.group)}"
    )


def _sides_of_tie(found: FoundMismatch) -> list[list[int]]:
    answer, ops = found.mismatch.answer, found.mismatch.ops
    parties = (
        [party.ranks for party in answer.parties]
        if answer is not None
        else [(rank,) for rank in sorted(ops)]
    )
    return [side for ranks in parties if (side := [rank for rank in ranks if rank in ops])]


def _what_they_did(context: Context, found: FoundMismatch) -> list[str]:
    if found.mismatch.tie:
        sides = _sides_of_tie(found)
        return [describe_sides(sides, found.mismatch.ops), separation(context, sides)]
    return _out_of_step(found) if found.mismatch.answer is None else _sides(context, found)


def _consequence(found: FoundMismatch) -> str:
    if found.cause.silent:
        return "Nothing hung, but the result is wrong."
    held = found.cause.held_up
    return f"{capital(ranks_and_verb(held, 'is', 'are'))} held up by it." if held else ""


def _aborted(context: Context, found: FoundMismatch) -> str:
    ranks = found.cause.ended_by_it
    if not ranks:
        return ""
    return f"{capital(phrases.ended_like_the_first(context, ranks))} because of it."


def _what_would_show(found: FoundMismatch) -> str | None:
    doubt = found.cause.doubt
    if doubt == "undecided":
        met = next(iter(found.mismatch.ops.values()), None)
        is_first = found.cause.number == 1 and met is not None and not met.is_point_to_point
        if is_first and not found.cause.not_seen:
            return "It is the first of its group: no earlier one shows which side is wrong."
        record = "The other ranks' records, or a" if found.cause.not_seen else "A"
        return f"{record} run with more steps before the fault would show which one is wrong."
    return _DOUBTS[doubt] if doubt is not None else None


def _sides(context: Context, found: FoundMismatch) -> list[str]:
    """``["rank 2 (pid 7) issued all_reduce float32[50] SUM at train.py:20 step.", "Ranks 0-1,3
    issued ..."]``.
    """
    mismatch, paths = found.mismatch, found.paths
    shown = [(rank, mismatch.ops[rank]) for rank in found.suspects[:3] if rank in mismatch.ops]
    first = shown[0][1].source if shown else None
    odd = "; ".join(
        f"{phrases.name(context, rank)}"
        f" {_issued(op, paths[0].phrase if op.source == first else frame_phrase(op.source))}"
        for rank, op in shown
    )
    usual = found.usual.source if found.usual is not None else None

    def said(rank: int) -> str:
        op = mismatch.ops[rank]
        return _issued(op, paths[1].phrase if op.source == usual else frame_phrase(op.source))

    others = "; ".join(
        f"{ranks_phrase(ranks)} {text}" for ranks, text in told_apart(mismatch.others, said)[:3]
    )
    return [f"{odd}." if odd else "", f"{capital(others)}." if others else ""]


def _issued(op: Collective, where: str) -> str:
    args = args_phrase(op)
    peer = f" {'to' if op.op == 'send' else 'from'} rank {op.peer}" if op.peer is not None else ""
    tag = f" with tag {op.tag}" if op.tag else ""
    return (
        f"issued {op.op}{peer}{tag}{f', {args},' if peer and args else f' {args}' if args else ''}"
        f" at {where or 'an unknown line'}"
    )


def _evidence(found: FoundMismatch) -> list[str]:
    mismatch = found.mismatch
    evidence = why_astray(mismatch)
    answer = mismatch.answer if mismatch.astray is None else None
    told = mismatch.blamed_by == "arguments"  # by the summary
    if answer is not None and (
        mismatch.tie or len(answer.parties) > 2 or (answer.aspect == "splits" and not told)
    ):
        evidence.append(f"{_name(found)}: {answer.detail}.")
    evidence += [] if mismatch.answer is None and not mismatch.tie else _out_of_step(found)
    evidence += _steps_ahead(found)
    if mismatch.tie and not has_one_side(mismatch):
        evidence.append(UNDECIDED)
    elif mismatch.blamed_by == "routine" and mismatch.astray is None:
        evidence.append(
            "No side has a majority, but"
            f" {ranks_and_verb(found.suspects, 'departs from its', 'depart from their')} usual"
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


def _steps_ahead(found: FoundMismatch) -> list[str]:
    ahead, usual = found.cause.steps_ahead, found.usual
    if usual is None or not ahead:
        return []
    return [
        f"{ranks_phrase(found.suspects)} did {count(abs(ahead), 'optimizer step')}"
        f" {'more' if ahead > 0 else 'fewer'} than the others until then: {found.op.step}, they"
        f" {usual.step}."
    ]


def _summary(found: FoundMismatch) -> str:
    mismatch, name, answer = found.mismatch, _name(found), found.mismatch.answer
    if answer is None:
        return _out_of_step_summary(found)
    if mismatch.astray is not None:
        return messages_part(mismatch)
    if mismatch.blamed_by == "arguments":
        return f"{answer.detail} in {name}: {answer.parties[-1].phrase}"
    if mismatch.tie or found.usual is None:
        sides = " against ".join(
            f"{party.phrase} ({ranks_phrase(party.ranks)})" for party in answer.parties[:3]
        )
        return f"ranks disagree in {name}: {sides}"
    if answer.aspect == "op":
        return _op_summary(found)
    if answer.aspect == "p2p":
        return f"{name} does not match: {answer.detail}"
    return _aspect_summary(found, answer)


def _out_of_step_summary(found: FoundMismatch) -> str:
    mismatch, name, shift = found.mismatch, _name(found), found.mismatch.shift
    assert shift is not None
    subject = ranks_phrase(found.suspects)
    if mismatch.tie:
        return (
            f"{subject} are out of step from #{mismatch.number} of"
            f" {group_phrase(mismatch.channel.group)} on"
        )
    if mismatch.departure == "either":
        own = op_phrase(found.op, group=False)
        did = f"either skipped {name} or issued an extra {own}"
    elif shift.by < 0:
        did = f"issued {count(-shift.by, 'collective')} too many, from {name} on"
    else:
        did = f"skipped {name}" + (f" and {shift.by - 1} more" if shift.by > 1 else "")
    return f"{subject} {did}; everything after it pairs up wrongly"


def _op_summary(found: FoundMismatch) -> str:
    mismatch, ops = found.mismatch, found.mismatch.ops
    odd = told_apart([rank for rank in found.suspects if rank in ops], lambda rank: ops[rank].op)
    issued = joined([f"{ranks_phrase(ranks)} issued {op}" for ranks, op in odd[:3]])
    theirs = joined(sorted({ops[rank].op for rank in mismatch.others}), "or")
    where = f"#{mismatch.number} of {group_phrase(mismatch.channel.group)}"
    skip = _DEPARTURES.get(mismatch.departure, "")
    return f"{issued} where the others issued {theirs} ({where}){skip}"


def _aspect_summary(found: FoundMismatch, answer: Disagree) -> str:
    culprits = found.suspects
    odd_parties = [party for party in answer.parties if set(party.ranks) & set(culprits)] or [
        answer.parties[-1]
    ]
    theirs = joined(
        [party.phrase for party in answer.parties if party not in odd_parties][:3], "or"
    )
    own = odd_parties[0].phrase
    if len(odd_parties) > 1:
        own = ", ".join(
            f"{party.phrase} ({ranks_phrase(party.ranks)})" for party in odd_parties[:3]
        )
    aspect = _ASPECTS.get(answer.aspect, answer.aspect)
    skip = _DEPARTURES.get(found.mismatch.departure, "")
    return (
        f"{ranks_and_verb(culprits, 'disagrees', 'disagree')} on the {aspect} of {_name(found)}:"
        f" {own}, the others {theirs}{skip}"
    )


def _and_so_on(matches: int) -> str:
    return f", and so on for {count(matches, 'collective')}" if matches > 1 else ""


def _out_of_step(found: FoundMismatch) -> list[str]:
    """Say what shows that the suspects skipped a collective or issued one too many."""
    mismatch, culprits, paths = found.mismatch, found.suspects, found.paths
    op, usual = found.op, found.usual
    shift, number, subject = mismatch.shift, mismatch.number, ranks_phrase(culprits)
    own = paths[0].phrase
    more = _and_so_on(shift.matches) if shift is not None else ""
    if shift is not None and mismatch.tie:
        other = next(rank for rank in culprits if rank != shift.rank)
        times = count(shift.by, "collective")
        return [
            f"#{number} of rank {shift.rank} matches #{number + shift.by} of rank {other}{more}: "
            f"rank {shift.rank} skipped {times}, or rank {other} issued {times} too many."
        ]
    if shift is not None and shift.by > 0:
        return [
            f"#{number} of {subject} ({own}) matches #{number + shift.by} of the others{more}; the"
            f" others' #{number} is {shift.skipped.op} at {paths[1].phrase}, step"
            f" {shift.skipped.step}."
        ]
    if shift is not None:
        match = f"#{number - shift.by} is their #{number}; #{number} at {own} is extra"
        return [
            f"From #{number - shift.by} on, the collectives of {subject} match earlier ones of the"
            f" others: {match}."
        ]
    they = verb(culprits, "it", "they")
    if mismatch.departure == "skipped":
        return [
            f"Until now, {subject} issued this right after the collective in which the others wait;"
            f" this time, {they} skipped that one."
        ]
    if (
        mismatch.departure
        or mismatch.tie
        or mismatch.pair is not None
        or usual is None
        or own == paths[1].phrase
    ):
        return []
    first = "" if found.been_there else " for the first time"
    return [
        f"{subject} issued {op.op} at {own}{first}: it may be extra, or {they} skipped the others'"
        f" {usual.op}."
    ]
