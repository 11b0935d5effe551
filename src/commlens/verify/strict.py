"""Strict verification: what a rank is about to issue is compared with what its peers on the node are about to, before it is.

Every collective is announced on the rank's board. Where an op needs every rank anyway and its caller waits for it, the rank
waits for its peers' announcements first, so that all of them raise and nothing is sent. Elsewhere it compares with those that
have announced already, and again when somebody waits for the op: the last to come finds the fault, refuses its own issue and
posts it; the others raise at their next collective or wait.

Waiting is bounded, follows the op's own meaning, and is never taken for evidence of a deadlock.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from commlens.capture.asked import Asked as Interned
from commlens.capture.asked import reduce_op_code
from commlens.capture.groups import Channel, Group
from commlens.compare import Disagree, compare_collectives, compare_pair
from commlens.errors import DistributedOperationException, FormatError
from commlens.formats import layout as L
from commlens.formats import places
from commlens.formats.blackbox import read_box
from commlens.model.collective import Asked, TensorSpec
from commlens.model.ops import POINT_TO_POINT
from commlens.model.ranks import format_ranks
from commlens.verify import board as B
from commlens.verify.alarm import Alarms
from commlens.verify.bells import Bells
from commlens.verify.board import Board, PeerBoard
from commlens.verify.leaves import LeafDisagreement, compare_leaves, unpacked
from commlens.verify.message import Row, Subject, absence_text, cycle_text, leaves_text, mismatch_text, tag_text
from commlens.verify.names import users_operation
from commlens.verify.refusal import refusal

if TYPE_CHECKING:
    from commlens.capture.recorder import Token

log = logging.getLogger("commlens")

NEEDS_ALL: Final = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier", "monitored_barrier"})
"""Wire ops that end on no rank before all have come."""

COLLECTING: Final = frozenset({"gather", "reduce"})
"""Wire ops that end on some ranks once the root is in them: it must not hold its own back until the last rank has come."""

NAP_S: Final = 50e-6
LOOK_AROUND_NS: Final = 50_000_000  # between looks at whether the absent still live, and whether all wait for each other
ROOTED_PATIENCE_NS: Final = 1_000_000_000  # a root may legally leave before the others come: so long it waits for them
ACCELERATOR_PATIENCE_NS: Final = 5_000_000_000  # there, the host may legally run ahead of every op
FULL_TABLE_NS: Final = 400_000_000  # a disagreement is told when all have come, or after this
WARN_AFTER_NS: Final = 10_000_000_000
CYCLE_AFTER_NS: Final = 300_000_000
ENTRY_PATIENCE_NS: Final = 10_000_000_000  # who enters `commlens.verify()` waits for the others at most so long
ENTRY_NAP_S: Final = 500e-6
SILENT_AFTER_S: Final = 1.0  # the watchdog thread's heart beats four times as often
HAS_FINISHED: Final = "has finished"
EVERY_MEETING: Final = 1 << 62  # of whoever verifies from first to last
_MASK: Final = (1 << 64) - 1
_now = time.monotonic_ns


class _Pending:
    """An announced op whose comparison is not complete: for whoever waits for it."""

    __slots__ = ("absent", "channel", "code", "interned", "number", "signature", "slot")

    def __init__(self, channel: _Watched, slot: int, number: int, signature: int, code: int, interned: Interned | _Call) -> None:
        self.channel = channel
        self.slot = slot
        self.number = number
        self.signature = signature
        self.code = code
        self.interned = interned
        self.absent: list[int] = channel.peers


class _Call:
    """A call of a user's function, in the place of a collective."""

    __slots__ = ("content", "op", "peer", "tag")

    def __init__(self, name: str, leaves: Any) -> None:
        self.op = name
        self.content = {"op": name, "dop": name, "in": [], "out": [], "root": None, "is": [], "os": [], "async": False, "leaves": leaves}
        self.peer, self.tag = -1, 0


class _Watched:
    """A channel of ours, or one direction between two of its ranks."""

    __slots__ = ("alarms_seen", "family", "group", "key", "members", "peers", "rooted_patience_ns", "round", "slot")

    def __init__(self, group: Group, key: int, slot: int, members: tuple[int, ...], peers: list[int]) -> None:
        self.group = group
        self.key = key
        self.slot = slot  # on our own board
        self.members = members  # global ranks
        self.peers = peers  # those whose boards can be read here
        self.rooted_patience_ns = ROOTED_PATIENCE_NS
        self.round = 0  # how many refusals all its members raised: what is tried again after one does not meet the first attempt
        self.alarms_seen = 0
        self.family = 0  # of a message's direction: the key that all tags of it share


class Verifier:
    """Compares this rank's collectives with its peers'. Its own errors switch it off with one line; only refusals are raised."""

    def __init__(self, folder: Path, rank: int, *, timeout_s: Callable[[], float], active: bool = True, late: Iterable[int] = ()) -> None:
        """Make the rank's board.

        Args:
            folder: the job's folder of black boxes.
            rank: the global rank.
            timeout_s: how long a peer may be silent, asked when it matters.
            active: verify from now on; otherwise between :meth:`enter` and :meth:`leave`.
            late: where this is switched on in the middle of a job, the ranks that do it together. Their numbers of collectives count
                from there, and fit those of nobody else.

        Raises:
            OSError: no room.
        """
        self.rank = rank
        self._folder = folder
        self._timeout_s = timeout_s
        self._board = Board(folder / f"rank{rank}.{os.getpid()}{B.SUFFIX}", rank, places.start_ticks(os.getpid()))
        self._alarms = Alarms(folder)
        self._bells = Bells(self._alarms.map, rank)
        self._raised = self._alarms.count()  # what was posted before our time is not for us
        self._boards: dict[int, PeerBoard] = {}
        self._watched: dict[Any, _Watched] = {}
        self._by_key: dict[int, _Watched] = {}
        self._signatures: dict[int, tuple[Interned, int]] = {}
        self._blobs: dict[Any, int] = {}
        self._agreed: set[tuple[tuple[int, int], ...]] = set()
        self._pending: dict[int, _Pending] = {}  # by record index
        self._threads: set[int] = set()
        self._unverified: set[int] = set()
        self._warned: set[int] = set()
        self._told: list[dict[str, Any]] = []
        self._off = False
        self._depth = 1 if active else 0  # of what has asked for verification; 0: collectives pass
        self._late = frozenset(late) - {rank}
        self._counts_from = int(bool(self._late))
        self._changes_seen = -1
        self._meetings = 0
        self._here: list[int] = []  # ranks to wait for where verification begins
        self._in_vain: dict[int, int] = {}  # how often they did not come there
        self._board.word(B.COUNTS_FROM, self._counts_from)
        steady = active and not self._late
        self._board.word(B.STEADY, int(steady))
        self._board.word(B.PRESENT, EVERY_MEETING if steady else 0)
        self._board.word(B.ACTIVE, self._depth)
        self._alarms.tell_change()

    # --- what the recorder calls

    def before_issue(self, token: Token, frame: FrameType | None, reduce_op: Any) -> None:
        """Announce an op, compare it, and wait for the peers where its meaning allows.

        Args:
            token: the recorder's, of the op.
            frame: where it was issued.
            reduce_op: it, as torch has it.

        Raises:
            DistributedOperationException: it must not be issued.
        """
        interned = token.asked
        if self._off or not self._depth or interned.stray or (interned.channel.device == "cuda" and _is_capturing()):
            return
        try:
            self._raise_alarm()
            if self._unverified:
                self._look_for_boards()
            pending = self._announce(token, frame, reduce_op)
            if pending is None:
                return
            self._compare(pending)
            if pending.absent:
                self._wait_before_issue(pending, interned)
            if pending.absent:
                self._refuse_if_ended(pending)
                self._remember(token.index, pending)
        except DistributedOperationException:
            raise
        except Exception as error:
            self._give_up(error)

    @property
    def is_active(self) -> bool:
        """Whether collectives are verified now."""
        return self._depth > 0 and not self._off

    def all_verify(self, group: Group) -> bool:
        """Whether all ranks of a group do, on this node, and from first to last: each of them says the same."""
        return all(board is not None and board.word(B.STEADY) for board in (self._peer_or_own(rank) for rank in group.ranks))

    def before_call(self, name: str, group: Group, number: int, describe: Callable[[], Any], frame: FrameType | None) -> None:
        """A function that all ranks of a group call together is about to run: its arguments must fit theirs.

        Args:
            name: the function's, "train.gather_metrics".
            group: the group.
            number: of this call, among those of such functions in this group.
            describe: makes the arguments' leaves.
            frame: the caller's.

        Raises:
            DistributedOperationException: they do not fit, or a rank does not come.
        """
        if not self.is_active or _is_capturing():
            return
        try:
            self._raise_alarm()
            if self._unverified:
                self._look_for_boards()
            watched = self._calls(name, group)
            if not watched.slot:
                return
            self._note(threading.get_native_id())
            call = _Call(name, describe())
            signature = B.key_of(name, call.content["leaves"])
            position = self._call_blob(watched.key, signature, call, frame)
            number = self._in_round(watched, number)
            self._board.announce(watched.slot, number, signature, position, 0)
            self._bells.ring(watched.peers)
            pending = _Pending(watched, watched.slot, number, signature, 0, call)
            try:
                self._compare(pending)
                if pending.absent:
                    self._wait(pending, pending.absent, None)
            except DistributedOperationException:
                self._board.withdraw(watched.slot, number)
                raise
        except DistributedOperationException as refused:
            raise refused.with_traceback(None) from refused.__cause__
        except Exception as error:
            self._give_up(error)

    def announce_late(self, token: Token) -> None:
        """The backend took what it seemed to refuse: from now on its kind is verified like others."""
        token.asked.stray = False
        if not self._off and self._depth:
            self._announce(token, None, None)

    def withdraw(self, token: Token) -> None:
        """An op was not issued after all: nobody is to meet its announcement."""
        self._pending.pop(token.index, None)
        if token.announced is not None:
            self._board.withdraw(*token.announced)

    def before_wait(self, index: int) -> None:
        """A thread is about to block in the backend until this op is done: all whom it needs must announce it first.

        Raises:
            DistributedOperationException: they announced something else, have ended, or do not come.
        """
        pending = self._pending.pop(index, None)
        if self._off or not self._depth:
            return
        try:
            self._raise_alarm()
            if pending is not None:
                self._compare(pending)
                if pending.absent:
                    self._wait(pending, self._needed(pending), None)
        except DistributedOperationException:
            raise
        except Exception as error:
            self._give_up(error)

    def pending_refusal(self) -> DistributedOperationException | None:
        """What this rank is to raise, and has not yet."""
        try:
            self._raise_alarm()
        except DistributedOperationException as refused:
            return refused
        return None

    def unraised_alarm(self) -> str | None:
        """The text of an alarm about a group of ours that this rank has not raised: for its watchdog, should it not come to that."""
        for at in range(self._raised, self._alarms.count()):
            alarm = self._alarms.read(at)
            if alarm and self._concerns_us(alarm):
                return str(alarm.get("text", ""))
        return None

    def before_end(self) -> None:
        """The process group is about to be destroyed: the last moment to raise what concerns this rank."""
        if not self._off and self._depth:
            self._raise_alarm()

    def enter(self) -> list[int]:
        """Verify from now on, once the others on the node do, too.

        Returns:
            The ranks that were waited for in vain, once each. Nobody compares with them until they verify.
        """
        self._depth += 1
        if self._depth > 1 or self._off:
            return []
        self._raised = self._alarms.count()  # what was posted while this rank did not verify is told by those who did
        self._board.word(B.ACTIVE, 1)
        return self.meet()

    def leave(self) -> None:
        """Undo one :meth:`enter`. Without another, collectives pass again; the peers see that, and go on without this rank."""
        self._depth -= 1
        if not self._depth:
            self._board.word(B.ACTIVE, 0)
            self._board.word(B.ALONE, 0)

    def meet(self) -> list[int]:
        """Let all recorded ranks of this node come to where they verify; at most for a while, since they need not.

        Returns:
            Those that were waited for in vain for the first time. They are waited for less and less.
        """
        began = _now()
        patience = min(int(self._timeout_s() * 1e9) or ENTRY_PATIENCE_NS, ENTRY_PATIENCE_NS)
        self._here = self._here or self._recorded_here()
        meeting = self._meetings + 1
        self._board.word(B.PRESENT, meeting)
        while True:
            absent = [rank for rank in self._here if not self._is_at(rank, meeting)]
            missing = [rank for rank in absent if not self._is_alone(rank)]
            waited = _now() - began
            if not any(waited < patience // 10 ** self._in_vain.get(rank, 0) for rank in missing):
                break
            time.sleep(ENTRY_NAP_S)
            self._here = self._recorded_here()
        if absent:
            # Not counted: the meeting that did not come about is the next one, for those who come later, too.
            self._board.word(B.PRESENT, self._meetings)
            self._board.word(B.ALONE, 1)
        else:
            self._meetings = meeting
        for rank in missing:
            self._in_vain[rank] = self._in_vain.get(rank, 0) + 1
        new = [rank for rank in missing if rank not in self._warned]
        self._warned.update(new)
        return new

    def _recorded_here(self) -> list[int]:
        """The other ranks of the job that live on this node, by their boxes."""
        ranks = set(self._late)
        for box in places.boxes(self._folder):
            rank, pid = int(box.name.removeprefix("rank").split(".")[0]), places.box_pid(box)
            if rank != self.rank and places.start_ticks(pid) and not _is_zombie(pid):
                ranks.add(rank)
        return sorted(ranks)

    def _is_at(self, rank: int, meeting: int) -> bool:
        self._look_for_boards()
        board = self._peer(rank)
        return board is not None and board.word(B.PRESENT) >= meeting

    def _is_alone(self, rank: int) -> bool:
        board = self._peer(rank)
        return board is not None and board.word(B.ALONE) == 1

    def stop(self) -> None:
        """Verify no more in this process. It lives on, and the peers go on without it."""
        self._off = True
        self._board.word(B.ACTIVE, 0)

    def close(self) -> None:
        """Say goodbye to the peers."""
        self._off = True
        self._board.close()
        self._alarms.close()

    def group_destroyed(self) -> None:
        """Names of groups start again with the next default group."""
        self._watched.clear()

    # --- announcing

    def _announce(self, token: Token, frame: FrameType | None, reduce_op: Any) -> _Pending | None:
        interned = token.asked
        watched = self._channel(interned)
        if watched is None or not watched.slot:
            return None
        number = self._in_round(watched, token.tagged_number or token.number)
        code = 0
        if reduce_op is not None:
            found = reduce_op_code(reduce_op)
            code = 0 if found is None else found + 1
        known = self._signatures.get(id(interned))
        if known is None or known[0] is not interned:
            if len(self._signatures) > 10_000:
                self._signatures.clear()
            known = self._signatures[id(interned)] = (interned, _signature(interned))
        signature = (known[1] + code * 0x9E3779B97F4A7C15) & _MASK
        self._note(token.thread)
        token.announced = (watched.slot, number)
        self._board.announce(watched.slot, number, signature, self._blob(interned, code, token.stack, frame), code)
        self._bells.ring(watched.peers)
        return _Pending(watched, watched.slot, number, signature, code, interned)

    def _in_round(self, watched: _Watched, number: int) -> int:
        """The number as boards have it: after a refusal that all its members raise, the channel's next round begins."""
        while watched.alarms_seen < self._raised:
            ranks = self._alarms.read(watched.alarms_seen).get("ranks", ())
            watched.alarms_seen += 1
            if set(watched.members) <= set(ranks):
                watched.round += 1
        return watched.round << B.ROUND_SHIFT | number

    def _note(self, thread: int) -> None:
        if thread not in self._threads:
            self._threads.add(thread)
            self._board.word(B.THREADS, len(self._threads))

    def _blob(self, interned: Interned, code: int, stack: int, frame: FrameType | None) -> int:
        """What was asked and where, for who must tell it in words: once for each stack."""
        key = (id(interned), code, stack)
        position = self._blobs.get(key, 0)
        if not position or not self._board.is_alive(position):
            if len(self._blobs) > 10_000:
                self._blobs.clear()
            name, where = users_operation(frame, interned.op)
            content = {
                **{field: interned.content[field] for field in ("op", "dop", "in", "out", "root", "is", "os")},
                "rop": L.REDUCE_OPS[code - 1] if 0 < code <= len(L.REDUCE_OPS) else None,
                "name": name, "where": where, "peer": interned.peer, "tag": interned.tag, "async": interned.content["async"],
            }  # fmt: skip
            position = self._blobs[key] = self._board.add_blob(content)
        return position

    def _channel(self, interned: Interned) -> _Watched | None:
        channel = interned.channel
        if interned.op in POINT_TO_POINT:
            if interned.peer < 0 or interned.flags & L.FLAG_ANY_SOURCE:
                return None  # which send it meets is not known before
            sends = interned.op == "send"
            tag = interned.tag if channel.polls else 0  # NCCL ignores tags
            if not sends and (-1, f"recv {tag}" if channel.polls else "recv") in channel.pairs:
                return None  # it has received from anybody, too: which message is the next one from this peer is not known
            identity: Any = (channel, sends, interned.peer, tag)
        else:
            identity = channel
        found = self._watched.get(identity)
        if found is None:
            found = self._watched[identity] = self._new_channel(channel, interned, identity)
        return found

    def _new_channel(self, channel: Channel, interned: Interned, identity: Any) -> _Watched:
        group = channel.group
        parts: tuple[Any, ...] = (group.incarnation, group.name, group.ranks, channel.device)
        if identity is channel:
            members = group.ranks
        else:
            pair = (self.rank, interned.peer) if interned.op == "send" else (interned.peer, self.rank)
            parts, members = (*parts, *pair), pair
        description: dict[str, Any] = {"group": _label(group), "ranks": list(members)}
        family = 0
        if identity is not channel:
            family = description["family"] = B.key_of(*parts)
            description["tag"] = identity[3]
            parts = (*parts, identity[3])
        key = B.key_of(*parts)
        slot = self._board.add_channel(key, description)
        if not slot:
            log.warning("commlens: more than %d channels: what goes over further ones is not verified", B.CHANNELS)
        peers = [rank for rank in members if rank != self.rank and self._peer(rank) is not None]
        self._warn_of_unverified(rank for rank in members if rank != self.rank and rank not in peers)
        watched = _Watched(group, key, slot, members, peers)
        watched.family = family
        self._by_key[key] = watched
        return watched

    def _calls(self, name: str, group: Group) -> _Watched:
        """The channel of calls of functions in a group: one for all functions, as there is one for all collectives."""
        found = self._watched.get(group)
        if found is None:
            key = B.key_of("calls", group.incarnation, group.name, group.ranks)
            slot = self._board.add_channel(key, {"group": _label(group), "ranks": list(group.ranks)})
            peers = [rank for rank in group.ranks if rank != self.rank and self._peer(rank) is not None]
            left_out = [rank for rank in group.ranks if rank != self.rank and rank not in peers]
            if left_out:
                log.warning(
                    "commlens: the arguments of %s are not compared with those of %s (on another node, or not verifying)",
                    name, f"rank {left_out[0]}" if len(left_out) == 1 else f"ranks {format_ranks(left_out)}",
                )  # fmt: skip
            found = self._watched[group] = self._by_key[key] = _Watched(group, key, slot, group.ranks, peers)
        return found

    def _call_blob(self, key: int, signature: int, call: _Call, frame: FrameType | None) -> int:
        place: list[int] = []
        below = frame
        while below is not None:
            place += (id(below.f_code), below.f_lasti)
            below = below.f_back
        known = (key, signature, *place)
        position = self._blobs.get(known, 0)
        if not position or not self._board.is_alive(position):
            if len(self._blobs) > 10_000:
                self._blobs.clear()
            content = {**call.content, "name": call.op, "where": users_operation(frame, "")[1]}
            position = self._board.add_blob(content) or self._board.add_blob({**content, "leaves": None})
            self._blobs[known] = position
        return position

    # --- peers

    def _peer(self, rank: int) -> PeerBoard | None:
        """A rank's board, where it is on this node and verifies too. Mostly all have made theirs before the first group was there."""
        found = self._boards.get(rank)
        if found is None and rank not in self._unverified:
            for path in sorted(self._folder.glob(f"rank{rank}.*{B.SUFFIX}")):
                try:
                    board = PeerBoard(path)
                except (OSError, ValueError):
                    continue
                if places.start_ticks(board.pid) == board.start_ticks and board.word(B.COUNTS_FROM) == self._counts_from:
                    found = self._boards[rank] = board
            if found is None:
                self._unverified.add(rank)
        return found

    def _peer_or_own(self, rank: int) -> PeerBoard | None:
        if rank == self.rank and rank not in self._boards:
            self._boards[rank] = PeerBoard(self._board.path)
        return self._boards[rank] if rank == self.rank else self._peer(rank)

    def _warn_of_unverified(self, ranks: Iterable[int]) -> None:
        """Once for each rank of this node: nobody compares with it."""
        new = [rank for rank in ranks if rank not in self._warned and rank in _ranks_of_this_node(self.rank)]
        if new:
            self._warned.update(new)
            log.warning(
                "commlens: %s not verify collectives (started without --debug?): rank %d goes on, and compares with the others only",
                f"rank {new[0]} does" if len(new) == 1 else f"ranks {format_ranks(new)} do", self.rank,
            )  # fmt: skip

    def _look_for_boards(self) -> None:
        """Boards that were made since: their ranks are peers from now on."""
        changes = self._alarms.changes()
        if changes == self._changes_seen:
            return
        self._changes_seen = changes
        self._unverified.clear()
        for watched in self._watched.values():
            watched.peers = [rank for rank in watched.members if rank != self.rank and self._peer(rank) is not None]

    # --- comparing

    def _compare(self, pending: _Pending) -> None:
        """Compare with all who have announced; leave in ``absent`` those who have not.

        Raises:
            DistributedOperationException: one of them announced something that does not fit.
        """
        absent: list[int] = []
        differing: list[int] = []
        for rank in pending.absent:
            board = self._boards[rank]
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
                self._raise_alarm()
                absent += differing
        pending.absent = absent

    def _rows(self, pending: _Pending) -> list[tuple[int, int, dict[str, Any] | None]]:
        """Rank, signature and blob of all who have announced, ourselves included."""
        rows: list[tuple[int, int, dict[str, Any] | None]] = []
        for rank in pending.channel.members:
            if rank == self.rank:
                rows.append((rank, pending.signature, self._own_blob(pending)))
                continue
            board = self._boards.get(rank)
            slot = board.slot(pending.channel.key) if board is not None else 0
            seen = board.announced(slot, pending.number) if board is not None and slot else None
            if board is not None and seen is not None:
                rows.append((rank, seen[0], board.blob(seen[1])))
        return rows

    def _own_blob(self, pending: _Pending) -> dict[str, Any]:
        content = pending.interned.content
        code = pending.code
        return {**content, "rop": L.REDUCE_OPS[code - 1] if 0 < code <= len(L.REDUCE_OPS) else None,
                "peer": pending.interned.peer, "tag": pending.interned.tag, "name": "", "where": ""}  # fmt: skip

    def _disagreement(self, pending: _Pending, rows: list[tuple[int, int, dict[str, Any] | None]]) -> Disagree | LeafDisagreement | None:
        if isinstance(pending.interned, _Call) and len({blob["op"] for _, _, blob in rows if blob is not None}) == 1:
            return compare_leaves({rank: unpacked(blob.get("leaves")) for rank, _, blob in rows if blob is not None})
        key = tuple((rank, signature) for rank, signature, _ in rows)
        if key in self._agreed:
            return None
        asked = {rank: _asked(blob) for rank, _, blob in rows if blob is not None}
        if pending.interned.op in POINT_TO_POINT:
            if len(asked) < 2:
                return None
            sender, receiver = pending.channel.members
            answer = compare_pair(sender, asked[sender], receiver, asked[receiver])
        else:
            answer = compare_collectives(asked, pending.channel.group.ranks)
        if isinstance(answer, Disagree):
            return answer
        if len(self._agreed) > 10_000:
            self._agreed.clear()
        self._agreed.add(key)
        return None

    def _refuse(self, pending: _Pending) -> None:
        """Give the others a moment to come, so that the table is whole; post it, and raise."""
        until = _now() + FULL_TABLE_NS
        while _now() < until and len(self._rows(pending)) < len(pending.channel.peers) + 1:
            alarm = self._alarm_about(pending)
            if alarm is not None:
                self._raised = self._alarms.count()
                raise refusal(str(alarm.get("text", "")), str(alarm.get("kind", "")))
            time.sleep(NAP_S)
        answer = self._disagreement(pending, self._rows(pending))
        if answer is None:
            return  # those who differed have withdrawn
        subject, rows = self._subject(pending), self._words(pending)
        text = leaves_text(answer, subject, rows) if isinstance(answer, LeafDisagreement) else mismatch_text(answer, subject, rows)
        self._post(pending, f"mismatch/{answer.aspect}", text)

    def _words(self, pending: _Pending) -> list[Row]:
        own = self._last_words(pending)
        rows = []
        for rank, _, blob in self._rows(pending):
            if blob is None:
                continue
            if rank == self.rank:
                blob = {**blob, **own}
            rows.append(self._row(rank, blob))
        return rows

    @staticmethod
    def _row(rank: int, blob: dict[str, Any]) -> Row:
        peer = blob.get("peer")
        return Row(rank, _asked(blob), str(blob.get("where", "")), str(blob.get("name", "")),
                   peer if isinstance(peer, int) and peer >= 0 else None, int(blob.get("tag") or 0))  # fmt: skip

    def _last_words(self, pending: _Pending) -> dict[str, Any]:
        """Our own announcement, read back: it has the line and the name."""
        board = self._boards.get(self.rank)
        if board is None:
            board = self._boards[self.rank] = PeerBoard(self._board.path)
        seen = board.announced(pending.slot, pending.number)
        blob = board.blob(seen[1]) if seen is not None else None
        return {"name": blob.get("name", ""), "where": blob.get("where", "")} if blob is not None else {}

    def _subject(self, pending: _Pending) -> Subject:
        group = pending.channel.group
        return Subject(_label(group), group.ranks, pending.number & B.NUMBER_MASK)

    # --- alarms

    def _post(self, pending: _Pending, kind: str, text: str, about: tuple[int, int, int] | None = None, ranks: Iterable[int] = ()) -> None:
        """Post it and raise; what was posted about the same before is raised instead."""
        key, number = about[1:] if about is not None else (pending.channel.key, pending.number)
        concerned = sorted({*pending.channel.members, *ranks})
        alarm = self._alarms.post(key, number, {"kind": kind, "text": text, "by": self.rank, "ranks": concerned})
        self._raised = max(self._raised, self._alarms.count())
        self._bells.wake(concerned)
        raise refusal(str(alarm.get("text") or text), str(alarm.get("kind") or kind))

    def _alarm_about(self, pending: _Pending) -> dict[str, Any] | None:
        for at in range(self._raised, self._alarms.count()):
            alarm = self._alarms.read(at)
            if alarm.get("key") == pending.channel.key and alarm.get("number") == pending.number:
                return alarm
        return None

    def _raise_alarm(self) -> None:
        count = self._alarms.count()
        while self._raised < count:
            alarm = self._alarms.read(self._raised)
            self._raised += 1
            if alarm and self._concerns_us(alarm):
                raise refusal(str(alarm.get("text", "")), str(alarm.get("kind", "")))

    def _concerns_us(self, alarm: dict[str, Any]) -> bool:
        ranks = alarm.get("ranks")
        return isinstance(ranks, list) and self.rank in ranks

    # --- waiting

    def _needed(self, pending: _Pending) -> list[int]:
        """Without which of the absent ranks the op cannot end on this one."""
        op = pending.interned.op
        if op in NEEDS_ALL:
            return pending.absent
        if op in POINT_TO_POINT:
            return pending.absent if op == "recv" else []
        root = pending.interned.content["root"]
        if op in ("broadcast", "scatter"):
            return [rank for rank in pending.absent if rank == root]
        return pending.absent if root == self.rank else []

    def _wait_before_issue(self, pending: _Pending, interned: Interned) -> None:
        if not interned.synchronous:
            return
        needed = self._needed(pending)
        if not interned.channel.polls:
            self._wait(pending, pending.absent, ACCELERATOR_PATIENCE_NS)
        elif needed and interned.op not in COLLECTING:
            self._wait(pending, needed, None)
        if pending.absent and interned.op not in NEEDS_ALL and interned.op not in POINT_TO_POINT:
            patience = pending.channel.rooted_patience_ns
            if patience:
                self._wait(pending, pending.absent, patience)
                if pending.absent:
                    pending.channel.rooted_patience_ns = 0  # this program does not meet here: do not hold it up again

    def _wait(self, pending: _Pending, needed: Iterable[int], patience_ns: int | None) -> None:
        """Until all who are needed have announced; at most for ``patience_ns``, where it is given."""
        wanted = set(needed)
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
                self._raise_alarm()
                self._compare(pending)
                if first in pending.absent:
                    self._bells.sleep(first, heard)
                    self._raise_alarm()
                    self._compare(pending)
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
                            f"rank {self.rank}", (now - began) / 1e9, pending.interned.op, pending.number & B.NUMBER_MASK,
                            self._subject(pending).group, ", ".join(f"rank {rank}" for rank in absent),
                        )  # fmt: skip
        finally:
            self._bells.awake(thread)
            self._board.waits(0, 0, 0)

    def _look_around(self, pending: _Pending, absent: list[int], waited_ns: int) -> None:
        gone = {rank: words for rank in absent if (words := self._how_it_ended(rank))}
        if gone:
            self._compare(pending)  # it may have come just before
            gone = {rank: words for rank, words in gone.items() if rank in pending.absent}
            if set(gone.values()) == {HAS_FINISHED}:
                self._refuse_if_tags_differ(pending, waited_ns, HAS_FINISHED)
            if gone:
                text = absence_text("dead", self._subject(pending), self._words(pending), gone, waited_ns / 1e9)
                self._post(pending, "dead", text)
        if waited_ns > CYCLE_AFTER_NS:
            cycle = self._cycle()
            if cycle:
                time.sleep(2 * LOOK_AROUND_NS / 1e9)
                if self._cycle() == cycle:
                    self._compare(pending)
                    self._refuse_if_tags_differ(pending, waited_ns)
                    concerned = {member for _, key, _ in cycle for member in self._members(key)}
                    self._post(pending, "cycle", cycle_text([self._edge(*step) for step in cycle]), about=cycle[0], ranks=concerned)
        timeout_s = self._timeout_s()
        if timeout_s and waited_ns > timeout_s * 1e9:
            where = {rank: self._where_is(rank) for rank in absent}
            self._refuse_if_tags_differ(pending, waited_ns, next(iter(where.values()), ""))
            self._post(pending, "missing", absence_text("missing", self._subject(pending), self._words(pending), where, waited_ns / 1e9))

    def _refuse_if_tags_differ(self, pending: _Pending, waited_ns: int, where: str = "") -> None:
        """Nobody sends what we wait for, and a message of the same peer under another tag is received by nobody: both are named."""
        if not pending.channel.family:
            return
        for rank in pending.absent:
            for tag, blob in self._other_tags(pending, rank):
                rows = [self._row(self.rank, {**self._own_blob(pending), **self._last_words(pending)}), self._row(rank, blob)]
                text = tag_text(self._subject(pending), rows, rank, (pending.interned.tag, tag), waited_ns / 1e9, where)
                self._post(pending, "mismatch/p2p", text)

    def _other_tags(self, pending: _Pending, rank: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Messages of a peer that ours could meet but for the tag, and that nobody takes: tag, and what was asked."""
        board, own = self._boards[rank], self._peer_or_own(self.rank)
        assert own is not None
        for key, description in board.channels():
            if description.get("family") != pending.channel.family or key == pending.channel.key:
                continue
            theirs, slot = board.last_number(board.slot(key)), own.slot(key)
            taken = own.last_number(slot) & B.NUMBER_MASK if slot else 0
            seen = board.announced(board.slot(key), (theirs & ~B.NUMBER_MASK) + taken + 1)
            blob = board.blob(seen[1]) if seen is not None else None
            if blob is not None:
                yield int(description.get("tag") or 0), blob

    def _refuse_if_ended(self, pending: _Pending) -> None:
        """At once where a rank that the op needs has said goodbye: what nobody waits for in Python is never looked at again."""
        if any(self._boards[rank].word(B.CLOSED) for rank in self._needed(pending)):
            self._look_around(pending, self._needed(pending), 0)

    def _how_it_ended(self, rank: int) -> str:
        board = self._boards[rank]
        if board.word(B.CLOSED):
            return HAS_FINISHED
        return "" if places.start_ticks(board.pid) == board.start_ticks and not _is_zombie(board.pid) else "was killed or crashed"

    def _where_is(self, rank: int) -> str:
        """What an absent rank does instead: the line of its main thread, as its own watchdog thread last saw it; "" where nothing tells."""
        board = self._boards[rank]
        if _process_state(board.pid) in ("T", "t"):
            return "is stopped by a signal"
        try:
            box = read_box(self._folder / places.box_name(rank, board.pid))
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

    def _cycle(self) -> list[tuple[int, int, int]] | None:
        """Ranks that wait for each other: (rank, channel's key, number); None unless it is proven.

        Proven is it among ranks of which each issues from one thread only and waits before issue for the next.
        """
        path: list[tuple[int, int, int]] = []
        rank = self.rank
        while True:
            state = self._waits_in(rank)
            if state is None:
                return None
            path.append((rank, *state))
            successors = self._absent_from(*state)
            following = next((r for r in sorted(successors) if r == self.rank), None)
            if following is not None:
                return self._told_alike(path) if len(path) > 1 else None
            following = next((r for r in sorted(successors) if r not in {step[0] for step in path} and self._waits_in(r) is not None), None)
            if following is None:
                return None
            rank = following

    def _told_alike(self, cycle: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """The cycle as every rank that waits in it tells it: of those that wait in one place, the first; the lowest rank at the start."""
        alike = []
        for at, (rank, key, number) in enumerate(cycle):
            missed = self._absent_from(*cycle[at - 1][1:])  # by the rank that waits for this one
            alike.append((next(r for r in sorted(missed | {rank}) if r == rank or self._waits_in(r) == (key, number)), key, number))
        first = alike.index(min(alike))
        return alike[first:] + alike[:first]

    def _waits_in(self, rank: int) -> tuple[int, int] | None:
        board = self._boards.get(rank)
        if rank == self.rank and board is None:
            board = self._boards[rank] = PeerBoard(self._board.path)
        if board is None or board.word(B.THREADS) != 1:
            return None
        key, number, since = board.word(B.WAITING), board.word(B.WAITING_NUMBER), board.word(B.WAITING_SINCE)
        return (key, number) if key and since and _now() - since > CYCLE_AFTER_NS else None

    def _absent_from(self, key: int, number: int) -> set[int]:
        """Who has not announced this collective, as far as boards tell."""
        absent = set()
        for rank in self._members(key):
            its = self._boards.get(rank)
            if its is not None:
                slot = its.slot(key)
                if not slot or its.last_number(slot) < number:
                    absent.add(rank)
        return absent

    def _members(self, key: int) -> set[int]:
        """A channel's ranks, as far as boards tell."""
        for board in self._boards.values():
            description = board.channel(key)
            if description is not None:
                return {rank for rank in description.get("ranks", ()) if isinstance(rank, int)}
        return set()

    def _edge(self, rank: int, key: int, number: int) -> tuple[int, str, str, list[int]]:
        board = self._boards[rank]
        slot = board.slot(key)
        seen = board.announced(slot, number) if slot else None
        blob = (board.blob(seen[1]) if seen is not None else None) or {}
        group = (board.channel(key) or {}).get("group", "?")
        return (
            rank,
            f"{blob.get('op', 'a collective')} #{number & B.NUMBER_MASK} of group {group}",
            str(blob.get("where", "")),
            sorted(self._absent_from(key, number)),
        )

    # --- odds and ends

    def _remember(self, index: int, pending: _Pending) -> None:
        if len(self._pending) > 4096:
            for old in list(self._pending)[:2048]:
                self._pending.pop(old, None)
        self._pending[index] = pending

    def _give_up(self, error: Exception) -> None:
        self._off = True
        log.warning("commlens stops verifying, the job goes on: %s: %s", type(error).__name__, error)
        log.debug("the verifier's error", exc_info=True)


def _label(group: Group) -> str:
    described = "" if group.description == "undefined" else group.description  # what torch says of a group that nobody described
    return group.mesh_dim or described or group.name


def _signature(interned: Interned) -> int:
    content = interned.content
    return B.key_of(*(content[field] for field in ("op", "in", "out", "root", "is", "os")))


def _asked(blob: dict[str, Any]) -> Asked:
    def specs(tensors: Any) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(tuple(shape), dtype, device, layout, tuple(order) if order is not None else None)
            for shape, dtype, device, layout, order in tensors or ()
        )

    return Asked(
        op=str(blob["op"]), dispatcher_op=str(blob["dop"]), inputs=specs(blob["in"]), outputs=specs(blob["out"]), reduce_op=blob.get("rop"),
        root=blob["root"], input_splits=tuple(blob["is"] or ()), output_splits=tuple(blob["os"] or ()), asynchronous=blob.get("async"),
    )  # fmt: skip


def _ranks_of_this_node(rank: int) -> range:
    try:
        local, size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError):
        return range(0)
    return range(rank - local, rank - local + size)


def _is_zombie(pid: int) -> bool:
    return _process_state(pid) in ("Z", "")


def _process_state(pid: int) -> str:
    """The letter that the kernel has for it; "" where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return "".join(text.rpartition(")")[2].split()[:1])


def _is_capturing() -> bool:
    import torch

    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
