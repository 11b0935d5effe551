"""The other ranks of this node, by their boards."""

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
    """Boards by rank, found as they are asked for. Mostly all have made theirs before the first group was there."""

    def __init__(self, folder: Path, rank: int, own: Path, counts_from: int) -> None:
        """Look for boards in a folder.

        Args:
            folder: the job's.
            rank: this rank.
            own: its own board.
            counts_from: with whom to compare: the word ``COUNTS_FROM`` of boards whose numbers of collectives fit ours.
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
        """A rank's board, where it is on this node and verifies too."""
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
        """Those of a group's other ranks whose boards can be read here."""
        return [rank for rank in members if rank != self.rank and self.get(rank) is not None]

    def known(self, rank: int) -> PeerBoard | None:
        """A rank's board, or our own, where it was found before."""
        return self.own() if rank == self.rank else self._boards.get(rank)

    def __getitem__(self, rank: int) -> PeerBoard:
        board = self.known(rank)
        if board is None:
            raise KeyError(rank)
        return board

    def own(self) -> PeerBoard:
        """Our own board, as the others read it."""
        if self._own is None:
            self._own = PeerBoard(self._own_path)
        return self._own

    def any_knows(self, key: int) -> set[int]:
        """A channel's ranks, as far as boards tell."""
        for board in (self.own(), *self._boards.values()):
            description = board.channel(key)
            if description is not None:
                return {rank for rank in description.get("ranks", ()) if isinstance(rank, int)}
        return set()

    def warn_of(self, members: Iterable[int], peers: list[int]) -> None:
        """Name those of this node that nobody compares with, once each."""
        here = _ranks_of_this_node(self.rank)
        new = [rank for rank in members if rank != self.rank and rank not in peers and rank not in self._warned and rank in here]
        if new:
            self._warned.update(new)
            log.warning(
                "commlens: %s not verify collectives (started without --debug?): rank %d goes on, and compares with the others only",
                f"{ranks_phrase(new)} {verb(new, 'does', 'do')}", self.rank,
            )  # fmt: skip

    def first_warning_of(self, ranks: Iterable[int]) -> list[int]:
        """Those that nobody has been warned of yet."""
        new = [rank for rank in ranks if rank not in self._warned]
        self._warned.update(new)
        return new


def _ranks_of_this_node(rank: int) -> range:
    try:
        local, size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError):
        return range(0)
    return range(rank - local, rank - local + size)


def is_gone(pid: int, start_ticks: int) -> bool:
    """Whether the process that made a board has ended."""
    return job_dirs.start_ticks(pid) != start_ticks or process_state(pid) in ("Z", "")


def process_state(pid: int) -> str:
    """The letter that the kernel has for it; "" where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return "".join(text.rpartition(")")[2].split()[:1])
