"""Watches the buffers of asynchronous collectives from the issue to the wait.

An op that writes to a buffer that the collective reads, or that reads or writes a buffer that the
collective writes, comes before or after the collective by chance. So does another collective with
the same buffer. An op may read a buffer that the collective only reads.

Only calls that the program makes itself are watched. torch's own parts (DDP, FSDP, DTensor,
pipelining) order their ops by other means than waits. On a CUDA device, only ops on the default
stream are looked at. A buffer is watched until a thread waits for the collective, polls it and
finds it complete, takes its future, meets the others in a barrier, or synchronizes the device.

The watch is awake only while Works of the program are in flight: then collectives and waits pass
through Python, and a dispatch mode makes every tensor op of the issuing thread several times
slower.

Tried on torch 2.13.0.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, Literal, TypeVar

import torch
import torch.distributed.distributed_c10d as c10d

from commlens.model.hazard import Hazard, Touch
from commlens.model.ops import BARRIERS, wire_op
from commlens.tap import tap, torch_patches
from commlens.tap.groups import Groups
from commlens.tracing.in_flight.callers import (
    RawStack,
    is_functional,
    issue_stack,
    stack_of,
    touch_stack,
)
from commlens.tracing.in_flight.memory import Memory, memory_of, storage_key
from commlens.tracing.in_flight.mode import OpsWatch
from commlens.tracing.in_flight.operands import OpAccess, Operand, operands_of
from commlens.tracing.patches import Patches

log = logging.getLogger("commlens")
T = TypeVar("T")

_DEVICES: Final = frozenset({"cpu", "cuda"})
_FLIGHTS_MAX: Final = 1024
_OPS_MAX: Final = 20_000  # after which a collective is no longer watched
_LOOK_AFTER: Final = 1_000  # ops
_FOUND_MAX: Final = 256
_WAIT: Final = "wait_tensor"

_lock = threading.RLock()  # of falling asleep and of what is in flight


def _forked() -> None:
    global _lock
    _lock = threading.RLock()  # another thread of the parent may have had it


os.register_at_fork(after_in_child=_forked)


class Flight:
    """A collective between its issue and the wait for it."""

    def __init__(self, op: str, stack: RawStack, channel: Any, began: int) -> None:
        self.op = op
        self.stack = stack
        self.channel = channel
        self.began = began  # number of the op before it
        self.work = 0  # id
        self.buffers: list[Buffer] = []
        self.is_functional = is_functional(stack)


@dataclass(eq=False)
class Buffer:
    """A tensor of a collective in flight."""

    flight: Flight
    memory: Memory
    written: bool  # by the collective
    described: str  # "float32[4,8]"


@dataclass(frozen=True)
class BufferUse:
    """An op that touched a buffer of a collective in flight."""

    what: Literal["touched-in-flight", "shared-in-flight"]
    issued: RawStack
    touched: RawStack
    op: str
    access: Literal["read", "written"]
    operand: Literal["input", "output"]
    tensor: str


class BufferWatch(tap.WaitSubscriber):
    """Watches the buffers of this process's collectives between ``start()`` and ``stop()``."""

    def __init__(self, *, preview: bool = False, backend: str = "") -> None:
        """Create a watch.

        Args:
            preview: whether the process plays one rank of a fake world. Its tensors may be fake,
                and ops are seen all the time, not only from the issue of a Work to its wait.
            backend: in a preview, the backend whose rules hold; empty: the one that the program
                asks for.
        """
        self.sees_fake_tensors = preview
        self.found: Counter[BufferUse] = Counter()
        self._preview = preview
        self._backend = backend
        self._mode = OpsWatch(self._before_op)
        self._groups = Groups()
        self._buffers: dict[int, list[Buffer]] = {}  # in flight, by storage
        self._flights: dict[Flight, None] = {}  # in order of issue
        # by id of the Work's one Python object, which is not kept alive
        self._works: dict[int, tuple[weakref.ref[Any], Flight]] = {}
        self._issuing: dict[int, RawStack] = {}  # by thread: the call that it is making
        self._issued: dict[int, Flight] = {}  # by thread: issued, but its Work is not known yet
        self._coalesced: dict[int, list[Flight]] = {}  # by thread
        self._ops = 0
        self._patches = Patches()
        self._awake = False
        self._failed = False

    def start(self) -> None:
        """Start watching."""
        torch_patches.add_work_listener(self)
        for owner, name in (
            (torch._C, "_cuda_synchronize"),
            (torch._C, "_accelerator_synchronizeDevice"),
            (torch.cuda.Stream, "synchronize"),
            (torch.cuda.Event, "synchronize"),
        ):
            self._patches.wrap(owner, name, self._synchronized)
        if self._preview:
            # those of a fake GPU do not come to the functions above
            for module in (torch.cuda, getattr(torch, "accelerator", torch.cuda)):
                self._patches.wrap(module, "synchronize", self._synchronized)
            self._patches.replace_aliases()
            self._wake()
            self._mode.settle(True)

    def stop(self) -> None:
        """Stop watching. What was found remains."""
        self._patches.restore()
        torch_patches.remove_work_listener(self)
        with _lock:
            self._sleep()
        self._mode.settle(False)

    def issue_begins(self, frame: FrameType, asynchronous: bool | None) -> None:
        """Wake up if the program itself is about to get a Work."""
        if not self._failed:
            self._safely(self._issue_begins, frame, asynchronous)

    def _issue_begins(self, frame: FrameType, asynchronous: bool | None) -> None:
        stack = issue_stack(frame, asynchronous)
        if stack is not None:
            self._issuing[threading.get_ident()] = stack
            with _lock:
                self._wake()

    def issue_ended(self, work: Any) -> None:
        """Watch the collective until a thread waits for this Work."""
        if self._issuing or self._issued:
            self._safely(self._issue_ended, work)

    def _issue_ended(self, work: Any) -> None:
        thread = threading.get_ident()
        self._issuing.pop(thread, None)
        flight = self._issued.pop(thread, None)
        if flight is None:
            return
        group = self._coalesced.get(thread)
        if group is not None:
            group.append(flight)
        elif work is not None and torch_patches.sees_waits_for(work):
            self._watch(flight, work)

    def _wake(self) -> None:
        if not self._awake:
            self._awake = True
            tap.attach(self)
            torch_patches.add_tracer(self)

    def _sleep(self) -> None:
        if self._awake:
            self._awake = False
            torch_patches.remove_tracer(self)
            tap.detach(self)
        for of_all in (self._flights, self._buffers, self._works):
            of_all.clear()

    def hazards(self) -> list[Hazard]:
        """Return what was found."""
        return [
            Hazard(
                found.what,
                times,
                stack_of(found.issued),
                touch=Touch(
                    found.op, found.access, found.operand, found.tensor, stack_of(found.touched)
                ),
            )
            for found, times in list(self.found.items())
        ]

    # --- called by the tap

    def begin(self, spec: tap.OpSpec, arguments: tuple[Any, ...]) -> Flight | None:
        """Look whether a collective touches what is in flight. Return it if it is to be watched."""
        return self._safely(self._begin, spec, arguments, sys._getframe(1).f_back)

    def _begin(
        self, spec: tap.OpSpec, arguments: tuple[Any, ...], frame: FrameType | None
    ) -> Flight | None:
        if self._failed:
            with _lock:
                self._sleep()
            return None
        thread = threading.get_ident()
        op = wire_op(spec.name)
        if op in BARRIERS:
            self._waited(list(self._flights))
            return None
        stack = self._issuing.pop(thread, None) or _functional_stack(frame)
        if stack is None and not self._flights:
            return None
        group = tap.unbox_group(arguments[spec.process_group])
        operands = operands_of(spec, arguments, group.rank())
        device = operands[0].tensor.device.type if operands else ""
        if self._preview:
            device = "cpu"  # a fake tensor says that it is on "meta"
        if not operands or device not in _DEVICES:
            return None
        channel = self._groups.find(group).channel(device)
        if self._preview:
            channel.runs_ahead = (self._backend or c10d.get_backend(group)) != "gloo"
        if self._flights:
            self._look(operands, op, frame, channel)
        if stack is None:
            return None
        flight = Flight(op, stack, channel, self._ops)
        flight.buffers = list(_buffers(flight, operands))
        return flight

    def returned(self, flight: Flight | None, result: Any) -> None:
        """Watch a collective that the backend has accepted."""
        if flight is None:
            return
        if flight.is_functional:
            self._safely(self._watch, flight, None)
        else:
            self._issued[threading.get_ident()] = flight

    def _watch(self, flight: Flight, work: Any) -> None:
        with _lock:
            self._wake()
            self._flights[flight] = None
            if work is not None:
                flight.work = id(work)
                self._works[flight.work] = weakref.ref(work), flight
            for buffer in flight.buffers:
                self._buffers.setdefault(buffer.memory.key, []).append(buffer)
            if len(self._flights) > _FLIGHTS_MAX:
                self._end(next(iter(self._flights)))
            self._settle()

    # --- waits

    def wait_begins(self, work: Any) -> list[Flight] | None:
        """Return the collectives for which ``work.wait()`` waits."""
        flight = self._of_work(work)
        if flight is not None:
            return [flight]
        if self._mode.here.is_on:
            self._safely(self._settle)  # what was in flight may have ended inside an op
        return None

    def tensor_wait_begins(self, tensor: Any) -> list[Flight] | None:
        """Return the collectives for which ``wait_tensor(tensor)`` waits."""
        return self._writing(tensor) or None

    def wait_ended(self, flights: list[Flight], error: BaseException | None) -> None:
        """Stop watching collectives, for which a thread has waited."""
        self._safely(self._waited, flights)

    def handled(self, work: Any) -> None:
        """Stop watching a collective that was found complete, or whose future was taken."""
        flight = self._of_work(work) if self._works else None
        if flight is not None:
            self._safely(self._waited, [flight])

    def _of_work(self, work: Any) -> Flight | None:
        held = self._works.get(id(work))
        return held[1] if held is not None and held[0]() is work else None

    def coalescing_starts(self) -> None:
        """Note that the calls of this thread get their Work at the end of a group."""
        self._coalesced[threading.get_ident()] = []

    def coalescing_ended(self, work: Any) -> None:
        """Watch the collectives of a group until a thread waits for its Work."""
        flights = self._coalesced.pop(threading.get_ident(), None)
        if flights and work is not None and not self._failed:
            first = flights[0]
            first.buffers = list(itertools.chain(*(flight.buffers for flight in flights)))
            for buffer in first.buffers:
                buffer.flight = first
            self._safely(self._watch, first, work)

    def backward_ended(self) -> None:
        """Put the mode back, which a backward pass takes away."""
        if self._flights:
            self._safely(self._settle)

    def _synchronized(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if self._flights:
            self._safely(self._device_synchronized)
        return result

    def _device_synchronized(self) -> None:
        with _lock:
            self._waited([each for each in self._flights if each.channel.runs_ahead])

    def _writing(self, tensor: Any) -> list[Flight]:
        key = storage_key(tensor) if self._buffers else None
        buffers = self._buffers.get(key, ()) if key is not None else ()
        return [buffer.flight for buffer in list(buffers) if buffer.written]

    def _waited(self, flights: Iterable[Flight]) -> None:
        """Stop watching collectives, and those before them if a device runs them in order."""
        with _lock:
            for flight in flights:
                if flight.channel.runs_ahead and flight in self._flights:
                    in_order = [each for each in self._flights if each.channel is flight.channel]
                    for earlier in in_order[: in_order.index(flight)]:
                        self._end(earlier)
                self._end(flight)
            self._settle()

    def _end(self, flight: Flight) -> None:
        if flight not in self._flights:
            return
        self._flights.pop(flight, None)
        self._works.pop(flight.work, None)
        for buffer in flight.buffers:
            buffers = [
                other for other in self._buffers.get(buffer.memory.key, ()) if other is not buffer
            ]
            if buffers:
                self._buffers[buffer.memory.key] = buffers
            else:
                self._buffers.pop(buffer.memory.key, None)

    def _settle(self) -> None:
        """Show ops to this thread, and stay awake, only while Works are in flight. The output of a
        functional collective waits by itself, inside an op, where the mode cannot be taken away.
        """
        if self._preview:
            return
        with _lock:
            wanted = not all(flight.is_functional for flight in self._flights)
            settled = self._mode.settle(wanted)
            if settled and not wanted and not self._coalesced:
                self._sleep()

    # --- ops

    def _before_op(self, access: OpAccess, args: Any, kwargs: Any) -> None:
        if not self._flights:
            return
        try:
            self._ops += 1
            if self._ops % _LOOK_AFTER == 0:
                with _lock:
                    for flight in list(self._flights):
                        is_freed = any(buffer.memory.is_freed for buffer in flight.buffers)
                        if is_freed or self._ops - flight.began > _OPS_MAX:
                            self._end(flight)
            if access.arguments:
                self._look(access.accesses(args, kwargs), access.op, sys._getframe(1), None)
            elif access.op.__name__.startswith(_WAIT) and args:
                self._waited(self._writing(args[0]))
        except Exception as error:
            self._fail(error)

    def _look(self, operands: Any, op: Any, frame: FrameType | None, channel: Any) -> None:
        """Compare what an op reads and writes with the buffers in flight.

        Args:
            operands: of the op.
            op: its name.
            frame: of the caller, or further inside.
            channel: of a collective.
        """
        for operand in operands:
            key = storage_key(operand.tensor)
            buffers = self._buffers.get(key) if key is not None else None
            if not buffers:
                continue
            hit = self._hit(operand, buffers, channel)
            stack = touch_stack(frame) if hit is not None else None
            if hit is None or stack is None or len(self.found) >= _FOUND_MAX:
                continue
            self.found[
                BufferUse(
                    "touched-in-flight" if channel is None else "shared-in-flight",
                    hit.flight.stack,
                    stack,
                    str(op),
                    "written" if operand.written else "read",
                    "output" if hit.written else "input",
                    hit.described,
                )
            ] += 1

    def _hit(self, operand: Operand, buffers: list[Buffer], channel: Any) -> Buffer | None:
        """Return the buffer that an access may not touch now; None if it is legal.

        Args:
            operand: the tensor that is accessed.
            buffers: those in flight in its storage.
            channel: of a collective that accesses it; a device runs those of one channel in order.
        """
        if not operand.written and not any(buffer.written for buffer in buffers):
            return None
        memory = memory_of(operand.tensor)
        if memory is None or self._is_on_another_stream(operand.tensor.device):
            return None
        ordered = channel if channel is not None and channel.runs_ahead else None
        touchable = [buffer for buffer in buffers if buffer.flight.channel is not ordered]
        return _conflict(memory, operand.written, buffers, touchable)

    def _is_on_another_stream(self, device: Any) -> bool:
        """Return whether ops on a device run beside its default stream."""
        if device.type != "cuda" or self._preview or not torch.cuda.is_initialized():
            return False
        return bool(torch.cuda.current_stream(device) != torch.cuda.default_stream(device))

    def _safely(self, method: Callable[..., T], *args: Any) -> T | None:
        try:
            return method(*args)
        except Exception as error:
            self._fail(error)
            return None

    def _fail(self, error: Exception) -> None:
        """Log an error of ours, and watch nothing any more."""
        if not self._failed:
            self._failed = True
            log.warning(
                "commlens: the buffers of collectives are watched no longer: %s: %s",
                type(error).__name__,
                error,
            )
        self._flights.clear()
        self._buffers.clear()


def _conflict(
    memory: Memory, writes: bool, buffers: list[Buffer], touchable: list[Buffer]
) -> Buffer | None:
    """Return the first ``touchable`` buffer that shares bytes with the memory, if the op or the
    collective writes them.
    """
    # A collective may read a slice of its own output: that slice is what the peers get.
    read = [buffer for buffer in buffers if not buffer.written]
    inputs = {buffer.flight for buffer in read if buffer.memory.contains(memory)}
    for buffer in touchable:
        written = writes or (buffer.written and buffer.flight not in inputs)
        if written and buffer.memory.shares_bytes_with(memory):
            return buffer
    return None


def _buffers(flight: Flight, operands: Iterable[Operand]) -> Iterator[Buffer]:
    for operand in operands:
        memory = memory_of(operand.tensor)
        if memory is not None:
            shape = ",".join(map(str, operand.tensor.shape))
            described = f"{str(operand.tensor.dtype).removeprefix('torch.')}[{shape}]"
            yield Buffer(flight, memory, operand.written, described)


def _functional_stack(frame: FrameType | None) -> RawStack | None:
    stack = issue_stack(frame, None)
    return stack if stack is not None and is_functional(stack) else None
