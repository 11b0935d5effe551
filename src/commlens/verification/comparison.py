"""Compare an announced collective with the peers' announcements under the same number.

An announcement has a signature, a hash of the arguments, and the position of a blob with the
arguments themselves. Equal signatures match. If rank 1 announces ``broadcast #3`` where this rank
has ``all_reduce #3``, the signatures differ; then the arguments are compared, and the collective is
refused. Different signatures may be legal, as those of an all_to_all with uneven splits.
"""

from __future__ import annotations

import time
from typing import Any, Final

from commlens.blackbox import layout as L
from commlens.boards import board as B
from commlens.matching.answer import Disagree
from commlens.matching.collectives import compare_collectives
from commlens.matching.point_to_point import compare_pair
from commlens.model.collective import CollectiveArgs, TensorSpec
from commlens.model.ops import POINT_TO_POINT
from commlens.verification import messages
from commlens.verification.arguments import LeafDisagreement, compare_leaves, unpack
from commlens.verification.channels import FunctionCall, Pending, group_label
from commlens.verification.messages import Row, Subject
from commlens.verification.peers import Peers
from commlens.verification.ready_clock import ReadyClock
from commlens.verification.refusals import Refusals

# a mismatch is reported when all ranks have announced, or after this
FULL_TABLE_NS: Final = 400_000_000
_NAP_S: Final = 1e-3
_KEPT: Final = 10_000  # sets of signatures that agree
_Signatures = tuple[tuple[int, int], ...]
"""Each rank with its signature."""


_Announced = dict[int, tuple[int, dict[str, Any] | None]]
"""By rank: its signature and its arguments; None if they were overwritten."""


class Comparison:
    """Compares announcements, and refuses a collective that does not match its peers'."""

    def __init__(self, peers: Peers, refusals: Refusals, exchange: Any) -> None:
        """Compare with peers.

        Args:
            peers: the peers' boards.
            refusals: the job's refusals.
            exchange: compares in C++, and is told which signatures agree; None with the Python
                engine.
        """
        self._peers = peers
        self._refusals = refusals
        self._exchange = exchange
        self._agreed: set[_Signatures] = set()

    def compare(self, pending: Pending) -> None:
        """Compare a collective with the announcements of the peers in ``pending.absent``, and keep
        there only the peers that have not announced.

        Raises:
            DistributedOperationException: a peer's announcement does not match.
        """
        absent: list[int] = []
        differing: list[int] = []
        for rank in pending.absent:
            board = self._peers[rank]
            slot = board.slot(pending.channel.key)
            seen = board.announced(slot, pending.number) if slot else None
            if seen is None:
                if slot and board.is_past(slot, pending.number):
                    # The peer's announcement was overwritten: it came, and nothing was refused.
                    continue
                if not board.word(B.ACTIVE):
                    continue  # the peer does not verify now, so it will not announce
                absent.append(rank)
            elif seen[0] != pending.signature:
                differing.append(rank)
        if differing:
            absent += self._compare_arguments(pending, differing)
        pending.absent = absent

    def _compare_arguments(self, pending: Pending, differing: list[int]) -> list[int]:
        """Refuse a collective if its arguments do not match those of the peers whose signatures
        differ. Different signatures alone may be legal.

        Returns:
            The peers that have withdrawn their announcements in the meantime.
        """
        announced = self._announcements(pending)
        if self._disagreement(pending, announced) is not None:
            self._refuse(pending)
            withdrawn = differing
        else:
            withdrawn = [rank for rank in differing if rank not in announced]
        if withdrawn:
            self._refusals.raise_new()  # a peer withdraws after a refusal, so there may be one
        return withdrawn

    def subject(self, pending: Pending) -> Subject:
        """Return the collective's group and number, as a refusal names them."""
        group = pending.channel.group
        return Subject(group_label(group), group.ranks, pending.number & B.NUMBER_MASK)

    def rows(self, pending: Pending) -> list[Row]:
        """Return a table row for each rank that has announced, this one included."""
        return [
            self.own_row(pending) if rank == self._peers.rank else table_row(rank, blob)
            for rank, (_, blob) in self._announcements(pending).items()
            if blob is not None
        ]

    def own_row(self, pending: Pending) -> Row:
        """Return this rank's own row: its arguments, with the call site and the name from its
        board.
        """
        blob = self._peers.own.announced_blob(pending.channel.key, pending.number) or {}
        return table_row(
            self._peers.rank,
            {**_own_blob(pending), "name": blob.get("name", ""), "where": blob.get("where", "")},
        )

    def _announcements(self, pending: Pending) -> _Announced:
        """Return the announcements of all ranks that have made one, this rank included."""
        found: _Announced = {}
        for rank in pending.channel.members:
            if rank == self._peers.rank:
                found[rank] = pending.signature, _own_blob(pending)
                continue
            board = self._peers.known(rank)
            slot = board.slot(pending.channel.key) if board is not None else 0
            seen = board.announced(slot, pending.number) if board is not None and slot else None
            if board is not None and seen is not None:
                found[rank] = seen[0], board.blob(seen[1])
        return found

    def _disagreement(
        self, pending: Pending, announced: _Announced
    ) -> Disagree | LeafDisagreement | None:
        """Return the aspect in which the announced arguments disagree; None if they match.
        Signatures that agree are remembered, also in C++.
        """
        blobs = {rank: blob for rank, (_, blob) in announced.items() if blob is not None}
        if (
            isinstance(pending.args, FunctionCall)
            and len({blob["op"] for blob in blobs.values()}) == 1
        ):
            return compare_leaves(
                {rank: unpack(blob.get("leaves")) for rank, blob in blobs.items()}
            )
        key = tuple((rank, signature) for rank, (signature, _) in announced.items())
        if key in self._agreed:
            return None
        by_rank = {rank: _arguments(blob) for rank, blob in blobs.items()}
        if pending.args.op in POINT_TO_POINT:
            if len(by_rank) < 2:
                return None
            sender, receiver = pending.channel.members
            answer = compare_pair(sender, by_rank[sender], receiver, by_rank[receiver])
        else:
            answer = compare_collectives(by_rank, pending.channel.group.ranks)
        if isinstance(answer, Disagree):
            return answer
        self._remember(key, is_complete=len(by_rank) == len(announced))
        return None

    def _remember(self, key: _Signatures, *, is_complete: bool) -> None:
        """Remember signatures that agree; in C++ only if the arguments of all were compared."""
        if len(self._agreed) > _KEPT:
            self._agreed.clear()
        self._agreed.add(key)
        if self._exchange is not None and is_complete:
            self._exchange.agree(
                [number for rank_and_signature in key for number in rank_and_signature]
            )

    def _refuse(self, pending: Pending) -> None:
        """Wait briefly until the other ranks have announced, so that the table is complete; then
        post the refusal and raise it. Return if the ranks that differed have withdrawn.
        """
        clock = ReadyClock()
        while True:
            announced = self._announcements(pending)
            late = set(pending.channel.peers) - announced.keys()
            pids = self._peers.pids_here(late)
            clock.watch(pids)
            if not late or clock.is_over(FULL_TABLE_NS, pids):
                break
            self._refusals.raise_if_posted(pending)
            time.sleep(_NAP_S)
        answer = self._disagreement(pending, announced)
        if answer is None:
            return
        subject, rows = self.subject(pending), self.rows(pending)
        self._refusals.post(
            pending,
            messages.leaves(answer, subject, rows)
            if isinstance(answer, LeafDisagreement)
            else messages.mismatch(answer, subject, rows),
        )


def table_row(rank: int, blob: dict[str, Any]) -> Row:
    """Return the table row of an announcement's blob."""
    peer = blob.get("peer")
    return Row(
        rank,
        _arguments(blob),
        str(blob.get("where", "")),
        str(blob.get("name", "")),
        peer if isinstance(peer, int) and peer >= 0 else None,
        int(blob.get("tag") or 0),
    )


def _own_blob(pending: Pending) -> dict[str, Any]:
    args = pending.args
    return {
        **args.content,
        "rop": L.reduce_op_of(pending.code),
        "peer": args.peer,
        "tag": args.tag,
        "name": "",
        "where": "",
    }


def _arguments(blob: dict[str, Any]) -> CollectiveArgs:
    def specs(tensors: Any) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(
                tuple(shape), dtype, device, layout, tuple(order) if order is not None else None
            )
            for shape, dtype, device, layout, order in tensors or ()
        )

    return CollectiveArgs(
        op=str(blob["op"]),
        dispatcher_op=str(blob["dop"]),
        inputs=specs(blob["in"]),
        outputs=specs(blob["out"]),
        reduce_op=blob.get("rop"),
        root=blob["root"],
        input_splits=tuple(blob["is"] or ()),
        output_splits=tuple(blob["os"] or ()),
        asynchronous=blob.get("async"),
    )
