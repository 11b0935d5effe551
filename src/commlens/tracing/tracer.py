"""The tracer: the tap's subscriber that keeps each collective with where and why it was issued.

The hot path is ``begin``, ``returned`` and the waits; what can be worked out later is. An error of ours is logged once, and the
collective goes its way.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from commlens.model.collective import ProcessGroup
from commlens.model.ops import POINT_TO_POINT
from commlens.model.trace import Cause, Coverage, Depth, Owner, Phase, TraceData, TracedModule, TraceEvent
from commlens.model.wire_bytes import wire_bytes
from commlens.tap import tap, torch_patches
from commlens.tap.collective_args import Asked, AskedTable, noted_reduce_ops, output_pointers, reduce_op_name
from commlens.tap.groups import Group, Groups
from commlens.tracing.causes import Causes
from commlens.tracing.modules import ModuleCall, ModuleTracker
from commlens.tracing.owners import Owners
from commlens.tracing.packets import key_of
from commlens.tracing.parameters import Parameters
from commlens.tracing.stacks import ENGINE, RECOMPUTE, StackInfo, StackInfos, steps_under_way
from commlens.version import __version__

log = logging.getLogger("commlens")

WHOLE_STEPS = 10
"""Optimizer steps whose collectives are kept one by one, unless said otherwise."""
WHOLE_EVENTS = 50_000
"""Where no step ends, or steps are large: from so many on, collectives are summarised."""
_FOLD_AT = 2_000
_WATCHED_LIMIT = 4096
_HELD_LIMIT = 16
_NAMED_AT_ONCE = 64
_now = time.monotonic_ns


class _FunctionalScope(threading.local):
    """The functional op that a dispatch mode is running on this thread."""

    packet: Any = None


functional_scope = _FunctionalScope()


class RawEvent:
    """A collective as the hot path leaves it."""

    __slots__ = ("asked", "call", "cause", "functional", "info", "owner", "path", "phase", "reduce_op", "returned_ns", "sequence",
                 "started_ns", "step", "thread", "wait_began_ns", "wait_ended_ns")  # fmt: skip

    asked: Asked
    info: StackInfo
    phase: Phase | None
    call: ModuleCall | None
    path: str | None
    owner: Owner | None
    cause: Cause | None
    functional: Any
    reduce_op: Any
    sequence: int
    step: int
    thread: int
    started_ns: int
    returned_ns: int
    wait_began_ns: int
    wait_ended_ns: int

    @property
    def op(self) -> str:
        """The wire op."""
        return self.asked.op

    @property
    def dispatcher_op(self) -> str:
        """The ``c10d`` op, ``"allreduce_"``."""
        name: str = self.asked.content["dop"]
        return name


class _Summary:
    """Events that differ only in when they ran."""

    __slots__ = ("count", "first", "last_step")

    def __init__(self, first: RawEvent) -> None:
        self.first = first
        self.count = 0
        self.last_step = first.step


class Tracer:
    """Traces the collectives of this process between ``start()`` and ``stop()``."""

    sees_fake_tensors = False
    """Whether the tap tells of collectives on fake and meta tensors, which communicate nothing."""

    def __init__(
        self,
        depth: Depth = Depth.COLLECTIVES,
        *,
        steps: tuple[int, int | None] | None = None,
        whole_steps: int | None = None,
        preview: bool = False,
    ) -> None:
        """Make a tracer that does nothing yet.

        Args:
            depth: collectives alone, or tensor ops too.
            steps: record only optimizer steps ``first <= step < last``, counted from 0; None records all.
            whole_steps: after so many recorded steps, events are summarised. None means ``WHOLE_STEPS``.
            preview: the process stands for one of a fake world.
        """
        self.depth = depth
        self.wanted_steps = steps
        self.whole_steps = WHOLE_STEPS if whole_steps is None else whole_steps
        self.preview = self.sees_fake_tensors = preview
        self.modules = ModuleTracker()
        self.on_collective: list[Callable[[RawEvent], None]] = []
        self.events: list[RawEvent] = []
        self.steps = 0
        self.dispatched = 0
        self.lost = 0
        self.ops: Any = None  # the dispatch mode, at depth ops
        self._summaries: dict[Any, _Summary] = {}
        self._folded = 0
        self._groups = Groups()
        self._asked = AskedTable()
        self._infos = StackInfos()
        self._causes = Causes()
        self._owners = Owners(self.modules)
        self._parameters = Parameters(self.modules.rows)
        self.modules.on_leave.append(self._parameters.left)
        self._sequence = itertools.count(1).__next__
        self._threads: dict[int, int] = {}
        self._synchronous: dict[int, RawEvent] = {}
        self._loose_works: weakref.WeakKeyDictionary[Any, RawEvent] = weakref.WeakKeyDictionary()
        self._works: dict[Any, RawEvent] = {}  # in flight on a CPU backend; few, and not for longer than until they are done
        self._pointers: dict[int, RawEvent] = {}
        self._stepping: Callable[[], Any] | None = None  # the optimizer whose steps count
        self._step_hook: Any = None
        self._place: tuple[int, int] | None = None  # rank and world size
        self._started_ns = 0
        self._started_unix_ns = 0
        self._running = False
        self._logged = False

    # --- on and off

    def start(self) -> None:
        """Trace from now on."""
        if self._running:
            return
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._running = True
        if not self._started_ns:
            self._started_ns, self._started_unix_ns = _now(), time.time_ns()
        self._step_hook = register_optimizer_step_post_hook(self._optimizer_stepped)
        self.modules.install()
        torch_patches.add_tracer(self)
        tap.attach(self)
        if self.depth is Depth.OPS:
            from commlens.tracing.ops import OpsMode

            self.ops = self.ops or OpsMode(self)
            self.ops.__enter__()

    def stop(self) -> None:
        """Stop, and let go of everything but what was recorded."""
        if not self._running:
            return
        self._running = False
        self._parameters.look()
        if self.ops is not None:
            self.ops.__exit__(None, None, None)
        tap.detach(self)
        torch_patches.remove_tracer(self)
        self.modules.remove()
        self._step_hook.remove()
        self._synchronous.clear()
        self._works.clear()
        self._loose_works.clear()
        self._infos.forget_codes()
        self._pointers.clear()

    def locate(self) -> tuple[Phase | None, ModuleCall | None]:
        """Where this thread is: phase and module's call."""
        return self.modules.locate()

    # --- the tap's calls

    def begin(self, spec: tap.OpSpec, arguments: tuple[Any, ...]) -> RawEvent | None:
        """A collective is about to be issued."""
        if self.wanted_steps is not None and not self._wanted():
            return None
        self.dispatched += 1
        try:
            return self._begin(spec, arguments, sys._getframe(1).f_back)
        except Exception as error:
            self._fail(error)
            return None

    def _begin(self, spec: tap.OpSpec, arguments: tuple[Any, ...], frame: FrameType | None) -> RawEvent:
        event = RawEvent()
        group = self._groups.find(tap.unbox_group(arguments[spec.process_group]))
        event.asked = asked = self._asked.find(spec, arguments, group)
        event.info = info = self._infos.find(frame, spec.name)
        event.functional = functional_scope.packet
        event.phase, event.call = self.modules.locate()
        event.owner = event.cause = event.path = None
        if info.in_pass is not None or info.in_optimizer:
            self._correct_phase(event, info)
        if event.call is not None:
            if info.fsdp_state_depth >= 0:
                event.call = self._owners.hooked_call(info, frame, event.call)
            event.path = event.call.row.path
        if info.redistribute_depth >= 0 or info.dispatch_depth >= 0:
            event.cause = self._causes.find(info, frame)
        event.owner, owners_path = self._owners.find(info, frame, asked.op, asked.first_tensor)
        if owners_path is not None and (event.path is None or (event.owner is not None and event.owner.library == "DDP")):
            event.path, event.call = owners_path, None
            if frame is None or (event.phase is Phase.OUTSIDE and info.in_pass == ENGINE):
                event.phase = Phase.BACKWARD
        elif frame is None and event.phase is Phase.OUTSIDE:
            event.phase = None  # a C++ thread's own: nothing tells
        thread = threading.get_ident()
        if spec.reduce_op >= 0:
            noted = noted_reduce_ops.get(threading.get_native_id()) if noted_reduce_ops else None
            event.reduce_op = noted or arguments[spec.reduce_op]
        else:
            event.reduce_op = None
        event.thread = self._threads.get(thread, -1)
        if event.thread < 0:
            event.thread = self._threads.setdefault(thread, len(self._threads))
        event.sequence = self._sequence()
        event.step = self.steps
        event.returned_ns = event.wait_began_ns = event.wait_ended_ns = 0
        if asked.synchronous:
            self._synchronous[thread] = event
        elif not self.preview:
            for pointer in output_pointers(spec, arguments):
                self._pointers[pointer] = event
            if len(self._pointers) > _WATCHED_LIMIT:
                self._pointers = dict(itertools.islice(self._pointers.items(), _WATCHED_LIMIT // 2, None))
        self.events.append(event)
        for listener in self.on_collective:
            listener(event)
        if self._place is None:
            self._place = _rank_and_world()  # asked now: the program may destroy its group before it looks at the trace
        event.started_ns = _now()
        return event

    def _correct_phase(self, event: RawEvent, info: StackInfo) -> None:
        """The stack knows of passes in which no node is current or no module runs: final callbacks, recomputed functions."""
        if info.in_pass == RECOMPUTE and event.phase in (Phase.BACKWARD, Phase.OUTSIDE):
            event.phase = Phase.RECOMPUTATION
        elif info.in_pass == ENGINE and event.phase is Phase.OUTSIDE:
            event.phase = Phase.BACKWARD
        elif info.in_optimizer and event.phase is Phase.OUTSIDE:
            event.phase = Phase.OPTIMIZER

    def returned(self, event: RawEvent | None, result: Any) -> None:
        """The backend has it."""
        if event is None:
            return
        event.returned_ns = _now()
        try:
            boxed = result[-1] if type(result) is tuple else result
            if not event.asked.synchronous and boxed is not None and not self.preview and event.asked.channel.polls:
                self._hold(tap.unbox_work(boxed), event)
            if event.sequence % _NAMED_AT_ONCE == 0:
                self._name_reduce_ops()
            if len(self.events) >= _FOLD_AT:
                self._fold_old()
        except Exception as error:
            self._fail(error)

    def _name_reduce_ops(self) -> None:
        """A reduce op as the dispatcher hands it over takes 10 KB: its name stays instead."""
        for event in self.events[-2 * _NAMED_AT_ONCE :]:
            event.reduce_op = _reduce_op(event.reduce_op)

    def _hold(self, work: Any, event: RawEvent) -> None:
        """Keep a Work so that its wait is recognised. It keeps tensors alive: away with those that are done, and with the oldest."""
        works = self._works
        if works:
            # Amortised: each new one looks at the oldest two.
            loose = [held for held in itertools.islice(works, 2) if len(works) > _HELD_LIMIT or held.is_completed()]
            for held in loose:
                done = works.pop(held, None)
                if done is not None:
                    self._loose_works[held] = done  # its wait may be yet to come, as long as the program has the Work
        works[work] = event

    def raised(self, event: RawEvent | None, error: BaseException) -> None:
        """The backend refused it, or waited in vain."""
        if event is not None:
            event.returned_ns = _now()
            self._synchronous.pop(threading.get_ident(), None)

    # --- waits, as the hooks see them

    def wait_begins(self, work: Any) -> RawEvent | None:
        """A thread is about to block in ``work.wait()``."""
        event = self._synchronous.pop(threading.get_ident(), None) if self._synchronous else None
        if event is None:
            event = self._works.pop(work, None) or (self._loose_works.pop(work, None) if self._loose_works else None)
        if event is not None and not event.wait_began_ns:
            event.wait_began_ns = _now()
        return event

    def tensor_wait_begins(self, tensor: Any) -> RawEvent | None:
        """A thread is about to block in ``wait_tensor(tensor)``."""
        if not self._pointers:
            return None
        try:
            event = self._pointers.pop(tensor.data_ptr(), None)
        except Exception:
            return None
        if event is not None and not event.wait_began_ns:
            event.wait_began_ns = _now()
        return event

    def wait_ended(self, event: RawEvent) -> None:
        """That wait is over."""
        if not event.wait_ended_ns:
            event.wait_ended_ns = _now()

    # --- steps

    def _wanted(self) -> bool:
        first, last = self.wanted_steps or (0, None)
        return first <= self.steps and (last is None or self.steps < last)

    def traced_steps(self) -> int:
        """How many of the steps that were to be traced have completed."""
        first, last = self.wanted_steps or (0, None)
        return max(0, (self.steps if last is None else min(self.steps, last)) - first)

    def _optimizer_stepped(self, optimizer: Any, *_: Any) -> None:
        try:
            if steps_under_way(sys._getframe(1)) > 1:
                return  # it is the outer one that counts
            if self._stepping is None or self._stepping() is None:
                self._stepping = weakref.ref(optimizer)
            if self._stepping() is not optimizer:
                return  # of several optimizers the first one counts
            self.steps += 1
            self.modules.step_ended()
            if self.steps == 1:
                self._parameters.look()
            self._fold_old()
        except Exception as error:
            self._fail(error)

    def _fold_old(self) -> None:
        """Summarise what lies beyond the whole steps; events of the current step wait for their waits."""
        first = self.wanted_steps[0] if self.wanted_steps is not None else 0
        too_many = len(self.events) + self._folded > WHOLE_EVENTS
        if self.steps <= first + self.whole_steps and not too_many:
            return
        kept: list[RawEvent] = []
        fold_until = len(self.events) - _FOLD_AT // 2 if too_many else 0
        events, self.events = self.events, kept
        for position, event in enumerate(events):
            beyond = event.step >= first + self.whole_steps and event.step < self.steps
            if beyond or (too_many and event.sequence > WHOLE_EVENTS and position < fold_until):
                self._fold(event)
            else:
                kept.append(event)

    def _fold(self, event: RawEvent) -> None:
        event.reduce_op = _reduce_op(event.reduce_op)
        key = (id(event.asked), event.reduce_op, event.path, event.phase, event.info.index, event.owner, event.cause, event.functional)
        summary = self._summaries.get(key)
        if summary is None:
            summary = self._summaries[key] = _Summary(event)
        summary.count += 1
        summary.last_step = event.step
        self._folded += 1

    # --- the result

    def data(self) -> TraceData:
        """What has been traced until now."""
        with contextlib.suppress(Exception):
            _name_mesh_dims(self._groups)
        table = _GroupTable()
        events = [self._event(raw, table) for raw in list(self.events)]
        for summary in list(self._summaries.values()):
            event = self._event(summary.first, table)
            event.count, event.last_step = summary.count, summary.last_step
            if summary.count > 1:
                event.started_ns = event.returned_ns = event.wait_began_ns = event.wait_ended_ns = event.call = 0
            events.append(event)
        events.sort(key=lambda event: event.sequence)
        rank, world_size = self._place or _rank_and_world()
        recorded = sum(event.count for event in events)
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
            groups=table.groups,
            modules=[
                TracedModule(row.path, row.type, row.calls, row.parent.index if row.parent is not None else None, self._parameters.of(row))
                for row in self.modules.rows
            ],
            events=events,
            ops=list(self.ops.traced_ops()) if self.ops is not None else [],
            coverage=Coverage(
                dispatched=self.dispatched,
                recorded=recorded,
                unclassified=sum(event.count for event in events if not event.classified),
                blind=[f"{self.lost} collectives could not be recorded."] if self.lost else [],
            ),
        )

    def _event(self, raw: RawEvent, table: _GroupTable) -> TraceEvent:
        asked, info = raw.asked, raw.info
        content = asked.content
        group = asked.channel.group
        inputs, outputs = content["in"], content["out"]
        input_bytes, output_bytes = _bytes(inputs), _bytes(outputs or inputs)
        if not outputs and asked.op == "recv":
            input_bytes = 0
        elif asked.op == "send":
            output_bytes = 0
        first = (inputs or outputs or [None])[0]

        def since_start(moment: int) -> int:
            return max(1, moment - self._started_ns) if moment else 0

        return TraceEvent(
            sequence=raw.sequence,
            op=asked.op,
            api=_api(raw),
            phase=raw.phase,
            group=table.index(group, asked.channel.device),
            site=raw.path,
            call=raw.call.number if raw.call is not None else 0,
            owner=raw.owner,
            cause=raw.cause,
            source=info.source,
            through=info.through,
            dtype=first[1] if first else "",
            input_bytes=input_bytes,
            output_bytes=output_bytes,
            wire_bytes=wire_bytes(asked.op, len(group.ranks), input_bytes, output_bytes),
            reduce_op=_reduce_op(raw.reduce_op),
            root=content["root"],
            peer=asked.peer if asked.op in POINT_TO_POINT and asked.peer >= 0 else None,
            tag=asked.tag,
            asynchronous=content["async"],
            members=len(inputs) if "coalesced" in content["dop"] and len(inputs) > 1 else 0,
            thread=raw.thread,
            step=raw.step,
            started_ns=since_start(raw.started_ns),
            returned_ns=since_start(raw.returned_ns),
            wait_began_ns=since_start(raw.wait_began_ns),
            wait_ended_ns=since_start(raw.wait_ended_ns),
        )

    def _fail(self, error: Exception) -> None:
        self.lost += 1
        if not self._logged:
            self._logged = True
            log.warning("commlens could not trace a collective and goes on without it: %s: %s", type(error).__name__, error)


class _GroupTable:
    """Groups by their place in a trace."""

    def __init__(self) -> None:
        self.groups: list[ProcessGroup] = []
        self._places: dict[tuple[Group, str], int] = {}

    def index(self, group: Group, device: str) -> int:
        place = self._places.get((group, device))
        if place is None:
            place = self._places[group, device] = len(self.groups)
            self.groups.append(
                ProcessGroup(group.name, group.ranks, group.description, group.backend(device), group.mesh_dim, group.incarnation)
            )
        return place


def _api(raw: RawEvent) -> str:
    """The op as CommDebugMode names it."""
    if raw.functional is not None:
        name = str(raw.functional).replace("::", ".")
    elif raw.info.packet is not None:
        name = str(key_of(raw)).replace("::", ".")
    else:
        return f"c10d.{raw.dispatcher_op}"
    return name.removeprefix("_") if name.startswith("_c10d_functional.") else name


def _reduce_op(noted: Any) -> str | None:
    """The name of a reduce op, which may have been worked out already."""
    return noted if noted is None or isinstance(noted, str) else reduce_op_name(noted)


def _bytes(tensors: list[Any]) -> int:
    total = 0
    for shape, dtype, *_ in tensors:
        size = _element_size(dtype)
        for extent in shape:
            size *= int(extent)
        total += size
    return total


def _element_size(dtype: str) -> int:
    kind = getattr(torch, dtype, None)
    return int(kind.itemsize) if isinstance(kind, torch.dtype) else 1


def _rank_and_world() -> tuple[int, int]:
    import torch.distributed as dist

    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def _name_mesh_dims(groups: Groups) -> None:
    """Groups that a DeviceMesh uses without having made them (its dimension spans the world) do not say its dimension's name."""
    nameless = {name for name, group in groups.by_name.items() if group.mesh_dim is None}
    if not nameless:
        return
    for mesh in _meshes():
        names = mesh.mesh_dim_names
        if not names or mesh.mesh.dim() != len(names) or mesh.get_coordinate() is None:
            continue
        for dim, name in enumerate(names):
            with contextlib.suppress(Exception):
                group_name = str(mesh.get_group(dim).group_name)
                if group_name in nameless and _is_current(mesh, groups.by_name[group_name]):
                    nameless.discard(group_name)  # where nothing tells meshes apart, the youngest is meant
                    groups.name_mesh_dim(group_name, str(name))


def _is_current(mesh: Any, group: Group) -> bool:
    """Whether a mesh was made for this very group, and not for one of an earlier world, whose names come again (not told by torch 2.6)."""
    registry = getattr(getattr(mesh, "_root_mesh", None) or mesh, "_pg_registry", {})
    registered = registry.get(group.name)
    return registered is None or registered is group.ref()


def _meshes() -> Iterator[DeviceMesh]:
    return (thing for thing in gc.get_objects() if type(thing) is DeviceMesh)
