"""The keys of the job's store that ranks wait for: who has written keys of this kind, and so should
write the next one.
"""

from __future__ import annotations

import re

from commlens.diagnosis.index.job_index import JobIndex
from commlens.model.collective import Collective
from commlens.text import key_kind

_NUMBER = re.compile(r"\d+")


def writes_of_kind(job: JobIndex, op: Collective) -> dict[int, Collective]:
    """Return the first write of each rank to a key that is the same but for its numbers."""
    kind = key_kind(op.channel.group.name)
    return {
        rank: write
        for rank, view in job.views.items()
        for write in view.log.keys_written
        if key_kind(write.channel.group.name) == kind
    }


def expected_writer(job: JobIndex, op: Collective) -> int | None:
    """Return the rank that should write the key that ``op`` waits for; None if the records do not
    show it.

    It is the only rank that has written keys of this kind, or of several that each write a key with
    their own rank in it the one whose rank this key has, or the only one of the job that does not
    wait for the key.
    """
    waits = {rank for rank, view in job.views.items() if _waits_for(view.log.store_wait, op)}
    wrote = writes_of_kind(job, op)
    able = sorted(wrote.keys() - waits)
    if len(able) == 1:
        return able[0]
    numbers = _NUMBER.findall(op.channel.group.name)
    for at, number in enumerate(numbers):
        if wrote and all(
            _NUMBER.findall(write.channel.group.name)[at] == str(rank)
            for rank, write in wrote.items()
        ):
            return int(number) if int(number) < job.size and int(number) not in waits else None
    others = set(range(job.size)) - waits
    return others.pop() if not wrote and len(others) == 1 else None


def _waits_for(wait: Collective | None, op: Collective) -> bool:
    return wait is not None and wait.channel.group.name == op.channel.group.name
