"""Words about collectives that all ranks have entered and that do not complete: "rank 2 is stopped
(by SIGSTOP or a debugger) inside all_reduce #41; ranks 0-1,3 wait there".
"""

from __future__ import annotations

from commlens.diagnosis.causes.context import Case, Context
from commlens.diagnosis.causes.stuck_inside import EnteredOp, StuckCase
from commlens.diagnosis.index.job_index import RankView
from commlens.diagnosis.words import phrases
from commlens.diagnosis.words.finding import Words
from commlens.diagnosis.words.next_steps import (
    compare_step,
    left_behind_step,
    missing_step,
    not_started_step,
    stuck_step,
)
from commlens.model.cause import StuckInside
from commlens.text import (
    duration,
    joined,
    numbered,
    op_phrase,
    rank_phrase,
    ranks_and_verb,
    ranks_phrase,
    verb,
)

RECORD_COMPLETION = (
    "start the job with TORCH_FR_BUFFER_SIZE=2000 (before torch 2.8: TORCH_NCCL_TRACE_BUFFER_SIZE)"
    " and without blocking wait; for this run, "
)
_RECORD_COMPLETION = {
    "hooks": "let commlens record with its native engine (commlens build-native); for this run, ",
    "unknown": "",
    "plugin": "start the job with --nccl-profiler kernels; for this run, ",
}
_ASPECTS = {
    "args": "arguments",
    "shape": "sizes",
    "reduce-op": "reduce op",
    "layout": "memory layout",
}
_AGREEMENT = {
    "all": " and agree on it",
    "sizes": " and agree on its sizes",
    "sizes-and-dtypes": " and agree on its sizes and dtypes",
    "unknown": "",
}


def words(context: Context, case: Case[StuckInside]) -> Words:
    """Return what a finding says about ranks inside of a collective, perhaps of several groups."""
    if isinstance(case, StuckCase):
        say = {
            "held-up": _held_up,
            "completion-unknown": _completion_unknown,
            "moving": _still_moving,
            "not-started": _never_started,
        }
        return say.get(case.cause.state, _no_progress)(context, case)
    return (
        _left_behind(context, case)
        if case.cause.state == "left-behind"
        else _undecided(context, case)
    )


def _name(entered: EnteredOp) -> str:
    """``"all_reduce #41 of group dp [0-3]"``, ``"message #3 from rank 0 to rank 1"``."""
    at = entered.instance
    if at.sender < 0:
        return op_phrase(entered.op)
    return (
        f"{numbered('message', at.number)} from {rank_phrase(at.sender)} to"
        f" {rank_phrase(at.receiver)}"
    )


def _undecided(context: Context, case: Case[StuckInside]) -> Words:
    ranks, edges = case.cause.ranks, case.edges
    inside = phrases.collective_phrase([edge.op for edge in edges])
    return Words(
        summary=(
            f"{ranks_and_verb(ranks, 'is', 'are')} inside {inside}; these"
            " dumps do not tell whether it is stuck or was under way"
        ),
        explanation=phrases.prose(
            phrases.how_long_they_wait(context, edges),
            phrases.blocked_behind(ranks, case.blocked),
            "All ranks of these groups have reached it. Several groups in one collective are what a"
            " running job looks like, and a job whose network failed.",
        ),
        next_step=(
            "dump the job again and compare (commlens compare BEFORE AFTER); if the same collective"
            " is still in flight, "
            + stuck_step(edges[0].op, [context.job.views[rank] for rank in ranks])
        ),
        would_raise_confidence="A second dump would show whether the job moves.",
    )


def _held_up(context: Context, case: StuckCase) -> Words:
    entered, culprits = case.entered, case.cause.culprits
    others = sorted(set(case.waiting) - set(culprits)) or case.waiting
    assert case.doing is not None
    cannot_run = f"{ranks_phrase(culprits)} {phrases.activity_words(case.doing, culprits)}"
    if context.completion_unknown(case.waiting):
        stand = ranks_and_verb(case.cause.victims, "stands", "stand")
        return Words(
            summary=f"{cannot_run} after {_name(entered)}; {stand} still, too",
            explanation=_nothing_tells(entered),
            next_step=missing_step(case.doing, culprits),
            would_raise_confidence=(
                f"It is certain if the job goes on when {ranks_phrase(culprits)} can run again."
            ),
        )
    return Words(
        summary=(
            f"{cannot_run} inside {_name(entered)}; {ranks_and_verb(others, 'waits', 'wait')} there"
        ),
        explanation=phrases.waits_and_blocked(context, case.edges, case.blocked),
        next_step=missing_step(case.doing, culprits),
        evidence=_errors(entered),
    )


def _nothing_tells(entered: EnteredOp) -> str:
    reason = phrases.completion_unknown(entered.op.channel)
    return f"Nothing tells how far their devices are: {reason}"


def _completion_unknown(_: Context, case: StuckCase) -> Words:
    entered = case.entered
    return Words(
        summary=(
            f"{ranks_and_verb(case.waiting, 'stands', 'stand')} still after {_name(entered)};"
            " whether their devices have completed it is not known"
        ),
        explanation=phrases.prose(
            "All ranks have issued it and agree on what was compared.",
            _nothing_tells(entered),
        ),
        next_step=_RECORD_COMPLETION.get(entered.op.channel.completion, RECORD_COMPLETION)
        + stuck_step(entered.op, entered.views),
        would_raise_confidence=(
            "C++ stacks of these ranks (py-spy dump --native) would show whether they wait for"
            " their devices."
        ),
    )


def _still_moving(context: Context, case: StuckCase) -> Words:
    entered = case.entered
    return Words(
        summary=(
            f"{ranks_phrase(case.cause.ranks)} are in {_name(entered)}, which still moves data,"
            f" {duration(context.longest_wait(case.waiting))} so far"
        ),
        explanation=phrases.how_long_they_wait(context, case.edges),
        next_step="wait",
        evidence=[f"{ranks_and_verb(case.cause.busy, 'uses', 'use')} CPU inside it."],
        would_raise_confidence="CPU time shows work, not that it ends.",
    )


def _never_started(context: Context, case: StuckCase) -> Words:
    entered, ranks, started = case.entered, case.cause.not_started_on, case.cause.started_on
    device = verb(ranks, "its device has", "their devices have")
    waits = ranks_and_verb(started, "has started it and waits", "have started it and wait")
    return Words(
        summary=(
            f"{ranks_phrase(ranks)} enqueued {_name(entered)}, but {device} not started it"
            f"{f'; {waits}' if started else ''}"
        ),
        explanation=phrases.waits_and_blocked(context, case.edges, case.blocked),
        next_step=not_started_step(entered.op, ranks),
        evidence=_errors(entered),
        would_raise_confidence="What the device does before it is not recorded.",
    )


_STORE_LOST = (
    "find out why the process of the job's store has ended, that of rank 0 unless the launcher"
    " serves it: these ranks do not reach it any more"
)


def _no_progress(context: Context, case: StuckCase) -> Words:
    cause, entered = case.cause, case.entered
    inside = [rank for rank in cause.ranks if rank not in cause.completed_on]
    question = _open_question(cause)
    return Words(
        summary=(
            f"{ranks_and_verb(inside, 'is', 'are')} inside {_name(entered)}"
            f"{_completed_or_not(cause, inside)}{_where_it_stands(cause)}"
        ),
        explanation=phrases.waits_and_blocked(context, case.edges, case.blocked),
        next_step=(
            compare_step(entered.op, question)
            if question
            else _STORE_LOST
            if entered.op.is_setup and "DistNetworkError" in (entered.op.error or "")
            else stuck_step(entered.op, _views_of_transfer(cause, entered))
        ),
        evidence=[*_errors(entered), *_seen_by_nccl(cause)],
        would_raise_confidence=_what_would_show(context, entered, question),
    )


def _where_it_stands(cause: StuckInside) -> str:
    if (at := cause.transfer) is None:
        return ""
    return (
        f"; NCCL's transfer from {rank_phrase(at.sender)} to {rank_phrase(at.receiver)} stands at"
        f" step {at.done} of {at.steps}, on channel {at.channel}, behind all others"
    )


_SENDER = {
    "waits-for-own-gpu": "the sender waits for data from its GPU",
    "waits-for-peer": "the sender waits until the receiver takes more",
    "in-network": "the sender has handed its data to the network",
}
_RECEIVER = {
    "waits-for-own-gpu": "the receiver waits until its GPU takes the data",
    "waits-for-data": "no data has come to the receiver",
    "flushes": "the receiver waits until the data is visible to its GPU",
}


def _seen_by_nccl(cause: StuckInside) -> list[str]:
    """Return sentences about what NCCL's kernels and transfers do."""
    said = []
    if cause.started_on and set(cause.started_on) == set(cause.ranks):
        said.append("The collective's kernel has started on all of these ranks, and ended on none.")
    if (at := cause.transfer) is not None:
        states = _SENDER.get(at.sender_state), _RECEIVER.get(at.receiver_state)
        if known := [state for state in states if state is not None]:
            said.append(f"In that transfer, {joined(known)}.")
    return said


def _views_of_transfer(cause: StuckInside, entered: EnteredOp) -> list[RankView]:
    """Return the two ranks of the transfer that stands, else all ranks."""
    if (at := cause.transfer) is None:
        return entered.views
    return [view for view in entered.views if view.rank in (at.sender, at.receiver)]


def _open_question(cause: StuckInside) -> str:
    """``"sizes and reduce op"``: what the records do not tell."""
    return joined([_ASPECTS.get(aspect, aspect) for aspect in cause.not_compared])


def _completed_or_not(cause: StuckInside, inside: list[int]) -> str:
    if cause.completed_on:
        rest = f"; {ranks_phrase(cause.completed_on)} completed it"
    else:
        agreed = _AGREEMENT[cause.agreement] if len(inside) > 1 else ""
        rest = f"{agreed}, but no rank has completed it"
    if cause.not_compared:
        rest += f"; it is not known whether they agree on its {_open_question(cause)}"
    if others := cause.perhaps_members:
        rest += (
            f"; no line tells whether {ranks_phrase(others)} {verb(others, 'is', 'are')} in that"
            " group"
        )
    return rest


def _what_would_show(context: Context, entered: EnteredOp, question: str) -> str:
    if question:
        return f"These records do not tell its {question}; `commlens launch` records them."
    stacks = (
        "C++ stacks of these ranks (COMMLENS_CPP_STACK=1, py-spy --native) would show where they"
        " are stuck."
    )
    timed = not context.job.foreign or any(v.log.captured_ns for v in entered.views)
    if timed or _errors(entered):
        return stacks
    return (
        f"{stacks} If the job may still be running, a second dump would show whether it moves"
        " (commlens compare BEFORE AFTER)."
    )


def _errors(entered: EnteredOp) -> list[str]:
    """Return sentences with the errors of the ranks on which the collective failed, three at
    most.
    """
    errors = sorted({phrases.first_line(op.error) for _, op in entered.records if op.error})
    return [f"It failed with: {error}." for error in errors[:3]]


def _left_behind(context: Context, case: Case[StuckInside]) -> Words:
    ranks, name = case.cause.culprits, phrases.collective_phrase([edge.op for edge in case.edges])
    return Words(
        summary=(
            f"{ranks_and_verb(ranks, 'is', 'are')} stuck in {name}, which"
            f" completed on {ranks_phrase(case.cause.completed_on)}"
        ),
        explanation=phrases.prose(
            "It needs data from every rank, so all of it had arrived: a device, driver or process"
            f" of {ranks_phrase(ranks)} makes no progress.",
            phrases.blocked_behind(ranks, set(case.blocked) - set(ranks)),
        ),
        next_step=left_behind_step(case.edges[0].op, ranks),
    )
