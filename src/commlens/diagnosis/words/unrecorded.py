"""Words about ranks whose calls no record shows, and about keys of the job's store that no rank
writes: "rank 3 left no record; ranks 0-2 wait for it in all_reduce #1".
"""

from __future__ import annotations

from collections.abc import Collection

from commlens.diagnosis.causes.context import Case, Context, most_waited
from commlens.diagnosis.causes.unrecorded import UnwrittenCase
from commlens.diagnosis.words import phrases
from commlens.diagnosis.words.circumstances import AGENT, LAUNCHERS_STORE
from commlens.diagnosis.words.finding import Words
from commlens.model.cause import Unrecorded
from commlens.model.collective import Collective
from commlens.model.grouping import grouped
from commlens.model.ops import STORE_CLIENT
from commlens.model.ranklog import RankLog
from commlens.model.worlds import Worlds
from commlens.text import (
    capital,
    duration,
    frame_phrase,
    joined,
    key_phrase,
    op_phrase,
    rank_phrase,
    ranks_and_verb,
    ranks_phrase,
    verb,
)

_PIDS_MAX = 8
_IDLE_MAX = 4


def words(context: Context, case: Case[Unrecorded]) -> Words:
    """Return what a finding says about ranks without a record."""
    words = _WORDS[case.cause.reason](context, case)
    unknown = {each.number for each in context.job.worlds.outsiders if each.size}
    if unknown.isdisjoint(case.cause.ranks):
        return words
    return words._replace(evidence=[*words.evidence, *_near(context.job.worlds)])


def _near(worlds: Worlds) -> list[str]:
    """Return what is known of processes of no known world that may be members of a group."""
    if worlds.near == ():
        return [
            "No other process on this host that has loaded torch is connected with its members."
        ]
    return [
        f"Process {near.pid} on this host ({near.command}) is"
        + (" recorded by commlens as another job" if near.recorded else " not recorded by commlens")
        + f", and is connected with {ranks_phrase(near.numbers)}"
        + (f": it is in {frame_phrase(near.frame)}." if near.frame is not None else ".")
        for near in worlds.near or ()
    ]


def _silent(context: Context, case: Case[Unrecorded]) -> Words:
    """No line of a log tells that they came to the collective in which the others timed out.

    The watchdog of a rank that waited as well would have told it, unless it could not run. So a
    single such rank is the suspect.
    """
    ranks, op = case.cause.ranks, most_waited(context, case.edges).op
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
    return _of_logs(context, case, cause, why, step)


def _watchdog_stuck(context: Context, case: Case[Unrecorded]) -> Words:
    ranks = case.cause.ranks
    subject = ranks_phrase(ranks)
    cause = (
        f"{subject} did not, because {verb(ranks, 'its', 'their')} NCCL watchdog was stuck for"
        f" {duration(case.cause.stuck_s * 1_000_000_000)}"
    )
    why = (
        "A watchdog gets stuck if a CUDA call does not return or a thread holds the GIL:"
        f" {subject} stood outside of the collective."
    )
    step = (
        f"take a stack of {subject} (py-spy dump --native): a CUDA call does not return there,"
        " or a thread holds the GIL"
    )
    return _of_logs(context, case, cause, why, step)


def _of_logs(context: Context, case: Case[Unrecorded], cause: str, why: str, step: str) -> Words:
    ranks, views = case.cause.ranks, context.job.views
    known = [rank for rank in ranks if rank in views]
    ends = [
        f"{capital(rank_phrase(rank))} {phrases.exit_words(views[rank].exit)}."
        for rank in known
        if views[rank].exit.ended
    ]
    verbs = ("timed out", "timed out") if context.job.only_logs else ("waits", "wait")
    return Words(
        summary=f"{phrases.where_they_wait(case.edges, *verbs)}; {cause}",
        explanation=phrases.prose(why, *ends),
        next_step=step,
        evidence=phrases.aborted(context, case.blocked),
        would_raise_confidence=(
            "A stack, or a dump of the Flight Recorder, would show where"
            f" {verb(ranks, 'it', 'they')} stood."
        ),
    )


def _not_recorded(context: Context, case: Case[Unrecorded]) -> Words:
    ranks, strangers = case.cause.ranks, context.job.strangers
    logs = [strangers[rank] for rank in ranks if rank in strangers]
    pids = joined([f"pid {log.pid}" for log in logs[:_PIDS_MAX]])
    them = verb(ranks, "it", "them")
    runs = verb(ranks, "runs on this node but is", "run on this node but are")
    return Words(
        summary=(
            f"{ranks_phrase(ranks)} ({pids}) {runs} not recorded; {_they_wait(context, case)} for"
            f" {them}"
        ),
        explanation=phrases.waits_and_blocked(context, case.edges, case.blocked),
        next_step=(
            f"take a stack of {them} (py-spy dump --pid {logs[0].pid}); {logs[0].unrecorded}"
        ),
        would_raise_confidence=_last_is_unknown(case),
    )


def _outdated(context: Context, case: Case[Unrecorded]) -> Words:
    ranks = case.cause.ranks
    return Words(
        summary=(
            f"{_they_wait(context, case)}; the {verb(ranks, 'dump', 'dumps')} of"
            f" {ranks_phrase(ranks)} {verb(ranks, 'is', 'are')} older and"
            f" {verb(ranks, 'does', 'do')} not show whether {verb(ranks, 'it', 'they')} came"
        ),
        explanation=phrases.waits_and_blocked(context, case.edges, case.blocked),
        next_step=(
            "dump all ranks at one moment while the job hangs, and diagnose these dumps; or take a"
            f" stack of {verb(ranks, 'it', 'them')} (py-spy dump)"
        ),
        would_raise_confidence=_last_is_unknown(case),
    )


def _unreadable(context: Context, case: Case[Unrecorded]) -> Words:
    ranks = case.cause.ranks
    subject, pid = ranks_phrase(ranks), context.job.views[ranks[0]].log.pid
    step = f"take a stack of {subject} (py-spy dump{f' --pid {pid}' if pid else ''})"
    if context.job.foreign:
        copies = verb(ranks, "a whole copy of the dump", "whole copies of the dumps")
        step = f"look for {copies} of {subject}, or {step}"
    return Words(
        summary=f"{_they_wait(context, case)}; the newest records of {subject} are unreadable",
        explanation=phrases.waits_and_blocked(context, case.edges, case.blocked),
        next_step=step,
        would_raise_confidence=_last_is_unknown(case),
    )


def _left_nothing(context: Context, case: Case[Unrecorded]) -> Words:
    ranks = case.cause.ranks
    subject = ranks_phrase(ranks)
    ended = verb(
        ranks,
        "it ended before it could record anything, or its black box is lost",
        "they ended before they could record anything, or their black boxes are lost",
    )
    waits = f"{_they_wait(context, case)} for {verb(ranks, 'it', 'them')}"
    return Words(
        summary=f"{subject} left no record; {waits}",
        waits=waits,
        explanation=phrases.waits_and_blocked(context, case.edges, case.blocked),
        next_step=f"look at the output of {subject}: {ended}",
        would_raise_confidence=_last_is_unknown(case),
    )


def _not_started(context: Context, case: Case[Unrecorded]) -> Words:
    ranks, op = case.cause.ranks, most_waited(context, case.edges).op
    subject, size = ranks_phrase(ranks), len(op.channel.group.all_ranks)
    waiting = sorted({edge.rank for edge in case.edges})
    return Words(
        summary=(
            f"{subject} of {size} {verb(ranks, 'was', 'were')} never started:"
            f" {_they_wait(context, case)} for {verb(ranks, 'it', 'them')}"
        ),
        explanation=phrases.prose(
            phrases.how_long_they_wait(context, case.edges),
            f"All ranks meet at {context.job.meets_here}, so they must be on this machine, where"
            f" only {ranks_phrase(waiting)} came.",
        ),
        next_step=_start_step(context, case),
        would_raise_confidence=(
            f"A process of {subject} that has not loaded torch yet would leave no record either."
        ),
    )


def _fewer_than_expected(context: Context, case: Case[Unrecorded]) -> Words:
    ranks, op = case.cause.ranks, most_waited(context, case.edges).op
    return Words(
        summary=(
            f"{_they_wait(context, case)} for {len(op.channel.group.all_ranks)} ranks, like all"
            f" with a record; there is no record of {ranks_phrase(ranks)}"
        ),
        explanation=phrases.how_long_they_wait(context, case.edges),
        next_step=(
            f"{_start_step(context, case)}; if {verb(ranks, 'it was', 'they were')} started on"
            " another node, dump that node too (`commlens dump`)"
        ),
        would_raise_confidence=_last_is_unknown(case),
    )


def _out_of_sight(context: Context, case: Case[Unrecorded]) -> Words:
    subject, they_wait = ranks_phrase(case.cause.ranks), _they_wait(context, case)
    idle = case.cause.idle
    views = [context.job.views[rank] for rank in idle[:_IDLE_MAX]]
    standing = [
        f"{phrases.name(context, view.rank)} {phrases.activity_words(context.doing(view))}"
        for view in views
    ]
    like_all = "" if idle else ", like all ranks with a record"
    return Words(
        summary=f"{they_wait}{like_all}; there is no record of {subject}"
        + (f", which may be {ranks_phrase(idle)}" if len(idle) == 1 else ""),
        waits=they_wait,
        explanation=phrases.waits_and_blocked(context, case.edges, case.blocked),
        evidence=[f"{each}, and waits for nobody." for each in standing],
        next_step=(
            (
                f"find out whether {ranks_phrase(idle)} ought to be {subject}; if not, "
                if idle
                else ""
            )
            + f"find {verb(case.cause.ranks, 'the process that is', 'the processes that are')}"
            f" {subject}, and start {verb(case.cause.ranks, 'it', 'them')} with commlens, too;"
            " `commlens attach PID` shows where a process is now"
            if min(case.cause.ranks) >= context.job.size
            else f"dump the node of {subject} too (`commlens dump`), and diagnose all nodes' dumps"
            " together"
        ),
        would_raise_confidence=_last_is_unknown(case),
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


def _they_wait(context: Context, case: Case[Unrecorded]) -> str:
    return phrases.where_they_wait(case.edges, "waits", "wait")


def _last_is_unknown(case: Case[Unrecorded]) -> str:
    return f"What {ranks_phrase(case.cause.ranks)} did last is not recorded."


def _start_step(context: Context, case: Case[Unrecorded]) -> str:
    waiting = min(edge.rank for edge in case.edges)
    origin = _origin_of_size(context.job.views[waiting].log, most_waited(context, case.edges).op)
    subject = ranks_phrase(case.cause.ranks)
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


_OTHERS_MAX = 4


def words_of_unwritten(context: Context, case: UnwrittenCase) -> Words:
    """Return what a finding says about a key that no rank writes."""
    if case.cause.written_before:
        return _write_skipped(context, case)
    return _writer_unknown(context, case)


def _write_skipped(context: Context, case: UnwrittenCase) -> Words:
    write, own, ranks = case.write, case.own, case.cause.ranks
    assert write is not None and own is not None
    op, (writer,) = case.edges[0].op, case.cause.culprits
    line, place = frame_phrase(write.source) or "an unknown line", frame_phrase(own.source)
    return Words(
        summary=(
            f"{rank_phrase(writer)} did not write the {key_phrase(op)};"
            f" {ranks_and_verb(ranks, 'waits', 'wait')} for it in {op.op}"
        ),
        explanation=phrases.prose(
            f"{phrases.name(context, writer)} waits for {ranks_phrase(ranks)} in"
            f" {op_phrase(own)}{f' at {place}' if place else ''}.",
            f"It wrote keys like this before, the first one ({write.channel.group.name!r}) at"
            f" {line}.",
            phrases.how_long_they_wait(context, case.edges),
            phrases.blocked_behind(case.involved, case.blocked),
        ),
        next_step=f"find the branch in which {rank_phrase(writer)} skips {line}",
        would_raise_confidence=(
            "The store itself is not read: whether a process outside of the job writes such keys is"
            " not known."
        ),
    )


def _writer_unknown(context: Context, case: UnwrittenCase) -> Words:
    op, ranks = case.edges[0].op, case.cause.ranks
    waits = f"{ranks_and_verb(ranks, 'waits', 'wait')} in {op.op} for the {key_phrase(op)}"
    if not op.is_for_key:
        return _store_not_made(context, case, waits)
    return Words(
        summary=f"{waits}, which no rank is known to write",
        explanation=phrases.prose(
            phrases.waits_and_blocked(context, case.edges, case.blocked),
            _sentence_on_others(context, case.involved),
        ),
        next_step=(
            f"look for the line that writes the {key_phrase(op)}, and for why no rank has come"
            " there"
        ),
        would_raise_confidence=(
            "The store itself is not read: a process outside of the job may be meant to write the"
            " key."
        ),
    )


def _store_not_made(context: Context, case: UnwrittenCase, waits: str) -> Words:
    op, ranks, listens = case.edges[0].op, case.cause.ranks, case.cause.listens
    seen = {None: "", False: ", where nobody listens", True: ", where a process listens"}
    summary = waits + seen[listens]
    if (elsewhere := case.cause.elsewhere) is not None:
        others = ranks_and_verb(elsewhere.ranks, "waits", "wait")
        summary += f"; {others} for {verb(ranks, 'a member', 'members')} at {elsewhere.name}"
    if listens:
        step = (
            "look at the process that listens there (ss -ltnp): it does not answer, or has come"
            " only now, and a client tries to connect again only after a pause"
        )
    elif case.cause.agent:
        step = f"leave out init_method, or pass env://, so that the ranks meet at {LAUNCHERS_STORE}"
    elif op.op == STORE_CLIENT:
        step = "find the process that is to make the store there, or correct the address"
    else:
        step = "find the processes that are to come there, or correct the store's world_size"
    return Words(
        summary=summary,
        explanation=phrases.prose(
            phrases.how_long_they_wait(context, case.edges),
            f"{AGENT}." if case.cause.agent else "",
            phrases.blocked_behind(ranks, case.blocked),
            _sentence_on_others(context, case.involved),
        ),
        next_step=step,
        would_raise_confidence="The processes that are to meet at a store are not recorded.",
    )


def _sentence_on_others(context: Context, waiting: Collection[int]) -> str:
    """Return a sentence about the ranks that wait for no key: their collectives or activities."""
    others = [view for rank, view in context.job.views.items() if rank not in waiting]
    waits = grouped(
        (op_phrase(block.op), view.rank)
        for view in others
        for block in list(view.blocks.values())[:1]
    )
    doing = grouped(
        (phrases.activity_words(context.doing(view)), view) for view in others if not view.blocks
    )
    told = [(ranks, f"{ranks_and_verb(ranks, 'is', 'are')} in {op}") for op, ranks in waits.items()]
    for views in doing.values():
        ranks = [view.rank for view in views]
        does = phrases.activity_words(context.doing(views[0]), ranks)
        told.append((ranks, f"{ranks_phrase(ranks)} {does}"))
    parts = [text for _, text in sorted(told)[:_OTHERS_MAX]]
    return f"{capital('; '.join(parts))}." if parts else ""
