"""Ranks that wait for each other in a ring, as their boards tell it."""

from __future__ import annotations

import time
from typing import Final

from commlens.blackbox import board as B
from commlens.verification.peers import Peers

CYCLE_AFTER_NS: Final = 300_000_000  # a rank that has waited for less is about to go on, perhaps
Step = tuple[int, int, int]  # a rank, and the channel's key and the number of what it waits in


class Cycles:
    """Finds the ring that this rank waits in."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def find(self) -> list[Step] | None:
        """Ranks that wait for each other; None unless it is proven.

        Proven is it among ranks of which each issues from one thread only and waits before issue for the next.
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
                return self._told_alike(path) if len(path) > 1 else None
            following = next((r for r in sorted(successors) if r not in {step[0] for step in path} and self._waits_in(r) is not None), None)
            if following is None:
                return None
            rank = following

    def edge(self, rank: int, key: int, number: int) -> tuple[int, str, str, list[int]]:
        """One step in words: the rank, its collective, the line, and for whom it waits."""
        board = self._peers[rank]
        slot = board.slot(key)
        seen = board.announced(slot, number) if slot else None
        blob = (board.blob(seen[1]) if seen is not None else None) or {}
        group = (board.channel(key) or {}).get("group", "?")
        return (
            rank,
            f"{blob.get('op', 'a collective')} #{number & B.NUMBER_MASK} of group {group}",
            str(blob.get("where", "")),
            sorted(self._absent_from(key, number)),
        )

    def _told_alike(self, cycle: list[Step]) -> list[Step]:
        """The cycle as every rank that waits in it tells it: of those that wait in one place, the first; the lowest rank at the start."""
        alike = []
        for at, (rank, key, number) in enumerate(cycle):
            missed = self._absent_from(*cycle[at - 1][1:])  # by the rank that waits for this one
            alike.append((next(r for r in sorted(missed | {rank}) if r == rank or self._waits_in(r) == (key, number)), key, number))
        first = alike.index(min(alike))
        return alike[first:] + alike[:first]

    def _waits_in(self, rank: int) -> tuple[int, int] | None:
        board = self._peers.known(rank)
        if board is None or board.word(B.THREADS) != 1:
            return None
        key, number, since = board.word(B.WAITING), board.word(B.WAITING_NUMBER), board.word(B.WAITING_SINCE)
        return (key, number) if key and since and time.monotonic_ns() - since > CYCLE_AFTER_NS else None

    def _absent_from(self, key: int, number: int) -> set[int]:
        """Who has not announced this collective, as far as boards tell."""
        absent = set()
        for rank in self._peers.any_knows(key):
            its = self._peers.known(rank)
            if its is not None:
                slot = its.slot(key)
                if not slot or its.last_number(slot) < number:
                    absent.add(rank)
        return absent
