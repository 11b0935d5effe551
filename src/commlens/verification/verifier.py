"""Strict verification: compare each collective with those of the peers before it is issued.

Every collective is announced on the rank's board (``announcer.py``). If an op needs every rank
anyway and its caller waits for it, the rank first waits for its peers' announcements
(``waiting.py``; ``late_ranks.py`` judges peers that do not come), so that all of them raise and
nothing is sent. Otherwise it compares with the peers that have announced already
(``comparison.py``), and again when a thread waits for the op: the last rank to arrive finds the
fault, refuses to issue and posts the refusal; the others raise it at their next collective or wait
(``refusals.py``). For example::

    rank 0                                    rank 1
    all_reduce(4 floats): announces it,
      and waits for rank 1
                                              all_reduce(8 floats): announces it, and finds that
                                                rank 0 announced another size: posts a refusal,
                                                and raises it
    finds the refusal, and raises the same

The peers' boards are in shared memory. Those of other nodes are copies, which a relay process keeps
(``link.py``, ``relay/node_relay.py``).

With the native engine, a collective like one that was verified here is verified in C++ from then
on, as long as all ranks agree.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final, NoReturn

from commlens.blackbox import job_dirs
from commlens.boards import board as B
from commlens.boards import refusal_log
from commlens.boards.board import Board, PeerBoard
from commlens.boards.refusal_log import RefusalLog
from commlens.boards.wakeup import Bells
from commlens.errors import DistributedOperationException
from commlens.matching.error_texts import is_peer_error
from commlens.model.collective import Collective
from commlens.model.ops import POINT_TO_POINT
from commlens.tap.cuda_graphs import is_capturing
from commlens.tap.groups import LiveGroup
from commlens.tap.interned_args import InternedArgs, reduce_op_code
from commlens.tap.token import Token
from commlens.verification.announcer import Announcer
from commlens.verification.call_site import call_site
from commlens.verification.channels import (
    BoardCode,
    Pending,
    VerifiedChannel,
    board_code,
    group_label,
)
from commlens.verification.comparison import Comparison, table_row
from commlens.verification.late_ranks import LateRanks
from commlens.verification.link import link_nodes
from commlens.verification.messages import Subject, no_such_peer
from commlens.verification.peers import Peers
from commlens.verification.refusals import Refusals
from commlens.verification.rendezvous import ALL_RENDEZVOUS, Rendezvous
from commlens.verification.sampling import EVERY, CallSampler
from commlens.verification.waiting import Waiting, needed_at_wait

log = logging.getLogger("commlens")

_PENDING_LIMIT: Final = 4096
_ON_THE_WAY_S: Final = 0.1  # the time for refusals on other nodes to arrive here, at the end
_NAP_S: Final = 0.001


class Verifier:
    """Compares this rank's collectives with its peers'. Only refusals are raised; an error of its
    own is logged and switches it off.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        *,
        timeout_s: Callable[[], float],
        active: bool = True,
        late: Iterable[int] = (),
        sample: bool = False,
        make_exchange: Callable[[Any, Any, int], Any] | None = None,
    ) -> None:
        """Create the rank's board.

        Args:
            folder: the job's folder of black boxes.
            rank: the global rank.
            timeout_s: returns after how many seconds a silent peer is refused.
            active: verify from now on; otherwise only between :meth:`enter` and :meth:`leave`.
            late: the ranks that enable verification together in mid-job. They number collectives
                from there, so only they can be compared with each other.
            sample: outside of :meth:`enter` and :meth:`leave`, compare only a part of the
                collectives.
            make_exchange: creates the verifier in C++ from the board's map, the refusal log's map
                and the rank.

        Raises:
            OSError: there is no space for the files.
        """
        self.rank = rank
        late_peers = frozenset(late) - {rank}  # empty also for the only rank of its node
        counts_from = int(bool(late_peers))
        self._folder = folder
        self._refusal_log = RefusalLog(folder)
        with self._refusal_log.locked():
            if not _remove_ended_boards(folder):
                self._refusal_log.reset()
            self._board = Board(
                folder / f"rank{rank}.{os.getpid()}{B.SUFFIX}",
                rank,
                job_dirs.start_ticks(os.getpid()),
            )
        # ranks of other nodes have counted from another moment on than this one, if it is late
        self._may_link = not late
        self.exchange = (
            make_exchange(self._board.map, self._refusal_log.map, rank)
            if make_exchange is not None
            else None
        )
        bells: Any = Bells(self._refusal_log.map, rank) if self.exchange is None else self.exchange
        self._refusals = Refusals(self._refusal_log, rank, bells)
        self._peers = Peers(folder, rank, self._board.path, counts_from)
        self._announcer = Announcer(self._board, bells, self._peers, self._refusals, self.exchange)
        self._comparison = Comparison(self._peers, self._refusals, self.exchange)
        parts = folder, self._board, bells, self._peers, self._comparison, self._refusals
        self._late = LateRanks(*parts, timeout_s)
        self._waiting = Waiting(*parts, self._late)
        self._rendezvous = Rendezvous(
            folder, self._board, self._peers, late_peers, timeout_s, self._find_new_boards
        )
        # by record index: what was issued before all peers had announced it, until a thread waits
        # for it
        self._pending: dict[int, Pending] = {}
        self._boards_seen = 0  # number of boards in the folder when peers were last looked for
        self._guarded = _Guard(self)
        self._off = False  # for good: stopped, closed, or after an error of its own
        self._depth = 1 if active else 0  # nesting of enter(); 0: collectives are not verified
        self._sampler = CallSampler() if sample and active else None
        # What the peers read on its board:
        # COUNTS_FROM: ranks with different values number their collectives differently, so they are
        # not compared. STEADY: it verifies from its first collective to its last. PRESENT: the
        # newest rendezvous that it has reached. ACTIVE: it announces its collectives, so peers wait
        # for it.
        #
        # It verifies           COUNTS_FROM  STEADY  PRESENT         ACTIVE
        # from the job's start            0       1  ALL_RENDEZVOUS       1
        # with late peers                 1       0  0 until they meet    1
        # only within enter()             0       0  0                    0
        self._board.set_word(B.COUNTS_FROM, counts_from)
        steady = active and not late_peers
        self._board.set_word(B.STEADY, int(steady))
        self._board.set_word(B.PRESENT, ALL_RENDEZVOUS if steady else 0)
        self._board.set_word(B.ACTIVE, self._depth)
        self._refusal_log.count_board()
        self._update_exchange()

    def link(self) -> None:
        """Begin to compare with the ranks on other nodes, once there is a default group. Waits for
        them for about ten seconds at most.
        """
        may_link, self._may_link = self._may_link and not self._off, False
        if may_link and link_nodes(self._folder, self.rank, self._refusal_log):
            self._refusals.reach_other_nodes(
                RefusalLog(self._folder, refusal_log.DRAFTS), self._peers.elsewhere
            )
            self._find_new_boards()

    @property
    def is_active(self) -> bool:
        """Whether collectives are verified now."""
        return self._depth > 0 and not self._off

    @property
    def _sampler_in_use(self) -> CallSampler | None:
        """The sampler, outside of :meth:`enter`: it exists only if the depth there is 1."""
        return self._sampler if self._depth == 1 else None

    # --- called by the recorder

    def before_issue(self, token: Token, frame: FrameType | None, reduce_op: Any) -> None:
        """Announce a collective, compare it, and wait for the peers as far as its semantics allow.

        Args:
            token: the recorder's token of the collective. C++ may have announced it already.
            frame: the caller's frame.
            reduce_op: torch's reduce op.

        Raises:
            DistributedOperationException: it must not be issued. The recorder then withdraws the
                announcement.
        """
        args = token.args
        if not self.is_active or (args.channel.device == "cuda" and is_capturing()):
            return
        with self._guarded:
            if args.no_such_peer:
                self._refuse_peer(token, frame)
            if args.fails_locally:  # announced only once the backend has accepted it
                return
            self._catch_up()
            sampler = self._sampler_in_use
            skipped = sampler is not None and sampler.skips(
                args, token.stack, token.tagged_number or token.number
            )
            code = board_code(reduce_op_code(reduce_op))
            pending = self._announcer.announce(token, frame, code, ring=not skipped)
            if pending is None or skipped:
                return
            self._comparison.compare(pending)
            if pending.absent:
                self._waiting.before_issue(pending, args, self._plans_changed)
            if pending.absent:  # also after the wait
                self._late.refuse_if_ended(pending)
                if len(self._pending) > _PENDING_LIMIT:  # a program need not wait for each
                    for old in list(self._pending)[: _PENDING_LIMIT // 2]:
                        self._pending.pop(old, None)
                self._pending[token.index] = pending

    def _refuse_peer(self, token: Token, frame: FrameType | None) -> NoReturn:
        """Refuse a message to or from a rank that does not exist: torch lets it wait for ever.

        Raises:
            DistributedOperationException: always.
        """
        args = token.args
        group = args.channel.group
        name, where = call_site(frame, args.op)
        row = table_row(
            self.rank,
            {**args.content, "peer": args.peer, "tag": args.tag, "name": name, "where": where},
        )
        key = B.key_of("no such peer", group.incarnation, group.name, self.rank, args.op, args.peer)
        channel = VerifiedChannel(group, key, 0, group.ranks, [])
        self._refusals.post(
            Pending(channel, token.number, 0, board_code(None), args),
            no_such_peer(Subject(group_label(group), group.members, token.number), row),
        )

    def plan(self, args: InternedArgs, stack: int, reduce_op: int | None) -> Any:
        """Return how C++ verifies further collectives like one that was verified here; None if
        Python must do it.

        Args:
            args: the collective's arguments.
            stack: the position of its stack in the side table.
            reduce_op: torch's code of its reduce op, if it has one.
        """
        with self._guarded:
            return self._announcer.plan(args, board_code(reduce_op), stack)
        return None

    def before_call(
        self,
        name: str,
        group: LiveGroup,
        number: int,
        describe: Callable[[], Any],
        frame: FrameType | None,
    ) -> None:
        """Compare the arguments of a function that all ranks of a group call together, before it
        runs.

        Args:
            name: the function's name, "train.gather_metrics".
            group: the group.
            number: the number of this call among the verified calls of the group.
            describe: returns the arguments' leaves.
            frame: the caller's frame.

        Raises:
            DistributedOperationException: the arguments do not match, or a rank does not arrive.
        """
        if not self.is_active or is_capturing():
            return
        try:
            with self._guarded:
                self._catch_up()
                pending = self._announcer.announce_call(
                    name, group, number, describe(), threading.get_native_id(), frame
                )
                if pending is None:
                    return
                try:
                    self._comparison.compare(pending)
                    if pending.absent:
                        self._waiting.wait(pending, pending.absent)
                except DistributedOperationException:
                    # the function has no token that a recorder could withdraw
                    self._announcer.withdraw(pending.channel.slot, pending.number)
                    raise
        except DistributedOperationException as refused:
            # the traceback begins at the user's line, not in our frames
            raise refused.with_traceback(None) from refused.__cause__

    def announce_accepted(self, token: Token) -> None:
        """Announce a collective that the backend accepted although it was expected to reject it
        (``fails_locally``), and verify further ones like it before they are issued.
        """
        # But not an all_to_all with wrong splits: gloo accepts and counts it, and its wait fails.
        token.args.fails_locally = token.args.op == "all_to_all"
        if self.is_active:
            with self._guarded:
                self._announcer.announce(token, None, board_code(None))

    def withdraw(self, token: Token) -> None:
        """Remove the announcement of a collective that was not issued."""
        self._pending.pop(token.index, None)
        if token.announced is not None:
            self._announcer.withdraw(*token.announced)

    def before_wait(self, index: int) -> None:
        """Wait for all ranks that a collective needs, before a thread blocks in the backend until
        it is done.

        Raises:
            DistributedOperationException: a rank announced something else, has ended, or does not
                arrive.
        """
        pending = self._pending.pop(index, None)
        if not self.is_active:
            return
        with self._guarded:
            self._refusals.raise_new()
            if pending is not None:
                self._comparison.compare(pending)
                if pending.absent:
                    needed = needed_at_wait(pending.args, pending.absent, self.rank)
                    self._waiting.wait(pending, needed)

    def before_planned_wait(
        self, args: InternedArgs, number: int, code: BoardCode, absent: list[int], index: int
    ) -> None:
        """Like :meth:`before_wait`, for a collective that C++ announced and could not compare with
        all peers.

        Args:
            args: its arguments.
            number: its number on the board, with its round.
            code: its reduce op on the board.
            absent: the ranks that had not arrived when it was issued.
            index: the index of its record.

        Raises:
            DistributedOperationException: a rank announced something else, has ended, or does not
                arrive.
        """
        with self._guarded:
            channel = self._announcer.channel(args)
            if channel is not None:
                pending = self._pending[index] = Pending(
                    channel, number, self._announcer.signature(args, code), code, args
                )
                pending.absent = [rank for rank in channel.peers if rank in absent]
        self.before_wait(index)

    # --- refusals that this rank has not raised yet

    def refusal_for(self, error: BaseException) -> DistributedOperationException | None:
        """Return the refusal that explains a backend's error, and count it as raised.

        It is the oldest one that this rank has not raised yet. If there is none, a peer has perhaps
        ended or not arrived.
        """
        if not self.is_active:
            return None
        try:
            with self._guarded:
                self._refusals.raise_new()
                if is_peer_error(text := str(error)):
                    self._late.refuse_failed(
                        self._announcer.channels(), timed_out="timed out" in text.lower()
                    )
        except DistributedOperationException as refused:
            return refused.with_traceback(None)
        return None

    @property
    def posted_refusals(self) -> int:
        """The number of refusals that the job's ranks have posted."""
        return self._refusal_log.count()

    def unraised_refusal(self) -> str | None:
        """Return the text of the oldest refusal that this rank has not raised yet, for the watchdog
        thread of a rank that is stuck.
        """
        return next((str(posted.get("text", "")) for posted in self._refusals.new()), None)

    def check_wait_in_cpp(self, args: InternedArgs, waited_ns: int) -> None:
        """Post a refusal if ranks do not join the oldest collective in flight, for which a thread
        waits in C++.
        """
        if not self.is_active:
            return
        # the waiting thread raises the refusal when it is back in Python
        with self._guarded, self._refusals.left_to_raise():
            channel = self._announcer.channel(args)
            if channel is not None and channel.slot:
                self._late.check_in_flight(channel, waited_ns)

    def refused_groups(self, in_flight: list[Collective]) -> list[Any]:
        """Return the process groups of those collectives in flight that an unraised refusal is
        about.
        """
        groups = []
        channels = {channel.key: channel for channel in self._announcer.channels()}
        for posted in self._refusals.new():
            channel = channels.get(posted.get("key", 0))
            if channel is not None and any(_is_about(posted, channel, op) for op in in_flight):
                groups.append(channel.group.ref())
        return [group for group in groups if group is not None]

    def before_end(self) -> None:
        """Raise a refusal that this rank has not raised yet, before the process group is
        destroyed.
        """
        if not self.is_active:
            return
        with self._guarded:
            self._refusals.raise_new()
            # a rank on another node may have refused what this one has sent
            until = time.monotonic() + (
                _ON_THE_WAY_S if self._refusal_log.link == refusal_log.LINKED else 0.0
            )
            while time.monotonic() < until:
                time.sleep(_NAP_S)
                self._refusals.raise_new()

    # --- switching

    def enter(self) -> list[int]:
        """Verify from now on. Waits until the other ranks do, too.

        Returns:
            The ranks that did not arrive, named once each. They are not compared until they verify.
        """
        self._depth += 1
        if self._depth > 1 or self._off:
            self._update_exchange()
            return []
        self._refusals.skip()  # ranks that verified meanwhile have raised these
        self._board.set_word(B.ACTIVE, 1)
        self.link()
        missing = self.meet()
        self._update_exchange()
        return missing

    def leave(self) -> None:
        """Undo one :meth:`enter`. After the last one, collectives are not verified, and the peers
        continue without this rank.
        """
        self._depth -= 1
        if not self._depth:
            self._board.set_word(B.ACTIVE, 0)
            self._board.set_word(B.ALONE, 0)
        self._update_exchange()

    def meet(self) -> list[int]:
        """Wait for all recorded ranks to verify. Returns those that did not arrive, named once
        each.
        """
        return self._rendezvous.meet()

    def all_verify(self, group: LiveGroup) -> bool:
        """Return whether all ranks of a group are on this node and verify from their first
        collective to the last.

        All of them must find the same, so a link to another node, which may break, is not enough.
        """
        boards = (
            self._peers.own if rank == self.rank else self._peers.get(rank) for rank in group.ranks
        )
        return all(
            board is not None and board.word(B.STEADY) and not board.is_remote for board in boards
        )

    def stop(self) -> None:
        """Stop verifying in this process. It and its peers continue."""
        self._off = True
        self._board.set_word(B.ACTIVE, 0)
        self._update_exchange()

    @property
    def has_announced(self) -> bool:
        """Whether this rank has announced any call to its peers."""
        return self._announcer.has_announced

    def close(self) -> None:
        """Tell the peers that this rank has finished."""
        self._off = True
        self._update_exchange()
        self._board.close()
        self._refusal_log.close()

    def group_destroyed(self) -> None:
        """Forget the groups that are gone."""
        self._announcer.forget_groups()
        self._plans_changed()

    # --- keeping up with the peers

    def _catch_up(self) -> None:
        """Raise new refusals, and find new boards of ranks that are not compared yet."""
        self._refusals.raise_new()
        if self._peers.unverified:
            self._find_new_boards()

    def _find_new_boards(self) -> None:
        """Look for peers again if boards were created since the last time."""
        created = self._refusal_log.boards_created()
        if created == self._boards_seen:
            return
        self._boards_seen = created
        self._peers.unverified.clear()
        self._announcer.peers_changed()
        self._plans_changed()

    def _plans_changed(self) -> None:
        """Let C++ forget how it verifies collectives: the next of each kind comes here."""
        if self.exchange is not None:
            self.exchange.forget()

    def _update_exchange(self) -> None:
        """Tell C++ which refusals and boards this rank has seen; it calls Python only for newer
        ones.
        """
        if self.exchange is not None:
            try:
                self.exchange.sample(EVERY if self._sampler_in_use is not None else 0)
                self.exchange.caught_up(
                    self.is_active,
                    self._refusals.raised,
                    self._boards_seen if self._peers.unverified else None,
                )
            except Exception as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Stop verifying after an error of the verifier's own. The peers do not wait for this
        rank's announcements any more.
        """
        self._off = True
        self._board.set_word(B.ACTIVE, 0)
        log.warning(
            "commlens stops verifying; the job goes on: %s: %s", type(error).__name__, error
        )
        log.debug("the verifier's error", exc_info=error)


class _Guard:
    """Surrounds the verifier's work, ``with self._guarded``. A refusal passes through; any other
    error switches the verifier off, and the program goes on. Then C++ learns what was seen.
    """

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier

    def __enter__(self) -> None: ...

    def __exit__(
        self, _: object, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        ours = (
            error
            if isinstance(error, Exception) and not isinstance(error, DistributedOperationException)
            else None
        )
        if ours is not None:
            self._verifier._give_up(ours)
        self._verifier._update_exchange()
        return ours is not None


def _remove_ended_boards(folder: Path) -> bool:
    """Remove the boards of ended processes; return whether others are left."""
    found = False
    for path in folder.glob(f"rank*{B.SUFFIX}"):
        try:
            board = PeerBoard(path)
        except (OSError, ValueError):
            continue
        if job_dirs.process_has_ended(board.pid, board.start_ticks):
            path.unlink(missing_ok=True)
        elif not board.is_remote:
            found = True
    return found


def _is_about(posted: dict[str, Any], channel: VerifiedChannel, op: Collective) -> bool:
    """Return whether a refusal is about this collective. Messages are compared by kind only: boards
    number them differently.
    """
    group, theirs = channel.group, op.channel.group
    is_same = (
        op.args.op in POINT_TO_POINT
        if channel.family
        else op.sequence_number == posted["number"] & B.NUMBER_MASK
    )
    return is_same and (group.incarnation, group.name, group.ranks) == (
        theirs.incarnation,
        theirs.name,
        theirs.ranks,
    )
