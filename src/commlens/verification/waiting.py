"""Wait for peers to announce: for which ranks, and for how long. ``late_ranks.py`` judges those
that do not arrive.

Waiting is bounded and follows the op's own semantics. It is never evidence of a deadlock by itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from commlens.boards import board as B
from commlens.boards.board import Board
from commlens.model.ops import NEEDS_ALL, POINT_TO_POINT, SENT_TO_ROOT
from commlens.tap.interned_args import InternedArgs
from commlens.text import ranks_phrase
from commlens.verification.channels import BoardArgs, Pending
from commlens.verification.comparison import Comparison
from commlens.verification.late_ranks import CHECK_EVERY_NS, LateRanks, needed
from commlens.verification.messages import group_name
from commlens.verification.peers import Peers
from commlens.verification.refusals import Refusals
from commlens.verification.whereabouts import waits_in_store

log = logging.getLogger("commlens")

WARN_AFTER_NS: Final = 10_000_000_000
RELEASE_AFTER_NS: Final = 1_000_000_000


def needed_at_issue(args: InternedArgs, ranks: list[int], own: int) -> list[int]:
    """Return those of ``ranks`` to wait for without a time limit before issue: none unless the call
    is synchronous.
    """
    return needed(args, ranks, own) if args.meets and args.op not in SENT_TO_ROOT else []


def needed_at_wait(args: InternedArgs | BoardArgs, ranks: list[int], own: int) -> list[int]:
    """Return those of ``ranks`` that a thread waits for until the op is done.

    gloo's send is done when the receive is issued (seen on torch 2.13.0, with one element as with
    four million).
    """
    if args.op == "send" and isinstance(args, InternedArgs):
        channel = args.channel
        return ranks if channel.group.backend(channel.device) == "gloo" else []
    return needed(args, ranks, own)


def may_complete_early(args: InternedArgs) -> bool:
    """Return whether ranks may legally complete the op before others arrive but rarely do, so that
    a short wait pays.
    """
    return args.meets and args.op not in NEEDS_ALL and args.op not in POINT_TO_POINT


class Waiting:
    """Waits for peers before a collective is issued, and before a thread waits for it."""

    def __init__(
        self,
        folder: Path,
        board: Board,
        bells: Any,
        peers: Peers,
        comparison: Comparison,
        refusals: Refusals,
        late: LateRanks,
    ) -> None:
        """Wait for peers.

        Args:
            folder: the job's folder of black boxes.
            board: this rank's board, which shows that it waits.
            bells: wakes this rank when a peer announces.
            peers: the peers' boards.
            comparison: compares announcements as they arrive.
            refusals: a refusal by another rank ends the wait.
            late: refuses a collective that some peer will not join.
        """
        self._folder = folder
        self._board = board
        self._bells = bells
        self._peers = peers
        self._comparison = comparison
        self._refusals = refusals
        self._late = late

    def before_issue(
        self, pending: Pending, args: InternedArgs, plans_changed: Callable[[], None]
    ) -> None:
        """Wait before issue, as far as the op's semantics allow it.

        Args:
            pending: the announced op.
            args: its arguments.
            plans_changed: called when a short wait has expired: later ops of the channel no longer
                wait for ranks that they do not need.

        Raises:
            DistributedOperationException: the op must not be issued.
        """
        required = needed_at_issue(args, pending.absent, self._peers.rank)
        if required:
            self.wait(pending, required, releases=args.channel.runs_ahead)
        if pending.absent and may_complete_early(args) and pending.channel.rooted_patience_ns:
            self.wait(pending, pending.absent, pending.channel.rooted_patience_ns)
            if pending.absent:
                # in this program, the ranks do not arrive together: do not delay it again
                pending.channel.rooted_patience_ns = 0
                plans_changed()

    def wait(
        self,
        pending: Pending,
        ranks: Iterable[int],
        patience_ns: int | None = None,
        *,
        releases: bool = False,
    ) -> None:
        """Wait until all of these ranks have announced, for ``patience_ns`` at most if given.

        With ``releases``, end the wait as soon as one of them waits for a key in a store: this rank
        may be the one to write it, since without verification its call would have returned at once.

        Raises:
            DistributedOperationException: an announcement does not match, or a rank does not
                arrive.
        """
        wanted = set(ranks)
        if wanted.isdisjoint(pending.absent):
            return
        began = checked = time.monotonic_ns()
        thread = threading.get_ident()
        if patience_ns is None:  # a bounded wait ends by itself, so it must not count in a cycle
            self._board.set_waiting(pending.channel.key, pending.number, began)
        try:
            while absent := [rank for rank in pending.absent if rank in wanted]:
                if pending.args.op == "send" and any(
                    self._peers[rank].word(B.ANY_SOURCE) for rank in pending.absent
                ):
                    return  # a rank that receives from any rank does not announce that
                now = time.monotonic_ns()
                heard = self._bells.listen(absent[0], thread)
                self._catch_up(pending)
                if absent[0] in pending.absent:
                    self._bells.sleep(absent[0], heard)
                    self._catch_up(pending)
                if now - checked > CHECK_EVERY_NS:
                    absent = [rank for rank in pending.absent if rank in wanted]
                    if self._goes_on(pending, absent, now - began, patience_ns, releases=releases):
                        return
                    self._late.refuse_if_hopeless(pending, absent, now - began)
                    if checked - began <= WARN_AFTER_NS < now - began:
                        log.warning(
                            "commlens: rank %d has waited %.0f s in %s #%d of %s for %s",
                            self._peers.rank,
                            (now - began) / 1e9,
                            pending.args.op,
                            pending.number & B.NUMBER_MASK,
                            group_name(self._comparison.subject(pending).group),
                            ranks_phrase(absent),
                        )
                    checked = now
        finally:
            self._bells.awake(thread)
            self._board.set_waiting(0, 0, 0)

    def _catch_up(self, pending: Pending) -> None:
        self._refusals.raise_new()
        self._comparison.compare(pending)

    def _goes_on(
        self,
        pending: Pending,
        absent: list[int],
        waited_ns: int,
        patience_ns: int | None,
        *,
        releases: bool,
    ) -> bool:
        """Return whether this rank goes on without the absent ranks: its patience is over, not
        counting the time in which they had no core, or one of them may wait for a key that this
        rank writes to a store.
        """
        if patience_ns is not None:
            return waited_ns > patience_ns and self._late.clock(pending).is_over(
                patience_ns, self._peers.pids_here(pending.absent), waited_ns
            )
        boards = {rank: self._peers[rank] for rank in absent if releases}
        return waited_ns > RELEASE_AFTER_NS and any(
            not board.is_remote and waits_in_store(self._folder, rank, board.pid)
            for rank, board in boards.items()
        )
