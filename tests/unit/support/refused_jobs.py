"""Jobs whose collectives strict verification refused."""

from __future__ import annotations

from builders import S

from commlens.model.collective import State
from commlens.model.ranklog import End, Observation, RankLog

TEXT = (
    "DistributedOperationException: Cannot apply desired operation due to shape"
    " mismatches.\n\nOperation: `all_reduce`\nInput shapes:"
)
EXCEPTION = f"commlens.errors.{TEXT.splitlines()[0]}"


def refuse(logs: list[RankLog], *, raises: bool = True, at_ns: int = 0) -> list[RankLog]:
    """Refuse what is in flight, and let the exception end the ranks if it is raised."""
    for log in logs:
        for op in log.collectives:
            if op.in_flight:
                op.state, op.error = State.FAILED, TEXT
                op.done_ns = at_ns or op.announced_ns + S // 10
                if raises:
                    log.exception = EXCEPTION
                    log.observation = Observation(End.FAILED, 1, ended_ns=op.done_ns)
    return logs
