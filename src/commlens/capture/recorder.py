"""The recorder: the tap's subscriber that writes the black box.

The hot path is ``begin``, ``returned`` and ``wait``. An error of ours on it is counted, logged once, and the collective goes
its way as if nobody recorded.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from commlens.blackbox import layout as L
from commlens.blackbox.writer import BoxWriter
from commlens.capture import backend_progress, stacks
from commlens.model.ops import POINT_TO_POINT
from commlens.tap import tap
from commlens.tap.groups import Channel, Groups, give_back
from commlens.tap.interned_args import ArgsTable, InternedArgs, noted_reduce_ops, output_pointers, reduce_op_code
from commlens.tap.rejections import was_not_issued
from commlens.tap.token import Token, Verifier

if TYPE_CHECKING:
    from types import FrameType

log = logging.getLogger("commlens")

_HOLD_WEAKLY_AFTER_NS = 200_000_000
_HELD_LIMIT = 512
_REDUCE_OPS_AT_ONCE = 500
_monotonic = time.monotonic_ns


class _Here(threading.local):
    """This thread, by the id that the system gives it. InternedArgs of the system once: a system call costs more than a look-up."""

    def __init__(self) -> None:
        self.id = threading.get_native_id()


_here = _Here()
os.register_at_fork(after_in_child=lambda: setattr(_here, "id", threading.get_native_id()))


class CoalescedGroup:
    """A coalesced group that a thread is building: one collective with its members."""

    def __init__(self, number: int) -> None:
        self.id = number
        self.members: list[InternedArgs] = []
        self.sequence_number = 0

    def add(self, args: InternedArgs) -> int:
        """One more member. Returns its sequence number: collectives share the group's, point-to-point keeps its pair's."""
        self.members.append(args)
        if args.op in POINT_TO_POINT:
            return args.next_number()
        self.sequence_number = self.sequence_number or args.next_number()
        return self.sequence_number


class Recorder:
    """Records every collective of the process into ``writer``."""

    def __init__(self, writer: BoxWriter, groups: Groups, *, cpp_stack: bool = False, timing: bool = False) -> None:
        self.writer = writer
        self.groups = groups
        self.cpp_stack = cpp_stack
        self.timing = timing
        self.steps = 0
        self.stacks = stacks.StackTable(writer)
        self.synchronous: dict[int, Token] = {}  # by thread: issued by a call that waits for it right away
        self.in_flight: dict[Any, Token] = {}  # Work (its one Python object) to token; emptied as soon as it is done
        self.weakly_held: dict[int, Token] = {}  # by index: in flight, its Work no longer held
        self.by_pointer: dict[int, Token] = {}  # address of an output to token, for wait_tensor
        self.reduce_ops: collections.deque[tuple[int, int, Any]] = collections.deque(maxlen=writer.capacity)
        self.on_accelerator: collections.deque[Token] = collections.deque(maxlen=writer.capacity)  # on an accelerator
        self._table = ArgsTable()
        self._coalescing: dict[int, CoalescedGroup] = {}  # by thread
        self.on_unreadable_reduce_op: Callable[[], None] | None = None
        self._coalescing_ids = itertools.count(1).__next__
        self._logged = False
        self.lost = 0
        self.verifier: Verifier | None = None

    # --- switching

    def attach(self) -> None:
        """Record from now on."""
        tap.attach(self)

    def detach(self) -> None:
        """Record no more."""
        tap.detach(self)

    def tapped_wait(self, original: Any, slow: Any) -> Any:
        """A method ``wait`` of Works in the place of ``original``, which ``slow`` calls and records."""
        return slow

    make_exchange: Callable[[Any, Any, int], Any] | None = None
    """What verifies natively where all agree, made of a board's map, the shared page and the rank; None: all of it is in Python."""

    @property
    def listens_to_waits(self) -> bool:
        """Whether waits for functional collectives must come here."""
        return True

    @property
    def reads_reduce_ops(self) -> bool:
        """Whether it reads reduce ops by itself where torch does not let Python read them."""
        return False

    # --- the tap's calls

    def begin(self, spec: tap.OpSpec, arguments: tuple[Any, ...]) -> Token | None:
        """Write the record, before the backend sees the op. Only a verifier's refusal is raised."""
        if self.verifier is not None:
            return self._begin_verified(self.verifier, spec, arguments, sys._getframe(1).f_back)
        return self._begin(spec, arguments, sys._getframe(1).f_back, L.FLAG_ENTERED)

    def _begin_verified(self, verifier: Verifier, spec: tap.OpSpec, arguments: tuple[Any, ...], frame: FrameType | None) -> Token | None:
        token = self._begin(spec, arguments, frame, 0)
        if token is None or token.coalescing is not None:
            return token
        reduce_op = arguments[spec.reduce_op] if spec.reduce_op >= 0 else None
        noted = noted_reduce_ops.get(token.thread) if noted_reduce_ops else None
        try:
            verifier.before_issue(token, frame, noted if noted is not None else reduce_op)
        except BaseException as error:
            # The record keeps its number: which collective was refused is worth knowing.
            self._ended_by(token, error, issued=False)
            raise error.with_traceback(None) from error.__cause__  # without our own frames: the user's line is what matters
        self.writer.mark(token.offset, L.ENTERED, token.index, _monotonic())
        return token

    def _begin(self, spec: tap.OpSpec, arguments: tuple[Any, ...], frame: FrameType | None, entered: int) -> Token | None:
        try:
            args = self._table.find(spec, arguments, self.groups.find(tap.unbox_group(arguments[spec.process_group])))
            channel = args.channel
            writer = self.writer
            if args.blob <= writer.side_floor and not args.too_large:
                args.blob = writer.add_blob(args.content)
                args.too_large = args.blob == 0
            if channel.blob <= writer.side_floor:
                channel.blob = writer.add_blob(channel.describe())
            # In a thread of C++'s own (autograd's, on an accelerator, where DDP issues its collectives) there is no frame.
            stack = self.stacks.position(frame) if not self.cpp_stack else self.stacks.native_position()
            thread = _here.id
            flags = args.flags | entered
            if channel.busy and channel.busy != thread:
                flags |= L.FLAG_CONCURRENT
            channel.busy = thread
            coalescing = self._coalescing.get(thread) if self._coalescing else None
            if coalescing is None:
                number, coalescing_id = args.next_number(), 0
            else:
                number, coalescing_id, flags = coalescing.add(args), coalescing.id, flags | L.FLAG_COALESCED_MEMBER
            index = writer.next_index()
            now = _monotonic()
            offset = writer.announce(
                (index, now, channel.blob, args.blob, stack, 0, number, self.steps, coalescing_id, args.tag, thread, flags, args.peer, 0)
            )
            token = Token(index, offset, args, now, thread, number, stack)
            if args.next_tagged is not None:
                token.tagged_number = args.next_tagged()
            if coalescing is not None:
                token.coalescing = coalescing
            elif not args.synchronous and channel.holds_works:
                token.pointers = output_pointers(spec, arguments)
            if spec.reduce_op >= 0:
                noted = noted_reduce_ops.get(thread) if noted_reduce_ops else None
                self.reduce_ops.append((offset, index, noted or arguments[spec.reduce_op]))
        except Exception as error:
            self._failed(error)
            return None
        return token

    def returned(self, token: Token | None, result: Any) -> None:
        """The backend has it. Hold its Work where that is allowed, to learn when it is done."""
        if token is None:
            return
        try:
            args = token.args
            args.channel.busy = 0
            if args.refused_locally and self.verifier is not None:
                self.verifier.announce_late(token)
            boxed = result[-1] if type(result) is tuple else result
            if args.synchronous and boxed is not None:
                # The caller waits in its next breath. That wait will say that the call returned, and needs no Work to find us.
                self.synchronous[token.thread] = token
                return
            if token.coalescing is not None:
                # The record that closes the group carries the state that counts.
                self.writer.mark_outcome(token.offset, token.index, L.OUTCOME_UNKNOWN, L.HOW_UNKNOWN)
                return
            self.returned_work(token, tap.unbox_work(boxed) if boxed is not None and args.channel.holds_works else boxed)
        except Exception as error:
            self._failed(error)

    def returned_work(self, token: Token, work: Any) -> None:
        """The same with the Work itself, or None where the backend's call has waited."""
        now = _monotonic()
        self.writer.mark(token.offset, L.RETURNED, token.index, now)
        if work is None:
            self._done(token, L.HOW_RETURN, now)
        elif token.args.channel.holds_works:
            self._hold(token, work)
        else:
            # On an accelerator a Work would keep tensors alive, and asking it queries an event: torch's recorder tells, or nobody.
            self.writer.mark_outcome(token.offset, token.index, L.OUTCOME_UNKNOWN, L.HOW_UNKNOWN)
            self.on_accelerator.append(token)

    def raised(self, token: Token | None, error: BaseException) -> None:
        """The backend refused it, or waited in vain."""
        if token is None:
            return
        if self._ended_by(token, error, issued=not was_not_issued(token.args.op, error)):
            self.writer.forget_number(token.offset, token.index)

    def _give_number_back(self, token: Token) -> bool:
        """An op that was not issued meets nobody: the next one of its channel has its number, as it has on ranks that never tried it."""
        args = token.args
        if token.coalescing is not None or not token.number:
            return False  # its group has the number
        if self.verifier is not None:
            self.verifier.withdraw(token)
        if token.tagged_number and args.next_tagged is not None:
            give_back(args.next_tagged, token.tagged_number)
        return give_back(args.next_number, token.number)

    def _ended_by(self, token: Token, error: BaseException, *, issued: bool) -> bool:
        """Note the error. Returns whether its number is free again."""
        freed = False
        try:
            token.args.channel.busy = 0
            freed = not issued and self._give_number_back(token)
            if token.coalescing is not None:
                self._coalescing.pop(token.thread, None)  # nobody will end the group now
            self._mark_failed(token, error)
        except Exception as ours:
            self._failed(ours)
        return freed

    # --- completion

    def _hold(self, token: Token, work: Any) -> None:
        in_flight = self.in_flight
        if in_flight:
            # Amortised: each new collective looks at the oldest one, so that no Work (and no tensor) is held for long.
            try:
                oldest, waiting = next(iter(in_flight.items()))
            except (RuntimeError, StopIteration):  # another thread took it away just now
                pass
            else:
                if not waiting.args.wait_only and oldest.is_completed():
                    self._completed(oldest, waiting, L.HOW_POLL)
                elif len(in_flight) >= _HELD_LIMIT:
                    self._let_go(oldest, waiting)
        in_flight[work] = token
        for pointer in token.pointers:
            self.by_pointer[pointer] = token

    def _let_go(self, work: Any, token: Token) -> None:
        """Too many are held, of a kind that nobody waits for: the state of this one cannot be known any more."""
        if token.args.wait_only:
            self._hold_weakly(work, token)
        elif self.in_flight.pop(work, None) is not None:
            token.unknown = True
            self._forget_pointers(token)
            self.writer.mark_outcome(token.offset, token.index, L.OUTCOME_UNKNOWN, L.HOW_UNKNOWN)

    def _hold_weakly(self, work: Any, token: Token) -> None:
        """Hold a Work no longer, and watch it through a weak reference."""
        token.work_ref = weakref.ref(work)
        self.weakly_held[token.index] = token
        if self.in_flight.pop(work, None) is None:  # its wait ended just now
            self.weakly_held.pop(token.index, None)

    def _completed(self, work: Any, token: Token, how: int) -> None:
        if self.in_flight.pop(work, None) is not None:
            self._forget_pointers(token)
            error = error_of(work)
            if error is None:
                self._done(token, how, _monotonic())
            else:
                self._mark_failed(token, error, how=how)

    def _forget_pointers(self, token: Token) -> None:
        for pointer in token.pointers:
            if self.by_pointer.get(pointer) is token:
                del self.by_pointer[pointer]

    def _done(self, token: Token, how: int, now: int, thread: int = 0) -> None:
        if self.timing and how == L.HOW_RETURN:
            self._time(token, now)
        self.writer.mark(token.offset, L.DONE, token.index, now)
        self.writer.mark_outcome(token.offset, token.index, L.OUTCOME_COMPLETED, how, thread)

    def _time(self, token: Token, now: int) -> None:
        """How long it took, where the moment of its end is known: not where it was found done by looking."""
        self.writer.mark_value(token.offset, L.DURATION, token.index, (now - token.since) // L.TICK_NS)

    def _mark_failed(self, token: Token, error: BaseException, thread: int = 0, how: int = L.HOW_RETURN) -> None:
        self.mark_failed(token.offset, token.index, error, thread, how)

    def mark_failed(self, offset: int, index: int, error: BaseException, thread: int, how: int) -> None:
        """The op of this record ended with this error."""
        writer = self.writer
        text = f"{type(error).__name__}: {error}"[:2000]
        writer.mark_value(offset, L.FAILURE, index, writer.add_blob({"k": "text", "text": text}))
        writer.mark(offset, L.DONE, index, _monotonic())
        writer.mark_outcome(offset, index, L.OUTCOME_FAILED, how, thread)

    def wait_begins(self, work: Any) -> Token | None:
        """A thread is about to block in ``work.wait()``."""
        try:
            token = self.in_flight.get(work)
            if token is None and self.synchronous:
                token = self.synchronous.get(_here.id)
            if token is None and self.weakly_held:
                token = next((t for t in list(self.weakly_held.values()) if t.work_ref() is work), None)
            if token is not None:
                self._wait_marks(token)
        except Exception as error:
            self._failed(error)
            return None
        if self.verifier is not None:
            self._verify_wait(self.verifier, token)
        return token

    def _verify_wait(self, verifier: Verifier, token: Token | None) -> None:
        try:
            verifier.before_wait(token.index if token is not None else 0)
        except BaseException as error:
            if token is not None:
                self._after_wait(token, error)
            raise

    def error_to_raise(self, error: BaseException) -> BaseException:
        """What to raise instead of an error of the backend: where a peer refused and ended, its refusal says why."""
        refused = self.verifier.pending_refusal() if self.verifier is not None else None
        if refused is None:
            return error
        refused.__cause__ = error
        return refused

    def _wait_marks(self, token: Token) -> None:
        token.waiting = True
        self.writer.wait_began(token.offset, token.index, _monotonic(), _here.id, token.args.synchronous)

    def wait_ended(self, work: Any, token: Token, error: BaseException | None) -> None:
        """That wait is over."""
        if token.args.synchronous:
            self.synchronous.pop(token.thread, None)
        else:
            self.in_flight.pop(work, None)
        self._after_wait(token, error)

    def _after_wait(self, token: Token, error: BaseException | None) -> None:
        try:
            if self.weakly_held:
                self.weakly_held.pop(token.index, None)
            if token.pointers:
                self._forget_pointers(token)
            if error is None:
                now = _monotonic()
                self.writer.wait_completed(token.offset, token.index, now, _here.id)
                if self.timing:
                    self._time(token, now)
            else:
                self._mark_failed(token, error, _here.id, L.HOW_WAIT)
        except Exception as ours:
            self._failed(ours)

    def tensor_wait_begins(self, tensor: Any) -> tuple[Any, Token | None] | None:
        """A thread is about to block in ``wait_tensor(tensor)``."""
        try:
            token = self.by_pointer.get(tensor.data_ptr()) if self.by_pointer else None
            if token is None and self.verifier is None:
                return None
            if token is not None:
                self._wait_marks(token)
            work = next((work for work, other in list(self.in_flight.items()) if other is token), None)
        except Exception as error:
            self._failed(error)
            return None
        if self.verifier is not None:
            self._verify_wait(self.verifier, token)
        return work, token

    def tensor_wait_ended(self, held: tuple[Any, Token | None], error: BaseException | None) -> None:
        """That wait is over."""
        work, token = held
        if error is not None and self.verifier is not None:
            refused = self.error_to_raise(error)
            if refused is not error:
                raise refused
        if token is None:
            return
        if work is not None:
            self.in_flight.pop(work, None)
        self._after_wait(token, error)

    def sweep(self) -> Token | None:
        """Look at what is in flight, from the watchdog thread. Returns the oldest that is not done.

        A Work that cannot say whether it is done (gloo's reduce_scatter, send and recv) is held no longer than until the next
        sweep: it would keep tensors alive. From then on it is watched through a weak reference, which lives as long as the
        user's own handle. Once that is dropped without a wait, nobody can know any more.
        """
        oldest: Token | None = None
        now = _monotonic()
        for work, token in list(self.in_flight.items()):
            if token.args.wait_only:
                if now - token.since > _HOLD_WEAKLY_AFTER_NS:
                    self._hold_weakly(work, token)
            elif work.is_completed():
                self._completed(work, token, L.HOW_POLL)
                continue
            if oldest is None or token.index < oldest.index:
                oldest = token
        work = None  # the loop's variable must not keep the last one alive
        for thread, token in list(self.synchronous.items()):
            if token.waiting:
                oldest = token if oldest is None or token.index < oldest.index else oldest
            elif now - token.since > _HOLD_WEAKLY_AFTER_NS and self.synchronous.pop(thread, None) is token:
                self.writer.mark_outcome(token.offset, token.index, L.OUTCOME_UNKNOWN, L.HOW_UNKNOWN)  # its caller never waited
        for index, token in list(self.weakly_held.items()):
            if self.overwritten(index):
                self.weakly_held.pop(index, None)
                self._forget_pointers(token)
            elif token.waiting:
                oldest = token if oldest is None or index < oldest.index else oldest
            elif token.work_ref() is None and not token.unknown:
                token.unknown = True
                self.writer.mark_outcome(token.offset, token.index, L.OUTCOME_UNKNOWN, L.HOW_UNKNOWN)
            elif not token.unknown and (oldest is None or index < oldest.index):
                oldest = token
        return oldest

    def held(self) -> int:
        """How many Works are held, and outputs remembered."""
        return len(self.in_flight) + len(self.by_pointer)

    def overwritten(self, index: int) -> bool:
        """Whether a record's slot has been given to a newer one."""
        return index + self.writer.capacity <= self.writer.last_index

    def decode_reduce_ops(self) -> None:
        """Fill in reduce ops, from the watchdog thread: reading one costs more than the whole rest of a record."""
        for _ in range(_REDUCE_OPS_AT_ONCE):
            if not self.reduce_ops:
                return
            offset, index, boxed = self.reduce_ops.pop()  # the newest first: what is too much is forgotten at the other end
            code = reduce_op_code(boxed)
            if code is None:
                if self.on_unreadable_reduce_op is not None:
                    self.on_unreadable_reduce_op()
            elif not self.overwritten(index):
                self.writer.mark_value(offset, L.REDUCE_OP, index, code + 1)

    # --- accelerators: torch's recorder tells, nobody else

    def learn_from_native(self) -> None:
        """Mark what torch's recorder says is complete."""
        by_channel: dict[Channel, list[Token]] = {}
        for token in list(self.on_accelerator):
            if self.overwritten(token.index):
                self._drop_on_accelerator(token)
            elif not token.args.wait_only or token.args.op == "reduce_scatter":
                by_channel.setdefault(token.args.channel, []).append(token)
        # Read after the tokens were listed: what is issued in between is in torch's count alone, which errs towards "in flight".
        statuses = backend_progress.group_statuses() if by_channel else {}
        for channel, tokens in by_channel.items():
            process_group = channel.group.ref()
            status = statuses.get(backend_progress.group_id(process_group) or "") if process_group is not None else None
            if status is None:
                continue
            # Both count this channel's collectives, from different starts: what torch enqueued last is what we recorded last.
            open_count = max(0, status.enqueued - status.completed)
            done, pending = tokens[: max(0, len(tokens) - open_count)], tokens[max(0, len(tokens) - open_count) :]
            for token in done:
                self._drop_on_accelerator(token)
                self._done(token, L.HOW_NATIVE_RECORDER, _monotonic())
            for token in pending:
                if not token.waiting:
                    token.waiting = True
                    self.writer.mark_outcome(token.offset, token.index, L.OUTCOME_NONE, L.HOW_NATIVE_RECORDER)

    def _drop_on_accelerator(self, token: Token) -> None:
        with contextlib.suppress(ValueError):
            self.on_accelerator.remove(token)

    def oldest_on_accelerator(self) -> Token | None:
        """The oldest op on an accelerator that torch's recorder says is in flight."""
        return next((token for token in list(self.on_accelerator) if token.waiting), None)

    def release(self) -> None:
        """Let go of every Work."""
        self.synchronous.clear()
        self.in_flight.clear()
        self.weakly_held.clear()
        self.by_pointer.clear()
        self.reduce_ops.clear()

    # --- coalesced groups

    def coalescing_starts(self) -> None:
        """``ProcessGroup._start_coalescing`` was called."""
        self._coalescing[_here.id] = CoalescedGroup(self._coalescing_ids())

    def coalescing_ends(self) -> Token | None:
        """``ProcessGroup._end_coalescing`` is about to be called: record the group as one collective."""
        thread = _here.id
        group = self._coalescing.pop(thread, None)
        if group is None or not group.members:
            return None
        try:
            channel = group.members[0].channel
            content = {**group.members[0].content, "op": "coalesced", "dop": "coalesced"}
            args = InternedArgs(content, channel, flags=L.FLAG_ENTERED | L.FLAG_COALESCED_END)
            args.blob = self.writer.add_blob(content)
            index = self.writer.next_index()
            now = _monotonic()
            record = L.Record(
                index, now, channel.blob, args.blob, self.stacks.position(sys._getframe(2)), sequence_number=group.sequence_number,
                step=self.steps, coalescing_id=group.id, thread=thread, flags=args.flags, members=len(group.members),
            )  # fmt: skip
            offset = self.writer.announce(record)
            return Token(index, offset, args, now, thread)
        except Exception as error:
            self._failed(error)
            return None

    def group_returned(self, token: Token, work: Any) -> None:
        """``ProcessGroup._end_coalescing`` returned ``work``."""
        try:
            self.returned_work(token, work)
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self.lost += 1
        try:
            self.writer.word(L.LOST, self.lost)
        finally:
            if not self._logged:
                self._logged = True
                log.warning("commlens could not record a collective and goes on without it: %s: %s", type(error).__name__, error)


def error_of(work: Any) -> Exception | None:
    """Why a Work that says it is completed failed: one that failed says so, too. None where it did not, or has no future to ask."""
    try:
        future = work.get_future()
    except Exception:
        return None
    try:
        if future.done():
            future.value()
    except Exception as error:
        return error
    return None
