"""Words about ranks that do not arrive where others wait for them, and about those that visibly
work: "rank 2 never reached all_reduce #7 of the default group [0-3]; ranks 0-1,3 wait for it".
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from commlens.diagnosis.align.call_paths import parting_paths
from commlens.diagnosis.align.routine import Loop
from commlens.diagnosis.causes.context import Context
from commlens.diagnosis.causes.helper_processes import HelpersCase
from commlens.diagnosis.causes.missing import Absence, ExtraLine, MissingCase, WorkingCase
from commlens.diagnosis.index.activity import longest_gap_ns
from commlens.diagnosis.index.job_index import RankView
from commlens.diagnosis.words import phrases
from commlens.diagnosis.words.finding import Words
from commlens.diagnosis.words.next_steps import (
    at,
    ended_step,
    midway_step,
    missing_step,
    recomputed_step,
)
from commlens.model.cause import Doubt, HelperCall, Missing, Working
from commlens.model.collective import Collective, Frame, State, user_frame, user_lines
from commlens.model.grouping import grouped
from commlens.text import (
    capital,
    count,
    duration,
    frame_phrase,
    group_phrase,
    joined,
    key_phrase,
    numbered,
    op_phrase,
    rank_phrase,
    ranks_and_verb,
    ranks_phrase,
    verb,
)


def about_waits(context: Context, absence: Absence) -> list[str]:
    """Return sentences about the ranks that wait: in the representative's collective, elsewhere,
    and behind these.
    """
    them = verb(absence.ranks, "it", "them")
    others = phrases.where_they_wait(absence.elsewhere, f"waits for {them}", f"wait for {them}")
    direct = {*absence.waiting, *(edge.rank for edge in absence.elsewhere)}
    return [
        phrases.how_long_they_wait(context, absence.edges),
        f"{capital(others)}." if others else "",
        phrases.blocked_behind(sorted(direct), set(absence.blocked) - set(absence.ranks)),
    ]


def about_signs(absence: Absence) -> list[str]:
    """``"rank 2: its stack does not move and it uses no CPU."``; ranks with the same signs share a
    sentence: ``"ranks 2-3, each: ..."``.
    """
    same = grouped(
        (joined(phrases.sign_words(doing.signs)), rank)
        for rank, doing in zip(absence.ranks, absence.activities, strict=True)
        if doing.signs
    )
    return [
        f"{ranks_phrase(ranks)}{verb(ranks, '', ', each')}: {text}." for text, ranks in same.items()
    ][:4]


MEMBERS_UNKNOWN = "Which ranks are in the group of that call cannot be seen from outside."
MANY_OUTSIDE = "More ranks stand outside of calls than wait, or at several places."
OVERDUE = "Whether a request, or what else it waits for, is overdue does not show from outside."
_S = 1_000_000_000  # ns
_MIN_GAP_NS = 1_000_000
_SPAWNED = Frame("<string>", 1, "<module>")
"""The line with which multiprocessing starts a process."""


def words(context: Context, case: MissingCase) -> Words:
    """Return what a finding says about ranks that do not arrive."""
    cause = case.cause
    return Words(
        summary=_summary(case),
        explanation=_explanation(context, case),
        next_step=_next_step(case),
        evidence=_evidence(context, case),
        would_raise_confidence=cause.doubt and _doubt(cause.doubt, cause, case.absence),
    )


def _summary(case: MissingCase) -> str:
    cause, absence = case.cause, case.absence
    if case.extra is not None:
        return _extra_line_summary(absence, case.extra)
    if cause.recomputed is not None:
        return phrases.issued_again(cause.recomputed)
    ranks, waiting, op = absence.ranks, absence.waiting, absence.edge.op
    name, them = op_phrase(op), verb(ranks, "it", "them")
    they_wait = ranks_and_verb(waiting, "waits", "wait")
    if cause.outcome == "extra-message":
        return (
            f"{they_wait} in {name}, but {ranks_and_verb(ranks, 'has', 'have')} {_ended(absence)},"
            " like most ranks"
        )
    if cause.outcome == "extra-collective":
        return (
            f"{ranks_and_verb(waiting, 'issues', 'issue')} {name}, but"
            f" {ranks_and_verb(ranks, 'has', 'have')} {_ended(absence)}"
        )
    if cause.outcome == "key-missing":
        return f"{_unwritten(cause, op)}; {they_wait} for it in {op.op}"
    if cause.outcome == "message-missing" and absence.edge.is_from_any:
        return (
            f"{ranks_phrase(ranks)} sent no message to {rank_phrase(absence.edge.rank)},"
            " which waits for"
            " one from any rank"
        )
    if cause.outcome == "message-missing":
        message = numbered("message" if op.sequence_number else "the message", op.sequence_number)
        did = f"sent {message} to" if op.op == "recv" else f"received {message} from"
        return (
            f"{ranks_phrase(ranks)} never {did} {rank_phrase(absence.edge.rank)}, which waits"
            " for it"
        )
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


def _ended(absence: Absence) -> str:
    return "finished" if absence.finished else "called destroy_process_group"


def _unwritten(cause: Missing, op: Collective) -> str:
    doing, done, awaited = "writing", "written", f"the {key_phrase(op)}"
    if not op.is_for_key:
        doing, done, awaited = "coming to", "come to", f"the TCPStore at {op.channel.group.name}"
    if cause.why == "finished":
        return f"{ranks_phrase(cause.ranks)} finished without {doing} {awaited}"
    return f"{ranks_and_verb(cause.ranks, 'has', 'have')} not {done} {awaited}"


def _extra_line_summary(absence: Absence, extra: ExtraLine) -> str:
    alone = f"{ranks_phrase(extra.ranks)} alone issued {op_phrase(extra.op)}"
    waits = ranks_and_verb(absence.waiting, "waits", "wait")
    return (
        f"{alone} at {extra.path.place}; what follows pairs up wrongly, and {waits} in"
        f" #{absence.edge.op.sequence_number} when the others have finished"
    )


def _explanation(context: Context, case: MissingCase) -> str:
    first, *others = case.absence.ranks
    like = f"Like {ranks_phrase(others)}, " if others and not case.cause.blames_waiting else ""
    return phrases.prose(
        f"{like}{phrases.name(context, first)} {phrases.activity_words(case.absence.doing)};"
        f" {phrases.last(context, first)}.",
        *about_waits(context, case.absence),
    )


def _next_step(case: MissingCase) -> str:
    cause, absence, op = case.cause, case.absence, case.absence.edge.op
    ranks = absence.ranks
    if case.extra is not None:
        return ended_step(case.extra.op, ranks, cause.came, case.extra.path.with_caller)
    if cause.new_line and not (op.is_setup or op.is_store_wait):
        return ended_step(op, ranks, cause.came)
    if cause.recomputed is not None:
        return recomputed_step(cause.recomputed)
    if cause.locked_out:
        return _locked_out_step(case)
    mutual = [(one, one.edge) for one in case.lock_holders if one.edge is not None]
    if mutual:
        holder, edge = mutual[-1]
        where = frame_phrase(edge.op.source) or "an unknown line"
        return f"release the lock on {rank_phrase(holder.holder)} before {edge.op.op} at {where}"
    if case.loop is not None:
        return midway_step(case.loop, cause.culprits)
    return _step_of_absent(case)


def _step_of_absent(case: MissingCase) -> str:
    cause, absence, op = case.cause, case.absence, case.absence.edge.op
    ranks, waiting, last = (
        ranks_phrase(absence.ranks),
        ranks_phrase(absence.waiting),
        case.ended_after,
    )
    where = frame_phrase(absence.doing.frame)
    if cause.doubt == "lock-holder-unknown":
        return (
            f"find out which process holds the lock that {ranks}"
            f" {verb(absence.ranks, 'takes', 'take')} at {where}: if {waiting} took it, release"
            f" it before {op.op}{at(op)}; delete a lock file that an earlier run has left"
        )
    if cause.doubt == "many-outside":
        return (
            f"compare {ranks}, which {verb(absence.ranks, 'stands', 'stand')} in {where}, with"
            f" {waiting}, which went on to {op.op}{at(op)}: most ranks are there, so {waiting} may"
            " have left it out"
        )
    culprits = cause.culprits or sorted([*absence.ranks, *absence.waiting])
    if absence.doing.state == "left" and culprits != absence.ranks:
        return (
            f"find out why {ranks} {verb(absence.ranks, 'calls', 'call')} destroy_process_group,"
            f" and {waiting} {verb(absence.waiting, 'goes', 'go')} on to {op.op}{at(op)}"
        )
    if absence.doing.state == "left":
        return (
            f"let {ranks_phrase(culprits)} call destroy_process_group only after the last"
            " collective of all ranks"
        )
    if last is not None and culprits == absence.ranks and last.source is not None:
        return (
            f"find out why {ranks_and_verb(culprits, 'ends', 'end')} after {last.op}{at(last)}, and"
            f" {waiting} {verb(absence.waiting, 'goes', 'go')} on to {op.op}{at(op)}"
        )
    return missing_step(absence.doing, culprits, op, ended=cause.over)


def _locked_out_step(case: MissingCase) -> str:
    ranks, where = ranks_phrase(case.cause.locked_out), frame_phrase(case.absence.doing.frame)
    place = f" at {where}" if where else ""
    if case.notified:
        return f"find out which thread was to wake {ranks}{place}: no other one runs Python there"
    return f"find out where {ranks} took the lock that it waits for{place}, and did not release it"


def _evidence(context: Context, case: MissingCase) -> list[str]:
    cause, absence = case.cause, case.absence
    view = context.job.views[absence.ranks[0]]
    evidence = _extra_line_evidence(absence, case.extra) if case.extra is not None else []
    evidence += about_signs(absence) + _lock_evidence(case)
    if case.strayed is not None:
        evidence.append(
            f"{capital(rank_phrase(view.rank))} issued {op_phrase(case.strayed)} once at"
            f" {frame_phrase(case.strayed.source)}, where {ranks_phrase(absence.waiting)} issued"
            f" those of {group_phrase(absence.edge.op.channel.group)} alone."
        )
    if error := view.log.thread_exception:
        raised = frame_phrase(user_frame(view.log.thread_exception_stack))
        where = f" at {raised}" if raised else ""
        evidence.append(f"A thread of {rank_phrase(view.rank)} ended{where} with {error}.")
    gap = longest_gap_ns(view.log)
    if cause.works_too_long and gap >= _MIN_GAP_NS:
        evidence.append(
            f"Before, {rank_phrase(view.rank)} spent at most {duration(gap)} between two"
            " collectives."
        )
    if cause.why == "finished":
        evidence += _steps_evidence(context, absence)
        evidence += phrases.rounds_told(cause.rounds)
        evidence += [_loop_evidence(cause, case.loop)] if case.loop is not None else []
        evidence += [phrases.UNDECIDED] if cause.blamed_by == "undecided" else []
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
    return [
        f"{extra.op.op} #{extra.op.sequence_number} of {ranks_phrase(absence.waiting)} met the one"
        f" at {frame_phrase(extra.met.source)}; {left}."
    ]


def _loop_evidence(cause: Missing, loop: Loop) -> str:
    """``"Rank 1 repeats recv from rank 0, send to rank 0: 2 times, and then recv from rank 0
    alone."``.
    """
    names = [phrases.kind_phrase(op) for op in loop.round]
    rank = cause.culprits[0]
    return (
        f"{capital(rank_phrase(rank))} repeats {joined(names)}:"
        f" {count(loop.rounds, 'time')}, and then"
        f" {joined(names[: loop.more])} alone."
    )


def _lock_evidence(case: MissingCase) -> list[str]:
    """Return sentences about the ranks that hold the locks that the missing ones wait for."""
    locked_out = case.cause.locked_out
    what, do = (
        ("another thread to wake it, as in a queue or an event", "do so")
        if case.notified
        else ("a lock (threading.Lock) that is locked", "release it")
    )
    alone = (
        f"{ranks_and_verb(locked_out, 'waits', 'wait')} for {what}, and no other thread runs Python"
        f" there that could {do}."
    )
    return [alone] * bool(locked_out) + [
        f"Process {one.pid} is {rank_phrase(one.holder)}."
        if one.edge is None
        else f"Process {one.pid} is {rank_phrase(one.holder)}, which waits for"
        f" {rank_phrase(one.rank)} in"
        f" {op_phrase(one.edge.op)}: neither can go on."
        for one in case.lock_holders
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
        return [f"There is no stack of {rank_phrase(view.rank)}" + (f": {note}." if note else ".")]
    op = absence.edge.op
    paths = (
        parting_paths(stack.frames, op.stack)
        if stack.source is not None and stack.source == op.source
        else None
    )
    if paths is not None:  # a trainer's call, or a helper: the line is the same on all ranks
        return [
            f"{rank_phrase(view.rank)} is in {paths[0].phrase}, {ranks_phrase(absence.waiting)} in"
            f" {paths[1].phrase}."
        ]
    lines = list(itertools.islice(user_lines(stack.frames), 4))
    callers = [frame_phrase(frame) for frame in lines[1:] if frame != _SPAWNED]
    if not callers:
        return []
    first = frame_phrase(lines[0])
    return [f"{first} on {rank_phrase(view.rank)} was called by {', called by '.join(callers)}."]


def _failure_evidence(view: RankView) -> list[str]:
    return [
        f"{rank_phrase(view.rank)}: {op_phrase(op)} failed with {phrases.first_line(op.error)}."
        for op in view.log.collectives[-1:]
        if op.state is State.FAILED and op.error
    ]


_DOUBTS: dict[Doubt, str] = {
    "ended-unobserved": "Whether it made progress was not observed before the job was ended.",
    "not-observed": (
        "Whether it makes progress was not observed: run `commlens dump` on its node, which watches"
        " the process for a moment."
    ),
    "only-issued": (
        "These records tell what a rank issued, not what completed: while a job runs, its ranks are"
        " a few collectives apart, too."
    ),
    "refused-elsewhere": (
        "Strict verification ended their waits elsewhere first, and what they waited for is not in"
        " these records."
    ),
    "undecided": (
        "A run with more steps before the fault would show which side departs from its routine."
    ),
    "store-elsewhere": (
        "Whether a process outside of the job is to come to that store is not known."
    ),
    "helper-unseen": (
        "A process that it started is in a process group of its own, whose calls are not recorded,"
        " and its stack could not be read (py-spy): the rank may wait for it."
    ),
    "members-unknown": MEMBERS_UNKNOWN,
    "many-outside": MANY_OUTSIDE,
    "lock-holder-unknown": "Which process holds the lock of that file does not show.",
}


def _doubt(doubt: Doubt, cause: Missing, absence: Absence) -> str:
    """Return what would raise the confidence, or why it is not high."""
    waiting, ranks = absence.waiting, ranks_phrase(cause.ranks)
    match doubt:
        case "may-be-working":
            return _may_be_working(cause, absence)
        case "outside-not-recorded":
            return (
                "A recorder of collectives does not show what a rank does between them; a stack of"
                f" {ranks} (py-spy dump) would."
            )
        case "completion-unknown":
            return (
                f"Whether {ranks_phrase(waiting)} wait at all is inferred from their stacks:"
                f" {phrases.completion_unknown(absence.edge.op.channel)}"
            )
        case "may-wait-in-message":
            return (
                f"Whether the last messages of {ranks} completed is not known, so they may be"
                " waiting there: only commlens's native engine learns that of torch 2.15's NCCL"
                " backend."
            )
        case "majority-assumed":
            right = verb(cause.ranks, "is", "are")
            ended = _ended(absence)
            return f"That {ranks} {right} right is an assumption: most ranks {ended}."
        case "loop-may-end-there":
            return (
                f"That {ranks} should have gone on is an assumption: a loop may end there on"
                " purpose."
            )
        case "wait-inferred":
            return (
                f"That {ranks_and_verb(waiting, 'waits', 'wait')} is inferred: an op is in flight,"
                " but no thread was seen in a wait."
            )
    return _DOUBTS[doubt]


def _may_be_working(cause: Missing, absence: Absence) -> str:
    question = "waits for a disk or a server" if cause.activity.unclear else "is in an endless loop"
    if absence.doing.state == "serves":
        question = "should have got an event that it waits for"
    advice = (
        "if its work may take this long, give the process group a longer timeout"
        if cause.timed_out
        else "commlens.expect_slow marks code that may take this long"
    )
    return f"Whether it {question} does not show from outside; {advice}."


_WORK = {
    "checkpoint-io": "busy with a checkpoint",
    "compilation": "compiling",
    "initialising": "initialising",
    "data-loading": "loading data",
    "finished": "shutting down",
}
_NO_WORK = {
    "checkpoint-io": "saving or loading",
    "compilation": "compiling",
    "initialising": "initialising",
}


def words_of_working(context: Context, case: WorkingCase) -> Words:
    """Return what a finding says about ranks that work."""
    cause, absence, op = case.cause, case.absence, case.absence.edge.op
    ranks, frame = cause.ranks, absence.doing.frame
    subject = ranks_phrase(ranks)
    they_wait = ranks_and_verb(absence.waiting, "waits", "wait")
    waited = context.longest_of(absence.edges)
    so_far = f", {duration(waited)} so far" if waited else ""
    serves = absence.doing.state == "serves"
    waits = [sign.about for sign in absence.doing.signs if sign.kind == "waits-for"]
    reason = "".join(waits) if len(ranks) == 1 and waits else "the reason is unknown"
    why = f": {reason}" if cause.activity.unclear and not serves else ""
    work = "waiting in an event loop" if serves else _work(context, cause)
    counts = capital(ranks_and_verb(ranks, "counts", "count"))
    limit_ns, sleep_ns = round((cause.patience_s or 0) * _S), round((cause.wakes_in_s or 0) * _S)
    they_wake = verb(ranks, "It wakes", "They wake")
    return Words(
        summary=(
            f"{they_wait} in {op_phrase(op)} for {subject}, which {verb(ranks, 'is', 'are')}"
            f" {work}{so_far}{why}"
        ),
        explanation=phrases.prose(
            f"{phrases.name(context, ranks[0])} {phrases.activity_words(absence.doing)};"
            f" {phrases.last(context, ranks[0])}.",
            *about_waits(context, absence),
            f"{counts} as stuck if that lasts {duration(limit_ns)}." if limit_ns else "",
            f"{they_wake} in {duration(sleep_ns)}." if sleep_ns >= _S else "",
        ),
        next_step=(
            f"wait; if {subject} should not take this long, look at {frame_phrase(frame)}"
            if frame is not None
            else "wait"
        ),
        evidence=about_signs(absence),
        would_raise_confidence=_doubt_of_work(cause, serves=serves),
    )


def _work(context: Context, cause: Working) -> str:
    if cause.wakes_in_s is not None:
        return "asleep"
    if cause.activity.unclear:
        work = _NO_WORK.get(cause.why, "sending data that nobody takes")
        return f"{work} and {verb(cause.ranks, 'shows', 'show')} no work"
    if cause.expected:
        block = context.job.views[cause.ranks[0]].log.expecting
        return f"in a block marked as slow ({block})"
    return _WORK.get(cause.why, "working")


def _doubt_of_work(cause: Working, *, serves: bool) -> str | None:
    if serves:
        return OVERDUE
    if cause.activity.unclear:
        return "Nothing shows work or a fault: it may wait for a disk or a server."
    if cause.activity.observed:
        return None
    return "It was not watched for long enough to see that it moves."


# --- ranks that wait for processes that they started

_HELPERS_SHOWN = 4


def words_of_helpers(context: Context, case: HelpersCase) -> Words:
    """Return what a finding says about ranks that wait for processes that they started."""
    cause, absence = case.cause, case.absence
    ops = joined(sorted({call.op for call in cause.inside}))
    theirs = verb(
        cause.ranks,
        f"a process that it started, which is in {ops}",
        f"processes that they started, which are in {ops}",
    )
    waiting = f"{ranks_and_verb(absence.waiting, 'waits', 'wait')} for {ranks_phrase(cause.ranks)}"
    without = (
        f" without {verb(cause.culprits, 'that', 'those')} of {ranks_phrase(cause.culprits)}"
        if cause.culprits
        else ""
    )
    first, *others = absence.ranks
    like = f"Like {ranks_phrase(others)}, " if others else ""
    return Words(
        summary=(
            f"{ranks_and_verb(cause.ranks, 'waits', 'wait')} for {theirs}{without};"
            f" {waiting} in {op_phrase(absence.edge.op)}"
        ),
        explanation=phrases.prose(
            f"{like}{phrases.name(context, first)} {phrases.activity_words(absence.doing)}.",
            *about_waits(context, absence),
        ),
        next_step=_step_of_helpers(case),
        evidence=places(cause.inside) + places(cause.outside),
        would_raise_confidence=(
            f"That {ranks_and_verb(cause.ranks, 'waits', 'wait')} for"
            f" {verb(cause.ranks, 'this process', 'these processes')} is inferred: the calls of"
            " processes that ranks start are not recorded, only their stacks were read."
        ),
    )


def _step_of_helpers(case: HelpersCase) -> str:
    cause, absence = case.cause, case.absence
    if cause.culprits:
        there = absence.doing.frame
        return (
            f"find out why {ranks_phrase(cause.culprits)} did not ask"
            f" {verb(cause.culprits, 'its process', 'their processes')} for what"
            f" {ranks_phrase(cause.ranks)} asked theirs"
            f"{f', before they came to {there.where}' if there is not None else ''}"
        )
    first = cause.inside[0]
    return f"look at process {first.pid} of {rank_phrase(first.rank)}, and at those that it meets"


def _place(call: HelperCall) -> str:
    if call.op:
        return f"is in {call.op} at {call.source}"
    return "waits for a request" if call.is_idle else f"is in no collective, but at {call.source}"


def places(calls: Sequence[HelperCall]) -> list[str]:
    """Return a sentence for each of these processes: where it stands."""
    return [
        f"Process {call.pid}, which {rank_phrase(call.rank)} started, {_place(call)}."
        for call in calls[:_HELPERS_SHOWN]
    ]
