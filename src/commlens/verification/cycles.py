"""Find ranks that wait for each other, and the ranks that others wait for, by their boards."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Final

from commlens.boards import board as B
from commlens.verification.messages import CycleStep, group_name
from commlens.verification.peers import Peers
from commlens.verification.refusals import Refusals

CYCLE_AFTER_NS: Final = 300_000_000  # a rank that has waited for less may be about to continue
# a rank, and the key of the channel and the number of the collective that it waits in
Step = tuple[int, int, int]


class Cycles:
    """Finds the cycle that this rank waits in, and the ranks at the end of a chain of waits."""

    def __init__(self, peers: Peers, refusals: Refusals) -> None:
        self._peers = peers
        self._refusals = refusals

    def find(self) -> list[Step] | None:
        """Return the ranks that wait for each other, or None unless that is proven.

        It is proven if each rank of the cycle issues from one thread only and waits for the next
        rank before it issues.
        """
        path: list[Step] = []
        rank = self._peers.rank
        while True:
            state = self.waits_in(rank)
            if state is None:
                return None
            path.append((rank, *state))
            successors = self.absent_from(*state)
            if self._peers.rank in successors:
                return self._canonical(path) if len(path) > 1 else None
            following = next(
                (
                    r
                    for r in sorted(successors)
                    if r not in {step[0] for step in path} and self.waits_in(r) is not None
                ),
                None,
            )
            if following is None:
                return None
            rank = following

    def chain(self, ranks: Iterable[int], longer_than_ns: int) -> list[Step]:
        """Return the chain of waits from late ranks to the ranks that hold them up. Each step is by
        a rank that the step before lacks.

        Args:
            ranks: the late ranks. If one of them does not wait, there is no chain.
            longer_than_ns: a rank that has waited for less was late by itself.
        """
        path: list[Step] = []
        missed = set(ranks)
        while missed and all(self.waits_in(rank, longer_than_ns) for rank in missed):
            rank = min(missed)
            if rank in {self._peers.rank, *(step[0] for step in path)}:
                return []
            path.append((rank, *(self.waits_in(rank) or (0, 0))))
            missed = self.absent_from(*path[-1][1:])
        return path if missed else []

    def held_up(self, ranks: set[int], longer_than_ns: int) -> set[int]:
        """Return these ranks and all that have waited longer than this for one of them, directly or
        through other ranks.
        """
        for rank in self._peers.ranks() - ranks:
            state = self.waits_in(rank, longer_than_ns)
            if state is not None and self.absent_from(*state) & ranks:
                return self.held_up(ranks | {rank}, longer_than_ns)
        return ranks

    def describe(self, step: Step) -> CycleStep:
        """Return a step as a refusal shows it."""
        rank, key, number = step
        board = self._peers[rank]
        blob = board.announced_blob(key, number) or {}
        group = group_name((board.channel(key) or {}).get("group"))
        collective = f"{blob.get('op', 'a collective')} #{number & B.NUMBER_MASK} of {group}"
        return CycleStep(
            rank,
            collective,
            str(blob.get("where", "")),
            sorted(self.absent_from(key, number)),
            str(blob.get("op", "")),
        )

    def _canonical(self, cycle: list[Step]) -> list[Step]:
        """Return the cycle in the form that every rank in it finds.

        Of the ranks that wait in the same collective, the lowest represents all; the lowest rank of
        the cycle comes first.
        """
        steps = []
        for at, (rank, key, number) in enumerate(cycle):
            missed = self.absent_from(*cycle[at - 1][1:])  # by the rank that waits for this one
            steps.append(
                (
                    next(
                        r
                        for r in sorted(missed | {rank})
                        if r == rank or self.waits_in(r) == (key, number)
                    ),
                    key,
                    number,
                )
            )
        first = steps.index(min(steps))
        return steps[first:] + steps[:first]

    def waits_in(self, rank: int, longer_than_ns: int = CYCLE_AFTER_NS) -> tuple[int, int] | None:
        """Return the channel's key and the number of the collective that a rank has waited in for
        longer than this.

        A rank that has yet to raise a posted refusal does not count as waiting, even if this rank
        has raised it and gone on: the refusal is about to end its wait.
        """
        board = self._peers.known(rank)
        if board is None or board.word(B.THREADS) != 1:
            return None
        key, number, since = (
            board.word(B.WAITING),
            board.word(B.WAITING_NUMBER),
            board.word(B.WAITING_SINCE),
        )
        waits = (
            key
            and since
            and time.monotonic_ns() - since > longer_than_ns
            and self.absent_from(key, number)
        )
        return (key, number) if waits and since > self._refusals.posted_ns(rank) else None

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
