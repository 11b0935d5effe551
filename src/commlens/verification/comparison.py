"""Comparing an announced op with what the peers have announced under its number."""

from __future__ import annotations

import time
from typing import Any, Final

from commlens.blackbox import board as B
from commlens.blackbox import layout as L
from commlens.matching import Disagree, compare_collectives, compare_pair
from commlens.model.collective import CollectiveArgs, TensorSpec
from commlens.model.ops import POINT_TO_POINT
from commlens.verification.arguments import LeafDisagreement, compare_leaves, unpacked
from commlens.verification.channels import Call, Pending, label
from commlens.verification.messages import Row, Subject, leaves_text, mismatch_text
from commlens.verification.peers import Peers
from commlens.verification.refusals import Refusals

FULL_TABLE_NS: Final = 400_000_000  # a disagreement is told when all have come, or after this
_NAP_S: Final = 50e-6
_KEPT: Final = 10_000  # of answers
_Rows = list[tuple[int, int, dict[str, Any] | None]]  # rank, signature and blob
_now = time.monotonic_ns


class Comparison:
    """Compares, and refuses what does not fit."""

    def __init__(self, peers: Peers, refusals: Refusals, exchange: Any) -> None:
        """Compare with peers; ``exchange`` is told which of them fit, to compare the next one like it in C++."""
        self._peers = peers
        self._refusals = refusals
        self._exchange = exchange
        self._agreed: set[tuple[tuple[int, int], ...]] = set()

    def compare(self, pending: Pending) -> None:
        """Compare with all who have announced; leave in ``absent`` those who have not.

        Raises:
            DistributedOperationException: one of them announced something that does not fit.
        """
        absent: list[int] = []
        differing: list[int] = []
        for rank in pending.absent:
            board = self._peers[rank]
            slot = board.slot(pending.channel.key)
            seen = board.announced(slot, pending.number) if slot else None
            if seen is None:
                if slot and board.is_past(slot, pending.number):
                    continue  # its announcement has been overwritten: it came, and nobody objected
                if not board.word(B.ACTIVE):
                    continue  # it does not announce (any more): nobody can wait for that
                absent.append(rank)
            elif seen[0] != pending.signature:
                differing.append(rank)
        if differing:
            rows = self._rows(pending)
            if self._disagreement(pending, rows) is not None:
                self._refuse(pending)
            else:
                there = {rank for rank, _, _ in rows}
                differing = [rank for rank in differing if rank not in there]
            if differing:  # it was refused there meanwhile, and withdrawn
                self._refusals.raise_new()
                absent += differing
        pending.absent = absent

    def subject(self, pending: Pending) -> Subject:
        """What a refusal is about."""
        group = pending.channel.group
        return Subject(label(group), group.ranks, pending.number & B.NUMBER_MASK)

    def words(self, pending: Pending) -> list[Row]:
        """A row for each rank that has announced, ourselves included."""
        return [self.row(rank, self.own_words(pending) if rank == self._peers.rank else blob)
                for rank, _, blob in self._rows(pending) if blob is not None]  # fmt: skip

    def own_words(self, pending: Pending) -> dict[str, Any]:
        """Our own announcement: as it was asked, with the line and the name as they stand on our board."""
        board = self._peers.own()
        seen = board.announced(pending.channel.slot, pending.number)
        blob = board.blob(seen[1]) if seen is not None else None
        content = self._own_blob(pending)
        return {**content, "name": blob.get("name", ""), "where": blob.get("where", "")} if blob is not None else content

    @staticmethod
    def row(rank: int, blob: dict[str, Any]) -> Row:
        """A blob as a refusal shows it."""
        peer = blob.get("peer")
        return Row(rank, _asked(blob), str(blob.get("where", "")), str(blob.get("name", "")),
                   peer if isinstance(peer, int) and peer >= 0 else None, int(blob.get("tag") or 0))  # fmt: skip

    def _rows(self, pending: Pending) -> _Rows:
        """All who have announced, ourselves included."""
        rows: _Rows = []
        for rank in pending.channel.members:
            if rank == self._peers.rank:
                rows.append((rank, pending.signature, self._own_blob(pending)))
                continue
            board = self._peers.known(rank)
            slot = board.slot(pending.channel.key) if board is not None else 0
            seen = board.announced(slot, pending.number) if board is not None and slot else None
            if board is not None and seen is not None:
                rows.append((rank, seen[0], board.blob(seen[1])))
        return rows

    @staticmethod
    def _own_blob(pending: Pending) -> dict[str, Any]:
        code = pending.code
        return {**pending.asked.content, "rop": L.reduce_op_of(code),
                "peer": pending.asked.peer, "tag": pending.asked.tag, "name": "", "where": ""}  # fmt: skip

    def _disagreement(self, pending: Pending, rows: _Rows) -> Disagree | LeafDisagreement | None:
        if isinstance(pending.asked, Call) and len({blob["op"] for _, _, blob in rows if blob is not None}) == 1:
            return compare_leaves({rank: unpacked(blob.get("leaves")) for rank, _, blob in rows if blob is not None})
        key = tuple((rank, signature) for rank, signature, _ in rows)
        if key in self._agreed:
            return None
        asked = {rank: _asked(blob) for rank, _, blob in rows if blob is not None}
        if pending.asked.op in POINT_TO_POINT:
            if len(asked) < 2:
                return None
            sender, receiver = pending.channel.members
            answer = compare_pair(sender, asked[sender], receiver, asked[receiver])
        else:
            answer = compare_collectives(asked, pending.channel.group.ranks)
        if isinstance(answer, Disagree):
            return answer
        if len(self._agreed) > _KEPT:
            self._agreed.clear()
        self._agreed.add(key)
        if self._exchange is not None and len(asked) == len(rows):
            self._exchange.agree([number for row in key for number in row])
        return None

    def _refuse(self, pending: Pending) -> None:
        """Give the others a moment to come, so that the table is whole; post it, and raise."""
        until = _now() + FULL_TABLE_NS
        while _now() < until and len(self._rows(pending)) < len(pending.channel.peers) + 1:
            self._refusals.raise_if_posted(pending)
            time.sleep(_NAP_S)
        answer = self._disagreement(pending, self._rows(pending))
        if answer is None:
            return  # those who differed have withdrawn
        subject, rows = self.subject(pending), self.words(pending)
        text = leaves_text(answer, subject, rows) if isinstance(answer, LeafDisagreement) else mismatch_text(answer, subject, rows)
        self._refusals.post(pending, f"mismatch/{answer.aspect}", text)


def _asked(blob: dict[str, Any]) -> CollectiveArgs:
    def specs(tensors: Any) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(tuple(shape), dtype, device, layout, tuple(order) if order is not None else None)
            for shape, dtype, device, layout, order in tensors or ()
        )

    return CollectiveArgs(
        op=str(blob["op"]), dispatcher_op=str(blob["dop"]), inputs=specs(blob["in"]), outputs=specs(blob["out"]), reduce_op=blob.get("rop"),
        root=blob["root"], input_splits=tuple(blob["is"] or ()), output_splits=tuple(blob["os"] or ()), asynchronous=blob.get("async"),
    )  # fmt: skip
