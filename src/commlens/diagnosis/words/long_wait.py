"""Words about a wait that is longer than usual, and not known to be a fault."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from commlens.diagnosis.index.activity import quiet_ns
from commlens.model.cause import CollectiveRef, Missing
from commlens.model.collective import Collective
from commlens.model.ranklog import RankLog
from commlens.model.verdict import Verdict
from commlens.speed.usual import usual_gap_s
from commlens.text import capital, count, duration, ranks_and_verb, ranks_phrase, verb


def long_wait(verdict: Verdict, logs: Sequence[RankLog], least_s: float) -> str:
    """``"Rank 2 has been in train.py:57 load_batch for 12 s, usually 0.2 s; 7 ranks wait."``

    Args:
        verdict: what a diagnosis found so far.
        logs: from which it was made.
        least_s: how long the ranks that are waited for must have been where they are.

    Returns:
        The line; empty if they came there later, as in a job that is only slow.
    """
    cause, by_rank = verdict.cause, {log.rank: log for log in logs}
    suspects = [rank for rank in verdict.culprits if rank in by_rank]
    if isinstance(cause, Missing) and suspects and not cause.blames_waiting:
        waiting = [by_rank[rank] for rank in verdict.victims if rank in by_rank]
        if max(quiet_ns(by_rank[rank]) for rank in suspects) < least_s * 1e9:
            return ""
        sentence = _of_suspects(verdict, [by_rank[rank] for rank in suspects], waiting)
    else:
        ranks = sorted({*verdict.culprits, *verdict.victims})
        sentence = _of_waiting(verdict.collective, [by_rank[r] for r in ranks if r in by_rank])
    return f"{capital(sentence)}."


def _of_suspects(verdict: Verdict, suspects: Sequence[RankLog], waiting: Sequence[RankLog]) -> str:
    ranks = [log.rank for log in suspects]
    finding = verdict.findings[0] if verdict.findings else None
    function = finding.function if finding is not None else None
    place = " ".join(filter(None, [verdict.source, function]))
    where = f"in {place}" if place else "outside of collectives"
    wait = f"{count(len(waiting), 'rank')} {'waits' if len(waiting) == 1 else 'wait'}"
    if verdict.why == "stopped":
        return f"{ranks_phrase(ranks)} {verb(ranks, 'is', 'are')} stopped {where}; {wait}"
    long_ns = max(quiet_ns(log) for log in suspects)
    said = f"{ranks_phrase(ranks)} {verb(ranks, 'has', 'have')} been {where}"
    said += f" for {duration(long_ns)}" if long_ns else ""
    awaited = next(
        (op for log in waiting if (op := _waited_in(log, verdict.collective)) is not None), None
    )
    gap_s = usual_gap_s(suspects[0], awaited) if awaited is not None else None
    usual = f", usually {duration(gap_s * 1e9)}" if gap_s is not None else ""
    return f"{said}{usual}; {wait}"


def _of_waiting(collective: CollectiveRef | None, logs: Sequence[RankLog]) -> str:
    ranks = [log.rank for log in logs]
    ops = [op for log in logs if (op := _waited_in(log, None)) is not None]
    name = f"{collective.op} #{collective.sequence_number}" if collective else "collectives"
    since_ns = min((op.announced_ns for op in ops), default=0)
    now_ns = max((log.captured_ns for log in logs), default=0)
    waited = f" for {duration(now_ns - since_ns)}" if since_ns and now_ns else ""
    known = [log.observation.usual_wait for log in logs if log.observation.usual_wait is not None]
    usual_ns = median([each.median_s for each in known]) * 1e9 if known else None
    usual = f", usually {duration(usual_ns)}" if usual_ns is not None else ""
    return f"{ranks_and_verb(ranks, 'has', 'have')} been waiting in {name}{waited}{usual}"


def _waited_in(log: RankLog, collective: CollectiveRef | None) -> Collective | None:
    """Return the oldest op that a rank is in, or the one that is meant."""
    return next(
        (
            op
            for op in log.collectives
            if op.in_flight
            and (
                collective is None
                or (op.op, op.sequence_number) == (collective.op, collective.sequence_number)
            )
        ),
        None,
    )
