"""The recorder: the tap's subscriber that writes the black box.

Of ``dist.all_reduce(x)``, for example, ``begin`` writes a record before the backend sees the op,
with the positions of its group, arguments and stack, which were written before. ``returned`` and
the methods of :class:`~commlens.capture.completion.CompletionTracker` then write into the record
when the call returned, when a thread waited, and how the op ended.

The hot path is ``begin``, ``returned`` and the waits. An error of commlens there is counted and
logged once, and the collective goes on unrecorded.
"""

from __future__ import annotations

import collections
import itertools
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from commlens.blackbox import layout as L
from commlens.blackbox.writer import BoxWriter
from commlens.capture import stacks
from commlens.capture.completion import CompletionTracker
from commlens.capture.hazards import Hazards
from commlens.capture.library_calls import LibraryCalls
from commlens.capture.thread_id import current
from commlens.tap import tap
from commlens.tap.groups import Groups, give_back
from commlens.tap.interned_args import (
    ArgsTable,
    CoalescedGroup,
    InternedArgs,
    output_pointers,
    reduce_op_code,
)
from commlens.tap.rejections import was_not_issued
from commlens.tap.token import CallVerifier, Token
from commlens.tap.torch_patches import noted_reduce_ops

if TYPE_CHECKING:
    from types import FrameType

_REDUCE_OPS_AT_ONCE = 500
_CLOSING_MAX = 1000  # arguments of records that close a group
_monotonic = time.monotonic_ns


class Recorder(CompletionTracker, tap.Subscriber):
    """Records every collective of the process into ``writer``."""

    def __init__(
        self, writer: BoxWriter, groups: Groups, *, cpp_stack: bool = False, timing: bool = False
    ) -> None:
        super().__init__(writer, timing=timing)
        self.groups = groups
        self.steps = 0
        self.stacks = stacks.StackTable(writer)
        self._position = self.stacks.native_position if cpp_stack else self.stacks.position
        self.reduce_ops: collections.deque[tuple[int, int, Any]] = collections.deque(
            maxlen=writer.capacity
        )
        self.hazards = Hazards(self)
        self.library_calls = LibraryCalls(self)
        self.on_unreadable_reduce_op: Callable[[], None] | None = None
        self._args_table = ArgsTable()
        self._coalescing: dict[int, CoalescedGroup] = {}  # by thread
        self._coalescing_ids = itertools.count(1).__next__
        # the arguments of the records that close a group, by those of its first member
        self._closing: dict[InternedArgs, InternedArgs] = {}

    def attach(self) -> None:
        """Start recording."""
        tap.attach(self)

    def detach(self) -> None:
        """Stop recording."""
        tap.detach(self)

    def tapped_wait(self, original: Any, slow: Any) -> Any:
        """Return the ``Work.wait`` to install in place of ``original``; ``slow`` calls and records
        the original in Python.
        """
        return slow

    make_exchange: Callable[[Any, Any, int], Any] | None = None
    """Make what verifies in C++, from a board's map, the shared page and the rank; None if all of
    it is in Python.
    """

    listens_to_waits = True
    """Whether waits of functional collectives must be reported to Python."""

    reads_reduce_ops = False
    """Whether it reads reduce ops even where torch hides them from Python."""

    # --- the tap's calls

    def begin(self, spec: tap.OpSpec, arguments: tuple[Any, ...]) -> Token | None:
        """Write the record before the backend sees the op. Raises only a verifier's refusal."""
        if self.verifier is not None:
            return self._begin_verified(self.verifier, spec, arguments, sys._getframe(1).f_back)
        return self._begin(spec, arguments, sys._getframe(1).f_back, L.FLAG_ENTERED)

    def _begin_verified(
        self,
        verifier: CallVerifier,
        spec: tap.OpSpec,
        arguments: tuple[Any, ...],
        frame: FrameType | None,
    ) -> Token | None:
        """Write the record, verify the op, and only then note that it enters the backend."""
        token = self._begin(spec, arguments, frame, 0)
        if token is None or token.coalescing is not None:
            return token
        reduce_op = arguments[spec.reduce_op] if spec.reduce_op >= 0 else None
        noted = noted_reduce_ops.get(token.thread) if noted_reduce_ops else None
        try:
            verifier.before_issue(token, frame, noted if noted is not None else reduce_op)
        except BaseException as error:
            # The record keeps its number, which shows which collective was refused.
            self._record_error(token, error, issued=False)
            # the traceback begins at the user's line, not in our frames
            raise error.with_traceback(None) from error.__cause__
        self.writer.mark(token.offset, L.ENTERED, token.index, _monotonic())
        return token

    def _begin(
        self, spec: tap.OpSpec, arguments: tuple[Any, ...], frame: FrameType | None, entered: int
    ) -> Token | None:
        """Write the record; ``entered``: the flag that the op enters the backend at once."""
        try:
            args = self._args_table.find(
                spec, arguments, self.groups.find(tap.unbox_group(arguments[spec.process_group]))
            )
            channel = args.channel
            writer = self.writer
            floor = writer.side_floor
            if args.blob <= floor or channel.blob <= floor:
                self._describe(args, floor)
            stack = self._position(frame)
            thread = current.id
            flags = args.flags | entered
            if self.capture_flag:
                flags |= self.capture_flag * channel.runs_ahead
            if channel.busy and channel.busy != thread:
                flags |= L.FLAG_CONCURRENT
            channel.busy = thread
            coalescing = self._coalescing.get(thread) if self._coalescing else None
            if coalescing is None:
                number, coalescing_id = args.next_number(), 0
            else:
                number, coalescing_id, flags = (
                    coalescing.add(args),
                    coalescing.id,
                    flags | L.FLAG_COALESCED_MEMBER,
                )
            index = writer.next_index()
            now = _monotonic()
            offset = writer.announce(
                (
                    index,
                    now,
                    channel.blob,
                    args.blob,
                    stack,
                    0,
                    number,
                    self.steps,
                    coalescing_id,
                    args.tag,
                    thread,
                    flags,
                    args.peer,
                    0,
                )
            )
            token = Token(index, offset, args, now, thread, number, stack)
            if args.next_tagged is not None:
                token.tagged_number = args.next_tagged()
            if coalescing is not None:
                token.coalescing = coalescing
            elif args.is_held:
                token.pointers = output_pointers(spec, arguments)
            if spec.reduce_op >= 0:
                noted = noted_reduce_ops.get(thread) if noted_reduce_ops else None
                self.reduce_ops.append((offset, index, noted or arguments[spec.reduce_op]))
        except Exception as error:
            self._failed(error)
            return None
        return token

    def _describe(self, args: InternedArgs, floor: int) -> None:
        """Write the blobs of the arguments and of their channel that are missing, or too old."""
        channel = args.channel
        if args.blob <= floor and not args.too_large:
            args.blob = self.writer.add_blob(args.content)
            args.too_large = args.blob == 0
        if channel.blob <= floor:
            channel.blob = self.writer.add_blob(channel.describe())

    def returned(self, token: Token | None, result: Any) -> None:
        """Note that the backend accepted the collective, and hold its Work, where that is safe, to
        learn when it is done.
        """
        if token is None:
            return
        try:
            args = token.args
            args.channel.busy = 0
            if args.fails_locally and self.verifier is not None:
                self.verifier.announce_accepted(token)
            boxed = result[-1] if type(result) is tuple else result
            if args.synchronous and boxed is not None:
                # The caller waits at once. That wait also records that the call returned, and finds
                # the token without a Work.
                self.synchronous[token.thread] = token
                return
            if token.coalescing is not None:
                # The record that closes the group carries the state of all its members.
                self.writer.mark_outcome(
                    token.offset, token.index, L.OUTCOME_UNKNOWN, L.HOW_UNKNOWN
                )
                return
            self.returned_work(token, None if boxed is None else tap.unbox_work(boxed))
        except Exception as error:
            self._failed(error)

    def raised(self, token: Token | None, error: BaseException) -> None:
        """Note that the backend's call raised: it refused the collective, or timed out inside."""
        if token is None:
            return
        if self._record_error(token, error, issued=not was_not_issued(token.args.op, error)):
            self.writer.forget_number(token.offset, token.index)
        if token.args.channel.backend.recorder and token.args.meets and not self.capture_flag:
            self.device_queues.add_rejected(token)

    def _give_number_back(self, token: Token) -> bool:
        """Free the number of a collective that was not issued, as on the ranks that never tried it.
        Return whether that worked.
        """
        args = token.args
        if token.coalescing is not None or not token.number:
            return False  # its group has the number
        if self.verifier is not None:
            self.verifier.withdraw(token)
        if token.tagged_number and args.next_tagged is not None:
            give_back(args.next_tagged, token.tagged_number)
        return give_back(args.next_number, token.number)

    def _record_error(self, token: Token, error: BaseException, *, issued: bool) -> bool:
        """Record the error of a call. Return whether the collective's number is free again."""
        freed = False
        try:
            token.args.channel.busy = 0
            freed = not issued and self._give_number_back(token)
            if token.coalescing is not None:
                self._coalescing.pop(token.thread, None)  # nothing will close the group now
            self.mark_failed(token.offset, token.index, error, 0, L.HOW_RETURN)
        except Exception as ours:
            self._failed(ours)
        return freed

    # --- rare work

    def decode_reduce_ops(self) -> None:
        """Fill in reduce ops, from the watchdog thread: reading one costs more than the rest of a
        record.
        """
        for _ in range(_REDUCE_OPS_AT_ONCE):
            if not self.reduce_ops:
                return
            # the newest first: the deque drops its oldest when it is full
            offset, index, boxed = self.reduce_ops.pop()
            code = reduce_op_code(boxed)
            if code is None:
                if self.on_unreadable_reduce_op is not None:
                    self.on_unreadable_reduce_op()
            elif not self.overwritten(index):
                self.writer.mark_value(offset, L.REDUCE_OP, index, code + 1)

    def release(self) -> None:
        """Drop every Work and reduce op."""
        super().release()
        self.reduce_ops.clear()

    # --- CUDA graphs

    def capture_begins(self) -> None:
        """Note that a CUDA graph is being captured: no collective runs, and nothing may query the
        device.
        """
        self.capture_flag = L.FLAG_CAPTURE
        self.device_queues.capture_begins()

    def capture_ends(self, graph: Any) -> None:
        """Note that the capture of a graph has ended."""
        self.capture_flag = 0
        self.device_queues.capture_ends()
        try:
            self.graphs.ends(graph)
        except Exception as error:
            self._failed(error)

    def replays(self, graph: Any) -> None:
        """Note that a graph is about to be replayed."""
        try:
            self.graphs.replayed(
                graph, _monotonic(), current.id, self.steps, self.stacks.position(sys._getframe(2))
            )
        except Exception as error:
            self._failed(error)

    # --- coalesced groups

    def coalescing_starts(self) -> None:
        """Note a call of ``ProcessGroup._start_coalescing``."""
        self._coalescing[current.id] = CoalescedGroup(self._coalescing_ids())

    def coalescing_ends(self) -> Token | None:
        """Record a coalesced group as one collective, before ``ProcessGroup._end_coalescing``
        runs.
        """
        thread = current.id
        group = self._coalescing.pop(thread, None)
        if group is None or not group.members:
            return None
        try:
            first, number = group.members[0], group.sequence_number
            stack = self.stacks.position(sys._getframe(2))
            args, index, offset, now = self._announce_group(
                first, first.channel.blob, stack, number, group.id, len(group.members)
            )
            return Token(index, offset, args, now, thread, number)
        except Exception as error:
            self._failed(error)
            return None

    def _announce_group(
        self,
        first: InternedArgs,
        channel_blob: int,
        stack: int,
        number: int,
        identity: int,
        members: int,
    ) -> tuple[InternedArgs, int, int, int]:
        """Write the record that closes a coalesced group. Return its arguments and index, and its
        slot's offset and time.

        Args:
            first: the arguments of the group's first member.
            channel_blob: position of the group in the side table.
            stack: position of the stack.
            number: the group's sequence number.
            identity: the group's number in this process.
            members: how many there are.
        """
        args = self._closing.get(first)
        if args is None:
            content = {**first.content, "op": "coalesced", "dop": "coalesced"}
            args = InternedArgs(content, first.channel, flags=L.FLAG_ENTERED | L.FLAG_COALESCED_END)
            if len(self._closing) >= _CLOSING_MAX:
                self._closing.clear()
            self._closing[first] = args
        if args.blob <= self.writer.side_floor:
            args.blob = self.writer.add_blob(args.content)
        record = L.Record(
            self.writer.next_index(),
            _monotonic(),
            channel_blob,
            args.blob,
            stack,
            sequence_number=number,
            step=self.steps,
            coalescing_id=identity,
            thread=current.id,
            flags=args.flags,
            members=members,
        )
        return args, record.record_index, self.writer.announce(record), record.announced_ns

    def group_returned(self, token: Token, work: Any) -> None:
        """Note that ``ProcessGroup._end_coalescing`` returned ``work``."""
        try:
            self.returned_work(token, work)
        except Exception as error:
            self._failed(error)
