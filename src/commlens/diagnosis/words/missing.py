"""Words about ranks that do not arrive where others wait for them."""

from __future__ import annotations

import itertools

from commlens.diagnosis.align.call_paths import parted
from commlens.diagnosis.align.rounds import Rounds
from commlens.diagnosis.align.routine import Loop
from commlens.diagnosis.causes.context import Context
from commlens.diagnosis.causes.missing import Absence, ExtraLine, FoundMissing
from commlens.diagnosis.index.activity import longest_gap_ns
from commlens.diagnosis.index.job_index import RankView
from commlens.diagnosis.words import phrases
from commlens.diagnosis.words.absence import signs, waits
from commlens.diagnosis.words.activities import activity_words
from commlens.diagnosis.words.finding import Words
from commlens.diagnosis.words.next_steps import ended_step, midway_step, missing_step
from commlens.diagnosis.words.phrases import COMPLETION_UNKNOWN, first_line, prose
from commlens.diagnosis.words.sides import UNDECIDED, kind_phrase
from commlens.model.cause import Doubt, Missing
from commlens.model.collective import Frame, State, user_lines
from commlens.text import (
    count,
    duration,
    frame_phrase,
    joined,
    key_phrase,
    numbered,
    op_phrase,
    ranks_and_verb,
    ranks_phrase,
    verb,
)

MEMBERS_UNKNOWN = "Which ranks are in the group of that call cannot be seen from outside."
MANY_OUTSIDE = "More ranks stand outside of calls than wait, or at several places."
_MIN_GAP_NS = 1_000_000
_SPAWNED = Frame("<string>", 1, "<module>")
"""The line with which multiprocessing starts a process."""


def words(context: Context, found: FoundMissing) -> Words:
    """Return what a finding says about ranks that do not arrive."""
    cause = found.cause
    return Words(
        summary=_summary(found),
        explanation=_explanation(context, found),
        next_step=_next_step(found),
        evidence=_evidence(context, found),
        would_raise_confidence=cause.doubt and _doubt(cause.doubt, cause, found.absence),
    )


def _summary(found: FoundMissing) -> str:
    cause, absence = found.cause, found.absence
    if found.extra is not None:
        return _extra_line_summary(absence, found.extra)
    ranks, waiting, op = absence.ranks, absence.waiting, absence.edge.op
    name, them = op_phrase(op), verb(ranks, "it", "them")
    they_wait = ranks_and_verb(waiting, "waits", "wait")
    if cause.outcome == "extra-message":
        return f"{they_wait} in {name}, but {ranks_phrase(ranks)} has finished, like most ranks"
    if cause.outcome == "extra-collective":
        return (
            f"{ranks_and_verb(waiting, 'issues', 'issue')} {name}, but"
            f" {ranks_and_verb(ranks, 'has', 'have')} finished"
        )
    if cause.outcome == "key-missing":
        return f"{_unwritten(cause)} the {key_phrase(op)}; {they_wait} for it in {op.op}"
    if cause.outcome == "message-missing" and absence.edge.is_from_any:
        return (
            f"{ranks_phrase(ranks)} sent no message to rank {absence.edge.rank}, which waits for"
            " one from any rank"
        )
    if cause.outcome == "message-missing":
        message = numbered("message" if op.sequence_number else "the message", op.sequence_number)
        did = f"sent {message} to" if op.op == "recv" else f"received {message} from"
        return f"{ranks_phrase(ranks)} never {did} rank {absence.edge.rank}, which waits for it"
    if cause.outcome == "reached-too-late":
        return (
            f"{ranks_phrase(ranks)} reached {name} after {ranks_phrase(waiting)} had given up"
            f" waiting for {them}"
        )
    did = "finished without" if cause.outcome == "finished" else "never reached"
    wait = f"{they_wait} for {them}"
    if cause.timed_out:
        wait = f"{ranks_phrase(waiting)} waited for {them} until the timeout"
    return f"{ranks_phrase(ranks)} {did} {name}; {wait}"


def _unwritten(cause: Missing) -> str:
    if cause.why == "finished":
        return f"{ranks_phrase(cause.ranks)} finished without writing"
    return f"{ranks_and_verb(cause.ranks, 'has', 'have')} not written"


def _extra_line_summary(absence: Absence, extra: ExtraLine) -> str:
    alone = f"{ranks_phrase(extra.ranks)} alone issued {op_phrase(extra.op)}"
    waits = ranks_and_verb(absence.waiting, "waits", "wait")
    return (
        f"{alone} at {extra.path.place}; what follows pairs up wrongly, and {waits} in"
        f" #{absence.edge.op.sequence_number} when the others have finished"
    )


def _explanation(context: Context, found: FoundMissing) -> str:
    first, *others = found.absence.ranks
    like = f"Like {ranks_phrase(others)}, " if others and not found.cause.blames_waiting else ""
    return prose(
        f"{like}{phrases.name(context, first)} {activity_words(found.absence.doing)};"
        f" {phrases.last(context, first)}.",
        *waits(context, found.absence),
    )


def _next_step(found: FoundMissing) -> str:
    cause, absence, op = found.cause, found.absence, found.absence.edge.op
    ranks, waiting = absence.ranks, absence.waiting
    if found.extra is not None:
        return ended_step(found.extra.op, ranks, cause.came, found.extra.path.with_caller)
    if cause.new_line and not (op.is_setup or op.is_store_wait):
        return ended_step(op, ranks, cause.came)
    mutual = [(one, one.edge) for one in found.lock_holders if one.edge is not None]
    if mutual:
        holder, edge = mutual[-1]
        where = frame_phrase(edge.op.source) or "an unknown line"
        return f"release the lock on rank {holder.holder} before {edge.op.op} at {where}"
    if found.loop is not None:
        return midway_step(found.loop, cause.culprits)
    culprits = cause.culprits or sorted([*ranks, *waiting])
    return missing_step(absence.doing, culprits, op, ended=cause.over)


def _evidence(context: Context, found: FoundMissing) -> list[str]:
    cause, absence = found.cause, found.absence
    view = context.job.views[absence.ranks[0]]
    evidence = _extra_line_evidence(absence, found.extra) if found.extra is not None else []
    evidence += signs(absence) + _lock_evidence(found)
    gap = longest_gap_ns(view.log)
    if cause.works_too_long and gap >= _MIN_GAP_NS:
        evidence.append(
            f"Before, rank {view.rank} spent at most {duration(gap)} between two collectives."
        )
    if cause.why == "finished":
        evidence += _steps_evidence(context, absence)
        evidence += [_rounds_evidence(found.rounds)] if found.rounds is not None else []
        evidence += [_loop_evidence(cause, found.loop)] if found.loop is not None else []
        evidence += [UNDECIDED] if cause.blamed_by == "undecided" else []
        evidence += _leaving_evidence(cause)
    elif context.job.has_stack(absence.ranks[0]):
        evidence += _stack_evidence(view, absence)
    return [*evidence, *_failure_evidence(view), *phrases.aborted(context, absence.blocked)]


def _extra_line_evidence(absence: Absence, extra: ExtraLine) -> list[str]:
    op, everyone = absence.edge.op, {*absence.ranks, *absence.waiting}
    left = (
        f"{op.op} at {frame_phrase(op.source)}, a line that {ranks_phrase(everyone)} reach, is left"
        " over"
    )
    if extra.met is None:
        return [f"{left}."]
    return [
        f"{extra.op.op} #{extra.op.sequence_number} of {ranks_phrase(absence.waiting)} met the one"
        f" at {frame_phrase(extra.met.source)}; {left}."
    ]


def _rounds_evidence(rounds: Rounds) -> str:
    """``"At train.py:20 step, the last recv of rank 2 is #10, of ranks 0-1,3 #9."``"""
    by_number: dict[int, list[int]] = {}
    for rank, number in sorted(
        rounds.last.items(), key=lambda item: (item[0] not in rounds.odd, item[0])
    ):
        by_number.setdefault(number, []).append(rank)
    told = ", of ".join(
        f"{ranks_phrase(ranks)}{' is' * (i == 0)} #{number}"
        for i, (number, ranks) in enumerate(by_number.items())
    )
    return f"At {frame_phrase(rounds.op.source)}, the last {rounds.op.op} of {told}."


def _loop_evidence(cause: Missing, loop: Loop) -> str:
    """``"Rank 1 repeats recv from rank 0, send to rank 0: 2 times, and then recv from rank 0
    alone."``.
    """
    names = [kind_phrase(op) for op in loop.round]
    rank = cause.culprits[0]
    return (
        f"Rank {rank} repeats {joined(names)}: {count(loop.rounds, 'time')}, and then"
        f" {joined(names[: loop.more])} alone."
    )


def _lock_evidence(found: FoundMissing) -> list[str]:
    """Return sentences about the ranks that hold the locks that the missing ones wait for."""
    return [
        f"Process {one.pid} is rank {one.holder}."
        if one.edge is None
        else f"Process {one.pid} is rank {one.holder}, which waits for rank {one.rank} in"
        f" {op_phrase(one.edge.op)}: neither can go on."
        for one in found.lock_holders
    ]


def _steps_evidence(context: Context, absence: Absence) -> list[str]:
    """``"rank 2 did 7 optimizer steps in all, 1 fewer than ranks 0-1,3 so far."``; nothing where
    ranks differ or count none.
    """
    ended, going = (
        {context.job.views[rank].log.steps for rank in ranks}
        for ranks in (absence.ranks, absence.waiting)
    )
    if len(ended) != 1 or len(going) != 1 or not max(ended):
        return []
    did, fewer = max(ended), max(going) - max(ended)
    than = f"{abs(fewer)} {'fewer' if fewer > 0 else 'more'} than" if fewer else "as many as"
    return [
        f"{ranks_phrase(absence.ranks)} did {count(did, 'optimizer step')} in all, {than}"
        f" {ranks_phrase(absence.waiting)} so far."
    ]


def _leaving_evidence(cause: Missing) -> list[str]:
    states = zip(cause.ranks, cause.processes, strict=True)
    leaving = sorted(rank for rank, state in states if state == "leaving")
    if not leaving:
        return []
    whose = f"The exit {verb(leaving, 'status', 'statuses')} of {ranks_phrase(leaving)}"
    return [
        f"{whose} {verb(leaving, 'is', 'are')} not known yet: the launcher reports one that is not"
        " 0."
    ]


def _stack_evidence(view: RankView, absence: Absence) -> list[str]:
    stack = view.log.main_stack
    if stack is None:
        note = view.log.observation.stacks_note
        return [f"There is no stack of rank {view.rank}" + (f": {note}." if note else ".")]
    op = absence.edge.op
    paths = (
        parted(stack.frames, op.stack)
        if stack.source is not None and stack.source == op.source
        else None
    )
    if paths is not None:  # a trainer's call, or a helper: the line is the same on all ranks
        return [
            f"rank {view.rank} is in {paths[0].phrase}, {ranks_phrase(absence.waiting)} in"
            f" {paths[1].phrase}."
        ]
    lines = list(itertools.islice(user_lines(stack.frames), 4))
    callers = [frame_phrase(frame) for frame in lines[1:] if frame != _SPAWNED]
    if not callers:
        return []
    first = frame_phrase(lines[0])
    return [f"{first} on rank {view.rank} was called by {', called by '.join(callers)}."]


def _failure_evidence(view: RankView) -> list[str]:
    failed = next((op for op in view.log.collectives[-1:] if op.state is State.FAILED), None)
    if failed is None or not failed.error:
        return []
    return [f"rank {view.rank}: {op_phrase(failed)} failed with {first_line(failed.error)}."]


def _doubt(doubt: Doubt, cause: Missing, absence: Absence) -> str:
    """Return what would raise the confidence, or why it is not high."""
    waiting = absence.waiting
    match doubt:
        case "may-be-working":
            return _may_be_working(cause)
        case "outside-not-recorded":
            return (
                "A recorder of collectives does not show what a rank does between them; a stack of"
                f" {ranks_phrase(cause.ranks)} (py-spy dump) would."
            )
        case "ended-unobserved":
            return "Whether it made progress was not observed before the job was ended."
        case "not-observed":
            return (
                "Whether it makes progress was not observed: run `commlens dump` on its node, which"
                " watches the process for a moment."
            )
        case "only-issued":
            return (
                "NCCL's lines tell what a rank issued, not what completed: while a job runs, its"
                " ranks are a few collectives apart, too."
            )
        case "completion-unknown":
            return (
                f"Whether {ranks_phrase(waiting)} wait at all is inferred from their stacks:"
                f" {COMPLETION_UNKNOWN}"
            )
        case "refused-elsewhere":
            return (
                "Strict verification ended their waits elsewhere first, and what they waited for is"
                " not in these records."
            )
        case "undecided":
            return (
                "A run with more steps before the fault would show which side departs from its"
                " routine."
            )
        case "majority-assumed":
            return (
                f"That {ranks_phrase(cause.ranks)} are right is an assumption: most ranks finished."
            )
        case "loop-may-end-there":
            return (
                f"That {ranks_phrase(cause.ranks)} should have gone on is an assumption: a loop may"
                " end there on purpose."
            )
        case "wait-inferred":
            return (
                f"That {ranks_and_verb(waiting, 'waits', 'wait')} is inferred: an op is in flight,"
                " but no thread was seen in a wait."
            )
        case "members-unknown":
            return MEMBERS_UNKNOWN
        case "many-outside":
            return MANY_OUTSIDE


def _may_be_working(cause: Missing) -> str:
    question = "waits for a disk or a server" if cause.activity.unclear else "is in an endless loop"
    advice = (
        "if its work may take this long, give the process group a longer timeout"
        if cause.timed_out
        else "commlens.expect_slow marks code that may take this long"
    )
    return f"Whether it {question} does not show from outside; {advice}."
