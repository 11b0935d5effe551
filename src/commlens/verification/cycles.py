"""Find ranks that wait for each other in a cycle, and the ranks that hold up a chain of waits, by
the ranks' boards.

Rank 0 waits in the all_reduce #3 of the default group, which rank 1 has not announced, and rank 1
waits in a broadcast of group tp, which rank 0 has not announced: both find the cycle
``[BoardWait(0, <default group>, 3), BoardWait(1, <tp>, 1)]``. If rank 1 waits for rank 2 instead,
and rank 2 waits for nothing, rank 0 finds the chain ``[BoardWait(1, <tp>, 1)]``: rank 2 holds both
up.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from commlens.boards import board as B
from commlens.model.refusal import RefusedWait
from commlens.verification.messages import group_name
from commlens.verification.peers import Peers
from commlens.verification.refusals import Refusals

CYCLE_AFTER_NS: Final = 300_000_000
"""A rank that has waited for less may be about to continue."""


class BoardWait(NamedTuple):
    """A rank, and the collective that it waits in."""

    rank: int
    key: int  # of the collective's channel
    number: int  # with its round


class Cycles:
    """Finds the cycle that this rank waits in, and the ranks at the end of a chain of waits."""

    def __init__(self, peers: Peers, refusals: Refusals) -> None:
        self._peers = peers
        self._refusals = refusals

    def find(self) -> list[BoardWait] | None:
        """Return the ranks that wait for each other, or None unless that is proven.

        It is proven if each rank of the cycle issues from one thread only and waits for the next
        rank before it issues.
        """
        path: list[BoardWait] = []
        wait = self.wait_of(self._peers.rank)
        while wait is not None:
            path.append(wait)
            absent = self.absent_from(wait.key, wait.number)
            if self._peers.rank in absent:
                return self._canonical(path) if len(path) > 1 else None
            unvisited = sorted(absent - {step.rank for step in path})
            wait = next(filter(None, map(self.wait_of, unvisited)), None)
        return None

    def chain(self, ranks: Iterable[int], longer_than_ns: int) -> list[BoardWait]:
        """Return the chain of waits from late ranks to the ranks that hold them up: each rank is
        absent from the collective that the one before waits in. Empty if there is no such chain, or
        it leads back into itself.

        Args:
            ranks: the late ranks. If one of them does not wait, there is no chain.
            longer_than_ns: a rank that has waited for less was late by itself.
        """
        path: list[BoardWait] = []
        absent = set(ranks)
        while absent:
            waits = [self.wait_of(rank, longer_than_ns) for rank in sorted(absent)]
            lowest = waits[0]
            if lowest is None or None in waits:
                return path
            if lowest.rank in {self._peers.rank, *(step.rank for step in path)}:
                return []
            path.append(lowest)
            absent = self.absent_from(lowest.key, lowest.number)
        return []

    def held_up(self, ranks: set[int], longer_than_ns: int) -> set[int]:
        """Return these ranks and all that have waited longer than this for one of them, directly or
        through other ranks.
        """
        for rank in self._peers.ranks() - ranks:
            wait = self.wait_of(rank, longer_than_ns)
            if wait is not None and self.absent_from(wait.key, wait.number) & ranks:
                return self.held_up(ranks | {rank}, longer_than_ns)
        return ranks

    def describe(self, wait: BoardWait) -> tuple[RefusedWait, str]:
        """Return a wait as a refusal shows it, and its op; "" if that is unknown."""
        board = self._peers[wait.rank]
        blob = board.announced_blob(wait.key, wait.number) or {}
        group = group_name((board.channel(wait.key) or {}).get("group"))
        number = wait.number & B.NUMBER_MASK
        refused = RefusedWait(
            wait.rank,
            f"{blob.get('op', 'a collective')} #{number} of {group}",
            tuple(sorted(self.absent_from(wait.key, wait.number))),
            str(blob.get("where", "")),
        )
        return refused, str(blob.get("op", ""))

    def _canonical(self, cycle: list[BoardWait]) -> list[BoardWait]:
        """Return the cycle in the form that every rank in it finds.

        Of the ranks that wait in the same collective, the lowest represents all; the lowest rank of
        the cycle comes first.
        """
        steps = []
        for at, wait in enumerate(cycle):
            before = cycle[at - 1]  # which waits for this rank, and perhaps for others
            alike = [
                wait._replace(rank=rank)
                for rank in self.absent_from(before.key, before.number)
                if self.wait_of(rank) == wait._replace(rank=rank)
            ]
            steps.append(min([wait, *alike]))
        first = steps.index(min(steps))
        return steps[first:] + steps[:first]

    def wait_of(self, rank: int, longer_than_ns: int = CYCLE_AFTER_NS) -> BoardWait | None:
        """Return the collective that a rank has waited in for longer than this.

        A rank that has yet to raise a posted refusal does not count as waiting, even if this rank
        has raised it and gone on: the refusal is about to end its wait.
        """
        board = self._peers.known(rank)
        if board is None or board.word(B.THREADS) != 1:
            return None
        key, number = board.word(B.WAITING), board.word(B.WAITING_NUMBER)
        since = board.word(B.WAITING_SINCE)
        waits = (
            key
            and since
            and time.monotonic_ns() - since > longer_than_ns
            and self.absent_from(key, number)
        )
        if not waits or self._refusals.concern_since(rank, since):
            return None
        return BoardWait(rank, key, number)

    def announced(self, key: int, number: int) -> dict[int, dict[str, Any]]:
        """Return the arguments of a collective by rank, of those that have announced it."""
        blobs = {
            rank: board.announced_blob(key, number)
            for rank in self._peers.members(key)
            if (board := self._peers.known(rank)) is not None
        }
        return {rank: blob for rank, blob in blobs.items() if blob is not None}

    def absent_from(self, key: int, number: int) -> set[int]:
        """Return the ranks that have not announced this collective, as far as boards show."""
        absent = set()
        for rank in self._peers.members(key):
            board = self._peers.known(rank)
            if board is not None:
                slot = board.slot(key)
                if not slot or board.last_number(slot) < number:
                    absent.add(rank)
        return absent
