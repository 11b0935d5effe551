"""Words about ranks that exist twice."""

from __future__ import annotations

from commlens.diagnosis.causes.started_twice import FoundStartedTwice
from commlens.diagnosis.words.finding import Words
from commlens.model.cause import Claims
from commlens.text import capital, ranks_and_verb

_SHOWN = 4


def words(found: FoundStartedTwice) -> Words:
    """Return what a finding says about ranks that exist twice."""
    cause = found.cause
    script = found.script.partition(" ")[0].rpartition("/")[2] or "the script"
    processes = [_processes(claims) for claims in cause.claims[:_SHOWN]]
    return Words(
        summary=(
            f"{ranks_and_verb(cause.ranks, 'exists', 'exist')} twice: the launcher starts ranks,"
            " and each of them starts ranks of the same numbers again, which meet at one place"
        ),
        explanation=f"{capital('; '.join(processes))}.",
        next_step=f"start {script} without the launcher, or let it start no processes of its own",
    )


def _processes(claims: Claims) -> str:
    """Return the processes of one rank: ``"rank 0: pid 12, started by pid 10, pid 13, ..."``."""
    pairs = list(zip(claims.pids, claims.started_by, strict=True))[:_SHOWN]
    return f"rank {claims.rank}: " + ", ".join(
        f"pid {pid}, started by pid {by}" for pid, by in pairs
    )
