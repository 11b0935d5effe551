"""Waiting for peers to announce: for whom, for how long, and what is found out about those who do not come.

Waiting is bounded, follows the op's own meaning, and is never taken for evidence of a deadlock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from commlens.blackbox import board as B
from commlens.blackbox import job_dirs
from commlens.blackbox.board import Board
from commlens.blackbox.reader import read_box
from commlens.errors import FormatError
from commlens.model.ops import POINT_TO_POINT
from commlens.tap.interned_args import InternedArgs
from commlens.verification.channels import Call, Pending
from commlens.verification.comparison import Comparison
from commlens.verification.cycles import CYCLE_AFTER_NS, Cycles
from commlens.verification.messages import absence_text, cycle_text, tag_text
from commlens.verification.peers import Peers, is_gone, process_state
from commlens.verification.refusals import Refusals

log = logging.getLogger("commlens")

NEEDS_ALL: Final = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier", "monitored_barrier"})
"""Wire ops that end on no rank before all have come."""

COLLECTING: Final = frozenset({"gather", "reduce"})
"""Wire ops that end on some ranks once the root is in them: it must not hold its own back until the last rank has come."""

LOOK_AROUND_NS: Final = 50_000_000  # between looks at whether the absent still live, and whether all wait for each other
WARN_AFTER_NS: Final = 10_000_000_000
SILENT_AFTER_S: Final = 1.0  # the watchdog thread's heart beats four times as often
HAS_FINISHED: Final = "has finished"
_now = time.monotonic_ns


def needed(asked: InternedArgs | Call, ranks: list[int], own: int) -> list[int]:
    """Without which of these ranks an op cannot end on rank ``own``."""
    op = asked.op
    if op in NEEDS_ALL:
        return ranks
    if op in POINT_TO_POINT:
        return ranks if op == "recv" else []
    root = asked.content["root"]
    if op in ("broadcast", "scatter"):
        return [rank for rank in ranks if rank == root]
    return ranks if root == own else []


def needed_at_issue(asked: InternedArgs, ranks: list[int], own: int) -> list[int]:
    """For which of these ranks it is waited before issue, for as long as it takes. Only where its caller waits for it anyway."""
    return needed(asked, ranks, own) if asked.synchronous and asked.op not in COLLECTING else []


def may_be_early(asked: InternedArgs) -> bool:
    """Whether a rank may legally leave an op before the others come, but mostly does not: so they are waited for for a while."""
    return asked.synchronous and asked.op not in NEEDS_ALL and asked.op not in POINT_TO_POINT


class Waiting:
    """Waits, and refuses where nobody will come."""

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
        """Wait for peers.

        Args:
            folder: the job's, with the ranks' black boxes.
            board: ours, which says that we wait.
            bells: what wakes us.
            peers: the others.
            comparison: what they have announced is compared as it comes.
            refusals: what others have refused ends our waiting.
            timeout_s: how long a peer may be silent, asked when it matters.
        """
        self._folder = folder
        self._board = board
        self._bells = bells
        self._peers = peers
        self._comparison = comparison
        self._refusals = refusals
        self._cycles = Cycles(peers)
        self._timeout_s = timeout_s

    def before_issue(self, pending: Pending, asked: InternedArgs, when_in_vain: Callable[[], None]) -> None:
        """As long as the op's meaning allows; ``when_in_vain`` is called once a program turns out not to meet where most do.

        Raises:
            DistributedOperationException: it must not be issued.
        """
        must = needed_at_issue(asked, pending.absent, self._peers.rank)
        if must:
            self.wait(pending, must)
        if pending.absent and may_be_early(asked) and pending.channel.rooted_patience_ns:
            self.wait(pending, pending.absent, pending.channel.rooted_patience_ns)
            if pending.absent:
                pending.channel.rooted_patience_ns = 0  # this program does not meet here: do not hold it up again
                when_in_vain()

    def before_wait(self, pending: Pending) -> None:
        """A thread is about to block until the op is done: all whom it needs must come.

        Raises:
            DistributedOperationException: they do not.
        """
        self.wait(pending, needed(pending.asked, pending.absent, self._peers.rank))

    def wait(self, pending: Pending, ranks: Iterable[int], patience_ns: int | None = None) -> None:
        """Until all of these have announced; at most for ``patience_ns``, where it is given.

        Raises:
            DistributedOperationException: one announced something that does not fit, or they do not come.
        """
        wanted = set(ranks)
        if not wanted & set(pending.absent):
            return
        began = _now()
        looked = began
        warned = False
        thread = threading.get_ident()
        if patience_ns is None:  # else it goes on by itself: no proof that ranks wait for each other
            self._board.waits(pending.channel.key, pending.number, began)
        try:
            while wanted & set(pending.absent):
                now = _now()
                first = next(rank for rank in pending.absent if rank in wanted)
                heard = self._bells.listen(first, thread)
                self._refusals.raise_new()
                self._comparison.compare(pending)
                if first in pending.absent:
                    self._bells.sleep(first, heard)
                    self._refusals.raise_new()
                    self._comparison.compare(pending)
                if patience_ns is not None and now - began > patience_ns:
                    return
                if now - looked > LOOK_AROUND_NS:
                    looked = now
                    absent = [rank for rank in pending.absent if rank in wanted]
                    self._look_around(pending, absent, now - began)
                    if not warned and now - began > WARN_AFTER_NS:
                        warned = True
                        log.warning(
                            "commlens: %s waits %.0f s before %s #%d of group %s for %s",
                            f"rank {self._peers.rank}", (now - began) / 1e9, pending.asked.op, pending.number & B.NUMBER_MASK,
                            self._comparison.subject(pending).group, ", ".join(f"rank {rank}" for rank in absent),
                        )  # fmt: skip
        finally:
            self._bells.awake(thread)
            self._board.waits(0, 0, 0)

    def refuse_if_ended(self, pending: Pending) -> None:
        """At once where a rank that the op needs has said goodbye: what nobody waits for in Python is never looked at again.

        Raises:
            DistributedOperationException: it has.
        """
        absent = needed(pending.asked, pending.absent, self._peers.rank)
        if any(self._peers[rank].word(B.CLOSED) for rank in absent):
            self._look_around(pending, absent, 0)

    def _look_around(self, pending: Pending, absent: list[int], waited_ns: int) -> None:
        subject = self._comparison.subject(pending)
        gone = {rank: words for rank in absent if (words := self._how_it_ended(rank))}
        if gone:
            self._comparison.compare(pending)  # it may have come just before
            gone = {rank: words for rank, words in gone.items() if rank in pending.absent}
            if set(gone.values()) == {HAS_FINISHED}:
                self._refuse_if_tags_differ(pending, waited_ns, HAS_FINISHED)
            if gone:
                text = absence_text("dead", subject, self._comparison.words(pending), gone, waited_ns / 1e9)
                self._refusals.post(pending, "dead", text)
        if waited_ns > CYCLE_AFTER_NS:
            cycle = self._cycles.find()
            if cycle:
                time.sleep(2 * LOOK_AROUND_NS / 1e9)
                if self._cycles.find() == cycle:
                    self._comparison.compare(pending)
                    self._refuse_if_tags_differ(pending, waited_ns)
                    concerned = {member for _, key, _ in cycle for member in self._peers.any_knows(key)}
                    text = cycle_text([self._cycles.edge(*step) for step in cycle])
                    self._refusals.post(pending, "cycle", text, about=cycle[0][1:], ranks=concerned)
        timeout_s = self._timeout_s()
        if timeout_s and waited_ns > timeout_s * 1e9:
            where = {rank: self._where_is(rank) for rank in absent}
            self._refuse_if_tags_differ(pending, waited_ns, next(iter(where.values()), ""))
            self._refusals.post(
                pending, "missing", absence_text("missing", subject, self._comparison.words(pending), where, waited_ns / 1e9)
            )

    def _refuse_if_tags_differ(self, pending: Pending, waited_ns: int, where: str = "") -> None:
        """Nobody sends what we wait for, and a message of the same peer under another tag is received by nobody: both are named."""
        if not pending.channel.family:
            return
        compared = self._comparison
        for rank in pending.absent:
            for tag, blob in self._other_tags(pending, rank):
                rows = [compared.row(self._peers.rank, compared.own_words(pending)), compared.row(rank, blob)]
                text = tag_text(compared.subject(pending), rows, rank, (pending.asked.tag, tag), waited_ns / 1e9, where)
                self._refusals.post(pending, "mismatch/p2p", text)

    def _other_tags(self, pending: Pending, rank: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Messages of a peer that ours could meet but for the tag, and that nobody takes: tag, and what was asked."""
        board, own = self._peers[rank], self._peers.own()
        for key, description in board.channels():
            if description.get("family") != pending.channel.family or key == pending.channel.key:
                continue
            theirs, slot = board.last_number(board.slot(key)), own.slot(key)
            taken = own.last_number(slot) & B.NUMBER_MASK if slot else 0
            seen = board.announced(board.slot(key), (theirs & ~B.NUMBER_MASK) + taken + 1)
            blob = board.blob(seen[1]) if seen is not None else None
            if blob is not None:
                yield int(description.get("tag") or 0), blob

    def _how_it_ended(self, rank: int) -> str:
        board = self._peers[rank]
        if board.word(B.CLOSED):
            return HAS_FINISHED
        return "was killed or crashed" if is_gone(board.pid, board.start_ticks) else ""

    def _where_is(self, rank: int) -> str:
        """What an absent rank does instead: the line of its main thread, as its own watchdog thread last saw it; "" where nothing tells."""
        board = self._peers[rank]
        if process_state(board.pid) in ("T", "t"):
            return "is stopped by a signal"
        try:
            box = read_box(self._folder / job_dirs.box_name(rank, board.pid))
        except (OSError, FormatError):
            return ""
        silent_s = (box.captured_ns - box.heartbeat_ns) / 1e9 if box.heartbeat_ns else 0.0
        if silent_s > SILENT_AFTER_S:
            return f"runs no Python code since {silent_s:.0f} s (is the GIL held?)"
        main = box.main_stack
        newest = max((op.announced_ns for op in box.collectives[-1:]), default=0)
        if main is None or main.taken_ns < newest:
            return ""  # the stack is older than its last collective
        frame = main.source
        return f"is at {frame.where} in {frame.function}" if frame is not None else ""
