"""The boards of the other ranks on this node."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from commlens import launchers
from commlens.blackbox import job_dirs
from commlens.boards import board as B
from commlens.boards.board import PeerBoard
from commlens.text import ranks_and_verb

log = logging.getLogger("commlens")

HAS_FINISHED: Final = "has finished"
FRESH_NS: Final = 1_500_000_000  # three beats of a relay: what is older may be a cut network
# the relay itself gives up a node that is silent for 5 s; it may be stopped, too
GIVE_UP_NS: Final = 7_000_000_000
AWAIT_BOARDS_S: Final = 10.0
ANSWER_S: Final = 4.0  # the longest wait for another node's answer
_ASK_EVERY_S: Final = 0.1
_LOW_HALF: Final = (1 << 32) - 1


class Peers:
    """Boards by rank, opened on demand. Usually all ranks have created theirs before the first
    group exists.

    Those of ranks on other nodes are copies, which the node's relay keeps (``relay.py``).
    """

    def __init__(self, folder: Path, rank: int, own: Path, counts_from: int) -> None:
        """Look for boards in a folder.

        Args:
            folder: the job's folder of black boxes.
            rank: this rank.
            own: the path of this rank's board.
            counts_from: this rank's word ``COUNTS_FROM``; boards with another value number
                collectives differently and are ignored.
        """
        self.rank = rank
        self.unverified: set[int] = set()
        self._folder = folder
        self.own = PeerBoard(own)  # as peers read it
        self._counts_from = counts_from
        self._boards: dict[int, PeerBoard] = {}
        self._own_start = job_dirs.start_ticks(os.getpid())
        self._questions = 0
        self._warned: set[int] = set()
        self._awaited: set[int] = set()

    def get(self, rank: int) -> PeerBoard | None:
        """Return a rank's board; None if the rank does not verify, or is on a node that is not
        linked.
        """
        found = self._boards.get(rank)
        if found is None and rank not in self.unverified:
            for path in sorted(self._folder.glob(f"rank{rank}.*{B.SUFFIX}")):
                try:
                    board = PeerBoard(path)
                except (OSError, ValueError):
                    continue
                if self._is_of_this_start(board) and board.word(B.COUNTS_FROM) == self._counts_from:
                    found = self._boards[rank] = board
            if found is None:
                self.unverified.add(rank)
        return found

    def _is_of_this_start(self, board: PeerBoard) -> bool:
        """Return whether a board is of a process that lives, or a copy by a relay of this start of
        the job.

        A rank starts the relay, so one that is older than this process belongs to an earlier start.
        """
        lives = job_dirs.start_ticks(board.pid) == board.start_ticks
        return lives and (
            not board.is_remote or (board.start_ticks >= self._own_start and not self._counts_from)
        )

    def among(self, members: Iterable[int]) -> list[int]:
        """Return those of a group's other ranks whose boards can be read here."""
        return [rank for rank in members if rank != self.rank and self.get(rank) is not None]

    def await_boards(self, members: Iterable[int]) -> None:
        """Wait until those of a group's ranks that live on this node have their boards, for ten
        seconds at most, once for each rank.

        gloo's groups come to be only when all ranks are there; NCCL's do not.
        """
        here = launchers.ranks_of_node(os.environ, self.rank)
        missing = {
            rank
            for rank in members
            if rank != self.rank and rank in here and rank not in self._boards
        } - self._awaited
        self._awaited |= missing
        until = time.monotonic() + AWAIT_BOARDS_S
        while missing and time.monotonic() < until:
            self.unverified -= missing
            missing = {rank for rank in missing if self.get(rank) is None}
            if missing <= self._ended_ranks():
                break
            if missing:
                time.sleep(0.01)

    def _ended_ranks(self) -> set[int]:
        """Return the ranks of this node whose processes with a black box have all ended."""
        owners = list(filter(None, map(job_dirs.owner, job_dirs.boxes(self._folder))))
        return {owner.rank for owner in owners} - {
            owner.rank for owner in owners if not owner.has_ended and not owner.closed
        }

    def known(self, rank: int) -> PeerBoard | None:
        """Return a rank's board, or this rank's own, if it has been opened."""
        return self.own if rank == self.rank else self._boards.get(rank)

    def ranks(self) -> set[int]:
        """Return the ranks whose boards have been opened."""
        return set(self._boards)

    def __getitem__(self, rank: int) -> PeerBoard:
        board = self.known(rank)
        if board is None:
            raise KeyError(rank)
        return board

    def members(self, key: int) -> set[int]:
        """Return a channel's ranks, if any board describes the channel."""
        for board in (self.own, *self._boards.values()):
            description = board.channel(key)
            if description is not None:
                return {rank for rank in description.get("ranks", ()) if isinstance(rank, int)}
        return set()

    def elsewhere(self, ranks: Iterable[int]) -> list[int]:
        """Return those of these ranks that are on other, linked nodes."""
        return [
            rank
            for rank in ranks
            if rank in self._boards and self._boards[rank].word(B.REMOTE) == B.LINKED
        ]

    def all_elsewhere(self) -> list[int]:
        """Return all ranks on other, linked nodes that have not ended."""
        names = {
            path.name.removeprefix("rank").split(".")[0]
            for path in self._folder.glob(f"rank*{B.SUFFIX}")
        }
        ranks = sorted(
            int(name) for name in names if name.isdecimal() and self.get(int(name)) is not None
        )
        return [
            rank
            for rank in self.elsewhere(ranks)
            if not self[rank].word(B.CLOSED) and not self[rank].word(B.ENDED)
        ]

    def how_it_ended(self, rank: int) -> str:
        """Return how a rank's process ended; "" while it lives or if that is not known."""
        board = self[rank]
        if board.word(B.CLOSED):
            return HAS_FINISHED
        ended = (
            bool(board.word(B.ENDED))
            if board.is_remote
            else job_dirs.process_has_ended(board.pid, board.start_ticks)
        )
        return "was killed or crashed" if ended else ""

    def pids_here(self, ranks: Iterable[int]) -> list[int]:
        """Return the processes here that these ranks' announcements wait for: the ranks, and
        the relay for those on other nodes.
        """
        return [*{self[rank].pid for rank in ranks}]

    def any_doubtful(self, ranks: Iterable[int]) -> bool:
        """Return whether one of these ranks is on another node from which no sign of life has come
        for a while, or which is given up: whether the rank lives is then not known.
        """
        fresh_ns = time.monotonic_ns() - FRESH_NS
        return any(
            board.word(B.HEARD) < fresh_ns or not board.word(B.ACTIVE)
            for board in self._copies(ranks)
        )

    def give_up_without_relay(self, ranks: Iterable[int]) -> None:
        """Give up the ranks of all other nodes, and warn, if the relay of this node has stopped, as
        its copies of these ranks' boards show.
        """
        kept = [board for board in self._copies(ranks) if board.word(B.ACTIVE)]
        longest_ns = time.monotonic_ns() - GIVE_UP_NS
        if any(
            board.word(B.HEARD) < longest_ns
            or job_dirs.process_has_ended(board.pid, board.start_ticks)
            for board in kept
        ):
            log.warning(
                "commlens: the relay of this node has stopped: rank %d no longer compares with"
                " ranks on other nodes",
                self.rank,
            )
            for board in self._boards.values():
                if board.is_remote:
                    board.give_up()

    def _copies(self, ranks: Iterable[int]) -> list[PeerBoard]:
        """Return the boards of those of these ranks that are on other nodes and have not ended."""
        return [
            board
            for board in map(self.__getitem__, ranks)
            if board.is_remote and not board.word(B.CLOSED) and not board.word(B.ENDED)
        ]

    def ask(self, ranks: Sequence[int], set_question: Callable[[int], None]) -> dict[int, str]:
        """Return what ranks on other nodes are doing, as their nodes answer; "" if no answer comes.

        Args:
            ranks: the ranks. All together are waited for ``ANSWER_S``, or one question each.
            set_question: writes the word ``ASKS`` of this rank's board.
        """
        before, told = {rank: self[rank].answer for rank in ranks}, dict.fromkeys(ranks, "")
        until = time.monotonic() + ANSWER_S
        # An answer is empty while the rank's watchdog thread, which knows its line, has no core.
        while (left := [rank for rank in ranks if not told[rank]]) and time.monotonic() < until:
            for rank in left:
                self._questions += 1
                set_question(self._questions << 32 | (rank + 1) & _LOW_HALF)
                time.sleep(_ASK_EVERY_S)
                answer = self[rank].answer
                told[rank] = answer[1] if answer != before[rank] else ""
        return told

    def warn_about(self, members: Iterable[int], peers: list[int]) -> None:
        """Warn once of each rank on this node whose collectives are not compared."""
        here = launchers.ranks_of_node(os.environ, self.rank)
        new = self.take_unwarned(
            rank for rank in members if rank in here and rank not in (self.rank, *peers)
        )
        if not new:
            return
        owners = filter(None, map(job_dirs.owner, job_dirs.boxes(self._folder)))
        lives = {owner.rank for owner in owners if not owner.has_ended and not owner.closed}
        without = [rank for rank in new if rank in lives]
        ended = [rank for rank in new if rank not in lives]
        reasons = [f"{ranks_and_verb(ended, 'has', 'have')} ended"] if ended else []
        if without:
            reasons.append(
                f"{ranks_and_verb(without, 'does', 'do')} not verify collectives (started without"
                " --debug?)"
            )
        log.warning(
            "commlens: %s; rank %d compares with the other ranks only",
            ", ".join(reasons),
            self.rank,
        )

    def take_unwarned(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks that no warning has named yet, and count them as named."""
        new = [rank for rank in ranks if rank not in self._warned]
        self._warned.update(new)
        return new
