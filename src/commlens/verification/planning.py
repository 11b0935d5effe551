"""What verification in C++ is told: how an op like one that was verified here goes the next time, and what has changed since.

``commlens/native/exchange.hpp`` is the other side.
"""

from __future__ import annotations

from typing import Any

from commlens.tap.interned_args import InternedArgs
from commlens.verification.announcer import Announcer
from commlens.verification.channels import Watched
from commlens.verification.peers import Peers
from commlens.verification.waiting import may_be_early, needed, needed_at_issue


class Planner:
    """Makes plans for the exchange."""

    def __init__(self, exchange: Any, announcer: Announcer, peers: Peers) -> None:
        self._exchange = exchange
        self._announcer = announcer
        self._peers = peers
        self._told: set[int] = set()  # ranks whose boards it has

    def plan(self, asked: InternedArgs, code: int, stack: int) -> Any:
        """How an op is verified where nothing is new; None where that stays here: on an accelerator, or where it meets nobody's.

        Args:
            asked: what it asks for.
            code: of its reduce op, plus 1.
            stack: where it is issued.
        """
        if asked.refused_locally or not asked.channel.holds_works:
            return None
        generation = self._exchange.generation
        watched = self._announcer.channel(asked)
        if watched is None or not watched.slot:
            return None
        own, peers = self._peers.rank, watched.peers
        at_issue = peers if may_be_early(asked) and watched.rooted_patience_ns else needed_at_issue(asked, peers, own)
        return self._exchange.plan(
            self._natively(watched), generation, self._announcer.in_round(watched, 0), self._announcer.signature(asked, code),
            self._announcer.blob_of(asked, code, stack), code, at_issue, needed(asked, peers, own),
        )  # fmt: skip

    def _natively(self, watched: Watched) -> Any:
        if watched.native is None:
            for rank in watched.peers:
                if rank not in self._told:
                    self._told.add(rank)
                    self._exchange.add_peer(rank, self._peers[rank].map)
            watched.native = self._exchange.channel(watched.key, watched.slot, watched.members, watched.peers)
        return watched.native
