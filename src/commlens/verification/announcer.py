"""Announce this rank's collectives on its board: the channel, the number, and the arguments to
compare.
"""

from __future__ import annotations

import logging
from types import FrameType
from typing import Any

from commlens.blackbox import layout as L
from commlens.boards import board as B
from commlens.boards.board import Board
from commlens.model.ops import POINT_TO_POINT
from commlens.tap.groups import LiveChannel, LiveGroup
from commlens.tap.interned_args import InternedArgs
from commlens.tap.token import Token
from commlens.text import ranks_phrase
from commlens.verification.call_site import call_site
from commlens.verification.channels import (
    BoardCode,
    FunctionCall,
    Pending,
    VerifiedChannel,
    board_code,
    group_label,
)
from commlens.verification.peers import Peers
from commlens.verification.refusals import Refusals
from commlens.verification.waiting import may_complete_early, needed_at_issue, needed_at_wait

log = logging.getLogger("commlens")

_KEPT = 10_000  # signatures, and blobs
# fields that a signature covers; the reduce op's code is added
_COMPARED = ("op", "in", "out", "root", "is", "os")


class Announcer:
    """Announces this rank's collectives on its board."""

    def __init__(
        self, board: Board, bells: Any, peers: Peers, refusals: Refusals, exchange: Any
    ) -> None:
        """Announce on a board.

        Args:
            board: this rank's.
            bells: wake the peers that wait for this rank.
            peers: the peers' boards.
            refusals: the job's refusals; each starts the next round of its channel.
            exchange: announces and verifies in C++; None with the Python engine. With it, it writes
                all announcements, because only one of the two may.
        """
        self._board = board
        self._writer = board if exchange is None else exchange
        self._exchange = exchange
        self._bells = bells
        self._peers = peers
        self._refusals = refusals
        # by the recorder's channel; of messages by channel, whether it sends, peer and tag; of
        # function calls by group
        self._channels: dict[Any, VerifiedChannel] = {}
        self.has_announced = False  # whether anything was announced, also on groups that are gone
        self._signatures: dict[int, tuple[InternedArgs, int]] = {}
        # with the object whose id is in the key, to keep it alive
        self._blobs: dict[Any, tuple[Any, int]] = {}
        self._threads: set[int] = set()
        self._from_any_source: set[tuple[LiveChannel, int]] = set()
        self._native_peers: set[int] = set()  # ranks whose boards the exchange has

    def announce(
        self,
        token: Token,
        frame: FrameType | None,
        code: BoardCode,
        *,
        ring: bool = True,
    ) -> Pending | None:
        """Announce a collective, unless C++ has done so already. Return None if it is compared with
        no peer's.

        Args:
            token: the recorder's token of the collective.
            frame: the caller's frame.
            code: its reduce op.
            ring: wake the peers that wait for it.
        """
        channel = self.channel(token.args)
        if channel is None or not channel.slot:
            return None
        signature = self.signature(token.args, code)
        self._count_thread(token.thread)
        if token.announced is None:
            number = self._with_round(channel, token.tagged_number or token.number)
            token.announced = (channel.slot, number)
            self._writer.announce(
                channel.slot,
                number,
                signature,
                self._blob(token.args, code, token.stack, frame),
                code,
            )
            if ring:
                self._bells.ring(channel.peers)
        return Pending(channel, token.announced[1], signature, code, token.args)

    def announce_call(
        self,
        name: str,
        group: LiveGroup,
        number: int,
        leaves: Any,
        thread: int,
        frame: FrameType | None,
    ) -> Pending | None:
        """Announce a call of a user's function. Return None if this rank's board is full or the
        peers are unknown.

        Args:
            name: the function's name.
            group: the group whose ranks call it.
            number: number of this call among the group's calls.
            leaves: the arguments to compare.
            thread: native id of the calling thread.
            frame: the caller's frame.
        """
        if group.hand_made is not None:
            return None
        channel = self._call_channel(name, group)
        if not channel.slot:
            return None
        self._count_thread(thread)
        call = FunctionCall(name, leaves)
        signature = B.key_of(name, leaves)
        position = self._call_blob(channel.key, signature, call, frame)
        number = self._with_round(channel, number)
        self._writer.announce(channel.slot, number, signature, position, board_code(None))
        self._bells.ring(channel.peers)
        return Pending(channel, number, signature, board_code(None), call)

    def withdraw(self, slot: int, number: int) -> None:
        """Remove an announcement: the collective was not issued."""
        self._writer.withdraw(slot, number)

    def plan(self, args: InternedArgs, code: BoardCode, stack: int) -> Any:
        """Return a plan, by which C++ verifies further collectives like one that was verified here;
        None if Python must verify them.

        Python verifies collectives on an accelerator, and those that are not compared.
        ``commlens/native/exchange.hpp`` executes plans.

        Args:
            args: the collective's arguments.
            code: its reduce op.
            stack: position of the stack that issues it.
        """
        if args.fails_locally or args.channel.runs_ahead:
            return None
        generation = self._exchange.generation
        channel = self.channel(args)
        if channel is None or not channel.slot:
            return None
        own, peers = self._peers.rank, channel.peers
        at_issue = (
            peers
            if may_complete_early(args) and channel.rooted_patience_ns
            else needed_at_issue(args, peers, own)
        )
        return self._exchange.plan(
            self._native(channel),
            generation,
            self._with_round(channel, 0),
            self.signature(args, code),
            self._known_blob((id(args), code, stack), args),
            code,
            at_issue,
            needed_at_wait(args, peers, own),
        )

    def forget_groups(self) -> None:
        """Forget the channels of groups that are gone."""
        self._channels = {
            identity: channel
            for identity, channel in self._channels.items()
            if channel.group.ref() is not None
        }

    def peers_changed(self) -> None:
        """Look up the peers of all channels again, after boards were created."""
        for channel in self._channels.values():
            channel.peers = self._peers.among(channel.members)
            channel.native = None

    def signature(self, args: InternedArgs, code: BoardCode) -> int:
        """Return a number that is equal on ranks with equal arguments."""
        known = self._signatures.get(id(args))
        if known is None or known[0] is not args:
            if len(self._signatures) > _KEPT:
                self._signatures.clear()
            known = self._signatures[id(args)] = (
                args,
                B.key_of(*(args.content[field] for field in _COMPARED)),
            )
        return (known[1] + code * 0x9E3779B97F4A7C15) % (1 << 64)

    def channel(self, args: InternedArgs) -> VerifiedChannel | None:
        """Return the channel to announce on; None if the peers are unknown: for a group that was
        made by hand, and for some messages.
        """
        channel = args.channel
        if channel.group.hand_made is not None:
            return None
        identity: Any = channel
        if args.op in POINT_TO_POINT:
            tag = args.tag if channel.matches_tags else 0
            if args.peer < 0 or args.flags & L.FLAG_ANY_SOURCE:
                self._board.set_word(B.ANY_SOURCE, 1)
                if self._exchange is not None and (channel, tag) not in self._from_any_source:
                    self._from_any_source.add((channel, tag))
                    # C++ may have plans for messages that can no longer be compared
                    self._exchange.forget()
                return None
            sends = args.op == "send"
            from_any = (-1, f"recv {tag}" if channel.matches_tags else "recv")
            if not sends and from_any in channel.pairs:
                # It is unknown which of this peer's messages this receive gets.
                return None
            identity = (channel, sends, args.peer, tag)
        found = self._channels.get(identity)
        if found is None:
            found = self._channels[identity] = self._new_channel(channel, args, identity)
            self.has_announced = True
        return found

    def channels(self) -> list[VerifiedChannel]:
        """Return the channels that this rank has used."""
        return [channel for channel in list(self._channels.values()) if channel.slot]

    def _new_channel(
        self, channel: LiveChannel, args: InternedArgs, identity: Any
    ) -> VerifiedChannel:
        group = channel.group
        parts: tuple[Any, ...] = (group.incarnation, group.name, group.ranks, channel.device)
        members = group.ranks
        description: dict[str, Any] = {"group": group_label(group)}
        family = 0
        if identity is not channel:  # a message
            rank, tag = self._peers.rank, identity[3]
            members = (rank, args.peer) if args.op == "send" else (args.peer, rank)
            family = B.key_of(*parts, *members)
            description.update(family=family, tag=tag)
            parts = (*parts, *members, tag)
        key = B.key_of(*parts)
        slot = self._board.add_channel(key, {**description, "ranks": list(members)})
        if not slot:
            log.warning(
                "commlens: more than %d channels are in use; collectives on further ones are not"
                " verified",
                B.CHANNELS,
            )
        if channel.runs_ahead:
            # NCCL's init_process_group does not wait for the others: their boards may not exist yet
            self._peers.await_boards(members)
        peers = self._peers.among(members)
        self._peers.warn_about(members, peers)
        return VerifiedChannel(group, key, slot, members, peers, family)

    def _call_channel(self, name: str, group: LiveGroup) -> VerifiedChannel:
        """Return the channel for function calls of a group, which all functions share."""
        found = self._channels.get(group)
        if found is None:
            key = B.key_of("calls", group.incarnation, group.name, group.ranks)
            slot = self._board.add_channel(
                key, {"group": group_label(group), "ranks": list(group.ranks)}
            )
            peers = self._peers.among(group.ranks)
            left_out = [
                rank for rank in group.ranks if rank != self._peers.rank and rank not in peers
            ]
            if left_out:
                log.warning(
                    "commlens: the arguments of %s are not compared with those of %s (on another"
                    " node, or not verifying)",
                    name,
                    ranks_phrase(left_out),
                )
            found = self._channels[group] = VerifiedChannel(group, key, slot, group.ranks, peers)
            self.has_announced = True
        return found

    def _with_round(self, channel: VerifiedChannel, number: int) -> int:
        """Return the number with the channel's round in its high bits, as boards hold it. Each
        refusal that all members of the channel raise starts a round.
        """
        while channel.refusals_seen < self._refusals.raised:
            ranks = self._refusals.ranks_of(channel.refusals_seen)
            channel.refusals_seen += 1
            if set(channel.members) <= set(ranks):
                channel.round += 1
        return channel.round << B.ROUND_SHIFT | number

    def _native(self, channel: VerifiedChannel) -> Any:
        if channel.native is None:
            for rank in channel.peers:
                if rank not in self._native_peers:
                    self._native_peers.add(rank)
                    self._exchange.add_peer(rank, self._peers[rank].map)
            channel.native = self._exchange.channel(
                channel.key, channel.slot, channel.members, channel.peers
            )
        return channel.native

    # --- blobs: arguments and call sites, for messages

    def _blob(
        self, args: InternedArgs, code: BoardCode, stack: int, frame: FrameType | None
    ) -> int:
        """Return the position of the blob with a collective's arguments and call site."""
        key = (id(args), code, stack)
        if position := self._known_blob(key, args):
            return position
        name, where = call_site(frame, args.op)
        content = {
            **{field: args.content[field] for field in (*_COMPARED, "dop", "async")},
            "rop": L.reduce_op_of(code),
            "name": name,
            "where": where,
            "peer": args.peer,
            "tag": args.tag,
        }
        return self._add_blob(key, args, content)

    def _call_blob(
        self, channel_key: int, signature: int, call: FunctionCall, frame: FrameType | None
    ) -> int:
        """Return the position of the blob with the arguments and call site of a function call."""
        places: list[Any] = []
        caller = frame
        while caller is not None:
            places += (caller.f_code, caller.f_lasti)
            caller = caller.f_back
        key = (channel_key, signature, *places)
        if position := self._known_blob(key, None):
            return position
        content = {**call.content, "name": call.op, "where": call_site(frame, "")[1]}
        position = self._add_blob(key, None, content)
        return position or self._add_blob(key, None, {**content, "leaves": None})

    def _known_blob(self, key: Any, of: InternedArgs | None) -> int:
        """Return the position of a blob; 0 if it was not written, or is too old."""
        known, position = self._blobs.get(key, (None, 0))
        return position if known is of and position and self._board.is_recent(position) else 0

    def _add_blob(self, key: Any, of: InternedArgs | None, content: dict[str, Any]) -> int:
        """Return the position of a new blob; 0 if it has no room."""
        if len(self._blobs) > _KEPT:
            self._blobs.clear()
        position = self._board.add_blob(content)
        self._blobs[key] = (of, position)
        return position

    def _count_thread(self, thread: int) -> None:
        if thread not in self._threads:
            self._threads.add(thread)
            self._board.set_word(B.THREADS, len(self._threads))
