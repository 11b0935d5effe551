"""Words about ranks that others wait for, and of which no record tells what they did."""

from __future__ import annotations

from commlens.diagnosis.causes.context import Context, most_waited
from commlens.diagnosis.causes.unrecorded import FoundUnrecorded
from commlens.diagnosis.words import phrases
from commlens.diagnosis.words.exits import exit_words
from commlens.diagnosis.words.finding import Words
from commlens.diagnosis.words.phrases import prose
from commlens.model.collective import Collective
from commlens.model.ranklog import RankLog
from commlens.text import (
    duration,
    frame_phrase,
    joined,
    ranks_phrase,
    verb,
)

_PIDS_MAX = 8


def words(context: Context, found: FoundUnrecorded) -> Words:
    """Return what a finding says about ranks without a record."""
    return _WORDS[found.cause.reason](context, found)


def _silent(context: Context, found: FoundUnrecorded) -> Words:
    """No line of a log tells that they came to the collective in which the others timed out.

    The watchdog of a rank that waited as well would have told it, unless it could not run. So a
    single such rank is the suspect.
    """
    ranks, op = found.cause.ranks, most_waited(found.edges).op
    subject = ranks_phrase(ranks)
    known = any(rank in context.job.views for rank in ranks)
    cause = (
        f"no line tells that {subject} came to it" if known else f"there is no line of {subject}"
    )
    why = (
        f"If {verb(ranks, 'it has', 'they have')} not come to it,"
        f" {verb(ranks, 'it holds', 'they hold')} up the others."
    )
    step = f"look at the output of {subject}, from the time when the others came to {op.op} on"
    return _of_logs(context, found, cause, why, step)


def _watchdog_stuck(context: Context, found: FoundUnrecorded) -> Words:
    ranks = found.cause.ranks
    subject = ranks_phrase(ranks)
    cause = (
        f"{subject} did not, because {verb(ranks, 'its', 'their')} NCCL watchdog was stuck for"
        f" {duration(found.stuck_watchdog_s * 1_000_000_000)}"
    )
    why = (
        "A watchdog gets stuck if a CUDA call does not return or a thread holds the GIL:"
        f" {subject} stood outside of the collective."
    )
    step = (
        f"take a stack of {subject} (py-spy dump --native): a CUDA call does not return there,"
        " or a thread holds the GIL"
    )
    return _of_logs(context, found, cause, why, step)


def _of_logs(context: Context, found: FoundUnrecorded, cause: str, why: str, step: str) -> Words:
    ranks, views = found.cause.ranks, context.job.views
    known = [rank for rank in ranks if rank in views]
    ends = [
        f"Rank {rank} {exit_words(views[rank].exit)}." for rank in known if views[rank].exit.ended
    ]
    verbs = ("timed out", "timed out") if context.job.only_logs else ("waits", "wait")
    return Words(
        summary=f"{phrases.waits(context, found.edges, *verbs)}; {cause}",
        explanation=prose(why, *ends),
        next_step=step,
        evidence=phrases.aborted(context, found.blocked),
        would_raise_confidence=(
            "A stack, or a dump of the Flight Recorder, would show where"
            f" {verb(ranks, 'it', 'they')} stood."
        ),
    )


def _not_recorded(context: Context, found: FoundUnrecorded) -> Words:
    ranks, strangers = found.cause.ranks, context.job.strangers
    logs = [strangers[rank] for rank in ranks if rank in strangers]
    pids = joined([f"pid {log.pid}" for log in logs[:_PIDS_MAX]])
    them = verb(ranks, "it", "them")
    runs = verb(ranks, "runs on this node but is", "run on this node but are")
    return Words(
        summary=(
            f"{ranks_phrase(ranks)} ({pids}) {runs} not recorded; {_they_wait(context, found)} for"
            f" {them}"
        ),
        explanation=_waits(context, found),
        next_step=(
            f"take a stack of {them} (py-spy dump --pid {logs[0].pid}); {logs[0].unrecorded}"
        ),
        would_raise_confidence=_last_is_unknown(found),
    )


def _outdated(context: Context, found: FoundUnrecorded) -> Words:
    ranks = found.cause.ranks
    return Words(
        summary=(
            f"{_they_wait(context, found)}; the {verb(ranks, 'dump', 'dumps')} of"
            f" {ranks_phrase(ranks)} {verb(ranks, 'is', 'are')} older and"
            f" {verb(ranks, 'does', 'do')} not show whether {verb(ranks, 'it', 'they')} came"
        ),
        explanation=_waits(context, found),
        next_step=(
            "dump all ranks at one moment while the job hangs, and diagnose these dumps; or take a"
            f" stack of {verb(ranks, 'it', 'them')} (py-spy dump)"
        ),
        would_raise_confidence=_last_is_unknown(found),
    )


def _unreadable(context: Context, found: FoundUnrecorded) -> Words:
    ranks = found.cause.ranks
    subject, pid = ranks_phrase(ranks), context.job.views[ranks[0]].log.pid
    step = f"take a stack of {subject} (py-spy dump{f' --pid {pid}' if pid else ''})"
    if not context.job.knows.stacks:
        copies = verb(ranks, "a whole copy of the dump", "whole copies of the dumps")
        step = f"look for {copies} of {subject}, or {step}"
    return Words(
        summary=f"{_they_wait(context, found)}; the newest records of {subject} are unreadable",
        explanation=_waits(context, found),
        next_step=step,
        would_raise_confidence=_last_is_unknown(found),
    )


def _left_nothing(context: Context, found: FoundUnrecorded) -> Words:
    ranks = found.cause.ranks
    subject = ranks_phrase(ranks)
    ended = verb(
        ranks,
        "it ended before it could record anything, or its black box is lost",
        "they ended before they could record anything, or their black boxes are lost",
    )
    waits = f"{_they_wait(context, found)} for {verb(ranks, 'it', 'them')}"
    return Words(
        summary=f"{subject} left no record; {waits}",
        waits=waits,
        explanation=_waits(context, found),
        next_step=f"look at the output of {subject}: {ended}",
        would_raise_confidence=_last_is_unknown(found),
    )


def _not_started(context: Context, found: FoundUnrecorded) -> Words:
    ranks, op = found.cause.ranks, most_waited(found.edges).op
    subject, size = ranks_phrase(ranks), len(op.channel.group.all_ranks)
    waiting = sorted({edge.rank for edge in found.edges})
    return Words(
        summary=(
            f"{subject} of {size} {verb(ranks, 'was', 'were')} never started:"
            f" {_they_wait(context, found)} for {verb(ranks, 'it', 'them')}"
        ),
        explanation=prose(
            phrases.waiting(context, found.edges),
            f"All ranks meet at {context.job.meets_here}, so they must be on this machine, where"
            f" only {ranks_phrase(waiting)} came.",
        ),
        next_step=_start_step(context, found),
        would_raise_confidence=(
            f"A process of {subject} that has not loaded torch yet would leave no record either."
        ),
    )


def _fewer_than_expected(context: Context, found: FoundUnrecorded) -> Words:
    ranks, op = found.cause.ranks, most_waited(found.edges).op
    return Words(
        summary=(
            f"{_they_wait(context, found)} for {len(op.channel.group.all_ranks)} ranks, like all"
            f" with a record; there is no record of {ranks_phrase(ranks)}"
        ),
        explanation=phrases.waiting(context, found.edges),
        next_step=(
            f"{_start_step(context, found)}; if {verb(ranks, 'it was', 'they were')} started on"
            " another node, dump that node too (`commlens dump`)"
        ),
        would_raise_confidence=_last_is_unknown(found),
    )


def _out_of_sight(context: Context, found: FoundUnrecorded) -> Words:
    subject, they_wait = ranks_phrase(found.cause.ranks), _they_wait(context, found)
    return Words(
        summary=f"{they_wait}, like all ranks with a record; there is no record of {subject}",
        waits=they_wait,
        explanation=_waits(context, found),
        next_step=(
            f"dump the node of {subject} too (`commlens dump`), and diagnose all nodes' dumps"
            " together"
        ),
        would_raise_confidence=_last_is_unknown(found),
    )


_WORDS = {
    "silent": _silent,
    "watchdog-stuck": _watchdog_stuck,
    "not-recorded": _not_recorded,
    "outdated": _outdated,
    "unreadable": _unreadable,
    "left-nothing": _left_nothing,
    "not-started": _not_started,
    "fewer-than-expected": _fewer_than_expected,
    "out-of-sight": _out_of_sight,
}


def _they_wait(context: Context, found: FoundUnrecorded) -> str:
    return phrases.waits(context, found.edges, "waits", "wait")


def _waits(context: Context, found: FoundUnrecorded) -> str:
    waiting = sorted({edge.rank for edge in found.edges})
    return prose(
        phrases.waiting(context, found.edges),
        phrases.waiting_behind(context, waiting, found.blocked),
    )


def _last_is_unknown(found: FoundUnrecorded) -> str:
    return f"What {ranks_phrase(found.cause.ranks)} did last is not recorded."


def _start_step(context: Context, found: FoundUnrecorded) -> str:
    waiting = min(edge.rank for edge in found.edges)
    origin = _origin_of_size(context.job.views[waiting].log, most_waited(found.edges).op)
    subject = ranks_phrase(found.cause.ranks)
    return f"start {subject}, or correct the number of ranks{f': {origin}' if origin else ''}"


def _origin_of_size(log: RankLog, op: Collective) -> str:
    """Say where the number of ranks comes from: the launcher, the environment, or the call; empty
    if that is not recorded.
    """
    size, known = len(op.channel.group.all_ranks), log.size_in_environment
    if known is None:
        return ""
    if known == size:
        where = (
            f"the options of {log.launcher}"
            if log.launcher in ("torchrun", "mpirun")
            else "the variable WORLD_SIZE"
        )
        return f"{size} comes from {where}"
    line = frame_phrase(op.source)
    but = f", although WORLD_SIZE is {known}" if known else ""
    return (
        f"{size} comes from world_size in the call of"
        f" init_process_group{f' at {line}' if line else ''}{but}"
    )
