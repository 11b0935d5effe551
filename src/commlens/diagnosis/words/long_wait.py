"""Words about a wait that is longer than usual, and not known to be a fault."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from commlens.diagnosis.standstill import late_ranks, stayed_ns
from commlens.model.collective import Collective
from commlens.model.ranklog import RankLog
from commlens.model.verdict import Verdict
from commlens.speed.usual import usual_gap_s
from commlens.text import capital, count, duration, naming_worlds, ranks_and_verb


def long_wait(verdict: Verdict, logs: Sequence[RankLog]) -> str:
    """``"Rank 2 has been in train.py:57 load_batch for 14 s, usually 0.2 s; 7 ranks wait."``

    Args:
        verdict: what a diagnosis found so far.
        logs: from which it was made.
    """
    by_rank = {log.rank: log for log in logs}
    if late := late_ranks(verdict, logs):
        waiting = [by_rank[rank] for rank in verdict.victims if rank in by_rank]
        with naming_worlds(verdict.worlds):
            sentence = _of_late_ranks(verdict, late, waiting)
    else:
        ranks = sorted({*verdict.culprits, *verdict.victims})
        with naming_worlds(verdict.worlds):
            sentence = _of_waiting(verdict, [by_rank[rank] for rank in ranks if rank in by_rank])
    return f"{capital(sentence)}."


def _of_late_ranks(verdict: Verdict, late: Sequence[RankLog], waiting: Sequence[RankLog]) -> str:
    ranks = [log.rank for log in late]
    finding = verdict.findings[0] if verdict.findings else None
    function = finding.function if finding is not None else None
    place = " ".join(filter(None, [verdict.source, function]))
    where = f"in {place}" if place else "outside of collectives"
    wait = f"{count(len(waiting), 'rank')} {'waits' if len(waiting) == 1 else 'wait'}"
    long_ns = stayed_ns(late)
    said = f"{ranks_and_verb(ranks, 'has', 'have')} been {where}"
    said += f" for {duration(long_ns)}" if long_ns else ""
    awaited = next((op for log in waiting if (op := _waited_in(log, verdict)) is not None), None)
    gap_s = usual_gap_s(late[0], awaited) if awaited is not None else None
    usual = f", usually {duration(gap_s * 1e9)}" if gap_s is not None else ""
    return f"{said}{usual}; {wait}"


def _of_waiting(verdict: Verdict, logs: Sequence[RankLog]) -> str:
    waits = {log.rank: op for log in logs if (op := _waited_in(log, verdict)) is not None}
    ranks = list(waits) or [log.rank for log in logs]
    collective = verdict.collective
    name = f"{collective.op} #{collective.sequence_number}" if collective else "collectives"
    since_ns = min((op.announced_ns for op in waits.values()), default=0)
    now_ns = max((log.captured_ns for log in logs), default=0)
    waited = f" for {duration(now_ns - since_ns)}" if since_ns and now_ns else ""
    known = [log.observation.usual_wait for log in logs if log.observation.usual_wait is not None]
    usual_ns = median([each.median_s for each in known]) * 1e9 if known else None
    usual = f", usually {duration(usual_ns)}" if usual_ns is not None else ""
    return f"{ranks_and_verb(ranks, 'has', 'have')} been waiting in {name}{waited}{usual}"


def _waited_in(log: RankLog, verdict: Verdict) -> Collective | None:
    """Return the collective that a verdict names, if a rank is in it; the oldest one that the rank
    is in, if the verdict names none.
    """
    named, group = verdict.collective, verdict.group
    for op in log.collectives:
        is_named = named is None or (op.op, op.sequence_number) == (named.op, named.sequence_number)
        # groups made by hand get other names where the logs of worlds are joined
        its = op.channel.group
        is_there = group is None or its.hand_made is not None or its.name == group.name
        if op.in_flight and is_named and is_there:
            return op
    return None
