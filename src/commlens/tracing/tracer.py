"""The tracer: a subscriber of the tap that records where and why each collective is issued.

For example, of a model that FSDP2 shards, the all_gather of its second block, issued while the
first one runs, becomes an event with

* phase ``forward`` and path ``Model.layers.0``: the module call in which it was issued;
* owner ``FSDP2 Model.layers.1``: whose parameters it gathers;
* cause: none, since no DTensor was redistributed;
* times: issued, returned, and when a thread waited for it.

An event is found again at its wait by the thread (the call waits itself), by the Work (asynchronous
calls), by the address of an output (functional collectives), or by a callback of the backward pass
(DDP's reducer, which waits in C++).

The hot path is ``begin``, ``returned`` and the waits; everything else is computed when the trace is
read. The first error in the tracer is logged, and the collective proceeds.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from commlens.model.steps import ALL
from commlens.model.trace import Coverage, Depth, Phase, TraceData, TracedModule, TraceEvent
from commlens.tap import tap, torch_patches
from commlens.tap.groups import Groups
from commlens.tap.interned_args import ArgsTable, InternedArgs, output_pointers
from commlens.tap.torch_patches import noted_reduce_ops
from commlens.tracing import fake_tensors
from commlens.tracing.attribution.causes import Causes
from commlens.tracing.attribution.module_calls import ModuleRow, current_node
from commlens.tracing.attribution.modules import ModuleTracker
from commlens.tracing.attribution.op_names import functional_scope
from commlens.tracing.attribution.owners import Owners, Parameters
from commlens.tracing.attribution.pipelines import marked_messages, set_microbatch
from commlens.tracing.attribution.stacks import (
    ENGINE,
    RECOMPUTE,
    StackInfo,
    StackInfos,
    running_steps,
    use_native_engine,
)
from commlens.tracing.backward_waits import BackwardWaits
from commlens.tracing.in_flight.watch import BufferWatch
from commlens.tracing.raw_event import RawEvent
from commlens.tracing.trace_events import (
    TraceEvents,
    add_durations,
    entries,
    name_mesh_dims,
    rank_and_world,
    reduce_op_text,
)
from commlens.version import __version__

log = logging.getLogger("commlens")

WHOLE_STEPS = 10  # default number of optimizer steps whose collectives are kept one by one
WHOLE_EVENTS = 50_000  # further collectives are summarised even if no step ends
_SUMMARISE_AT = 2_000  # events kept before old ones are summarised
_POINTERS_LIMIT = 4096  # outputs whose waits are watched
_WORKS_LIMIT = 16  # Works kept alive
_NAME_EVERY = 64  # events between replacements of reduce ops by their names
_now = time.monotonic_ns


@dataclass(slots=True)
class _Summary:
    """Events of later steps that differ only in time."""

    first: RawEvent
    last_step: int
    count: int = 0


@dataclass(slots=True)
class _Setup:
    """The collectives that the program issues before its first step begins."""

    is_over: bool = False
    last: int | None = None
    """The sequence number of the last one; 0: there is none. None: unknown, since the setup is not
    over, or ended unseen.
    """

    def has(self, event: RawEvent | TraceEvent) -> bool:
        """Return whether a collective was issued in the setup."""
        return event.sequence <= (self.last or 0)

    def last_unrepeated(self, events: list[TraceEvent]) -> int | None:
        """Return ``last`` without collectives that later steps issue again, such as a batch's
        broadcast: these belong to the first step.
        """
        if not self.last:
            return self.last
        repeated = {_call_site(event) for event in events if (event.last_step or event.step) > 0}
        return max(
            (e.sequence for e in events if self.has(e) and _call_site(e) not in repeated), default=0
        )


class Tracer(tap.WaitSubscriber):
    """Traces the collectives of this process between ``start()`` and ``stop()``."""

    def __init__(
        self,
        depth: Depth = Depth.COLLECTIVES,
        *,
        steps: range = ALL,
        whole_steps: int | None = None,
        preview: bool = False,
        watches_buffers: bool = False,
    ) -> None:
        """Create a tracer; ``start()`` starts it.

        Args:
            depth: whether tensor ops are recorded, too.
            steps: record only these optimizer steps, counted from 0.
            whole_steps: recorded steps after which events are summarised; ``WHOLE_STEPS`` by
                default.
            preview: whether the process plays one rank of a fake world.
            watches_buffers: whether to find the ops that touch a buffer of a collective in flight.
        """
        self.depth = depth
        self.wanted_steps = steps
        self.whole_steps = WHOLE_STEPS if whole_steps is None else whole_steps
        self.preview = self.sees_fake_tensors = preview
        self.buffers = BufferWatch(preview=preview) if watches_buffers else None
        self.modules = ModuleTracker()
        self.on_collective: list[Callable[[RawEvent], None]] = []
        self.on_step: list[Callable[[], None]] = []
        self.events: list[RawEvent] = []
        self.steps = 0  # optimizer steps that have ended
        self.dispatched = 0  # collectives in the wanted steps, recorded or lost
        self.ops: Any = None  # the dispatch mode, at depth ops
        self._summaries: dict[Any, _Summary] = {}
        self._summarised = 0
        self._summarise_at = _SUMMARISE_AT
        self._groups = Groups()
        self._args_table = ArgsTable()
        self._stacks = StackInfos()
        self._causes = Causes()
        self._owners = Owners(self.modules)
        self.parameters = Parameters(self.modules.rows)
        self._backward_waits = BackwardWaits()
        self.modules.on_leave.append(self.parameters.left)
        self.modules.on_enter.append(self._setup_ended)
        self._setup = _Setup()
        self._sequence = itertools.count(1).__next__
        self._threads: dict[int, int] = {}  # by a thread's id: its number in the trace
        # Events whose wait is still to come: by thread, if its call waits itself; by Work, few and
        # on CPU backends, since a Work keeps tensors alive; by Work that is held no longer; by
        # address of an output, for wait_tensor().
        self._synchronous: dict[int, RawEvent] = {}
        self._works: dict[Any, RawEvent] = {}
        self._dropped_works: weakref.WeakKeyDictionary[Any, RawEvent] = weakref.WeakKeyDictionary()
        self._pointers: dict[int, RawEvent] = {}
        # weak reference to the optimizer whose steps are counted: the first one that steps
        self._stepper: Callable[[], Any] | None = None
        self._step_hook: Any = None
        self._rank_and_size: tuple[int, int] | None = None  # rank and world size
        self._started_ns = 0
        self._started_unix_ns = 0
        self._running = False
        self._failed = False  # the first error was logged

    # --- start and stop

    def start(self) -> None:
        """Start tracing."""
        if self._running:
            return
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._running = True
        use_native_engine()
        if not self._started_ns:
            self._started_ns, self._started_unix_ns = _now(), time.time_ns()
        self._step_hook = register_optimizer_step_post_hook(self._optimizer_stepped)
        self.modules.install()
        torch_patches.add_tracer(self)
        tap.attach(self)
        marked_messages.add(self)
        fake_tensors.listeners.add(self._on_fake_tensors)
        if self.buffers is not None:
            self.buffers.start()
        if self.depth is Depth.OPS:
            from commlens.tracing.ops import OpsMode

            self.ops = self.ops or OpsMode(self.modules, self.on_collective)
            self.ops.__enter__()

    def stop(self) -> None:
        """Stop tracing and release everything except the recorded events."""
        if not self._running:
            return
        self._running = False
        # now, because the program may destroy its groups before it reads the trace
        self._groups.before_destroy()
        self.parameters.read()
        if self.ops is not None:
            self.ops.__exit__(None, None, None)
        if self.buffers is not None:
            self.buffers.stop()
        tap.detach(self)
        marked_messages.remove(self)
        fake_tensors.listeners.remove(self._on_fake_tensors)
        torch_patches.remove_tracer(self)
        self.modules.remove()
        self._step_hook.remove()
        self._synchronous.clear()
        self._works.clear()
        self._dropped_works.clear()
        self._stacks.forget_codes()
        self._pointers.clear()

    def clear(self) -> None:
        """Forget the collectives and steps so far. Modules and their parameters stay known."""
        self.events, self._summaries, self._summarised = [], {}, 0
        self._summarise_at = _SUMMARISE_AT
        self.steps = self.dispatched = 0
        self._sequence = itertools.count(1).__next__
        if self._setup.last:
            self._setup.last = 0  # what follows is numbered anew, and belongs to steps

    # --- called by the tap

    def begin(self, spec: tap.OpSpec, arguments: tuple[Any, ...]) -> RawEvent | None:
        """Record a collective that is about to be issued."""
        if self.steps not in self.wanted_steps:
            return None
        self.dispatched += 1
        try:
            return self._begin(spec, arguments, sys._getframe(1).f_back)
        except Exception as error:
            self._fail(error)
            return None

    def _begin(
        self, spec: tap.OpSpec, arguments: tuple[Any, ...], frame: FrameType | None
    ) -> RawEvent:
        group = self._groups.find(tap.unbox_group(arguments[spec.process_group]))
        args = self._args_table.find(spec, arguments, group)
        reduce_op = None
        if spec.reduce_op >= 0:
            # before torch 2.10 the dispatcher's object cannot be read
            noted = noted_reduce_ops.get(threading.get_native_id()) if noted_reduce_ops else None
            reduce_op = noted or arguments[spec.reduce_op]
        event = self._event(spec.name, args, reduce_op, frame)
        if args.synchronous:
            self._synchronous[threading.get_ident()] = event
        elif event.info.may_be_functional and not self.preview:
            for pointer in output_pointers(spec, arguments):
                self._pointers[pointer] = event
            if len(self._pointers) > _POINTERS_LIMIT:  # the older half was perhaps never waited for
                self._pointers = dict(
                    itertools.islice(self._pointers.items(), _POINTERS_LIMIT // 2, None)
                )
        is_bucket = event.owner is not None and event.owner.library == "DDP"
        # on a device, and in a preview, the reducer's wait returns at once
        if is_bucket and not args.channel.runs_ahead and not self.preview:
            self._backward_waits.issued(event, self.modules.outermost_pass())
        self._add(event)
        return event

    def _event(
        self, op: str, args: InternedArgs, reduce_op: Any, frame: FrameType | None
    ) -> RawEvent:
        """Describe a collective that ``frame`` issues; None: C++ does, without Python."""
        event = RawEvent()
        event.args = args
        event.reduce_op = reduce_op
        event.info = self._stacks.find(frame, op)
        event.functional = functional_scope.packet
        self._attribute(event, frame)
        thread = threading.get_ident()
        event.thread = self._threads.get(thread, -1)
        if event.thread < 0:
            event.thread = self._threads.setdefault(thread, len(self._threads))
        event.step = self.steps
        event.started_ns = event.returned_ns = event.wait_began_ns = event.wait_ended_ns = 0
        return event

    def _add(self, event: RawEvent) -> None:
        """Add an event whose collective begins now. Nothing that fails may follow: an event in the
        trace is one whose end is recorded, too.
        """
        if not self._setup.is_over and event.phase is not Phase.OUTSIDE:
            self._setup_ended()
        if self._rank_and_size is None:
            # now, because the program may destroy its group before it reads the trace
            self._rank_and_size = rank_and_world()
        event.sequence = self._sequence()
        self.events.append(event)
        try:
            for listener in self.on_collective:
                listener(event)
        except Exception as error:
            self._fail(error)
        event.started_ns = _now()

    def _on_fake_tensors(
        self, op: str, describing: fake_tensors.Describe, frame: FrameType | None
    ) -> None:
        """Record a collective on fake tensors, which is not issued."""
        if self.steps not in self.wanted_steps:
            return
        self.dispatched += 1
        try:
            args, reduce_op = describing(self._groups)
            event = self._event(op, args, reduce_op_text(reduce_op), frame)
            self._add(event)
            event.returned_ns = event.started_ns
        except Exception as error:
            self._fail(error)

    def _attribute(self, event: RawEvent, frame: FrameType | None) -> None:
        """Set phase, module call, path, cause and owner of an event of this stack.

        What the running modules and autograd nodes show comes first. Frames of torch's libraries
        in the stack, the *markers*, then correct it.
        """
        info = event.info
        event.phase, event.call = self.modules.locate()
        event.owner = event.cause = event.path = event.microbatch = None
        if info.in_pass is not None or info.in_optimizer:
            self._correct_phase(event, info)
        if "message" in info.markers or "microbatch" in info.markers:  # of a pipeline's schedule
            set_microbatch(event, info, frame, self.modules)
        if event.call is not None:
            if "FSDP2 state" in info.markers:  # a hook of a block, which runs in a child's node
                event.call = self._owners.hooked_call(info, frame, event.call)
            event.path = event.call.row.path
        if "redistribution" in info.markers or "DTensor op" in info.markers:
            event.cause = self._causes.find(info, frame)
        self._attribute_to_owner(event, frame)

    def _attribute_to_owner(self, event: RawEvent, frame: FrameType | None) -> None:
        """Set the owner: the library, and the module whose parameters or gradients are sent. This
        module's path becomes the event's where no module call gave it one. So it does for a bucket
        of DDP, which autograd issues at one parameter, but which carries gradients of many modules.
        """
        info, args = event.info, event.args
        event.owner, owners_path = self._owners.find(info, frame, args.op, args.first_tensor)
        is_bucket = event.owner is not None and event.owner.library == "DDP"
        if owners_path is not None and (event.path is None or is_bucket):
            event.path, event.call = owners_path, None
            if frame is None:  # without Python on the stack: DDP's reducer, in backward
                event.phase = Phase.BACKWARD
        elif event.path is None and event.phase is Phase.BACKWARD:
            # in the hook of a parameter's gradient
            event.path = self.modules.accumulating_path(current_node())
        elif frame is None and event.phase is Phase.OUTSIDE:
            event.phase = None  # issued by a C++ thread: the phase is unknown

    def _correct_phase(self, event: RawEvent, info: StackInfo) -> None:
        """Take the phase from the stack, where autograd and the modules do not show it: in final
        callbacks, recomputed functions and optimizers.
        """
        # an optimizer may also run inside backward, in a gradient's hook
        if info.in_optimizer and event.phase in (Phase.OUTSIDE, Phase.BACKWARD):
            event.phase, event.call = Phase.OPTIMIZER, None
        elif info.in_pass == RECOMPUTE and event.phase in (Phase.BACKWARD, Phase.OUTSIDE):
            event.phase = Phase.RECOMPUTATION
        elif info.in_pass == ENGINE and event.phase is Phase.OUTSIDE:
            event.phase = Phase.BACKWARD

    def returned(self, event: RawEvent | None, result: Any) -> None:
        """Record that the backend accepted the collective."""
        if event is None:
            return
        event.returned_ns = _now()
        try:
            args = event.args
            waits_later = not args.synchronous and event.info.returns_work
            # the Works of a device, and of a preview, tell nothing about when they are done
            if waits_later and not self.preview and not args.channel.runs_ahead:
                boxed = result[-1] if type(result) is tuple else result
                if boxed is not None:
                    self._hold(tap.unbox_work(boxed), event)
            if event.sequence % _NAME_EVERY == 0:
                # A reduce op of the dispatcher takes 10 KB. The slice is twice as long as needed,
                # because other threads may have added events since this one.
                for recent in self.events[-2 * _NAME_EVERY :]:
                    recent.reduce_op = reduce_op_text(recent.reduce_op)
            if len(self.events) >= self._summarise_at:
                self._summarise_old()
        except Exception as error:
            self._fail(error)

    def _hold(self, work: Any, event: RawEvent) -> None:
        """Keep a Work, to recognise the wait for it. Drop completed and old Works, because they
        keep tensors alive: each new Work checks the oldest two.
        """
        works = self._works
        if works:
            dropped = [
                held
                for held in itertools.islice(works, 2)
                if len(works) > _WORKS_LIMIT or torch_patches.work_is_completed(held)
            ]
            for held in dropped:
                its_event = works.pop(held, None)
                if its_event is not None:
                    self._dropped_works[held] = its_event  # the program may still wait on it
        works[work] = event

    def raised(self, event: RawEvent | None, error: BaseException) -> None:
        """Record that the backend rejected the collective or timed out."""
        if event is not None:
            event.returned_ns = _now()
            self._synchronous.pop(threading.get_ident(), None)
            # another tensor may get the address of an output, and its wait is not this event's
            for pointer, other in list(self._pointers.items()):
                if other is event:
                    self._pointers.pop(pointer, None)

    # --- waits, reported by the hooks

    def wait_begins(self, work: Any) -> RawEvent | None:
        """Record that a thread is about to block in ``work.wait()``."""
        event = self._synchronous.pop(threading.get_ident(), None) if self._synchronous else None
        if event is None:
            event = self._works.pop(work, None) or (
                self._dropped_works.pop(work, None) if self._dropped_works else None
            )
        if event is not None and not event.wait_began_ns:
            event.wait_began_ns = _now()
        return event

    def tensor_wait_begins(self, tensor: Any) -> RawEvent | None:
        """Record that a thread is about to block in ``wait_tensor(tensor)``."""
        if not self._pointers:
            return None
        try:
            event = self._pointers.pop(tensor.data_ptr(), None)
        except Exception:
            return None
        if event is not None and not event.wait_began_ns:
            event.wait_began_ns = _now()
        return event

    def wait_ended(self, event: RawEvent, error: BaseException | None) -> None:
        """Record the end of a wait, however it ended."""
        if not event.wait_ended_ns:
            event.wait_ended_ns = _now()

    # --- steps

    def _setup_ended(self, *_: Any) -> None:
        """Note that the setup has ended: the first forward begins, or a collective is issued in
        another phase, in a program without modules. Later collectives belong to steps.
        """
        # A new list: the old one is being iterated over.
        self.modules.on_enter = [
            listener for listener in self.modules.on_enter if listener != self._setup_ended
        ]
        # If steps have ended without a pass, nobody saw where the setup ended.
        self._setup.is_over = True
        if not self.steps:
            self._setup.last = self.events[-1].sequence if self.events else 0

    def traced_steps(self) -> int:
        """Return how many of the requested steps have completed."""
        return max(0, min(self.steps, self.wanted_steps.stop) - self.wanted_steps.start)

    def _optimizer_stepped(self, optimizer: Any, *_: Any) -> None:
        try:
            if running_steps(sys._getframe(1)) > 1:
                return  # only the outermost step counts
            if self._stepper is None or self._stepper() is None:
                self._stepper = weakref.ref(optimizer)
            if self._stepper() is not optimizer:
                return  # of several optimizers, only the first counts
            if torch._C._current_graph_task_id() == -1:
                self._count_step()
            else:
                # The optimizer runs in a gradient's hook, and other hooks may follow: the step ends
                # with the backward pass.
                torch.autograd.Variable._execution_engine.queue_callback(self._count_step)
        except Exception as error:
            self._fail(error)

    def _count_step(self) -> None:
        self.steps += 1
        try:
            self.modules.step_ended()
            if self.steps == 1:
                self.parameters.read()
            self._summarise_old()
        except Exception as error:
            self._fail(error)
        for listener in self.on_step:
            listener()

    def _summarise_old(self) -> None:
        """Summarise the events of completed steps after the whole steps. In a program whose steps
        do not end, also those after the first ``WHOLE_EVENTS``, but for the newest thousand.
        """
        whole_until = self.wanted_steps.start + self.whole_steps
        too_many = len(self.events) + self._summarised > WHOLE_EVENTS
        if self.steps <= whole_until and not too_many:
            return
        kept: list[RawEvent] = []
        newest_at = len(self.events) - _SUMMARISE_AT // 2
        events, self.events = self.events, kept
        for position, event in enumerate(events):
            is_later_step = whole_until <= event.step < self.steps
            is_excess = too_many and event.sequence > WHOLE_EVENTS and position < newest_at
            if is_later_step or is_excess:
                self._summarise(event)
            else:
                kept.append(event)
        # not again for each event, where the whole steps alone have so many
        self._summarise_at = max(_SUMMARISE_AT, len(kept) + _SUMMARISE_AT // 2)

    def _summarise(self, event: RawEvent) -> None:
        event.reduce_op = reduce_op_text(event.reduce_op)
        key = (
            id(event.args),
            event.reduce_op,
            event.path,
            event.phase,
            event.info.index,
            event.owner,
            event.cause,
            event.functional,
            event.microbatch,
            self._setup.has(event),
        )
        summary = self._summaries.get(key)
        if summary is None:
            summary = self._summaries[key] = _Summary(event, event.step)
        summary.count += 1
        summary.last_step = event.step
        self._summarised += 1

    # --- the result

    def data(self) -> TraceData:
        """Return the trace so far."""
        with contextlib.suppress(Exception):
            if self._running:
                self._groups.before_destroy()
            name_mesh_dims(self._groups)
        converter = TraceEvents(self._started_ns)
        events = self._converted(converter)
        if converter.on_accelerator and not self.preview:
            add_durations(events, entries(), self._started_unix_ns)
        for group in self._groups.by_name.values():
            converter.add(group)
        rank, world_size = self._rank_and_size or rank_and_world()
        return TraceData(
            commlens_version=__version__,
            torch_version=str(torch.__version__),
            script=sys.argv[0] if sys.argv else "",
            rank=rank,
            world_size=world_size,
            preview=self.preview,
            depth=self.depth,
            started_unix_ns=self._started_unix_ns,
            steps=self.traced_steps(),
            whole_steps=self.whole_steps if self._summaries else None,
            setup_until=self._setup.last_unrepeated(events),
            groups=converter.groups,
            modules=[self._traced_module(row) for row in self.modules.rows],
            events=events,
            ops=list(self.ops.traced_ops()) if self.ops is not None else [],
            hazards=self.buffers.hazards() if self.buffers is not None else [],
            coverage=self._coverage(events),
        )

    def _coverage(self, events: list[TraceEvent]) -> Coverage:
        """Return how many collectives are in these events, and how many are missing."""
        recorded = sum(event.count for event in events)
        unclassified = sum(event.count for event in events if not event.classified)
        found = Coverage(self.dispatched, recorded, unclassified)
        lost = found.dispatched - recorded
        if self._failed and lost > 0:
            found.blind.append(f"{lost} of {found.dispatched} collectives could not be recorded.")
        return found

    def _converted(self, converter: TraceEvents) -> list[TraceEvent]:
        """Return the events and the summaries in the form of a trace, in order."""
        events = [converter.convert(raw) for raw in list(self.events)]
        for summary in list(self._summaries.values()):
            event = converter.convert(summary.first)
            event.count, event.last_step = summary.count, summary.last_step
            if summary.count > 1:
                event.started_ns = event.returned_ns = 0
                event.wait_began_ns = event.wait_ended_ns = 0
                event.call = 0
            events.append(event)
        return sorted(events, key=lambda event: event.sequence)

    def _traced_module(self, row: ModuleRow) -> TracedModule:
        parent = row.parent.index if row.parent is not None else None
        return TracedModule(
            row.path,
            row.type,
            row.calls,
            parent,
            self.parameters.of(row),
            self.modules.other_paths(row),
        )

    def _fail(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            log.warning(
                "commlens could not trace a collective or a step, and continues without it: %s: %s",
                type(error).__name__,
                error,
            )


def _call_site(event: TraceEvent) -> tuple[Any, ...]:
    return event.op, event.group, event.source, event.through
