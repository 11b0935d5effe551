"""Check the numbers of collectives of ranks whose recording was switched on while the job ran.

The numbers are the backend's. They are the same on all ranks, unless the backend also counts what
not all ranks issue: gloo counts messages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import msgspec

from commlens.model.collective import ChannelKey, ProcessGroup, State
from commlens.model.ops import NEEDS_ALL
from commlens.model.ranklog import RankLog
from commlens.text import capital, group_phrase

_CLOCKS_NS: Final = 20_000_000  # between the clocks of two hosts, after correction


def without_contradicted_numbers(logs: Sequence[RankLog]) -> tuple[list[RankLog], list[str]]:
    """Set the numbers of a group's collectives to 0 if they contradict the times: a collective
    cannot end before all ranks issue it.

    Returns:
        The logs, and a sentence for each such group.
    """
    contradicted = _contradicted(logs) if any(log.joined for log in logs) else {}
    notes = [
        f"{capital(group_phrase(group))}: its collectives have different numbers on different"
        " ranks, because recording was switched on while the job ran, so they are not compared."
        for _, group in sorted(contradicted.items())
    ]
    return [
        _without(log, contradicted) if log.joined and contradicted else log for log in logs
    ], notes


def _contradicted(logs: Sequence[RankLog]) -> dict[ChannelKey, ProcessGroup]:
    """Return the groups with a collective that ended on one rank before another rank issued it."""
    # the first end on each host
    ends: dict[tuple[ChannelKey, int], dict[str, int]] = defaultdict(dict)
    for log in logs:
        for op in log.collectives:
            if (
                op.state is State.COMPLETED
                and op.op in NEEDS_ALL
                and op.done_ns
                and op.sequence_number
            ):
                of_host = ends[op.channel.key, op.sequence_number]
                of_host[log.host] = min(of_host.get(log.host, op.done_ns), op.done_ns)
    found: dict[ChannelKey, ProcessGroup] = {}
    for log in logs:
        for op in log.collectives:
            for host, end_ns in ends.get((op.channel.key, op.sequence_number), {}).items():
                if end_ns + (_CLOCKS_NS if host != log.host else 0) < op.announced_ns:
                    found[op.channel.key] = op.channel.group
    return found


def _without(log: RankLog, contradicted: dict[ChannelKey, ProcessGroup]) -> RankLog:
    collectives = [
        msgspec.structs.replace(op, sequence_number=0) if op.channel.key in contradicted else op
        for op in log.collectives
    ]
    return msgspec.structs.replace(log, collectives=collectives)
