"""The boards of the other ranks on this node."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

from commlens.blackbox import board as B
from commlens.blackbox import job_dirs
from commlens.blackbox.board import PeerBoard
from commlens.text import ranks_phrase, verb

log = logging.getLogger("commlens")


class Peers:
    """Boards by rank, opened on demand. Usually all ranks have created theirs before the first group exists."""

    def __init__(self, folder: Path, rank: int, own: Path, counts_from: int) -> None:
        """Look for boards in a folder.

        Args:
            folder: the job's folder of black boxes.
            rank: this rank.
            own: the path of this rank's board.
            counts_from: this rank's word ``COUNTS_FROM``; boards with another value number collectives differently and are ignored.
        """
        self.rank = rank
        self.unverified: set[int] = set()
        self._folder = folder
        self._own_path = own
        self._counts_from = counts_from
        self._boards: dict[int, PeerBoard] = {}
        self._own: PeerBoard | None = None
        self._warned: set[int] = set()

    def get(self, rank: int) -> PeerBoard | None:
        """Return a rank's board; None if the rank is on another node or does not verify."""
        found = self._boards.get(rank)
        if found is None and rank not in self.unverified:
            for path in sorted(self._folder.glob(f"rank{rank}.*{B.SUFFIX}")):
                try:
                    board = PeerBoard(path)
                except (OSError, ValueError):
                    continue
                if job_dirs.start_ticks(board.pid) == board.start_ticks and board.word(B.COUNTS_FROM) == self._counts_from:
                    found = self._boards[rank] = board
            if found is None:
                self.unverified.add(rank)
        return found

    def among(self, members: Iterable[int]) -> list[int]:
        """Return those of a group's other ranks whose boards can be read here."""
        return [rank for rank in members if rank != self.rank and self.get(rank) is not None]

    def known(self, rank: int) -> PeerBoard | None:
        """Return a rank's board, or this rank's own, if it has been opened."""
        return self.own() if rank == self.rank else self._boards.get(rank)

    def ranks(self) -> set[int]:
        """Return the ranks whose boards have been opened."""
        return set(self._boards)

    def __getitem__(self, rank: int) -> PeerBoard:
        board = self.known(rank)
        if board is None:
            raise KeyError(rank)
        return board

    def own(self) -> PeerBoard:
        """Return this rank's own board, as peers read it."""
        if self._own is None:
            self._own = PeerBoard(self._own_path)
        return self._own

    def members(self, key: int) -> set[int]:
        """Return a channel's ranks, if any board describes the channel."""
        for board in (self.own(), *self._boards.values()):
            description = board.channel(key)
            if description is not None:
                return {rank for rank in description.get("ranks", ()) if isinstance(rank, int)}
        return set()

    def warn_about(self, members: Iterable[int], peers: list[int]) -> None:
        """Warn once of each rank on this node whose collectives are not compared."""
        here = _ranks_of_this_node(self.rank)
        new = [rank for rank in members if rank != self.rank and rank not in peers and rank not in self._warned and rank in here]
        if new:
            self._warned.update(new)
            log.warning(
                "commlens: %s %s not verify collectives (started without --debug?); rank %d compares with the other ranks only",
                ranks_phrase(new), verb(new, "does", "do"), self.rank,
            )  # fmt: skip

    def take_unwarned(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks that no warning has named yet, and count them as named."""
        new = [rank for rank in ranks if rank not in self._warned]
        self._warned.update(new)
        return new


def _ranks_of_this_node(rank: int) -> range:
    try:
        local, size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError):
        return range(0)
    return range(rank - local, rank - local + size)
