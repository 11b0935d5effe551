"""Words about processes that ended: "rank 1 died of SIGKILL; rank 0 was waiting for it in
reduce_scatter #59 of the default group [0-1]".
"""

from __future__ import annotations

from commlens.diagnosis.causes.context import Case, Context
from commlens.diagnosis.causes.dead import UNDECIDED, Stopped
from commlens.diagnosis.index.job_index import RankView
from commlens.diagnosis.words import phrases
from commlens.diagnosis.words.circumstances import KEYS_OF_ITS_OWN
from commlens.diagnosis.words.error_steps import known_step, peer_step
from commlens.diagnosis.words.finding import Words
from commlens.diagnosis.words.next_steps import (
    death_step,
    outside_cause,
    outside_step,
)
from commlens.matching.errors import is_kernel_error
from commlens.model.cause import Dead, DeathDoubt, Ended
from commlens.model.sender import Sender
from commlens.text import (
    capital,
    frame_phrase,
    joined,
    rank_phrase,
    ranks_and_verb,
    ranks_phrase,
    verb,
)

_SHOWN = 4
_SYSTEM_LOG = (
    "The system's log (dmesg, the scheduler) may show how it ended; `commlens launch` records it."
)
_WOULD_RAISE: dict[DeathDoubt, str] = {
    "perhaps-aborted": "No line tells how it ended; the records of `commlens launch` do.",
    "first-unknown": _SYSTEM_LOG,
    "unspecific": (
        "NCCL_DEBUG=WARN would print what happened on each rank before that error; the output of"
        " ranks without a line may show it, too."
    ),
    "unobserved": _SYSTEM_LOG,
}


_NOT_TOLD: dict[DeathDoubt | None, str] = {
    "perhaps-aborted": (
        "; no line tells whether of an error, or because NCCL's watchdog gave up waiting for"
        " another rank"
    ),
    "unspecific": "; no line tells whether of its own fault, or because of another rank",
}


def words(context: Context, case: Case[Dead]) -> Words:
    """Return what a finding says about processes that ended."""
    cause, views = case.cause, context.job.views
    ranks, peers = cause.ranks, cause.ended_by_it
    view = views[ranks[0]]
    waiting = sorted({edge.rank for edge in case.edges})
    others = [rank for rank in peers if not (views[rank].exit.refused or views[rank].exit.gave_up)]
    waits = _waits(context, case)
    undecided = cause.doubt in UNDECIDED
    return Words(
        summary=f"{_summary(context, case)}; {waits}" if waits else _summary(context, case),
        explanation=phrases.prose(
            f"{phrases.name(context, ranks[0])}:"
            f" {phrases.last(context, ranks[0])}{_last_seen(context, case)}.",
            phrases.how_long_they_wait(context, case.edges) if case.edges else "",
            phrases.blocked_behind(waiting, set(case.blocked) - set(ranks)),
            f"{capital(ranks_phrase(peers))} ended because of it." if peers else "",
        ),
        next_step=(
            f"look at the output of {ranks_phrase(ranks)}"
            if undecided
            else death_step(view, case.frame)
        ),
        evidence=[
            *_assertion(view),
            *_warnings(view),
            *(f"{rank_phrase(rank)} {phrases.exit_words(views[rank].exit)}." for rank in others),
            *phrases.aborted(context, peers),
        ][:_SHOWN],
        would_raise_confidence=_WOULD_RAISE[cause.doubt] if cause.doubt is not None else None,
        waits=waits,
        finds_kernel=not undecided and is_kernel_error(view.log.exception),
    )


def _summary(context: Context, case: Case[Dead]) -> str:
    views, ranks, doubt = context.job.views, case.cause.ranks, case.cause.doubt
    end = views[ranks[0]].exit
    summary = f"{ranks_phrase(ranks)} {phrases.exit_words(end, ranks)}"
    if len({views[rank].exit.error for rank in ranks}) > 1:
        summary += f" (on {rank_phrase(ranks[0])}; the same on the others, but for numbers)"
    if end.source is not None:
        summary += f" at {frame_phrase(end.source)}"
    return summary + _NOT_TOLD.get(doubt, "")


def _assertion(view: RankView) -> list[str]:
    """Return the assertion that failed in a kernel, if the rank ended with its error."""
    assertion = view.log.device_assertion
    if not assertion or view.exit.why != "exception":
        return []
    return [f"An assertion failed in a kernel of {rank_phrase(view.rank)}: {assertion}."]


def _warnings(view: RankView) -> list[str]:
    """Return the first warning of NCCL that the rank's error does not repeat, in a sentence."""
    said = [
        one for one in view.log.warnings if one.partition("NCCL WARN ")[2] not in view.exit.error
    ]
    on = f" on {view.log.host}" if view.log.host else ""
    return [f"{rank_phrase(view.rank)}{on} printed before: {one.rstrip('.')}." for one in said[:1]]


def _waits(context: Context, case: Case[Dead]) -> str:
    ranks, awaited = case.cause.ranks, case.cause.awaited
    if not case.edges:
        return ""
    all_alike = awaited == ranks or case.cause.doubt not in UNDECIDED
    them = verb(ranks, "it", "them") if all_alike else ranks_phrase(awaited)
    return phrases.where_they_wait(
        case.edges, f"was waiting for {them}", f"were waiting for {them}"
    )


def _last_seen(context: Context, case: Case[Dead]) -> str:
    view = context.job.views[case.cause.ranks[0]]
    if case.frame is None or view.exit.source is not None:
        return ""
    issued = view.last_op is not None and case.frame == view.last_op.source
    did = "issued" if issued else "last seen"
    return f"; it was {did} at {frame_phrase(case.frame)}"


def words_of_ended(context: Context, case: Case[Ended]) -> Words:
    """Return what a finding says about processes that failed."""
    how = {
        "after-a-peer": _after_a_peer,
        "kept-address": _kept_address,
        "unobserved": _unobserved,
        "from-outside": _from_outside,
    }
    return how[case.cause.how](context, case.cause)


def _after_a_peer(context: Context, cause: Ended) -> Words:
    first, suspects = cause.first, cause.culprits
    end = context.job.views[first].exit
    which = "no record shows which peer"
    if cause.silent:
        which = f"no line tells anything of {ranks_phrase(cause.silent)}"
    where = ranks_phrase(suspects) if suspects else "all ranks, and of the other nodes,"
    logs = [context.job.views[rank].log for rank in cause.victims]
    return Words(
        summary=(
            f"{ranks_phrase(cause.ranks)} ended because a peer ended or did not answer; {which}"
        ),
        explanation=(
            f"{phrases.name(context, first)}{' was the first to end: it' if end.at_ns else ''}"
            f" {phrases.exit_words(end)}; {phrases.last(context, first)}."
        ),
        next_step=(
            next(filter(None, (known_step(log.told_error, log.host) for log in logs)), "")
            or next(filter(None, (peer_step(log.told_error) for log in logs)), "")
            or f"look at the output of {where} for the first error"
        ),
        evidence=phrases.exits(context, cause.victims),
        would_raise_confidence="The records of the missing ranks would show it.",
    )


def _kept_address(context: Context, cause: Ended) -> Words:
    first = cause.first
    at, end = joined(cause.addresses[:_SHOWN]), context.job.views[first].exit
    earlier = (
        "the earlier start of the workers" if cause.restarts else "an earlier init_process_group"
    )
    return Words(
        summary=(
            f"{ranks_phrase(cause.ranks)} could not connect to {at}, which the store kept from"
            f" {earlier}"
        ),
        explanation=(
            f"{phrases.name(context, first)} {phrases.exit_words(end)}. A rank listens before it"
            " writes its address into the store, and no rank of this start had ended before: the"
            " process that listened there is one of before. No rank of this start is to blame, even"
            " if it came late."
        ),
        next_step=(
            "let the workers of each start meet in a store of their own"
            " (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in torchrun's environment)"
            if cause.restarts
            else KEYS_OF_ITS_OWN
        ),
        evidence=phrases.exits(context, cause.ranks),
    )


def _unobserved(context: Context, cause: Ended) -> Words:
    gone = cause.ranks
    others = phrases.ended_like_the_first(context, cause.victims)
    return Words(
        summary=f"{ranks_and_verb(gone, 'is', 'are')} gone, and nobody saw how; {others}",
        waits=others,
        explanation=f"{phrases.name(context, gone[0])}: {phrases.last(context, gone[0])}.",
        next_step=(
            f"look at the end of the output of {ranks_phrase(gone)}, and at the scheduler's log"
        ),
        would_raise_confidence=(
            "The system's log (dmesg, the scheduler) may show how it ended; `commlens launch`"
            " records it."
        ),
    )


def _from_outside(context: Context, cause: Ended) -> Words:
    first, signal = cause.first, cause.signal or ""
    return Words(
        summary=(
            "the job was ended from outside:"
            f" {phrases.ended_like_the_first(context, cause.victims)}"
        ),
        explanation=phrases.prose(
            f"{phrases.name(context, first)} {phrases.exit_words(context.job.views[first].exit)};"
            f" {phrases.last(context, first)}.",
            outside_cause(signal),
        ),
        next_step=outside_step(signal),
        would_raise_confidence="The signal is known, its sender is not.",
    )


# --- a launcher that a signal stopped: the line that is printed while it ends the job


def stopped_line(stop: Stopped) -> str:
    """Return a line about a launcher that ends its job because it received a signal."""
    origin = f" from {_sender_phrase(stop.sender)}" if stop.sender is not None else ""
    return " ".join(
        [f"the launcher received {stop.signal}{origin} and ends the job.", *_advice(stop)]
    )


def _sender_phrase(sender: Sender) -> str:
    """``"kill (pid 4242, the job's own user, started by bash, pid 4100)"``."""
    if sender.is_kernel:
        return "the kernel"
    if not sender.pid:
        return "a process outside this container"
    if sender.rank is not None:
        return f"{rank_phrase(sender.rank)} (pid {sender.pid})"
    user = "root" if sender.uid == 0 else f"user {sender.uid}"
    about = [f"pid {sender.pid}", "the job's own user" if sender.is_own_user else user]
    if sender.parent_name:
        about.append(f"started by {sender.parent_name}, pid {sender.parent_pid}")
    return f"{sender.name or 'a process'} ({', '.join(about)})"


def _advice(stop: Stopped) -> list[str]:
    match stop.by:
        case "unknown":
            cause, step = outside_cause(stop.signal), outside_step(stop.signal)
            return [*filter(None, [cause]), f"{capital(step)}."]
        case "system":
            return ["Look at the scheduler's log (preemption, time limit)."]
        case "process":
            return []
