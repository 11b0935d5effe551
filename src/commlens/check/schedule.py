"""Put the sequences of all ranks together: let every rank go on until it waits for another one, by
the rules of a backend.

This is a pure function. The order of events does not change how far each rank gets, except for a
receive from any source: :func:`schedule` tries each sender whose message it may take.

Ranks 0 and 1 that both call ``send`` to each other, then ``recv``, wait for ever on gloo: the
outcome has ``stuck == [0, 1]``, and each rank's ``blocked_in`` is its send.

An :class:`Op` is *issued* when its rank calls it, *starts* when nothing of its own rank holds it up
(NCCL runs the ops of a group one after another), and is *done* when the other ranks that it needs
have started theirs.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final, NamedTuple

from commlens.check.sequence import Event, Issue, RankSequence, Setup, StoreCall, ThreadWait
from commlens.matching.answer import Disagree, Severity
from commlens.matching.collectives import compare_coalesced
from commlens.matching.point_to_point import compare_pair
from commlens.model.collective import ChannelKey, Collective, CollectiveArgs
from commlens.model.grouping import grouped
from commlens.model.ops import SENT_BY_ROOT, SENT_TO_ROOT

_EXPLORED_MAX = 100

Instance = tuple[ChannelKey, int]
"""A channel and the number of a collective on it."""

Mailbox = tuple[ChannelKey, int, int]
"""A channel, the receiver, and the tag."""


class Rules(NamedTuple):
    """The rules by which calls of a backend wait for other ranks.

    Where a rule is uncertain, the one by which fewer ranks wait is used, so that every reported
    deadlock is one of all runs.
    """

    backend: str
    meets_by_tag: bool
    """A receive takes the first message with its tag; otherwise the first message."""
    groups_meet: bool
    """``new_group`` returns when all members have called it."""
    runs_in_order: bool
    """A group's ops run one after another, and so do the messages between two ranks, both ways.
    Those of a batch run together.
    """


RULES: Final = {
    # Tried on torch 2.13.0: a send of any size, even of 4 bytes, ends only when the other rank
    # receives it.
    "gloo": Rules("gloo", meets_by_tag=True, groups_meet=True, runs_in_order=False),
    # docs/nccl.md. Groups are made at their first collective.
    "nccl": Rules("nccl", meets_by_tag=False, groups_meet=False, runs_in_order=True),
}


@dataclass(eq=False)
class Op:
    """A collective or message that a rank has issued, or a call that makes a group."""

    rank: int
    record: Collective
    issued_at: int
    members: tuple[Op, ...] = ()  # of a coalesced group
    started: bool = False  # nothing of its own rank holds it up
    done_at: int = 0  # 0: it has not completed
    waited_at: int = 0  # a thread began to wait for it
    waiter: int = 0
    source: int | None = None  # whose message a receive from any source took
    stream: deque[Op] | None = None

    @property
    def done(self) -> bool:
        """Whether it has completed."""
        return self.done_at > 0


@dataclass(eq=False)
class _Thread:
    """A thread of a rank, and the events that it has done."""

    rank: int
    events: Sequence[Event]
    position: int = 0
    blocked_in: Op | None = None


@dataclass
class RankState:
    """How far a rank has come."""

    sequence: RankSequence
    ops: list[Op] = field(default_factory=list)  # in the order of issue
    setups: list[Op] = field(default_factory=list)
    keys_written: list[Op] = field(default_factory=list)
    blocked_in: list[Op] = field(default_factory=list)  # one for each thread that waits
    ended_at: int = 0  # 0: it has not come to its end
    came_to: float = math.inf  # the number of events before the one at which it waits for ever

    @property
    def has_ended(self) -> bool:
        """Whether the rank has come to the end of its program."""
        cut = self.sequence.cut_off or bool(self.sequence.problem)
        return self.ended_at > 0 and not cut and not self.blocked_in

    @property
    def came_to_cut(self) -> bool:
        """Whether the rank has come to where its sequence was cut off."""
        return self.sequence.cut_off and self.ended_at > 0 and not self.blocked_in


@dataclass
class Outcome:
    """How far all ranks come."""

    ranks: dict[int, RankState]
    stuck: list[int]  # ranks that wait for ever
    open_ranks: list[int]  # ranks that wait for one whose sequence is not complete
    now: int  # number of moments that have passed
    incomplete: bool = False  # not all orders of messages were tried


def schedule(sequences: Mapping[int, RankSequence], rules: Rules) -> Outcome:
    """Return how far the ranks come. If it depends on which message a receive from any source
    takes, return the first order in which ranks wait for ever; else the first one.
    """
    first: Outcome | None = None
    choices: list[int] | None = []
    tried = 0
    while choices is not None and tried < _EXPLORED_MAX:
        execution = _Schedule(sequences, rules, choices)
        outcome = execution.run()
        if outcome.stuck:
            return outcome
        first = first or outcome
        choices = _next_choices(choices, execution.widths)
        tried += 1
    assert first is not None
    first.incomplete = choices is not None
    return first


def _next_choices(choices: Sequence[int], widths: Sequence[int]) -> list[int] | None:
    """Return the choices of the next order to try, as one counts: raise the last choice that can be
    raised, and begin again after it. Return None if all orders were tried.

    Args:
        choices: the first choices of an order; those after them were 0.
        widths: how many senders were possible at each choice.
    """
    made = [*choices, *[0] * len(widths)][: len(widths)]
    for place in reversed(range(len(made))):
        if made[place] + 1 < widths[place]:
            return [*made[:place], made[place] + 1]
    return None


class _Schedule:
    """One execution. ``choices`` say which of the possible senders' messages is taken, at each
    moment at which a receive from any source could take several.
    """

    def __init__(
        self, sequences: Mapping[int, RankSequence], rules: Rules, choices: Sequence[int]
    ) -> None:
        self._rules = rules
        self._clock = count(1).__next__
        self._choices = deque(choices)
        self.widths: list[int] = []  # of each choice made: how many senders were possible
        self.ranks = {rank: RankState(sequence) for rank, sequence in sequences.items()}
        self._threads = [
            thread for sequence in sequences.values() for thread in _threads_of(sequence)
        ]
        self._ready = deque(self._threads)
        self._ops: dict[tuple[int, int], Op] = {}  # by rank and index
        self._waiting: dict[int, list[_Thread]] = defaultdict(list)  # by id of the Op
        # the ops of each collective that have started, by rank; and collectives that never complete
        self._instances: dict[Instance, dict[int, Op]] = defaultdict(dict)
        self._illegal: set[Instance] = set()
        self._keys: set[str] = set()  # of the store
        self._key_waits: list[tuple[Op, tuple[str, ...]]] = []
        # messages that have started and not met, in order
        self._sends: dict[Mailbox, list[Op]] = defaultdict(list)
        self._receives: dict[Mailbox, list[Op]] = defaultdict(list)
        # ops that run one after another: of a group, or of two ranks that exchange messages
        self._streams: dict[tuple[object, ...], deque[Op]] = defaultdict(deque)
        self._moving: deque[deque[Op]] = deque()  # streams whose first op may start
        # the indices of the ops of each coalesced group
        self._batches = {
            rank: grouped((op.coalescing_id, op.index) for op in sequence.ops if op.coalescing_id)
            for rank, sequence in sequences.items()
        }
        self._closers: dict[int, Op] = {}  # by id of a member: the op that it is part of

    def run(self) -> Outcome:
        """Let the ranks go on until none can: receives from any source take a message only then."""
        while True:
            while self._ready:
                self._advance(self._ready.popleft())
            if not self._match_any_source():
                break
        for thread in self._threads:
            if thread.blocked_in is not None:
                state = self.ranks[thread.rank]
                state.blocked_in.append(thread.blocked_in)
                # the other threads' events may come before or after it
                if len(thread.events) == len(state.sequence.events):
                    state.came_to = thread.position
        blocked = {rank for rank, state in self.ranks.items() if state.blocked_in}
        for rank, state in self.ranks.items():
            if rank not in blocked:
                state.ended_at = state.ended_at or self._clock()
        freed = self._freed(blocked)
        return Outcome(
            self.ranks,
            sorted(blocked - freed),
            sorted(freed & blocked),
            self._clock(),
        )

    # --- threads

    def _advance(self, thread: _Thread) -> None:
        """Do the events of a thread until it waits for an op that is not done."""
        while thread.position < len(thread.events):
            event = thread.events[thread.position]
            waits_for = self._do_event(thread, event)
            if waits_for is not None and not waits_for.done:
                thread.blocked_in = waits_for
                self._waiting[id(waits_for)].append(thread)
                return
            thread.position += 1
        self.ranks[thread.rank].ended_at = self._clock()

    def _do_event(self, thread: _Thread, event: Event) -> Op | None:
        """Do one event, only once. Return the op for which it waits."""
        if isinstance(event, Issue):
            self._issue(thread.rank, event.op)
            return None
        if isinstance(event, ThreadWait):
            op = self._ops[thread.rank, event.index]
            if not op.done and not op.waited_at:
                op.waited_at, op.waiter = self._clock(), event.thread
            return op
        if isinstance(event, Setup):
            return self._set_up(thread.rank, event.call)
        if isinstance(event, StoreCall):
            return self._use_store(thread.rank, event)
        return None

    def _complete(self, op: Op) -> None:
        """Note that an op is done, and let go on what has waited for it."""
        if op.done:
            return
        op.done_at = self._clock()
        for thread in self._waiting.pop(id(op), ()):
            thread.blocked_in = None
            thread.position += 1
            self._ready.append(thread)
        closer = self._closers.get(id(op))
        if closer is not None and all(member.done for member in closer.members):
            self._complete(closer)
        if op.stream is not None:
            self._start_next(op.stream)

    # --- groups

    def _set_up(self, rank: int, call: Collective) -> Op:
        """Call a function that makes a group, which may return only when all ranks have called
        it.
        """
        ranks = call.channel.group.ranks
        op = Op(rank, call, self._clock(), started=True, waited_at=self._clock())
        op.waiter = call.issue_thread
        self.ranks[rank].setups.append(op)
        meets = call.op == "init_process_group" or (
            call.op != "init_device_mesh" and (self._rules.groups_meet or call.op == "split_group")
        )
        if not meets or rank not in ranks:
            op.done_at = self._clock()
            return op
        arrived = self._instances[call.channel.key, call.sequence_number]
        arrived[rank] = op
        for each in arrived.values() if len(arrived) == len(ranks) else ():
            self._complete(each)
        return op

    # --- the store

    def _use_store(self, rank: int, event: StoreCall) -> Op:
        """Write keys of the store, or wait for them."""
        op = Op(rank, event.call, self._clock(), started=True, waiter=event.call.issue_thread)
        if event.waits:
            op.waited_at = op.issued_at
            self._key_waits.append((op, event.keys))
        else:
            op.done_at = op.issued_at
            self.ranks[rank].keys_written.append(op)
            self._keys.update(event.keys)
        for each, keys in self._key_waits:
            if self._keys.issuperset(keys):
                self._complete(each)
        self._key_waits = [wait for wait in self._key_waits if not wait[0].done]
        return op

    # --- issue

    def _issue(self, rank: int, record: Collective) -> None:
        """Issue an op. Those of a coalesced group or a batch are enqueued with the last of them."""
        op = Op(rank, record, self._clock())
        self._ops[rank, record.index] = op
        self.ranks[rank].ops.append(op)
        batch = self._batches[rank].get(record.coalescing_id, ()) if record.coalescing_id else ()
        if not batch:
            self._enqueue(op)
        elif record.index == batch[-1]:
            members = tuple(self._ops[rank, index] for index in batch)
            if record.coalesced_members:
                op.members = members[:-1]
                self._closers.update((id(member), op) for member in op.members)
            for member in members:
                self._enqueue(member)

    def _enqueue(self, op: Op) -> None:
        """Start an op, behind those that its backend runs before it."""
        if not self._rules.runs_in_order:
            self._start(op)
            return
        record = op.record
        alone = record.is_point_to_point and not record.coalescing_id
        op.stream = self._streams[op.rank, record.channel.key, record.peer if alone else None]
        op.stream.append(op)
        self._start_next(op.stream)

    def _start_next(self, stream: deque[Op]) -> None:
        """Start the next op of a stream, and of the streams that can go on because of it.

        An op that completes calls this method again. The outermost call then does the work, since
        a recursion as deep as a stream is long would be too deep.
        """
        self._moving.append(stream)
        if len(self._moving) > 1:
            return
        while self._moving:
            self._start_head(self._moving[0])
            self._moving.popleft()

    def _start_head(self, stream: deque[Op]) -> None:
        """Start the first op of a stream that is not done, with all others of its batch."""
        while stream and stream[0].done:
            stream.popleft()
        batch = stream[0].record.coalescing_id if stream else 0
        for place, op in enumerate(list(stream)):
            if place and (not batch or op.record.coalescing_id != batch):
                break  # only the ops of one batch run together
            if not op.started:
                self._start(op)

    def _start(self, op: Op) -> None:
        """Start an op: let it meet those of other ranks."""
        op.started = True
        if op.record.is_point_to_point:
            self._start_message(op)
        elif op.members and op.members[0].record.is_point_to_point:
            if all(member.done for member in op.members):
                self._complete(op)
        elif not op.record.coalescing_id or op.record.coalesced_members:
            self._start_collective(op)
        # The members of a coalesced group end with it: only the closing record meets others.

    # --- collectives

    def _start_collective(self, op: Op) -> None:
        """Let an op meet those of the other ranks under its number. All complete that need no other
        rank any more, unless their arguments never meet.
        """
        key = op.record.channel.key
        instance = key, op.record.sequence_number
        arrived = self._instances[instance]
        arrived[op.rank] = op
        if instance in self._illegal:
            return
        # else it completes nothing but itself, such as a send to the root of a gather
        frees_others = len(arrived) == len(key[2]) or op.rank == op.record.args.root
        agreed = False  # all that have arrived, which need not be compared for each of them
        for each in list(arrived.values()) if frees_others else [op]:
            if not each.done and (needed := _needed(each, arrived)) is not None:
                whole = len(needed) == len(arrived)
                if not (whole and agreed) and self._disagree(needed, key):
                    self._illegal.add(instance)
                    return
                agreed = agreed or whole
                self._complete(each)
                for member in each.members:
                    self._complete(member)

    def _disagree(self, ops: Sequence[Op], key: ChannelKey) -> bool:
        """Return whether the arguments of these ranks never meet."""
        same = len({id(op.record.args) for op in ops}) == 1 and not ops[0].members
        if same and ops[0].record.op != "all_to_all":
            return False
        args: dict[int, Sequence[CollectiveArgs]] = {
            op.rank: [part.record.args for part in op.members or (op,)] for op in ops
        }
        answer = compare_coalesced(args, key[2])
        return isinstance(answer, Disagree) and answer.severity is Severity.ILLEGAL

    # --- messages

    def _start_message(self, op: Op) -> None:
        """Put a send or a receive into the receiver's mailbox."""
        record = op.record
        tag = record.tag if self._rules.meets_by_tag else 0
        if record.op == "send":
            if record.peer is None:  # to an unknown rank: it never completes
                return
            box = record.channel.key, record.peer, tag
            self._sends[box].append(op)
        else:
            box = record.channel.key, op.rank, tag
            self._receives[box].append(op)
        self._match(box)

    def _match(self, box: Mailbox) -> None:
        """Let the receives of a mailbox take messages as long as it is certain which message each
        takes.
        """
        receives, sends = self._receives[box], self._sends[box]
        matched = True
        while matched:
            matched = False
            for receive in receives:
                if receive.record.peer is None:
                    break  # it may take any message: the later ones are not certain
                send = next((one for one in sends if one.rank == receive.record.peer), None)
                if send is not None:
                    self._meet(box, send, receive)
                    matched = True
                    break

    def _meet(self, box: Mailbox, send: Op, receive: Op) -> None:
        """Let a receive take a message. If they do not fit, both wait for ever."""
        self._receives[box].remove(receive)
        self._sends[box].remove(send)
        receive.source = send.rank
        answer = compare_pair(send.rank, send.record.args, receive.rank, receive.record.args)
        if not isinstance(answer, Disagree):
            self._complete(send)
            self._complete(receive)

    def _match_any_source(self) -> bool:
        """Let one receive from any source take a message. Return False if none can."""
        for box, receives in self._receives.items():
            first = next((one for one in receives if one.record.peer is None), None)
            if first is None:
                continue
            senders = sorted({send.rank for send in self._sends[box]})
            if not senders:
                continue
            place = self._choices.popleft() if self._choices else 0
            self.widths.append(len(senders))
            sender = senders[min(place, len(senders) - 1)]
            send = next(one for one in self._sends[box] if one.rank == sender)
            self._meet(box, send, first)
            self._match(box)
            return True
        return False

    # --- ranks whose sequence is not complete

    def _freed(self, blocked: set[int]) -> set[int]:
        """Return the ranks that may go on if the ranks whose sequences were cut off do what is
        needed.
        """
        freed = {
            rank
            for rank, state in self.ranks.items()
            if rank not in blocked and (state.sequence.cut_off or state.sequence.problem)
        }
        if not freed:
            return freed
        changed = True
        while changed:
            changed = False
            for rank in sorted(blocked - freed):
                ops = self.ranks[rank].blocked_in
                if any(self._may_end(op, freed) for op in ops):
                    freed.add(rank)
                    changed = True
        return freed

    def _may_end(self, op: Op, freed: set[int]) -> bool:
        """Return whether an op waits only for ranks that may still do anything."""
        record = op.record
        if record.is_point_to_point:
            others = {record.peer} if record.peer is not None else set(record.channel.group.ranks)
            return bool(others & freed)
        if record.is_store_wait:
            return True
        if op.members and op.members[0].record.is_point_to_point:
            return all(member.done or self._may_end(member, freed) for member in op.members)
        instance = record.channel.key, record.sequence_number
        if instance in self._illegal:
            return False
        absent = set(record.channel.group.ranks) - set(self._instances[instance])
        return bool(absent) and absent <= freed


def _needed(op: Op, arrived: Mapping[int, Op]) -> list[Op] | None:
    """Return the ops of other ranks that an op needs to complete; None if one is missing."""
    record = op.record
    name, root = record.op, record.args.root
    if name in SENT_BY_ROOT and root is not None:
        if op.rank == root:
            return [op]
        return [op, arrived[root]] if root in arrived else None
    if name in SENT_TO_ROOT and op.rank != root:
        return [op]
    return list(arrived.values()) if len(arrived) == len(record.channel.group.ranks) else None


def _threads_of(sequence: RankSequence) -> list[_Thread]:
    """Return the threads of a rank with their events. Events without a thread are the first
    thread's.
    """
    events: dict[int, list[Event]] = {}
    first = 0
    for event in sequence.events:
        thread = (
            event.op.issue_thread
            if isinstance(event, Issue)
            else event.thread
            if isinstance(event, ThreadWait)
            else event.call.issue_thread
            if isinstance(event, (Setup, StoreCall))
            else first
        )
        first = first or thread
        events.setdefault(thread, []).append(event)
    return [_Thread(sequence.rank, each) for each in events.values()]
