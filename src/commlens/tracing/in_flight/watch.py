"""Watch the buffers of asynchronous collectives from the issue to the wait, and find races.

While a collective is in flight, an op or another collective may only read the buffers that it only
reads. Any other access is a race: it happens before or after the collective by chance::

    work = dist.all_reduce(x, async_op=True)    # a Flight with one Buffer: x, written
    y = x + 1                                   # a BufferUse: "add" read x, touched in flight
    work.wait()                                 # the flight ends
    x.zero_()                                   # fine

Only calls that the program makes itself are watched: torch's own parts (DDP, FSDP, DTensor,
pipelining) order their ops without waits. On a CUDA device, only ops on the default stream are
checked. The watch of a buffer ends when a thread waits for the collective, finds by polling that it
is complete, takes its future, calls a barrier, or synchronizes the device.

The watch is awake only while Works of the program are in flight, because it is expensive: all
collectives and waits then pass through Python, and a dispatch mode makes every tensor op of the
issuing thread several times slower.

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
_CLEAN_UP_EVERY: Final = 1_000  # ops
_USES_MAX: Final = 256
_WAIT: Final = "wait_tensor"

_lock = threading.RLock()  # held to change the flights, and to fall asleep


def _replace_lock() -> None:
    global _lock
    _lock = threading.RLock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_replace_lock)


class Flight:
    """A collective between its issue and the wait for it."""

    def __init__(self, op: str, stack: RawStack, channel: Any, began: int) -> None:
        self.op = op
        self.stack = stack
        self.channel = channel
        self.began = began  # the number of tensor ops seen before it
        self.work = 0  # id of its Work; 0: it has none
        self.buffers: list[Buffer] = []
        self.is_functional = is_functional(stack)


@dataclass(eq=False)
class Buffer:
    """A tensor of a collective in flight."""

    flight: Flight
    memory: Memory
    written: bool  # by the collective
    description: str  # "float32[4,8]"


@dataclass(frozen=True)
class BufferUse:
    """A race: an op or another collective used a buffer of a collective in flight."""

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
                and the watch is always awake.
            backend: in a preview, the backend whose rules hold; empty: the backend that the program
                asks for.
        """
        self.sees_fake_tensors = preview
        self.found: Counter[BufferUse] = Counter()
        self._preview = preview
        self._backend = backend
        self._mode = OpsWatch(self._before_op)
        self._groups = Groups()
        # What a collective passes through, by thread, until its Work is known:
        # issue_begins() notes the stack; begin() takes it, and returned() notes the flight;
        # issue_ended() has the Work, or the flight waits for the Work of its coalesced group.
        self._issuing_stacks: dict[int, RawStack] = {}
        self._without_work: dict[int, Flight] = {}
        self._coalescing: dict[int, list[Flight]] = {}
        # Then it is in flight:
        self._flights: dict[Flight, None] = {}  # in order of issue
        # by id of the Work's one Python object, which is not kept alive
        self._flights_by_work: dict[int, tuple[weakref.ref[Any], Flight]] = {}
        self._buffers_by_storage: dict[int, list[Buffer]] = {}
        self._op_count = 0  # tensor ops seen
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
            # torch calls none of the functions above for a fake GPU
            for module in (torch.cuda, getattr(torch, "accelerator", torch.cuda)):
                self._patches.wrap(module, "synchronize", self._synchronized)
            self._patches.replace_aliases()
            self._wake()
            self._mode.switch(True)

    def stop(self) -> None:
        """Stop watching. The races found so far remain."""
        self._patches.restore()
        torch_patches.remove_work_listener(self)
        with _lock:
            self._sleep()
        self._mode.switch(False)

    def issue_begins(self, frame: FrameType, asynchronous: bool | None) -> None:
        """Wake up if the program itself is about to get a Work."""
        if not self._failed:
            self._safely(self._issue_begins, frame, asynchronous)

    def _issue_begins(self, frame: FrameType, asynchronous: bool | None) -> None:
        stack = issue_stack(frame, asynchronous)
        if stack is not None:
            self._issuing_stacks[threading.get_ident()] = stack
            with _lock:
                self._wake()

    def issue_ended(self, work: Any) -> None:
        """Watch the collective until a thread waits for this Work."""
        if self._issuing_stacks or self._without_work:
            self._safely(self._issue_ended, work)

    def _issue_ended(self, work: Any) -> None:
        thread = threading.get_ident()
        self._issuing_stacks.pop(thread, None)
        flight = self._without_work.pop(thread, None)
        if flight is None:
            return
        group = self._coalescing.get(thread)
        if group is not None:
            group.append(flight)
        elif work is not None and torch_patches.sees_waits_for(work):
            self._watch(flight, work)

    def _wake(self) -> None:
        """Have the tap report all collectives and waits."""
        if not self._awake:
            self._awake = True
            tap.attach(self)
            torch_patches.add_tracer(self)

    def _sleep(self) -> None:
        """Have the tap report nothing, and forget what is in flight."""
        if self._awake:
            self._awake = False
            torch_patches.remove_tracer(self)
            tap.detach(self)
        for in_flight in (self._flights, self._buffers_by_storage, self._flights_by_work):
            in_flight.clear()

    def hazards(self) -> list[Hazard]:
        """Return the races found, each with the number of times it was seen."""
        return [
            Hazard(
                use.what,
                times,
                stack_of(use.issued),
                touch=Touch(use.op, use.access, use.operand, use.tensor, stack_of(use.touched)),
            )
            for use, times in list(self.found.items())
        ]

    # --- called by the tap

    def begin(self, spec: tap.OpSpec, arguments: tuple[Any, ...]) -> Flight | None:
        """Check whether a collective touches a buffer in flight. Return the collective if it must
        be watched itself.
        """
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
        if op in BARRIERS:  # after it, all ranks have done what they issued before
            self._stop_watching(list(self._flights))
            return None
        # None: the program's call waits itself, or a library of torch issues the collective. Then
        # it is not watched, but may touch what is in flight.
        stack = self._issuing_stacks.pop(thread, None) or _functional_stack(frame)
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
            self._check_operands(operands, op, frame, channel)
        if stack is None:
            return None
        flight = Flight(op, stack, channel, self._op_count)
        flight.buffers = list(_buffers(flight, operands))
        return flight

    def returned(self, flight: Flight | None, result: Any) -> None:
        """Watch a collective that the backend has accepted."""
        if flight is None:
            return
        if flight.is_functional:  # its wait_tensor() is given the output, not a Work
            self._safely(self._watch, flight, None)
        else:
            self._without_work[threading.get_ident()] = flight

    def _watch(self, flight: Flight, work: Any) -> None:
        """Note that a collective is in flight, and drop the oldest one if there are too many."""
        with _lock:
            self._wake()
            self._flights[flight] = None
            if work is not None:
                flight.work = id(work)
                self._flights_by_work[flight.work] = weakref.ref(work), flight
            for buffer in flight.buffers:
                self._buffers_by_storage.setdefault(buffer.memory.key, []).append(buffer)
            if len(self._flights) > _FLIGHTS_MAX:
                self._remove(next(iter(self._flights)))
            self._switch_mode()

    # --- waits

    def wait_begins(self, work: Any) -> list[Flight] | None:
        """Return the collectives for which ``work.wait()`` waits."""
        flight = self._flight_of(work)
        if flight is not None:
            return [flight]
        if self._mode.here.is_on:
            # the last flight may have ended inside an op, where the mode could not be taken off
            self._safely(self._switch_mode)
        return None

    def tensor_wait_begins(self, tensor: Any) -> list[Flight] | None:
        """Return the collectives for which ``wait_tensor(tensor)`` waits."""
        return self._flights_that_write(tensor) or None

    def wait_ended(self, flights: list[Flight], error: BaseException | None) -> None:
        """Stop watching the collectives for which a thread has waited."""
        self._safely(self._stop_watching, flights)

    def used_without_wait(self, work: Any) -> None:
        """Stop watching a collective whose Work was found complete, or whose future was taken."""
        flight = self._flight_of(work) if self._flights_by_work else None
        if flight is not None:
            self._safely(self._stop_watching, [flight])

    def _flight_of(self, work: Any) -> Flight | None:
        held = self._flights_by_work.get(id(work))
        return held[1] if held is not None and held[0]() is work else None

    def coalescing_starts(self) -> None:
        """Note that this thread's calls share one Work, which comes at the end of the group."""
        self._coalescing[threading.get_ident()] = []

    def coalescing_ended(self, work: Any) -> None:
        """Watch the collectives of a group, as one with the buffers of all, until a thread waits
        for its Work.
        """
        flights = self._coalescing.pop(threading.get_ident(), None)
        if flights and work is not None and not self._failed:
            first = flights[0]
            first.buffers = list(itertools.chain(*(flight.buffers for flight in flights)))
            for buffer in first.buffers:
                buffer.flight = first
            self._safely(self._watch, first, work)

    def backward_ended(self) -> None:
        """Put the mode back: after a backward pass, torch restores the stack of modes from before,
        without it if the flight began meanwhile.
        """
        if self._flights:
            self._safely(self._switch_mode)

    def _synchronized(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Synchronize a device, a stream or an event: what ran on a device before has ended."""
        result = original(*args, **kwargs)
        if self._flights:
            self._safely(self._device_synchronized)
        return result

    def _device_synchronized(self) -> None:
        with _lock:
            self._stop_watching([each for each in self._flights if each.channel.runs_ahead])

    def _flights_that_write(self, tensor: Any) -> list[Flight]:
        """Return the collectives in flight that write into a tensor's storage."""
        key = storage_key(tensor) if self._buffers_by_storage else None
        buffers = self._buffers_by_storage.get(key, ()) if key is not None else ()
        return [buffer.flight for buffer in list(buffers) if buffer.written]

    def _stop_watching(self, flights: Iterable[Flight]) -> None:
        """Stop watching collectives, and those before them on a channel that a device runs in
        order.
        """
        with _lock:
            for flight in flights:
                if flight.channel.runs_ahead and flight in self._flights:
                    in_order = [each for each in self._flights if each.channel is flight.channel]
                    for earlier in in_order[: in_order.index(flight)]:
                        self._remove(earlier)
                self._remove(flight)
            self._switch_mode()

    def _remove(self, flight: Flight) -> None:
        if flight not in self._flights:
            return
        self._flights.pop(flight, None)
        self._flights_by_work.pop(flight.work, None)
        for buffer in flight.buffers:
            buffers = [
                other
                for other in self._buffers_by_storage.get(buffer.memory.key, ())
                if other is not buffer
            ]
            if buffers:
                self._buffers_by_storage[buffer.memory.key] = buffers
            else:
                self._buffers_by_storage.pop(buffer.memory.key, None)

    def _switch_mode(self) -> None:
        """Switch the mode on in this thread while a Work is in flight, else off, and fall asleep.

        A functional collective does not count: its output waits by itself, inside an op, where the
        mode could not be switched off.
        """
        if self._preview:
            return
        with _lock:
            wanted = not all(flight.is_functional for flight in self._flights)
            switched = self._mode.switch(wanted)
            if switched and not wanted and not self._coalescing:  # whose flights have no Work yet
                self._sleep()

    # --- ops

    def _before_op(self, access: OpAccess, args: Any, kwargs: Any) -> None:
        """Check a tensor op that is about to run. The mode calls this."""
        if not self._flights:
            return
        try:
            self._op_count += 1
            if self._op_count % _CLEAN_UP_EVERY == 0:
                # what nobody waits for: its memory is free, or the wait was not seen
                with _lock:
                    for flight in list(self._flights):
                        is_freed = any(buffer.memory.is_freed for buffer in flight.buffers)
                        if is_freed or self._op_count - flight.began > _OPS_MAX:
                            self._remove(flight)
            if access.arguments:
                self._check_operands(
                    access.accesses(args, kwargs), access.op, sys._getframe(1), None
                )
            elif access.op.__name__.startswith(_WAIT) and args:
                self._stop_watching(self._flights_that_write(args[0]))
        except Exception as error:
            self._fail(error)

    def _check_operands(
        self, operands: Any, op: Any, frame: FrameType | None, channel: Any
    ) -> None:
        """Count the operands of an op or a collective that touch a buffer in flight.

        Args:
            operands: the tensors that it reads or writes.
            op: its name.
            frame: of the caller, or further inside.
            channel: the collective's; None for an op.
        """
        for operand in operands:
            key = storage_key(operand.tensor)
            buffers = self._buffers_by_storage.get(key) if key is not None else None
            if not buffers:
                continue
            buffer = self._buffer_in_conflict(operand, buffers, channel)
            stack = touch_stack(frame) if buffer is not None else None
            if buffer is not None and stack is not None and len(self.found) < _USES_MAX:
                use = BufferUse(
                    "touched-in-flight" if channel is None else "shared-in-flight",
                    buffer.flight.stack,
                    stack,
                    str(op),
                    "written" if operand.written else "read",
                    "output" if buffer.written else "input",
                    buffer.description,
                )
                self.found[use] += 1

    def _buffer_in_conflict(
        self, operand: Operand, buffers: list[Buffer], channel: Any
    ) -> Buffer | None:
        """Return the buffer with which an access conflicts; None if the access is legal.

        Args:
            operand: the tensor that is accessed.
            buffers: the buffers in flight in its storage.
            channel: of the collective that accesses it; None: an op does.
        """
        if not operand.written and not any(buffer.written for buffer in buffers):
            return None
        memory = memory_of(operand.tensor)
        if memory is None or self._is_on_another_stream(operand.tensor.device):
            return None
        # A device runs the collectives of one channel in order: this one does not race with those.
        in_order = channel if channel is not None and channel.runs_ahead else None
        racing = [buffer for buffer in buffers if buffer.flight.channel is not in_order]
        return _first_in_conflict(memory, operand.written, buffers, racing)

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
        self._buffers_by_storage.clear()


def _first_in_conflict(
    memory: Memory, writes: bool, buffers: list[Buffer], racing: list[Buffer]
) -> Buffer | None:
    """Return the first racing buffer that shares bytes with an accessed memory, if the access or
    the buffer's collective writes them.

    Args:
        memory: the accessed memory.
        writes: whether the access writes it.
        buffers: all buffers in flight in its storage.
        racing: those whose collectives are not ordered with the access.
    """
    # If a collective's input is a slice of its own output, as in an all_gather in place, that slice
    # keeps its content: to read it is no race.
    inputs = [buffer for buffer in buffers if not buffer.written]
    keep_content = {buffer.flight for buffer in inputs if buffer.memory.contains(memory)}
    for buffer in racing:
        written = writes or (buffer.written and buffer.flight not in keep_content)
        if written and buffer.memory.shares_bytes_with(memory):
            return buffer
    return None


def _buffers(flight: Flight, operands: Iterable[Operand]) -> Iterator[Buffer]:
    """Yield the buffers of a collective; not of tensors without memory, such as sparse ones."""
    for operand in operands:
        memory = memory_of(operand.tensor)
        if memory is not None:
            shape = ",".join(map(str, operand.tensor.shape))
            description = f"{str(operand.tensor.dtype).removeprefix('torch.')}[{shape}]"
            yield Buffer(flight, memory, operand.written, description)


def _functional_stack(frame: FrameType | None) -> RawStack | None:
    """Return the stack of a functional collective that the program calls; None for other calls.
    It passes no method of the process group from Python, so issue_begins() did not see it.
    """
    stack = issue_stack(frame, None)
    return stack if stack is not None and is_functional(stack) else None
