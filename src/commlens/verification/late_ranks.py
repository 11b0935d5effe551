"""Judge the ranks that a collective still waits for, and refuse it if it is hopeless: a rank has
ended, ranks wait for one another in a cycle, or a rank has not arrived within the timeout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from commlens.boards import board as B
from commlens.boards.board import Board
from commlens.model.ops import NEEDS_ALL, POINT_TO_POINT, SENT_BY_ROOT
from commlens.tap.interned_args import InternedArgs
from commlens.verification import messages
from commlens.verification.channels import BoardArgs, BoardCode, Pending, VerifiedChannel
from commlens.verification.comparison import Comparison, table_row
from commlens.verification.cycles import CYCLE_AFTER_NS, BoardWait, Cycles
from commlens.verification.messages import Subject
from commlens.verification.peers import HAS_FINISHED, Peers
from commlens.verification.ready_clock import ReadyClock
from commlens.verification.refusals import Refusals
from commlens.verification.whereabouts import whereabouts

CHECK_EVERY_NS: Final = 50_000_000  # checks of whether absent ranks are alive, and of cycles
# the longest from a rank's last use of its connections to its last note on its board
ENDING_NS: Final = 2_000_000_000


def needed(args: InternedArgs | BoardArgs, ranks: list[int], own: int) -> list[int]:
    """Return those of ``ranks`` without which the op cannot complete on rank ``own``."""
    op = args.op
    if op in NEEDS_ALL:
        return ranks
    if op in POINT_TO_POINT:
        return ranks if op == "recv" else []
    root = args.content["root"]
    if op in SENT_BY_ROOT:
        return [rank for rank in ranks if rank == root]
    return ranks if root == own else []


class LateRanks:
    """Refuses a collective that some peer will not join."""

    def __init__(
        self,
        folder: Path,
        board: Board,
        bells: Any,
        peers: Peers,
        comparison: Comparison,
        refusals: Refusals,
        timeout_s: Callable[[], float],
    ) -> None:
        """Judge late ranks.

        Args:
            folder: the job's folder of black boxes.
            board: this rank's board, on which it asks other nodes where their ranks are.
            bells: wakes the relay for such a question.
            peers: the peers' boards.
            comparison: compares announcements that arrive in the last moment.
            refusals: takes the refusals.
            timeout_s: returns how many seconds a peer may be silent.
        """
        self._folder = folder
        self._board = board
        self._bells = bells
        self._peers = peers
        self._comparison = comparison
        self._refusals = refusals
        self._cycles = Cycles(peers, refusals)
        self._timeout_s = timeout_s
        # by channel: the number of the collective that ranks are late for, and its clock
        self._clocks: dict[int, tuple[int, ReadyClock]] = {}

    def clock(self, pending: Pending) -> ReadyClock:
        """Return the clock of this collective, which runs since its first check."""
        number, clock = self._clocks.get(pending.channel.key, (None, None))
        if clock is None or number != pending.number:
            clock = ReadyClock()
            self._clocks[pending.channel.key] = pending.number, clock
        return clock

    # --- when a collective is checked

    def refuse_if_hopeless(self, pending: Pending, absent: list[int], waited_ns: int) -> None:
        """Refuse the op if an absent rank has ended, if the ranks wait for one another in a cycle,
        or if an absent rank has not arrived within the timeout.

        Raises:
            DistributedOperationException: one of these is so.
        """
        if not absent:
            return  # all others have just arrived, or are given up
        clock, pids = self.clock(pending), self._peers.pids_here(absent)
        clock.watch(pids)
        self._refuse_if_dead(pending, absent, waited_ns)
        self._peers.give_up_without_relay(absent)
        if self._peers.any_doubtful(absent):
            return  # its announcement may be on the way
        if waited_ns > CYCLE_AFTER_NS:
            self._refuse_if_in_cycle(pending, waited_ns)
        timeout_ns = self._timeout_s() * 1e9
        if timeout_ns and clock.is_over(timeout_ns, pids, waited_ns):
            self._refuse_missing(pending, absent, waited_ns)

    def refuse_if_ended(self, pending: Pending) -> None:
        """Refuse the op at once if a rank that it needs has finished: if C++ waits for it, there is
        no later check.

        Raises:
            DistributedOperationException: a rank that it needs has finished.
        """
        absent = self._needed(pending)
        if any(self._peers.how_it_ended(rank) == HAS_FINISHED for rank in absent):
            self.refuse_if_hopeless(pending, absent, 0)

    def check_in_flight(self, channel: VerifiedChannel, waited_ns: int) -> None:
        """Check the ranks that have not joined a channel's oldest collective in flight, which a
        thread has waited for so long.

        Raises:
            DistributedOperationException: one that it needs has ended, or is late.
        """
        pending = self._first_unanswered(channel)
        absent = self._needed(pending) if pending is not None else []
        if pending is not None and absent:
            waits_since = time.monotonic_ns() - waited_ns
            self._board.set_waiting(channel.key, pending.number, waits_since)
            self.refuse_if_hopeless(pending, absent, waited_ns)

    def refuse_failed(self, channels: Iterable[VerifiedChannel], *, timed_out: bool) -> None:
        """Refuse a collective that failed in the backend, because a rank has ended or, with
        ``timed_out``, did not arrive.

        Raises:
            DistributedOperationException: there is such a rank.
        """
        clock = ReadyClock()
        while failed := list(filter(None, map(self._first_unanswered, channels))):
            for pending in failed:
                self.refuse_if_hopeless(pending, pending.absent, 0)
                absent = self._needed(pending)
                if timed_out and absent and not self._peers.any_doubtful(absent):
                    self._refuse_missing(pending, absent, self._timeout_s() * 1e9)
            pids = {pid for each in failed for pid in self._peers.pids_here(each.absent)}
            clock.watch(pids)
            if clock.is_over(ENDING_NS, pids):
                return
            time.sleep(CHECK_EVERY_NS / 1e9)
            self._refusals.raise_new()

    def _needed(self, pending: Pending) -> list[int]:
        return needed(pending.args, pending.absent, self._peers.rank)

    def _first_unanswered(self, channel: VerifiedChannel) -> Pending | None:
        """Return the first collective that this rank has announced on a channel and others have
        not, if any. Its number counts within a round, which the upper bits give: a rank that is
        still in an earlier round has announced none of this one.
        """
        own = self._peers.own
        last = own.last_number(channel.slot)
        behind: dict[int, int] = {}  # rank: the next number that it has not announced
        for rank in channel.peers:
            slot = self._peers[rank].slot(channel.key)
            theirs = self._peers[rank].last_number(slot) if slot else 0
            if theirs < last and self._peers[rank].word(B.ACTIVE):
                behind[rank] = max(theirs, last & ~B.NUMBER_MASK) + 1
        number = min(behind.values(), default=0)
        seen = own.announced(channel.slot, number)
        blob = own.blob(seen[1]) if seen is not None else None
        if seen is None or blob is None:
            return None
        pending = Pending(channel, number, seen[0], BoardCode(seen[2]), BoardArgs(blob))
        pending.absent = [rank for rank in behind if behind[rank] == number]
        return pending

    # --- a rank has ended

    def _refuse_if_dead(self, pending: Pending, absent: Iterable[int], waited_ns: int) -> None:
        ended = {rank: how for rank in absent if (how := self._peers.how_it_ended(rank))}
        if not ended:
            return
        self._comparison.compare(pending)  # a rank may have announced just before it ended
        ended = {rank: how for rank, how in ended.items() if rank in pending.absent}
        if set(ended.values()) == {HAS_FINISHED}:
            self._refuse_if_tags_differ(pending, waited_ns, HAS_FINISHED)
        if ended:
            self._refusals.post(pending, self._absence("dead", pending, ended, waited_ns))

    def _absence(
        self, kind: str, pending: Pending, where: Mapping[int, str], waited_ns: float
    ) -> messages.WordedRefusal:
        subject, rows = self._comparison.subject(pending), self._comparison.rows(pending)
        return messages.absence(kind, subject, rows, where, waited_ns / 1e9)

    # --- ranks wait for one another

    def _refuse_if_in_cycle(self, pending: Pending, waited_ns: int) -> None:
        """Refuse the collectives of ranks that wait for one another, if they still do so a moment
        later: their boards are not read at the same time.
        """
        cycle = self._cycles.find()
        if not cycle:
            return
        time.sleep(2 * CHECK_EVERY_NS / 1e9)
        if self._cycles.find() == cycle:
            self._comparison.compare(pending)
            self._refuse_if_tags_differ(pending, waited_ns)
            concerned = {member for wait in cycle for member in self._peers.members(wait.key)}
            waits, ops = zip(*map(self._cycles.describe, cycle), strict=True)
            refused = messages.cycle(waits, set(ops))
            about = cycle[0].key, cycle[0].number  # the same on every rank of the cycle
            self._refusals.post(pending, refused, about=about, ranks=concerned)

    # --- a rank has not arrived

    def _refuse_missing(self, pending: Pending, absent: list[int], waited_ns: float) -> None:
        """Refuse the collective because ranks are late. If other ranks hold all of them up in
        another one, refuse that one for the ranks it lacks.

        Return if they have arrived meanwhile, or if it is no longer known whether they live.
        """
        # a rank that has waited for less than half of this time was late before it began to wait
        cycles, half = self._cycles, int(waited_ns) // 2
        if chain := cycles.chain(absent, half):
            self._refuse_held_up(pending, chain, waited_ns)  # raises
        # name the ranks that no other rank holds up, if there are such
        absent = [rank for rank in absent if not cycles.wait_of(rank, half)] or absent
        where = self._whereabouts(absent)
        self._comparison.compare(pending)
        if not set(where) <= set(pending.absent) or self._peers.any_doubtful(where):
            return
        self._refuse_if_tags_differ(pending, waited_ns, next(iter(where.values()), ""))
        members = cycles.held_up(set(pending.channel.members), half)
        refused = self._absence("missing", pending, where, waited_ns)
        self._refusals.post(pending, refused, ranks=members)

    def _refuse_held_up(
        self, pending: Pending, chain: Sequence[BoardWait], waited_ns: float
    ) -> NoReturn:
        """Refuse the collective at the end of a chain of waits: rank 0 waits for rank 1, which
        waits in another collective for rank 2, which is late.

        Args:
            pending: the collective in which this rank waits.
            chain: the waits of other ranks, from one that this rank waits for.
            waited_ns: how long this rank has waited.
        """
        cycles = self._cycles
        own = BoardWait(self._peers.rank, pending.channel.key, pending.number)
        last, key, number = chain[-1]
        late = [
            rank for rank in sorted(cycles.absent_from(key, number)) if not cycles.wait_of(rank)
        ]
        description = self._peers[last].channel(key) or {}
        subject = Subject(
            description.get("group"),
            description.get("ranks", []),
            number & B.NUMBER_MASK,
        )
        rows = [table_row(rank, blob) for rank, blob in cycles.announced(key, number).items()]
        where = self._whereabouts(late)
        behind = [cycles.describe(wait)[0] for wait in (own, *chain[:-1])]
        refused = messages.absence("missing", subject, rows, where, waited_ns / 1e9, behind)
        members = cycles.held_up(
            {rank for wait in (own, *chain) for rank in self._peers.members(wait.key)},
            int(waited_ns) // 2,
        )
        self._refusals.post(pending, refused, about=(key, number), ranks=members)

    # --- a message has another tag

    def _refuse_if_tags_differ(self, pending: Pending, waited_ns: float, where: str = "") -> None:
        """Refuse a message whose peer waits for one with another tag, or has sent one. Both ranks
        may be the first to see it, and post the same refusal: about the receive, whose row is the
        first.
        """
        if not pending.channel.family:
            return
        compared, subject = self._comparison, self._comparison.subject(pending)
        for rank in pending.absent:
            for key, number, blob in self._other_tags(pending, rank):
                own, other = compared.own_row(pending), table_row(rank, blob)
                if pending.args.op == "recv":
                    refused = messages.tags(subject, (own, other), waited_ns / 1e9, where)
                    about = pending.channel.key, pending.number
                else:
                    refused = messages.tags(subject, (other, own), waited_ns / 1e9, "")
                    about = key, number
                self._refusals.post(pending, refused, about=about)

    def _other_tags(self, pending: Pending, rank: int) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Yield the peer's first message of each other tag that this rank has not matched: its
        channel's key, its number and its arguments.
        """
        board, own = self._peers[rank], self._peers.own
        for key, description in board.channels():
            if description.get("family") != pending.channel.family or key == pending.channel.key:
                continue
            newest, slot = board.last_number(board.slot(key)), own.slot(key)
            matched = own.last_number(slot) & B.NUMBER_MASK if slot else 0
            number = (newest & ~B.NUMBER_MASK) + matched + 1
            if (blob := board.announced_blob(key, number)) is not None:
                yield key, number, blob

    # --- where a rank is

    def _whereabouts(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return what absent ranks are doing, by rank; "" if unknown."""
        boards = {rank: self._peers[rank] for rank in ranks}
        here = {rank: board.pid for rank, board in boards.items() if not board.is_remote}
        elsewhere = [rank for rank in boards if rank not in here]
        found = whereabouts(self._folder, here) | self._peers.ask(elsewhere, self._ask)
        return {rank: found[rank] for rank in boards}

    def _ask(self, question: int) -> None:
        """Put a question for the relay of another node on this rank's board (see ``B.ASKS``)."""
        self._board.set_word(B.ASKS, question)
        self._bells.ring([(question & 0xFFFFFFFF) - 1])  # the rank that it is about
