"""Saying on our board what is about to be issued: of which channel, as which number, and in which words."""

from __future__ import annotations

import logging
from types import FrameType
from typing import Any

from commlens.blackbox import board as B
from commlens.blackbox import layout as L
from commlens.blackbox.board import Board
from commlens.model.ops import POINT_TO_POINT
from commlens.tap.groups import Channel, Group
from commlens.tap.interned_args import InternedArgs
from commlens.tap.token import Token
from commlens.text import ranks_phrase
from commlens.verification.call_site import users_operation
from commlens.verification.channels import Call, Pending, Watched, label
from commlens.verification.peers import Peers
from commlens.verification.refusals import Refusals

log = logging.getLogger("commlens")

_MASK = (1 << 64) - 1
_KEPT = 10_000  # of signatures, and of blobs


class Announcer:
    """This rank's board, as its collectives are announced there."""

    def __init__(self, board: Board, bells: Any, peers: Peers, refusals: Refusals, exchange: Any) -> None:
        """Announce on a board.

        Args:
            board: ours.
            bells: what wakes who waits for us.
            peers: the others.
            refusals: what was refused begins a channel's next round.
            exchange: what announces in C++, for all announcements to be made by one; None where Python does.
        """
        self._board = board
        self._say = board if exchange is None else exchange
        self._exchange = exchange
        self._bells = bells
        self._peers = peers
        self._refusals = refusals
        self._watched: dict[Any, Watched] = {}
        self._signatures: dict[int, tuple[InternedArgs, int]] = {}
        self._blobs: dict[Any, tuple[Any, int]] = {}  # with what must live as long as the key is to mean it
        self._threads: set[int] = set()
        self._from_anybody: set[tuple[Channel, int]] = set()

    def announce(self, token: Token, frame: FrameType | None, reduce_op_code: int | None) -> Pending | None:
        """Announce a collective; one that has been, by plan, is only found again. None where it is not compared with anybody's.

        Args:
            token: the recorder's, of the op.
            frame: where it was issued.
            reduce_op_code: of its reduce op.
        """
        watched = self.channel(token.args)
        if watched is None or not watched.slot:
            return None
        code = 0 if reduce_op_code is None else reduce_op_code + 1
        signature = self.signature(token.args, code)
        self._note(token.thread)
        if token.announced is None:
            number = self.in_round(watched, token.tagged_number or token.number)
            token.announced = (watched.slot, number)
            self._say.announce(watched.slot, number, signature, self.blob(token.args, code, token.stack, frame), code)
            self._bells.ring(watched.peers)
        return Pending(watched, token.announced[1], signature, code, token.args)

    def announce_call(self, name: str, group: Group, number: int, leaves: Any, thread: int, frame: FrameType | None) -> Pending | None:
        """The same for a call of a user's function."""
        watched = self._calls(name, group)
        if not watched.slot:
            return None
        self._note(thread)
        call = Call(name, leaves)
        signature = B.key_of(name, leaves)
        position = self._call_blob(watched.key, signature, call, frame)
        number = self.in_round(watched, number)
        self._say.announce(watched.slot, number, signature, position, 0)
        self._bells.ring(watched.peers)
        return Pending(watched, number, signature, 0, call)

    def withdraw(self, slot: int, number: int) -> None:
        """It was not issued: nobody is to meet its announcement."""
        self._say.withdraw(slot, number)

    def groups_start_again(self) -> None:
        """Their names do, with the next default group."""
        self._watched.clear()

    def peers_changed(self) -> None:
        """Boards were made since: their ranks are peers from now on."""
        for watched in self._watched.values():
            watched.peers = self._peers.among(watched.members)
            watched.native = None

    def in_round(self, watched: Watched, number: int) -> int:
        """The number as boards have it: after a refusal that all its members raise, the channel's next round begins."""
        while watched.alarms_seen < self._refusals.raised:
            ranks = self._refusals.ranks_of(watched.alarms_seen)
            watched.alarms_seen += 1
            if set(watched.members) <= set(ranks):
                watched.round += 1
        return watched.round << B.ROUND_SHIFT | number

    def signature(self, asked: InternedArgs, code: int) -> int:
        """What is equal where ranks ask for the same."""
        known = self._signatures.get(id(asked))
        if known is None or known[0] is not asked:
            if len(self._signatures) > _KEPT:
                self._signatures.clear()
            content = asked.content
            known = self._signatures[id(asked)] = (asked, B.key_of(*(content[field] for field in ("op", "in", "out", "root", "is", "os"))))
        return (known[1] + code * 0x9E3779B97F4A7C15) & _MASK

    def blob(self, asked: InternedArgs, code: int, stack: int, frame: FrameType | None) -> int:
        """Position of what was asked and where, for who must tell it in words: once for each stack."""
        key = (id(asked), code, stack)
        known, position = self._blobs.get(key, (None, 0))
        if known is not asked or not position or not self._board.is_alive(position):
            name, where = users_operation(frame, asked.op)
            content = {
                **{field: asked.content[field] for field in ("op", "dop", "in", "out", "root", "is", "os")},
                "rop": L.reduce_op_of(code),
                "name": name, "where": where, "peer": asked.peer, "tag": asked.tag, "async": asked.content["async"],
            }  # fmt: skip
            position = self._keep_blob(key, asked, self._board.add_blob(content))
        return position

    def blob_of(self, asked: InternedArgs, code: int, stack: int) -> int:
        """The position of one that was made; 0 where it was not, or is too old to be referred to."""
        known, position = self._blobs.get((id(asked), code, stack), (None, 0))
        return position if known is asked and position and self._board.is_alive(position) else 0

    def channel(self, asked: InternedArgs) -> Watched | None:
        """Where it is announced; None for a message that nobody can say the partner of."""
        channel = asked.channel
        if asked.op in POINT_TO_POINT:
            tag = asked.tag if channel.matches_tags else 0  # NCCL ignores tags
            if asked.peer < 0 or asked.flags & L.FLAG_ANY_SOURCE:
                if self._exchange is not None and (channel, tag) not in self._from_anybody:
                    self._from_anybody.add((channel, tag))
                    self._exchange.forget()  # plans of messages that are not compared from now on
                return None  # which send it meets is not known before
            sends = asked.op == "send"
            if not sends and (-1, f"recv {tag}" if channel.matches_tags else "recv") in channel.pairs:
                return None  # it has received from anybody, too: which message is the next one from this peer is not known
            identity: Any = (channel, sends, asked.peer, tag)
        else:
            identity = channel
        found = self._watched.get(identity)
        if found is None:
            found = self._watched[identity] = self._new_channel(channel, asked, identity)
        return found

    def _new_channel(self, channel: Channel, asked: InternedArgs, identity: Any) -> Watched:
        group = channel.group
        parts: tuple[Any, ...] = (group.incarnation, group.name, group.ranks, channel.device)
        if identity is channel:
            members = group.ranks
        else:
            rank = self._peers.rank
            pair = (rank, asked.peer) if asked.op == "send" else (asked.peer, rank)
            parts, members = (*parts, *pair), pair
        description: dict[str, Any] = {"group": label(group), "ranks": list(members)}
        family = 0
        if identity is not channel:
            family = description["family"] = B.key_of(*parts)
            description["tag"] = identity[3]
            parts = (*parts, identity[3])
        key = B.key_of(*parts)
        slot = self._board.add_channel(key, description)
        if not slot:
            log.warning("commlens: more than %d channels: what goes over further ones is not verified", B.CHANNELS)
        peers = self._peers.among(members)
        self._peers.warn_of(members, peers)
        watched = Watched(group, key, slot, members, peers)
        watched.family = family
        return watched

    def _calls(self, name: str, group: Group) -> Watched:
        """The channel of calls of functions in a group: one for all functions, as there is one for all collectives."""
        found = self._watched.get(group)
        if found is None:
            key = B.key_of("calls", group.incarnation, group.name, group.ranks)
            slot = self._board.add_channel(key, {"group": label(group), "ranks": list(group.ranks)})
            peers = self._peers.among(group.ranks)
            left_out = [rank for rank in group.ranks if rank != self._peers.rank and rank not in peers]
            if left_out:
                log.warning(
                    "commlens: the arguments of %s are not compared with those of %s (on another node, or not verifying)",
                    name, ranks_phrase(left_out),
                )  # fmt: skip
            found = self._watched[group] = Watched(group, key, slot, group.ranks, peers)
        return found

    def _call_blob(self, key: int, signature: int, call: Call, frame: FrameType | None) -> int:
        place: list[Any] = []
        below = frame
        while below is not None:
            place += (below.f_code, below.f_lasti)
            below = below.f_back
        known = (key, signature, *place)
        _, position = self._blobs.get(known, (None, 0))
        if not position or not self._board.is_alive(position):
            content = {**call.content, "name": call.op, "where": users_operation(frame, "")[1]}
            position = self._board.add_blob(content) or self._board.add_blob({**content, "leaves": None})
            self._keep_blob(known, None, position)
        return position

    def _keep_blob(self, key: Any, of: Any, position: int) -> int:
        if len(self._blobs) > _KEPT:
            self._blobs.clear()
        self._blobs[key] = (of, position)
        return position

    def _note(self, thread: int) -> None:
        if thread not in self._threads:
            self._threads.add(thread)
            self._board.word(B.THREADS, len(self._threads))
