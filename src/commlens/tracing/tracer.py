"""The tracer: a subscriber of the tap that records where and why each collective is issued.

For example, of a model that FSDP2 shards, the all_gather of its second block, issued while the
first one runs, becomes an event with

* phase ``forward`` and path ``Model.layers.0``: the module call in which it was issued;
* owner ``FSDP2 Model.layers.1``: whose parameters it gathers;
* cause: none, since no DTensor was redistributed;
* times: issued, returned, and when a thread waited for it.

The hot path is ``begin``, ``returned`` and the waits; everything else is computed when the trace is
read. The first error in the tracer is logged, and the collective proceeds.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable
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
from commlens.tracing.attribution.attribute import Attribution
from commlens.tracing.attribution.module_calls import ModuleRow
from commlens.tracing.attribution.modules import ModuleTracker
from commlens.tracing.attribution.op_names import functional_scope
from commlens.tracing.attribution.owners import Parameters
from commlens.tracing.attribution.pipelines import marked_messages
from commlens.tracing.attribution.stacks import StackInfos, running_steps, use_native_engine
from commlens.tracing.event_log import EventLog
from commlens.tracing.in_flight.watch import BufferWatch
from commlens.tracing.raw_event import RawEvent
from commlens.tracing.trace_events import (
    TraceEvents,
    add_durations,
    entries,
    name_mesh_dims,
    rank_and_world,
    reduce_op_text,
    without_repeated,
)
from commlens.tracing.waits import BackwardWaits, Waits
from commlens.version import __version__

log = logging.getLogger("commlens")

WHOLE_STEPS = 10  # default number of optimizer steps whose collectives are kept one by one
_now = time.monotonic_ns


class Tracer(tap.Subscriber):
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
        self.event_log = EventLog(steps.start + self.whole_steps)
        self.steps = 0  # optimizer steps that have ended
        self.dispatched = 0  # collectives in the wanted steps, recorded or lost
        self.ops: Any = None  # the dispatch mode, at depth ops
        self._groups = Groups()
        self._args_table = ArgsTable()
        self._stacks = StackInfos()
        self._attribution = Attribution(self.modules)
        self.parameters = Parameters(self.modules.paths.rows)
        self._waits, self._backward_waits = Waits(), BackwardWaits()
        self.modules.on_leave.append(self.parameters.left)
        self.modules.on_enter.append(self._setup_ended)
        self._in_setup = True  # the program's first step has not begun
        self._setup_until: int | None = None
        """The last collective that the program issues before its first step; 0: there is none.
        None: unknown, since the setup is not over, or ended unseen.
        """
        self._threads: dict[int, int] = {}  # by a thread's id: its number in the trace
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
        torch_patches.add_tracer(self._waits)
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
        torch_patches.remove_tracer(self._waits)
        self.modules.remove()
        self._step_hook.remove()
        self._waits.forget_all()
        self._stacks.forget_codes()

    def clear(self) -> None:
        """Forget the collectives and steps so far. Modules and their parameters stay known."""
        self.event_log = EventLog(self.wanted_steps.start + self.whole_steps)
        self.steps = self.dispatched = 0
        if self._setup_until:
            self._setup_until = 0  # what follows is numbered anew, and belongs to steps

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
            self._waits.expect_of_thread(event)
        elif event.info.may_be_functional and not self.preview:
            self._waits.expect_of_outputs(event, output_pointers(spec, arguments))
        # on a device, and in a preview, the reducer's wait returns at once
        if event.is_bucket and not args.channel.runs_ahead and not self.preview:
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
        self._attribution.attribute(event, frame)
        event.thread = self._threads.setdefault(threading.get_ident(), len(self._threads))
        event.step = self.steps
        event.started_ns = event.returned_ns = event.wait_began_ns = event.wait_ended_ns = 0
        return event

    def _add(self, event: RawEvent) -> None:
        """Add an event whose collective begins now. Nothing that fails may follow: an event in the
        trace is one whose end is recorded, too.
        """
        if self._in_setup and event.phase is not Phase.OUTSIDE:
            self._setup_ended()
        if self._rank_and_size is None:
            # now, because the program may destroy its group before it reads the trace
            self._rank_and_size = rank_and_world()
        self.event_log.add(event)
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
                    self._waits.expect_of_work(event, tap.unbox_work(boxed))
            self.event_log.tidy(event, self.steps, self._setup_until or 0)
        except Exception as error:
            self._fail(error)

    def raised(self, event: RawEvent | None, error: BaseException) -> None:
        """Record that the backend rejected the collective or timed out."""
        if event is not None:
            event.returned_ns = _now()
            self._waits.forget(event)

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
        self._in_setup = False
        if not self.steps:
            self._setup_until = self.event_log.last

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
            self.event_log.summarise(self.steps, self._setup_until or 0)
        except Exception as error:
            self._fail(error)
        for listener in self.on_step:
            listener()

    # --- the result

    def data(self) -> TraceData:
        """Return the trace so far."""
        with contextlib.suppress(Exception):
            if self._running:
                self._groups.before_destroy()
            name_mesh_dims(self._groups)
        converter = TraceEvents(self._started_ns)
        events = self.event_log.converted(converter)
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
            whole_steps=self.whole_steps if self.event_log.summaries else None,
            setup_until=without_repeated(self._setup_until, events),
            groups=converter.groups,
            modules=[self._traced_module(row) for row in self.modules.paths.rows],
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

    def _traced_module(self, row: ModuleRow) -> TracedModule:
        parent = row.parent.index if row.parent is not None else None
        return TracedModule(
            row.path,
            row.type,
            row.calls,
            parent,
            self.parameters.of(row),
            self.modules.paths.other_paths(row),
        )

    def _fail(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            log.warning(
                "commlens could not trace a collective or a step, and continues without it: %s: %s",
                type(error).__name__,
                error,
            )
