"""Find ranks that wait for each other, by their boards."""

from __future__ import annotations

import time
from typing import Final

from commlens.blackbox import board as B
from commlens.verification.messages import CycleStep
from commlens.verification.peers import Peers

CYCLE_AFTER_NS: Final = 300_000_000  # a rank that has waited for less may be about to continue
Step = tuple[int, int, int]  # a rank, and the key of the channel and the number of the collective that it waits in


class Cycles:
    """Finds the cycle that this rank waits in."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def find(self) -> list[Step] | None:
        """Return the ranks that wait for each other, or None unless that is proven.

        It is proven if each rank of the cycle issues from one thread only and waits for the next rank before it issues.
        """
        path: list[Step] = []
        rank = self._peers.rank
        while True:
            state = self._waits_in(rank)
            if state is None:
                return None
            path.append((rank, *state))
            successors = self._absent_from(*state)
            if self._peers.rank in successors:
                return self._canonical(path) if len(path) > 1 else None
            following = next((r for r in sorted(successors) if r not in {step[0] for step in path} and self._waits_in(r) is not None), None)
            if following is None:
                return None
            rank = following

    def describe(self, step: Step) -> CycleStep:
        """Return a step as a refusal shows it."""
        rank, key, number = step
        board = self._peers[rank]
        slot = board.slot(key)
        seen = board.announced(slot, number) if slot else None
        blob = (board.blob(seen[1]) if seen is not None else None) or {}
        group = (board.channel(key) or {}).get("group", "?")
        collective = f"{blob.get('op', 'a collective')} #{number & B.NUMBER_MASK} of group {group}"
        return CycleStep(rank, collective, str(blob.get("where", "")), sorted(self._absent_from(key, number)))

    def _canonical(self, cycle: list[Step]) -> list[Step]:
        """Return the cycle in the form that every rank in it finds.

        Of the ranks that wait in the same collective, the lowest represents all; the lowest rank of the cycle comes first.
        """
        steps = []
        for at, (rank, key, number) in enumerate(cycle):
            missed = self._absent_from(*cycle[at - 1][1:])  # by the rank that waits for this one
            steps.append((next(r for r in sorted(missed | {rank}) if r == rank or self._waits_in(r) == (key, number)), key, number))
        first = steps.index(min(steps))
        return steps[first:] + steps[:first]

    def _waits_in(self, rank: int) -> tuple[int, int] | None:
        """Return the channel's key and the number of the collective that a rank has waited in for long, if its board says so."""
        board = self._peers.known(rank)
        if board is None or board.word(B.THREADS) != 1:
            return None
        key, number, since = board.word(B.WAITING), board.word(B.WAITING_NUMBER), board.word(B.WAITING_SINCE)
        return (key, number) if key and since and time.monotonic_ns() - since > CYCLE_AFTER_NS else None

    def _absent_from(self, key: int, number: int) -> set[int]:
        """Return the ranks that have not announced this collective, as far as boards show."""
        absent = set()
        for rank in self._peers.members(key):
            board = self._peers.known(rank)
            if board is not None:
                slot = board.slot(key)
                if not slot or board.last_number(slot) < number:
                    absent.add(rank)
        return absent
