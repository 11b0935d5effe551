"""The outputs of collectives that give all ranks of their group the same bytes, measured during one
step of the first optimizer.

An output is measured when the wait for it has returned, on the stream that waits: what the program
does to it comes later, and no thread and no stream waits for us. The output of a collective that
C++ waits for, such as DDP's gradients, is not measured: a check compares the gradients themselves.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any, Final, NamedTuple

import torch

from commlens.model.ops import WIRE_OPS
from commlens.numbers.measuring import Named, Unread, reason_to_skip, versions
from commlens.numbers.replicas import Replicas, group_ranks
from commlens.tap import tap, torch_patches
from commlens.tap.cuda_graphs import is_capturing
from commlens.tap.groups import is_coalescing, unique_name
from commlens.tap.running_frames import user_line

_ALIKE: Final = frozenset({"all_reduce", "broadcast", "all_gather"})
_COLLECTIVES_MAX: Final = 4096  # in one step; the first optimizer may make no further step
# gloo writes the outputs of all other ops with copies, in a thread of its own
_IN_PLACE: Final = frozenset({"allreduce_", "broadcast_"})
_ENGINE: Final = "torch/autograd/graph.py"


class _Pending(NamedTuple):
    """A collective that is under way."""

    name: str
    source: str
    ranks: tuple[int, ...]
    tensors: list[torch.Tensor]
    versions: list[int | None]  # of the tensors, as the call left them
    in_place: bool  # no copy of the backend counts as a version

    def versions_now(self) -> list[int | None]:
        """Return how often the outputs were written to, if only the program writes to them."""
        return versions(self.tensors) if self.in_place else []


class OutputWatch(tap.WaitSubscriber):
    """Subscriber of the tap, and listener to waits. An error of its own ends it, and is kept."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._outputs: list[Unread] = []
        self._counts: dict[str, int] = {}  # collectives of this step, by group
        self._works: dict[Any, _Pending] = {}  # keeps the outputs alive until they are waited for
        self._by_address: dict[int, Any] = {}  # Work, by the address of an output
        self._is_on = False
        self._thread = 0  # that trains

    def start(self) -> None:
        """Begin a step."""
        self._forget()
        self._thread = threading.get_ident()
        if not self._is_on and self.error is None:
            self._is_on = True
            torch_patches.add_tracer(self)
            tap.attach(self)

    def stop(self) -> None:
        """Stop listening."""
        if self._is_on:
            self._is_on = False
            tap.detach(self)
            torch_patches.remove_tracer(self)
        self._works.clear()
        self._by_address.clear()

    def take(self) -> list[Unread]:
        """Return the outputs measured in this step."""
        outputs = self._outputs
        self._forget()
        return outputs

    def _forget(self) -> None:
        self._outputs = []
        self._counts.clear()
        self._works.clear()
        self._by_address.clear()

    # --- called by the tap

    def begin(self, spec: tap.OpSpec, arguments: tuple[Any, ...]) -> _Pending | None:
        """Number the collective among those of its group."""
        op = WIRE_OPS.get(spec.name)
        if op not in _ALIKE or not self._is_on:
            return None
        try:
            frame = sys._getframe(1)
            group = tap.unbox_group(arguments[spec.process_group])
            ranks = group_ranks(group)
            # the n-th collective is the same one on all ranks only if one thread issues them all
            is_unnumbered = is_coalescing(group) or is_capturing() or self._is_in_other_thread()
            if len(ranks) < 2 or is_unnumbered or not _is_waited_for(frame):
                return None
            name = unique_name(group)
            number = self._counts[name] = self._counts.get(name, 0) + 1
            if sum(self._counts.values()) > _COLLECTIVES_MAX:
                self.stop()
                return None
            outputs = [arguments[index] for index in spec.writes or spec.tensors]
            tensors = [
                each
                for each in torch.utils._pytree.tree_leaves(outputs)
                if reason_to_skip(each) is None
            ]
            title = f"{op} {number}{f' of group {name}' if name else ''}"
            return _Pending(title, user_line(frame), ranks, tensors, [], spec.name in _IN_PLACE)
        except Exception as error:
            self._fail(error)
            return None

    def _is_in_other_thread(self) -> bool:
        """Return whether another thread runs that Python made, not a backward pass."""
        here = threading.get_ident()
        if here == self._thread:
            return False
        known = (each for each in threading.enumerate() if each.ident == here)
        return any(not isinstance(each, threading._DummyThread) for each in known)

    def returned(self, pending: _Pending | None, result: Any) -> None:
        """Measure the output of a collective that has no Work, or wait until its Work was waited
        for.
        """
        if pending is None:
            return
        try:
            pending.versions.extend(pending.versions_now())
            boxed = result[-1] if type(result) is tuple else result
            if boxed is None:
                self._measure(pending)
                return
            work = tap.unbox_work(boxed)
            self._works[work] = pending
            self._by_address.update({each.data_ptr(): work for each in pending.tensors})
        except Exception as error:
            self._fail(error)

    # --- called by the hooks of waits

    def wait_begins(self, work: Any) -> _Pending | None:
        """Return the collective that a thread waits for."""
        return self._works.pop(work, None)

    def tensor_wait_begins(self, tensor: Any) -> _Pending | None:
        """Return the collective that a thread waits for."""
        try:
            if not self._by_address:
                return None
            return self._works.pop(self._by_address.pop(tensor.data_ptr(), None), None)
        except Exception:
            return None

    def wait_ended(self, pending: _Pending, error: BaseException | None) -> None:
        """Measure the output."""
        if error is not None or not self._is_on:
            return
        try:
            if not is_capturing():
                self._measure(pending)
        except Exception as failed:
            self._fail(failed)

    # ---

    def _measure(self, pending: _Pending) -> None:
        for tensor in pending.tensors:
            self._by_address.pop(tensor.data_ptr(), None)
        if not pending.tensors or pending.versions != pending.versions_now():
            return  # the program has changed its output before it waited
        names = [
            f"{pending.name}, tensor {number}" if len(pending.tensors) > 1 else pending.name
            for number in range(len(pending.tensors))
        ]
        kept_by = (Replicas(pending.ranks, "output"),)
        named = [
            Named("collective-output", name, tensor, kept_by, source=pending.source)
            for name, tensor in zip(names, pending.tensors, strict=True)
        ]
        self._outputs.append(Unread(named))

    def _fail(self, error: Exception) -> None:
        self.error = self.error or error
        self.stop()


def _is_waited_for(frame: FrameType | None) -> bool:
    """Return whether Python issued a collective, which then waits for it: not DDP in C++."""
    while frame is not None and frame.f_code.co_filename == tap.__file__:
        frame = frame.f_back
    return frame is not None and not frame.f_code.co_filename.endswith(_ENGINE)
