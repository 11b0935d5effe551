"""Words about the causes found from outside. They differ from those of the diagnosis because stacks
show no sequence numbers, and say how sure they can be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from commlens.diagnosis.words.circumstances import with_init_meeting
from commlens.diagnosis.words.finding import Words, finding_of
from commlens.diagnosis.words.hardware import add_hardware
from commlens.diagnosis.words.missing import MANY_OUTSIDE, MEMBERS_UNKNOWN, OVERDUE
from commlens.diagnosis.words.next_steps import step_without_tensors
from commlens.diagnosis.words.phrases import activity_words, sign_words
from commlens.model.cause import (
    Cycle,
    Dead,
    Doubt,
    LoopRound,
    Mismatch,
    Missing,
    NoneWaits,
    StuckInside,
    Unrecorded,
    Working,
)
from commlens.model.grouping import grouped
from commlens.model.verdict import Finding
from commlens.outside.sample import RankSample
from commlens.outside.seen import Found, Seen, SeenJob, ranks_of
from commlens.text import (
    capital,
    count,
    duration,
    frame_phrase,
    joined,
    rank_phrase,
    ranks_and_verb,
    ranks_phrase,
    verb,
)

_MORE: Final = (
    "Sequence numbers would decide it: start the job with `commlens launch`, or with torch's Flight"
    " Recorder and a pipe for dumps."
)
_GROUPS_UNKNOWN: Final = (
    "Which ranks are in which group, and in which order they called them, cannot be seen from"
    " outside, so no rank is named."
)
_DOUBTS: Final[Mapping[Doubt, str]] = {
    "members-unknown": MEMBERS_UNKNOWN,
    "many-outside": MANY_OUTSIDE,
}


def describe(job: SeenJob, found: Found[Any]) -> Finding:
    """Return the finding for a cause. Its evidence ends with where all ranks stand."""
    words = _WORDS[found.seen](job, found)
    words = add_hardware(with_init_meeting(words, found.cause), found.cause)
    words = words._replace(evidence=[*words.evidence, *_places(job)])
    return finding_of(found.cause, words, None, found.frame)


def describe_none_waits(job: SeenJob, cause: NoneWaits) -> Finding:
    """Return the finding that no rank is seen to wait."""
    steps = _steps(job)
    words = Words(
        summary=_no_wait(job, cause) + (f" ({steps})" if steps else ""),
        next_step="" if cause.moving else "look again with --window 30: a rank may be slow",
    )
    return finding_of(cause, words)


def _no_wait(job: SeenJob, cause: NoneWaits) -> str:
    moving = ranks_and_verb(cause.moving, "moves", "move")
    if cause.unreadable:
        unread = ranks_phrase(cause.unreadable)
        return f"the stack of {unread} could not be read; the other ranks do not wait"
    if not cause.moving:
        return f"no rank waits for another, and none moved within {duration(job.window_s * 1e9)}"
    if cause.moving != cause.ranks:
        return f"nothing is wrong: no rank waits for another, and {moving}"
    if cause.whole_job:
        return "nothing is wrong: the job moves"
    return f"nothing is wrong in what was seen: {moving}"


def _steps(job: SeenJob) -> str:
    """Return the steps in which the ranks are, if a variable's name shows them."""
    counters = [
        [value for name, value in one.counters.items() if "step" in name] for one in job.samples
    ]
    values = {each[0] for each in counters if each}
    if len(values) == 1:
        return f"step {max(values)}"
    return f"steps {min(values)} to {max(values)}" if values else ""


def _dead(job: SeenJob, found: Found[Dead]) -> Words:
    ranks = found.cause.ranks
    one = verb(ranks, "process", "processes")
    it, its = verb(ranks, "it", "they"), verb(ranks, "its", "their")
    return Words(
        summary=f"{ranks_and_verb(ranks, 'has', 'have')} no {one} any more{_waiting(job, '; ')}",
        explanation=(
            f"{capital(its)} launcher's environment says that {it} should run on this machine."
        ),
        next_step=(
            f"look at the end of {ranks_phrase(ranks)}'s output; dmesg shows whether the kernel"
            f" ended {verb(ranks, 'it', 'them')} for {its} memory"
        ),
        would_raise_confidence=f"Nobody saw how {it} ended.",
    )


def _outside(job: SeenJob, found: Found[Missing | Working]) -> Words:
    ranks, one = found.cause.ranks, found.sides[0][0]
    doing = job.doing[one.rank]
    at = frame_phrase(found.frame)
    if found.cause.kind == "waiting":
        did = f"{ranks_and_verb(ranks, 'works', 'work')} in {at or 'code without a Python frame'}"
        if doing.state == "serves":
            did = f"{ranks_phrase(ranks)} {activity_words(doing, ranks)}"
    else:
        stand = [(ranks_of(side), job.doing[side[0].rank]) for side in found.sides]
        did = joined(f"{ranks_phrase(some)} {activity_words(each, some)}" for some, each in stand)
        if doing.state in ("stopped", "debugged") and doing.frame is not None:
            did += f" at {at}"
    doubt = _DOUBTS[found.doubt] if found.doubt is not None else None
    if doubt is None and found.cause.kind == "waiting":
        it = verb(ranks, "it works, so it", "they work, so they")
        doubt = f"{capital(it)} may still arrive."
        if doing.state == "serves":
            doubt = OVERDUE
    are = capital(ranks_and_verb(ranks, "is", "are"))
    first = verb(ranks, "", f". {capital(rank_phrase(one.rank))}")
    return Words(
        summary=f"{did}{_waiting(job, '; ')}",
        explanation=(
            f"{are} in no collective{first}: {joined(sign_words(doing.signs[:3]))}."
            f" {_unmoved_sentence(job)}"
        ),
        next_step=_step_of_outside(job, found),
        would_raise_confidence=doubt,
    )


def _step_of_outside(job: SeenJob, found: Found[Missing | Working]) -> str:
    one = found.sides[0][0]
    doing, log = job.doing[one.rank], one.log
    if doing.why == "stopped":
        them = verb(found.cause.ranks, "it", "them")
        pids = verb(found.cause.ranks, f" {log.pid}`", "` with their pids")
        return f"find out who stopped {them}; `kill -CONT{pids} lets {them} run"
    if doing.state == "serves":
        return "wait for the next request, or whatever the event loop waits for"
    if found.cause.kind == "waiting":
        return (
            "look again with --window 60: a rank that works for very long may be in an endless loop"
        )
    if len(found.sides) > 1:
        return f"find out whether {ranks_phrase(found.cause.ranks)} are members of the group"
    where = doing.frame.function if doing.frame is not None else "its stack"
    return (
        f"look at {where} on {rank_phrase(one.rank)} (pid {log.pid} on {log.host});"
        f" `commlens stacks {log.pid}` shows all stacks"
    )


def _unread(job: SeenJob, found: Found[Unrecorded]) -> Words:
    return Words(
        summary=(
            f"the stack of {ranks_phrase(found.cause.ranks)} could not be read{_waiting(job, '; ')}"
        ),
        explanation=(
            "Every rank that could be read waits, so the cause may be where none could be read."
            f" {_unmoved_sentence(job)}"
        ),
        next_step="look again, or as root",
        would_raise_confidence="The stacks that could not be read would show it.",
    )


def _moving(job: SeenJob, found: Found[Working]) -> Words:
    return Words(
        summary=(
            f"{ranks_and_verb(found.cause.ranks, 'moves', 'move')} on{_waiting(job, ', while ')}"
        ),
        next_step="look again with --window 30: if the same ranks still wait, they are stuck",
        would_raise_confidence="A longer look would show whether the ranks that wait move on, too.",
    )


def _ring(job: SeenJob, found: Found[Cycle]) -> Words:
    ahead = found.cause.other_round
    skipped = ""
    if ahead is not None:
        other = ranks_phrase(rank for rank in found.cause.ranks if rank != ahead.rank)
        skipped = f"{capital(_round(ahead, other))}: it has left out a message. "
    return Words(
        summary=(
            f"{ranks_phrase(found.cause.ranks)} wait for each other:"
            f" {joined(_waits_at_line([one]) for one in found.sides[0])}"
        ),
        explanation=f"{skipped}{_unmoved_sentence(job)}",
        next_step=f"compare the order of sends and receives up to {frame_phrase(found.frame)}",
        would_raise_confidence=_MORE,
    )


def _unmet(job: SeenJob, found: Found[Missing]) -> Words:
    [one], [other] = found.sides
    op = one.call.op if one.call is not None else "the message"
    part = "recv" if op == "send" else "send"
    return Words(
        summary=f"{_waits_at_line([one])}, but {_waits_at_line([other])}",
        explanation=(
            f"{capital(rank_phrase(other.rank))} has left out its {part}, or has not come to it"
            f" because it waits itself; or {rank_phrase(one.rank)} calls {op}"
            f" where it should not. {_unmoved_sentence(job)}"
        ),
        next_step=(
            f"compare the messages between {ranks_phrase([one.rank, other.rank])} before"
            f" {frame_phrase(one.line)}"
        ),
        would_raise_confidence=_MORE,
    )


def _sides(job: SeenJob, found: Found[Mismatch | Cycle]) -> Words:
    sides = found.sides
    odd, most = sides[0], sides[-1]
    if found.cause.blamed_by == "majority":
        why = (
            f"{capital(ranks_and_verb(ranks_of(odd), 'stands', 'stand'))} where no other rank"
            " stands: the majority decides."
        )
    elif len(sides) == 2 and len(odd) == len(most):
        why = "As many ranks stand in one call as in the other, so no rank is named."
    else:
        why = _GROUPS_UNKNOWN
    ahead = found.cause.other_round
    step = f" {capital(_round(ahead))}." if ahead is not None else ""
    return Words(
        summary="; ".join(_waits_at_line(side) for side in sides),
        explanation=(
            f"The ranks wait in different calls, so none can complete. {why}{step}"
            f" {_unmoved_sentence(job)}"
        ),
        next_step=(
            f"find out how {ranks_and_verb(ranks_of(odd), 'comes', 'come')} to"
            f" {frame_phrase(odd[0].line)} while {ranks_and_verb(ranks_of(most), 'is', 'are')} at"
            f" {frame_phrase(most[0].line)}"
        ),
        would_raise_confidence=_MORE,
    )


def _apart(job: SeenJob, found: Found[StuckInside]) -> Words:
    return Words(
        summary="; ".join(_waits_at_line(side) for side in found.sides),
        explanation=(
            f"All ranks wait, in different calls. {_GROUPS_UNKNOWN} {_unmoved_sentence(job)}"
        ),
        next_step="find out which members of the groups made by hand have not come to these calls",
        would_raise_confidence=_MORE,
    )


def _out_of_round(job: SeenJob, found: Found[Mismatch]) -> Words:
    ahead = found.cause.other_round
    assert ahead is not None
    return Words(
        summary=f"{_round(ahead)}; {_waits_at_line(job.stuck)}",
        explanation=f"Its loop is not in step with the others'. {_unmoved_sentence(job)}",
        next_step=f"find out which round of its loop {rank_phrase(ahead.rank)} left out or added",
        would_raise_confidence=_MORE,
    )


def _inside(job: SeenJob, found: Found[StuckInside]) -> Words:
    busy = found.cause.busy
    work = []
    if busy:
        uses = capital(ranks_and_verb(busy, "uses", "use"))
        work.append(f"{uses} CPU or the network: the call may be at work.")
    return Words(
        summary=(
            f"{_waits_at_line(job.stuck)}, and none has left it within"
            f" {duration(job.window_s * 1e9)}"
        ),
        explanation="All ranks stand at the same line.",
        next_step=f"look again with --window 30; if they still stand there, {_compare(job, found)}",
        evidence=work,
        would_raise_confidence=_MORE,
    )


def _compare(job: SeenJob, found: Found[StuckInside]) -> str:
    call = job.stuck[0].call
    at = f" at {frame_phrase(found.frame)}" if found.frame is not None else ""
    step = step_without_tensors(call.op, at) if call is not None else ""
    if call is not None and call.kind == "setup" and not step:
        return f"find out which member does not come to it, or comes to another store{at}"
    return step or "compare the tensors' shapes, and look at the network"


_WORDS: Final[Mapping[Seen, Callable[[SeenJob, Any], Words]]] = {
    "dead": _dead,
    "outside": _outside,
    "unread": _unread,
    "moving": _moving,
    "ring": _ring,
    "unmet": _unmet,
    "sides": _sides,
    "apart": _apart,
    "out-of-round": _out_of_round,
    "inside": _inside,
}


def _places(job: SeenJob) -> list[str]:
    """Return where each class of ranks stands, the smallest first."""
    found = grouped(((_place(job, one), job.own_world(one)), one.rank) for one in job.samples)
    return [
        f"{capital(ranks_phrase(ranks))}: {text}."
        for (text, _), ranks in sorted(found.items(), key=lambda item: len(item[1]))
    ]


def _place(job: SeenJob, one: RankSample) -> str:
    if one.call is None:
        return activity_words(job.doing[one.rank])
    where = f" at {frame_phrase(one.line)}" if one.line is not None else ""
    return f"in {one.call.phrase}{where}"


def _waiting(job: SeenJob, before: str) -> str:
    """Return where the waiting ranks wait: the call in which most of them are, and how many other
    calls there are.
    """
    calls = grouped(
        ((one.call.phrase, frame_phrase(one.line), job.own_world(one)), one.rank)
        for one in job.stuck
        if one.call is not None
    )
    if not calls:
        return ""
    (phrase, where, _), ranks = max(calls.items(), key=lambda item: len(item[1]))
    text = f"{before}{ranks_and_verb(ranks_of(job.stuck), 'waits', 'wait')} in {phrase}"
    if len(calls) > 1:
        others = count(len(calls) - 1, "other call")
        return f"{text} ({ranks_phrase(ranks)}, at {where}) and {others}"
    return f"{text} at {where}" if where else text


def _unmoved_sentence(job: SeenJob) -> str:
    ranks = capital(ranks_phrase(ranks_of(job.stuck)))
    return f"{ranks} did not move for {duration(job.window_s * 1e9)}."


def _round(ahead: LoopRound, others: str = "the others") -> str:
    """``"rank 2 is in step 7, the others in step 6"``."""
    name = ahead.variable
    return (
        f"{rank_phrase(ahead.rank)} is in {name} {ahead.value}, {others} in {name} {ahead.others}"
    )


def _waits_at_line(members: Sequence[RankSample]) -> str:
    where = frame_phrase(members[0].line)
    phrase = members[0].call.phrase if members[0].call is not None else "no call"
    text = f"{ranks_and_verb(ranks_of(members), 'waits', 'wait')} in {phrase}"
    return f"{text} at {where}" if where else text
