"""How far ranks got at a line: ranks of one program come to it equally often."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from commlens.diagnosis.align.tie_break import is_majority
from commlens.diagnosis.index.job_index import JobIndex
from commlens.model.collective import Collective


class Rounds(NamedTuple):
    """The number of each rank's last collective or message from a line, and the ranks that differ
    from the majority of the job.
    """

    op: Collective
    last: dict[int, int]  # rank: sequence number
    odd: frozenset[int]


def count_rounds(job: JobIndex, op: Collective) -> Rounds | None:
    """Return how far the ranks got at the line of an op; None if these are not the majority of the
    job, or if all got equally far.
    """
    last: dict[int, int] = {}
    for rank, view in job.views.items():
        numbers = [
            one.sequence_number
            for one in view.history
            if one.op == op.op and one.source == op.source
        ]
        if numbers and op.source is not None:
            last[rank] = max(numbers)
    counts = Counter(last.values()).most_common(1)
    if not counts or not is_majority(counts[0][1], len(job.views)):
        return None
    odd = frozenset(rank for rank, number in last.items() if number != counts[0][0])
    return Rounds(op, last, odd) if odd else None
