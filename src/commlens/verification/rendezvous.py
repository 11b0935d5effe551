"""Where verification begins in the middle of a program: ranks let each other come there, for a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from commlens.blackbox import board as B
from commlens.blackbox import job_dirs
from commlens.blackbox.board import Board
from commlens.verification.peers import Peers, is_gone

ENTRY_PATIENCE_NS: Final = 10_000_000_000  # who enters `commlens.verify()` waits for the others at most so long
ENTRY_NAP_S: Final = 500e-6
EVERY_MEETING: Final = 1 << 62  # of whoever verifies from first to last


class Meetings:
    """The first, the second ... time that this rank begins to verify."""

    def __init__(
        self, folder: Path, board: Board, peers: Peers, late: frozenset[int], timeout_s: Callable[[], float], look_again: Callable[[], None]
    ) -> None:
        """Meet the ranks of a node.

        Args:
            folder: the job's, with the ranks' black boxes.
            board: ours, which says that we are there.
            peers: the others.
            late: ranks that switch verification on together with us, in the middle of a job.
            timeout_s: how long a peer may be silent.
            look_again: finds boards that were made since.
        """
        self._folder = folder
        self._board = board
        self._peers = peers
        self._late = late
        self._timeout_s = timeout_s
        self._look_again = look_again
        self._count = 0
        self._here: list[int] = []  # ranks to wait for
        self._in_vain: dict[int, int] = {}  # how often they did not come

    def meet(self) -> list[int]:
        """Let all recorded ranks of this node come; at most for a while, since they need not.

        Returns:
            Those that were waited for in vain for the first time. They are waited for less and less.
        """
        began = time.monotonic_ns()
        patience = min(int(self._timeout_s() * 1e9) or ENTRY_PATIENCE_NS, ENTRY_PATIENCE_NS)
        self._here = self._here or self._recorded_here()
        meeting = self._count + 1
        self._board.word(B.PRESENT, meeting)
        while True:
            absent = [rank for rank in self._here if not self._is_at(rank, meeting)]
            missing = [rank for rank in absent if not self._is_alone(rank)]
            waited = time.monotonic_ns() - began
            if not any(waited < patience // 10 ** self._in_vain.get(rank, 0) for rank in missing):
                break
            time.sleep(ENTRY_NAP_S)
            self._here = self._recorded_here()
        if absent:
            # Not counted: the meeting that did not come about is the next one, for those who come later, too.
            self._board.word(B.PRESENT, self._count)
            self._board.word(B.ALONE, 1)
        else:
            self._count = meeting
        for rank in missing:
            self._in_vain[rank] = self._in_vain.get(rank, 0) + 1
        return self._peers.first_warning_of(missing)

    def _recorded_here(self) -> list[int]:
        """The other ranks of the job that live on this node, by their boxes."""
        ranks = set(self._late)
        for box in job_dirs.boxes(self._folder):
            rank, pid = int(box.name.removeprefix("rank").split(".")[0]), job_dirs.box_pid(box)
            started = job_dirs.start_ticks(pid)
            if rank != self._peers.rank and started and not is_gone(pid, started):
                ranks.add(rank)
        return sorted(ranks)

    def _is_at(self, rank: int, meeting: int) -> bool:
        self._look_again()
        board = self._peers.get(rank)
        return board is not None and board.word(B.PRESENT) >= meeting

    def _is_alone(self, rank: int) -> bool:
        board = self._peers.get(rank)
        return board is not None and board.word(B.ALONE) == 1
