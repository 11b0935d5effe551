"""Decode a copy of a black box into a RankLog.

A record of the ring buffer holds numbers: times, and the positions in the side table of the blobs
with its group, arguments and stack::

    slot 7 of the ring buffer    index 1031, announced at ..., group at 512, arguments at 768,
                                 stack at 4096, number 57, step 12, thread 4711
                                 and life words: entered, returned, wait began, ..., outcome
    side table at 512            {"k": "group", "name": "0", "ranks": "0-7", ...}
    side table at 768            {"k": "asked", "op": "all_reduce", "in": [...], ...}

This becomes ``Collective(index=1031, sequence_number=57, args=all_reduce of ..., step=12, ...)``. A
life word is written later than its slot, which the next record of the slot may have taken by then;
so it holds the lowest 16 bits of its record's index, its *tag*. docs/protocol.md describes all
parts. Whatever is overwritten, torn or damaged is left out, and named in ``RankLog.problems``.
"""

from __future__ import annotations

import contextlib
import functools
import time
import zlib
from collections.abc import Callable
from typing import Final, TypeVar

from commlens.blackbox import layout as L
from commlens.blackbox.blobs import (
    AdaptersJson,
    ArgsJson,
    ExceptionJson,
    FrameJson,
    GroupJson,
    HazardsJson,
    QueuesJson,
    SetupJson,
    SideTable,
    StackJson,
    TextJson,
    ThreadJson,
    TouchJson,
    decode_args,
    decode_channel,
    decode_evidence,
    decode_setup,
)
from commlens.blackbox.copy import Parts
from commlens.blackbox.header import INT_MAX, about_number, about_text, read_live
from commlens.model.collective import (
    QUEUE,
    Channel,
    Collective,
    CollectiveArgs,
    Frame,
    FrameKind,
    LearnedHow,
    ProcessGroup,
    Stack,
    State,
)
from commlens.model.frames import frame_kind, kind_prefixes
from commlens.model.hazard import Hazard, Touch
from commlens.model.ranklog import RankLog, ThreadStack
from commlens.model.refusal import Refusal

# over all groups of a box: the text "0-99999999" is cheap, its tuple is not
_RANKS_MAX: Final = 500_000
_TICKS_MASK: Final = (1 << 48) - 1
_CLOCK_SET_MAX_NS: Final = 86_400 * 10**9  # largest adjustment of a wall clock while a job runs
_TEXT_MAX: Final = 4000  # characters of an exception
_LIFE_AT: Final = len(L.Record._fields) + 1  # of the first life word in a slot, after the CRC
_GROUP_AT: Final = L.Record._fields.index("group")
_STACK_AT: Final = L.Record._fields.index("stack")

_HOW: Final = {
    L.HOW_NOT_YET: LearnedHow.NOT_YET,
    L.HOW_RETURN: LearnedHow.RETURN,
    L.HOW_WAIT: LearnedHow.WAIT,
    L.HOW_POLL: LearnedHow.POLL,
    L.HOW_NATIVE_RECORDER: LearnedHow.NATIVE_RECORDER,
    L.HOW_UNKNOWN: LearnedHow.UNKNOWN,
    L.HOW_ENQUEUED: LearnedHow.ENQUEUED,
    L.HOW_STARTED: LearnedHow.STARTED,
}
_OUTCOME_STATES: Final = {
    L.OUTCOME_COMPLETED: State.COMPLETED,
    L.OUTCOME_FAILED: State.FAILED,
    L.OUTCOME_UNKNOWN: State.UNKNOWN,
}


Key = TypeVar("Key")
Value = TypeVar("Value")


class _Decoded(dict[Key, Value | None]):
    """Values that records share, decoded on first use; equal ones are one object."""

    def __init__(self, decode: Callable[[Key], Value | None]) -> None:
        super().__init__()
        self._decode = decode
        self._same: dict[Value, Value] = {}

    def __missing__(self, key: Key) -> Value | None:
        value = self._decode(key)
        self[key] = value = value if value is None else self._same.setdefault(value, value)
        return value


class BoxReader:
    """Decodes a copy of a box: :meth:`log` returns all that it holds.

    Args:
        parts: of the copy.
        name: of the box, for sentences.
        captured_ns: when it was copied, Unix ns; None: now.
    """

    def __init__(self, parts: Parts, name: str, captured_ns: int | None) -> None:
        self.parts = parts
        self.identity = parts.identity
        self.name = name
        self.captured_ns = time.time_ns() if captured_ns is None else captured_ns
        self.status = read_live(parts.header, parts.identity)
        self.problems = list(parts.identity.problems)
        self.side = SideTable(parts.side, parts.identity.side_size, parts.side_head)
        self.ranks_left = _RANKS_MAX  # ranks of groups that may still be decoded
        # by the positions of their blobs
        self.channels = _Decoded(self._decode_channel)
        self.stacks = _Decoded(self._decode_stack)
        self.args = _Decoded(self._decode_args)  # by position and code of the reduce op
        prefixes = kind_prefixes(parts.identity.about)
        self.kind_of = functools.cache(lambda file: frame_kind(file, prefixes))
        self.unix_offset = self._monotonic_to_unix()
        self.newest = max((record[0] for record in parts.slots), default=0)
        self.issued = self._count_issued()

    # --- times

    def _monotonic_to_unix(self) -> int:
        """Return the offset from CLOCK_MONOTONIC to Unix time, in ns.

        It comes from the latest heartbeat, since the wall clock may have been set after creation.
        One offset serves the whole box, so that durations stay correct.
        """
        status = self.status
        created = status.created_ns - status.created_mono_ns
        latest = status.heartbeat_ns - status.heartbeat_mono_ns
        # Live words have no checksum: an offset that is a day off is damaged.
        return (
            latest
            if status.heartbeat_mono_ns >= status.created_mono_ns
            and abs(latest - created) < _CLOCK_SET_MAX_NS
            else created
        )

    def unix(self, monotonic_ns: int) -> int:
        """Convert CLOCK_MONOTONIC ns to Unix ns; 0 stays 0."""
        if not monotonic_ns:
            return 0
        unix_ns = monotonic_ns + self.unix_offset
        return unix_ns if 0 < unix_ns < INT_MAX else min(max(unix_ns, 1), INT_MAX)

    # --- values that records share

    def _decode_channel(self, position: int) -> Channel | None:
        blob = self.side.blob(position, GroupJson)
        channel = None
        if blob is not None:
            try:
                channel = decode_channel(blob, limit=self.ranks_left)
            except ValueError:
                self.ranks_left //= 2  # a failed attempt costs time, too
        if channel is not None:
            self.ranks_left -= len(channel.group.ranks)
        return channel

    def _decode_args(self, key: tuple[int, int]) -> CollectiveArgs | None:
        position, reduce_code = key
        blob = self.side.blob(position, ArgsJson)
        return decode_args(blob, reduce_code) if blob is not None else None

    def _decode_stack(self, position: int) -> Stack | None:
        blob = self.side.blob(position, StackJson)
        return self.frames(blob.f) if blob is not None else None

    def text(self, position: int) -> str | None:
        """Return the text of a text or exception blob."""
        if not position:  # most records have none
            return None
        blob = self.side.blob(position, TextJson) or self.side.blob(position, ExceptionJson)
        return blob.text if blob is not None else None

    def frames(self, found: tuple[FrameJson, ...]) -> Stack:
        """Return frames with their kinds."""
        return tuple(
            Frame(
                frame.file,
                max(frame.line or 0, 0),
                frame.function,
                FrameKind.NATIVE if frame.native else self.kind_of(frame.file),
            )
            for frame in found
        )

    # --- the log

    def log(self, newest: int | None = None) -> RankLog:
        """Decode the whole box, or only its ``newest`` records."""
        status, about = self.status, self.identity.about
        collectives = self._collectives(newest)
        ends, full = self._queues()
        setups = [*ends, *self._setups(), *full]
        stacks, stacks_ns = self._evidence()
        exception, exception_stack, assertion, refusal = self._exception()
        of_thread, of_thread_stack = self._thread_exception()
        expecting = self._expecting()
        adapters = self.side.blob(status.adapters, AdaptersJson)
        self._note_damage()
        return RankLog(
            rank=status.rank,
            world_size=max(0, status.world_size),
            job=status.job,
            host=status.host,
            pid=status.pid,
            local_rank=status.local_rank,
            restart=status.restart,
            launcher=about_text(about, "launcher"),
            size_in_environment=(
                int(about_number(about, "env_world_size")) if "env_world_size" in about else None
            ),
            collectives=collectives,
            setups=[op for op in setups if not op.is_store_wait],
            store_wait=next((op for op in setups[-1:] if op.is_store_wait and op.in_flight), None),
            keys_written=[op for op in setups if op.op == "store.set"],
            issued=self.issued,
            stacks=stacks,
            stacks_ns=stacks_ns,
            main_stack_since_ns=self.unix(status.main_stack_since_mono_ns),
            heartbeat_ns=status.heartbeat_ns,
            captured_ns=self.captured_ns,
            head_lost=0 < status.oldest_index <= self.issued - self.identity.capacity,
            steps=status.steps,
            expecting=expecting,
            closed=status.closed,
            left=status.left,
            exception=exception,
            exception_stack=exception_stack,
            thread_exception=of_thread,
            thread_exception_stack=of_thread_stack,
            device_assertion=assertion,
            refusal=refusal,
            hazards=self._hazards(),
            initialised=status.initialised,
            timeout_s=status.timeout_s,
            gave_up_ns=status.gave_up_mono_ns and status.gave_up_mono_ns + self.unix_offset,
            stall_timeout_s=about_number(about, "stall_timeout"),
            adapters=adapters.found if adapters is not None else {},
            source=self.name,
            problems=self.problems,
            script=status.script,
            world=self.text(status.world) or about_text(about, "world"),
            versions={
                key: text
                for key in ("commlens", "torch", "python")
                if (text := about_text(about, key))
            },
        )

    def _expecting(self) -> str | None:
        """Return the label of the open expect_slow; None if there is none."""
        if not self.status.expecting:
            return None
        label = self.text(self.status.expecting)
        if label is None:
            self.problems.append("the label of the open expect_slow could not be read")
        return "something slow" if label is None else label

    def _note_damage(self) -> None:
        status = self.status
        if status.lost:
            self.problems.append(
                f"{status.lost} collectives were not recorded because of an error inside commlens"
            )
        if status.phase > L.PHASE_LEFT:
            self.problems.append("the word with the phase of the process is damaged")
        if self.parts.size < self.identity.total_size:
            self.problems.insert(
                0,
                f"the file is cut off: {self.parts.size} of {self.identity.total_size} bytes are"
                " left",
            )

    def _setups(self) -> list[Collective]:
        """Return the calls that make process groups or use the store, oldest first, as far as the
        chain of their blobs, from the newest call back, is not overwritten.
        """
        found: list[Collective] = []
        position, since = self.status.setup, self.status.setup_since_mono_ns
        state = {L.SETUP_RETURNED: State.COMPLETED, L.SETUP_RAISED: State.FAILED}.get(
            since, State.ISSUED
        )
        while (blob := self.side.blob(position, SetupJson)) is not None:
            try:
                channel = decode_setup(blob, limit=self.ranks_left)
            except ValueError:
                break
            self.ranks_left -= len(channel.group.ranks)
            began, stack = self.unix(blob.began), self.stacks[blob.stack] or ()
            found.append(
                Collective(
                    0,
                    channel,
                    blob.number,
                    CollectiveArgs(blob.op, blob.op),
                    state,
                    began,
                    began,
                    stack=stack,
                    issue_thread=blob.thread,
                    module=blob.label,
                )
            )
            if blob.prev >= position:
                break
            position, state = blob.prev, State.COMPLETED
        return found[::-1]

    def _queues(self) -> tuple[list[Collective], list[Collective]]:
        """Return how far the process is in each of its message queues, and its waits for the
        readers of full ones.

        Both are returned as ``dequeue`` calls, numbered by the message: a reader that waits for
        message 7 has an end with number 7, and a writer into a full queue of 4 messages, which has
        written 10, waits until all readers have done ``dequeue`` #7.
        """
        ends: list[Collective] = []
        waits: list[Collective] = []
        blob = self.side.blob(self.status.queues, QueuesJson)
        for each in blob.found if blob is not None else ():
            name = each.hand.store.rpartition("/")[2]
            group = ProcessGroup(name, (), QUEUE, hand_made=each.hand)
            channel, args = Channel(group, QUEUE), CollectiveArgs("dequeue", "dequeue")
            began, waits_to_read = self.unix(each.since), each.op == "dequeue"
            reads = each.done + waits_to_read if each.hand.member else 0  # member 0 writes
            end = Collective(0, channel, reads, args, State.COMPLETED, began, began)
            end.wait_began_ns = began if waits_to_read else 0
            ends.append(end)
            first = each.done + 1 - each.holds  # the oldest message in the queue, if it is full
            if each.op == "enqueue" and self.status.queue_since_mono_ns and first > 0:
                stack = self.stacks[each.stack] or ()
                waits.append(
                    Collective(
                        0,
                        channel,
                        first,
                        args,
                        State.ISSUED,
                        began,
                        began,
                        stack=stack,
                        issue_thread=each.thread,
                    )
                )
        return ends, waits

    def _exception(self) -> tuple[str | None, Stack, str, Refusal | None]:
        """Return the uncaught exception's first line, the stack where it was raised, the assertion
        that failed in a kernel, and the refusal that it is.
        """
        status = self.status
        if not status.exception:
            return "a non-zero exit status" if status.closed_by_exception else None, (), "", None
        blob = self.side.blob(status.exception, ExceptionJson)
        if blob is None:
            self.problems.append("the text of the uncaught exception could not be read")
            return "an exception whose text is lost", (), "", None
        line = next(
            (line.strip() for line in blob.text.splitlines() if line.strip()),
            "an exception without a text",
        )
        return line[:_TEXT_MAX], self.frames(blob.f), blob.assertion[:_TEXT_MAX], blob.refusal

    def _thread_exception(self) -> tuple[str, Stack]:
        blob = self.side.blob(self.status.thread_exception, ExceptionJson)
        return (blob.text, self.frames(blob.f)) if blob is not None else ("", ())

    def _hazards(self) -> list[Hazard]:
        """Return the latent faults, without those in calls of torch itself and those whose line is
        lost.
        """
        blob = self.side.blob(self.status.hazards, HazardsJson)
        hazards = [
            Hazard(
                each.what,
                each.times,
                self.stacks[each.stack] or (),
                each.group,
                self._touch(each.touch) if each.touch is not None else None,
            )
            for each in (blob.found if blob is not None else ())
        ]
        return [each for each in hazards if each.source is not None]

    def _touch(self, read: TouchJson) -> Touch:
        stack = self.stacks[read.stack] or ()
        return Touch(read.op, read.access, read.operand, read.tensor, stack)

    def _evidence(self) -> tuple[list[ThreadStack], int]:
        """Return the threads' stacks in the newest intact evidence slot, and when they were taken.
        The writer fills the two slots in turn: one may be in the middle of a write.
        """
        slots = map(_intact_evidence, range(2), self.parts.evidence)
        newest = max(filter(None, slots), default=None)
        threads: tuple[ThreadJson, ...] | None = None
        if newest is not None:
            with contextlib.suppress(ValueError, RecursionError):
                threads = decode_evidence(newest[2]).threads
        if newest is None or threads is None:
            if self.status.evidence_number:
                self.problems.append("the threads' stacks could not be read")
            return [], 0
        taken_ns = self.unix(newest[1])
        return [
            ThreadStack(
                each.tid,
                each.name,
                self.frames(each.f),
                taken_ns,
                each.main,
                each.locked_out,
                each.in_lock,
            )
            for each in threads
        ], taken_ns

    def _count_issued(self) -> int:
        """Return the number of collectives that the process has announced."""
        issued = max(self.newest, self.status.issued)
        if self.newest and issued > self.newest + self.identity.capacity:
            self.problems.append("the count of collectives is damaged")
            return self.newest
        return issued

    def _collectives(self, at_most: int | None) -> list[Collective]:
        """Return the readable records, oldest first, and note how many are not readable."""
        capacity = self.identity.capacity
        # The writer continued during the copy: drop records that the ring buffer no longer holds.
        oldest = self.newest - capacity
        held = {record[0]: record for record in self.parts.slots if record[0] > oldest}
        result: list[Collective] = []
        lost_channels = lost_args = lost_stacks = 0
        for index in sorted(held)[-(at_most or len(held) or 1) :]:
            record = held[index]
            channel = self.channels[record[_GROUP_AT]]
            collective = self._collective(record, channel) if channel is not None else None
            if collective is None:
                lost_channels += 1
                continue
            lost_args += collective.args.dispatcher_op == "unknown"
            stack = record[_STACK_AT]
            lost_stacks += stack != 0 and self.stacks[stack] is None
            result.append(collective)
        if at_most is not None:
            return result  # the others are left out on purpose
        unreadable = min(self.issued, capacity) - sum(
            index > self.issued - capacity for index in held
        )
        self._note_loss(unreadable, "torn or damaged and left out")
        self._note_loss(lost_channels, "left out because their group was overwritten or is damaged")
        self._note_loss(lost_args, "without their arguments, which were overwritten or are damaged")
        self._note_loss(lost_stacks, "without their stacks, which were overwritten or are damaged")
        return result

    def _note_loss(self, count: int, problem: str) -> None:
        if count > 0:
            self.problems.append(
                f"{count} of the last {min(self.issued, self.identity.capacity)} records are"
                f" {problem}"
            )

    def _collective(self, record: tuple[int, ...], channel: Channel) -> Collective | None:
        """Return the collective of a record; None if nothing is known of its arguments, and they
        matter.
        """
        announced = L.Record(*record[: _LIFE_AT - 1])
        tag, flags = announced.record_index & L.TAG_MASK, announced.flags
        announced_ns = self.unix(announced.announced_ns)
        ticks = (announced.announced_ns - self.identity.created_mono_ns) // L.TICK_NS
        entered_ns, returned_ns, began_ns, ended_ns, done_ns = (
            _moment(word, tag, ticks, announced_ns) for word in record[_LIFE_AT : _LIFE_AT + 5]
        )
        outcome, failure, asked, duration = (_value(word, tag) for word in record[_LIFE_AT + 5 :])
        if flags & L.FLAG_ENTERED:
            entered_ns = announced_ns
        # one life word has two meanings: a reduce op, or the rank whose message was received
        reduce_op, source = (0, asked) if flags & L.FLAG_ANY_SOURCE else (asked, 0)
        args = self.args[announced.asked, reduce_op] or _lost_args(announced)
        if args is None:
            return None
        result, how = (outcome >> 8) & 0xFF, outcome & 0xFF
        state = _OUTCOME_STATES.get(result, State.UNKNOWN)
        if result == L.OUTCOME_NONE:
            state = State.ISSUED if entered_ns else State.ANNOUNCED
        error = None
        if state is State.FAILED:
            error = (self.text(failure) or "an error whose text is lost")[:_TEXT_MAX]
        return Collective(
            index=announced.record_index,
            channel=channel,
            sequence_number=min(announced.sequence_number, INT_MAX),
            args=args,
            state=state,
            announced_ns=announced_ns,
            entered_ns=entered_ns,
            returned_ns=returned_ns,
            wait_began_ns=began_ns,
            wait_ended_ns=ended_ns,
            done_ns=done_ns,
            learned_how=_HOW.get(how, LearnedHow.UNKNOWN),
            stack=self.stacks[announced.stack] or (),
            issue_thread=announced.thread,
            wait_thread=outcome >> 16,
            peer=announced.peer if announced.peer >= 0 else None,
            tag=announced.tag,
            step=min(announced.step, INT_MAX),
            coalescing_id=min(announced.coalescing_id, INT_MAX),
            coalesced_members=announced.members if flags & L.FLAG_COALESCED_END else 0,
            duration_ns=duration * L.TICK_NS if duration else None,
            error=error,
            concurrent=bool(flags & L.FLAG_CONCURRENT),
            module=self.text(announced.module),
            captured=bool(flags & L.FLAG_CAPTURE),
            took_from=_member(channel, source - 1),
        )


def _intact_evidence(slot: int, content: bytes) -> tuple[int, int, bytes] | None:
    """Return the number of the write that filled an evidence slot, when the stacks were taken
    (CLOCK_MONOTONIC ns) and the payload; None if the slot is empty, torn or damaged.
    """
    if len(content) < L.EVIDENCE.size:
        return None
    length, crc, number, taken = L.EVIDENCE.unpack_from(content)
    payload = content[L.EVIDENCE.size : L.EVIDENCE.size + length]
    is_whole = len(payload) == length and crc == zlib.crc32(payload)
    return (number, taken, payload) if number and number % 2 == slot and is_whole else None


def _lost_args(announced: L.Record) -> CollectiveArgs | None:
    """Return what is known of arguments that are lost; None of a send or a receive from one rank:
    they name the direction, without which its sequence number means nothing.
    """
    if announced.flags & L.FLAG_ANY_SOURCE:
        return CollectiveArgs("recv", "unknown")
    return None if announced.peer >= 0 else CollectiveArgs("unknown", "unknown")


def _member(channel: Channel, place: int) -> int | None:
    """Return the rank at a place of the channel's group, or the place if nothing maps it; None if
    there is none.
    """
    by_hand = channel.group.hand_made
    ranks = channel.group.ranks if by_hand is None else range(by_hand.size)
    return ranks[place] if 0 <= place < len(ranks) else None


def _moment(word: int, own: int, ticks: int, announced_ns: int) -> int:
    """Return the Unix ns in a life word of the record whose tag is ``own``; 0 if it has none.

    ``ticks`` and ``announced_ns`` are the record's announcement, in ticks and in Unix ns.
    """
    if word & L.TAG_MASK != own or not word >> 16:
        return 0
    passed = ((word >> 16) - ticks) & _TICKS_MASK
    if passed >> 47:
        # Before the announcement: written for an older record whose index ends in the same 16 bits.
        return 0
    return min(announced_ns + passed * L.TICK_NS, INT_MAX)


def _value(word: int, own: int) -> int:
    """Return the value in a life word of the record whose tag is ``own``; 0 if it has none."""
    return word >> 16 if word & L.TAG_MASK == own else 0
