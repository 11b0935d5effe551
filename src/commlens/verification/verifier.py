"""Strict verification: what a rank is about to issue is compared with what its peers on the node are about to, before it is.

Every collective is announced on the rank's board (``announcing.py``). Where an op needs every rank anyway and its caller waits for it,
the rank waits for its peers' announcements first (``waiting.py``), so that all of them raise and nothing is sent. Elsewhere it
compares (``comparing.py``) with those that have announced already, and again when somebody waits for the op: the last to come finds
the fault, refuses its own issue and posts it; the others raise at their next collective or wait (``refusing.py``).

With the native engine, what was verified here once is verified in C++ from then on, as long as all agree (``planning.py``).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any, Final

from commlens.blackbox import board as B
from commlens.blackbox import job_dirs
from commlens.blackbox.board import Board
from commlens.blackbox.refusal_log import Alarms
from commlens.blackbox.wakeup import Bells
from commlens.errors import DistributedOperationException
from commlens.tap.groups import Group
from commlens.tap.interned_args import InternedArgs, reduce_op_code
from commlens.tap.token import Token
from commlens.verification.announcer import Announcer
from commlens.verification.channels import Pending
from commlens.verification.comparison import Comparison
from commlens.verification.peers import Peers
from commlens.verification.planning import Planner
from commlens.verification.refusals import Refusals
from commlens.verification.rendezvous import EVERY_MEETING, Meetings
from commlens.verification.waiting import Waiting

log = logging.getLogger("commlens")

_PENDING_LIMIT: Final = 4096


class Verifier:
    """Compares this rank's collectives with its peers'. Its own errors switch it off with one line; only refusals are raised."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        *,
        timeout_s: Callable[[], float],
        active: bool = True,
        late: Iterable[int] = (),
        make_exchange: Callable[[Any, Any, int], Any] | None = None,
    ) -> None:
        """Make the rank's board.

        Args:
            folder: the job's folder of black boxes.
            rank: the global rank.
            timeout_s: how long a peer may be silent, asked when it matters.
            active: verify from now on; otherwise between :meth:`enter` and :meth:`leave`.
            late: where this is switched on in the middle of a job, the ranks that do it together. Their numbers of collectives count
                from there, and fit those of nobody else.
            make_exchange: makes what verifies in C++, of a board's map, the page that all ranks share, and the rank.

        Raises:
            OSError: no room.
        """
        self.rank = rank
        together = frozenset(late) - {rank}
        counts_from = int(bool(together))
        self._board = Board(folder / f"rank{rank}.{os.getpid()}{B.SUFFIX}", rank, job_dirs.start_ticks(os.getpid()))
        self._alarms = Alarms(folder)
        self.exchange = make_exchange(self._board.map, self._alarms.map, rank) if make_exchange is not None else None
        bells: Any = Bells(self._alarms.map, rank) if self.exchange is None else self.exchange
        self._refusals = Refusals(self._alarms, rank, bells)
        self._peers = Peers(folder, rank, self._board.path, counts_from)
        self._announcer = Announcer(self._board, bells, self._peers, self._refusals, self.exchange)
        self._comparison = Comparison(self._peers, self._refusals, self.exchange)
        self._waiting = Waiting(folder, self._board, bells, self._peers, self._comparison, self._refusals, timeout_s)
        self._meetings = Meetings(folder, self._board, self._peers, together, timeout_s, self._look_for_boards)
        self._planner = Planner(self.exchange, self._announcer, self._peers)
        self._pending: dict[int, Pending] = {}  # by record index: for whoever waits for it
        self._changes_seen = -1
        self._off = False
        self._depth = 1 if active else 0  # of what has asked for verification; 0: collectives pass
        self._board.word(B.COUNTS_FROM, counts_from)
        steady = active and not together
        self._board.word(B.STEADY, int(steady))
        self._board.word(B.PRESENT, EVERY_MEETING if steady else 0)
        self._board.word(B.ACTIVE, self._depth)
        self._alarms.tell_change()
        self._tell_exchange()

    @property
    def is_active(self) -> bool:
        """Whether collectives are verified now."""
        return self._depth > 0 and not self._off

    # --- what the recorder calls

    def before_issue(self, token: Token, frame: FrameType | None, reduce_op: Any) -> None:
        """Announce an op, unless that has been done, compare it, and wait for the peers where its meaning allows.

        Args:
            token: the recorder's, of the op.
            frame: where it was issued.
            reduce_op: it, as torch has it.

        Raises:
            DistributedOperationException: it must not be issued.
        """
        asked = token.args
        if self._off or not self._depth or asked.refused_locally or (asked.channel.device == "cuda" and _is_capturing()):
            return
        try:
            self._catch_up()
            pending = self._announcer.announce(token, frame, reduce_op_code(reduce_op) if reduce_op is not None else None)
            if pending is None:
                return
            self._comparison.compare(pending)
            if pending.absent:
                self._waiting.before_issue(pending, asked, self._plans_changed)
            if pending.absent:
                self._waiting.refuse_if_ended(pending)
                self._remember(token.index, pending)
        except DistributedOperationException:
            raise
        except Exception as error:
            self._give_up(error)
        finally:
            self._tell_exchange()

    def plan(self, asked: InternedArgs, stack: int, reduce_op_code: int) -> Any:
        """How the next op like one that was verified just now is verified in C++; None where that stays here.

        Args:
            asked: what it asks for.
            stack: the position of its stack in the side table.
            reduce_op_code: of its reduce op; -1 for none.
        """
        try:
            return self._planner.plan(asked, reduce_op_code + 1, stack)
        except Exception as error:
            self._give_up(error)
            return None

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
            self._catch_up()
            pending = self._announcer.announce_call(name, group, number, describe(), threading.get_native_id(), frame)
            if pending is None:
                return
            try:
                self._comparison.compare(pending)
                if pending.absent:
                    self._waiting.wait(pending, pending.absent)
            except DistributedOperationException:
                self._announcer.withdraw(pending.channel.slot, pending.number)
                raise
        except DistributedOperationException as refused:
            raise refused.with_traceback(None) from refused.__cause__
        except Exception as error:
            self._give_up(error)
        finally:
            self._tell_exchange()

    def announce_late(self, token: Token) -> None:
        """The backend took what it seemed to refuse: from now on its kind is verified like others."""
        token.args.refused_locally = False
        if not self._off and self._depth:
            self._announcer.announce(token, None, None)

    def withdraw(self, token: Token) -> None:
        """An op was not issued after all: nobody is to meet its announcement."""
        self._pending.pop(token.index, None)
        if token.announced is not None:
            self._announcer.withdraw(*token.announced)

    def before_wait(self, index: int) -> None:
        """A thread is about to block in the backend until this op is done: all whom it needs must announce it first.

        Raises:
            DistributedOperationException: they announced something else, have ended, or do not come.
        """
        pending = self._pending.pop(index, None)
        if self._off or not self._depth:
            return
        try:
            self._refusals.raise_new()
            if pending is not None:
                self._comparison.compare(pending)
                if pending.absent:
                    self._waiting.before_wait(pending)
        except DistributedOperationException:
            raise
        except Exception as error:
            self._give_up(error)
        finally:
            self._tell_exchange()

    def before_planned_wait(self, asked: InternedArgs, number: int, code: int, absent: list[int], index: int) -> None:
        """The same for an op that was announced by plan, where C++ could not settle it.

        Args:
            asked: what it asks for.
            number: its number on the board, with its round.
            code: of its reduce op, plus 1.
            absent: the ranks that had not come when it was issued.
            index: of its record.

        Raises:
            DistributedOperationException: as there.
        """
        watched = self._announcer.channel(asked)
        if watched is not None:
            pending = self._pending[index] = Pending(watched, number, self._announcer.signature(asked, code), code, asked)
            pending.absent = [rank for rank in watched.peers if rank in absent]
        self.before_wait(index)

    # --- refusals that were not raised yet

    def pending_refusal(self) -> DistributedOperationException | None:
        """What this rank is to raise, and has not yet."""
        try:
            self._refusals.raise_new()
        except DistributedOperationException as refused:
            return refused
        finally:
            self._tell_exchange()
        return None

    def unraised_alarm(self) -> str | None:
        """The text of an alarm about a group of ours that this rank has not raised: for its watchdog, should it not come to that."""
        return self._refusals.unraised()

    def before_end(self) -> None:
        """The process group is about to be destroyed: the last moment to raise what concerns this rank."""
        if not self._off and self._depth:
            self._refusals.raise_new()

    # --- switching

    def enter(self) -> list[int]:
        """Verify from now on, once the others on the node do, too.

        Returns:
            The ranks that were waited for in vain, once each. Nobody compares with them until they verify.
        """
        self._depth += 1
        if self._depth > 1 or self._off:
            return []
        self._refusals.skip()  # what was posted while this rank did not verify is told by those who did
        self._board.word(B.ACTIVE, 1)
        missing = self.meet()
        self._tell_exchange()
        return missing

    def leave(self) -> None:
        """Undo one :meth:`enter`. Without another, collectives pass again; the peers see that, and go on without this rank."""
        self._depth -= 1
        if not self._depth:
            self._board.word(B.ACTIVE, 0)
            self._board.word(B.ALONE, 0)
            self._tell_exchange()

    def meet(self) -> list[int]:
        """Let all recorded ranks of this node come to where they verify. Returns those that were waited for in vain, once each."""
        return self._meetings.meet()

    def all_verify(self, group: Group) -> bool:
        """Whether all ranks of a group do, on this node, and from first to last: each of them says the same."""
        boards = (self._peers.own() if rank == self.rank else self._peers.get(rank) for rank in group.ranks)
        return all(board is not None and board.word(B.STEADY) for board in boards)

    def stop(self) -> None:
        """Verify no more in this process. It lives on, and the peers go on without it."""
        self._off = True
        self._board.word(B.ACTIVE, 0)
        self._tell_exchange()

    def close(self) -> None:
        """Say goodbye to the peers."""
        self._off = True
        self._tell_exchange()
        self._board.close()
        self._alarms.close()

    def group_destroyed(self) -> None:
        """Names of groups start again with the next default group."""
        self._announcer.groups_start_again()
        self._plans_changed()

    # --- odds and ends

    def _catch_up(self) -> None:
        """With what others have posted, and with boards that were made."""
        self._refusals.raise_new()
        if self._peers.unverified:
            self._look_for_boards()

    def _look_for_boards(self) -> None:
        """Boards that were made since: their ranks are peers from now on."""
        changes = self._alarms.changes()
        if changes == self._changes_seen:
            return
        self._changes_seen = changes
        self._peers.unverified.clear()
        self._announcer.peers_changed()
        self._plans_changed()

    def _remember(self, index: int, pending: Pending) -> None:
        if len(self._pending) > _PENDING_LIMIT:
            for old in list(self._pending)[: _PENDING_LIMIT // 2]:
                self._pending.pop(old, None)
        self._pending[index] = pending

    def _plans_changed(self) -> None:
        if self.exchange is not None:
            self.exchange.forget()

    def _tell_exchange(self) -> None:
        """Up to where this rank has seen to what others do: C++ turns to Python as soon as there is more."""
        if self.exchange is not None:
            self.exchange.caught_up(self.is_active, self._refusals.raised, self._changes_seen if self._peers.unverified else None)

    def _give_up(self, error: Exception) -> None:
        self._off = True
        log.warning("commlens stops verifying, the job goes on: %s: %s", type(error).__name__, error)
        log.debug("the verifier's error", exc_info=True)


def _is_capturing() -> bool:
    import torch

    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
