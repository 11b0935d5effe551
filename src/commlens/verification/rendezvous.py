"""The rendezvous where ranks start to verify in the middle of a program: they wait for each other,
for a limited time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from commlens.blackbox import job_dirs
from commlens.boards import board as B
from commlens.boards.board import Board
from commlens.verification.peers import Peers
from commlens.verification.ready_clock import ReadyClock

PATIENCE_NS: Final = 10_000_000_000  # the longest wait for ranks that do not arrive
NAP_S: Final = 500e-6
# number for a rank that verifies from its first collective to its last
ALL_RENDEZVOUS: Final = 1 << 62


class Rendezvous:
    """This rank's first, second, ... start of verification."""

    def __init__(
        self,
        folder: Path,
        board: Board,
        peers: Peers,
        late: frozenset[int],
        timeout_s: Callable[[], float],
        find_new_boards: Callable[[], None],
    ) -> None:
        """Meet the other ranks of a node.

        Args:
            folder: the job's folder of black boxes.
            board: this rank's board, which shows that it has arrived.
            peers: the peers' boards.
            late: the ranks that enable verification in mid-job together with this one.
            timeout_s: returns how many seconds a peer may be silent.
            find_new_boards: looks for boards that were created since.
        """
        self._folder = folder
        self._board = board
        self._peers = peers
        self._late = late
        self._timeout_s = timeout_s
        self._find_new_boards = find_new_boards
        self._count = 0
        self._expected: dict[int, list[int]] = {}  # ranks to wait for: their processes here
        self._missed: dict[int, int] = {}  # rank: how often it did not arrive

    def meet(self) -> list[int]:
        """Wait for all recorded ranks on this node and the ranks of linked nodes.

        They need not arrive, so the wait is limited, and shorter for ranks that missed one.

        Returns:
            The ranks that did not arrive, named once each.
        """
        clock = ReadyClock()
        patience = min(int(self._timeout_s() * 1e9) or PATIENCE_NS, PATIENCE_NS)
        self._expected = self._expected or self._recorded_ranks()
        number = self._count + 1
        self._board.set_word(B.PRESENT, number)
        while True:
            absent = self._absent(number)
            missing = [rank for rank, is_alone in absent.items() if not is_alone]
            clock.watch([pid for rank in missing for pid in self._expected[rank]])
            if all(
                clock.is_over(patience // 10 ** self._missed.get(rank, 0), self._expected[rank])
                for rank in missing
            ):
                break
            time.sleep(NAP_S)
            self._expected = self._recorded_ranks()
        if absent:
            # Do not count it: the same number is the next rendezvous, for ranks that arrive later,
            # too.
            self._board.set_word(B.PRESENT, self._count)
            self._board.set_word(B.ALONE, 1)
        else:
            self._count = number
        for rank in missing:
            self._missed[rank] = self._missed.get(rank, 0) + 1
        return self._peers.take_unwarned(missing)

    def _absent(self, number: int) -> dict[int, bool]:
        """Return the ranks that have not reached a rendezvous, and whether each goes on alone."""
        self._find_new_boards()
        boards = {rank: self._peers.get(rank) for rank in self._expected}
        return {
            rank: board is not None and board.word(B.ALONE) == 1
            for rank, board in boards.items()
            if board is None or board.word(B.PRESENT) < number
        }

    def _recorded_ranks(self) -> dict[int, list[int]]:
        """Return the other live ranks, by black boxes here and boards of others, and their
        processes here.
        """
        ranks: dict[int, list[int]] = {
            rank: [] for rank in (*self._late, *self._peers.all_elsewhere())
        }
        for box in job_dirs.boxes(self._folder):
            rank = job_dirs.box_rank(box)
            if rank != self._peers.rank and job_dirs.has_ended(box) is False:
                ranks[rank] = [job_dirs.box_pid(box)]
        return dict(sorted(ranks.items()))
