"""The line that a node prints when the job's store has ended with the process that served it: what
is known, and of whom nothing is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from commlens.errors import FormatError
from commlens.model.grouping import grouped
from commlens.text import joined, op_phrase, ranks_phrase, verb
from commlens.watch.nodes.exchange import LostStore, Nodes
from commlens.watch.roster import Member

# after which a store that refuses connections is reported: ranks that end with it need no report
ENDED_S: Final = 2.5
SILENT_S: Final = 12.0  # after which one that only does not answer is: it may be busy
_NEWEST: Final = 8


class LostStoreReport:
    """Reports the loss of the job's store, once, if ranks of this node still communicate."""

    def __init__(self) -> None:
        self._issued: dict[int, int] = {}  # pid: records when the store was lost
        self._is_told = False

    def take_line(self, nodes: Nodes, members: Sequence[Member]) -> str:
        """Return the line if it is time to print it; else an empty text."""
        lost = nodes.lost_store
        if lost is None or self._is_told:
            self._issued = {}
            return ""
        alive = [member for member in members if member.alive and member.status is not None]
        for member in alive:
            self._issued.setdefault(
                member.pid, member.status.issued if member.status is not None else 0
            )
        if lost.silent_s < (ENDED_S if lost.refuses else SILENT_S) or not any(
            self._communicates(member) for member in alive
        ):
            return ""
        self._is_told = True
        return lost_store_line(lost, alive)

    def _communicates(self, member: Member) -> bool:
        """Return whether a rank waits, or has gone on since the store was lost. One that has
        destroyed its groups has ended well.
        """
        status = member.status
        if status is None or status.left or status.closed:
            return False
        waits = status.oldest_mono_ns and time.monotonic_ns() - status.oldest_mono_ns > 1e9
        return bool(waits) or status.issued > self._issued[member.pid]


def lost_store_line(lost: LostStore, members: Sequence[Member]) -> str:
    """Return what is known, in sentences: who served the store, of whom nothing is known from here
    on, and where the ranks here are.
    """
    beats = sorted(lost.beats, key=lambda beat: beat.order)
    server = next((beat for beat in beats if beat.serves_store or 0 in beat.ranks), None)
    served = (
        f", which node {server.host} ({ranks_phrase(server.ranks)}) served,"
        if server is not None
        else ""
    )
    how = (
        "has ended: it refuses connections"
        if lost.refuses
        else f"has not answered for {lost.silent_s:.0f} s"
    )
    text = (
        f"{lost.place}{served} {how}. Nothing is known any more of"
        f" {ranks_phrase(rank for beat in beats for rank in beat.ranks)}"
    )
    text += f" on {joined(f'{beat.host}' for beat in beats)}."
    where = grouped((_place(member), member.rank) for member in members)
    here = [
        f"{ranks_phrase(ranks)} {verb(ranks, 'is', 'are')} {place}"
        for place, ranks in where.items()
        if place
    ]
    return f"{text} Here, {joined(here)}."


def _place(member: Member) -> str:
    try:
        op = member.box.log(newest=_NEWEST).current_collective if member.box is not None else None
    except FormatError:
        op = None
    return "" if op is None else f"{'in' if op.in_flight else 'past'} {op_phrase(op)}"
