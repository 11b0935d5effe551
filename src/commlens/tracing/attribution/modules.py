"""Where a collective or an op is issued: the module call that runs on this thread, or, in a
backward pass, the call whose forward made the running autograd node.

For example, of ``model = MLP()`` with a child ``net1``:

============================================  ===============  ====================================
issued                                        phase            call
============================================  ===============  ====================================
in the forward of ``net1``                    forward          ``MLP.net1``, the top of the stack
by the autograd node of ``net1``'s matmul     backward         ``MLP.net1``, by the node's number
in ``net1``, called again in backward by a    recomputation    that call, whose parent is the call
checkpoint's node                                              that made the node
in the optimizer                              outside          none
============================================  ===============  ====================================

:mod:`~commlens.tracing.attribution.module_calls` explains the numbers of nodes.

``nn.Module.__call__`` is wrapped while a tracker is installed. The wrapper encloses the module's
own hooks, in which tensor-parallel plans communicate, and is left through ``finally`` if the module
raises. No hook is registered and no tensor is touched. The function that runs a backward pass is
wrapped too, for passes that begin inside another.

Tried on torch 2.6.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import collections
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.fx import GraphModule
from torch.nn import Module

from commlens.model.trace import Phase
from commlens.tracing.attribution.module_calls import (
    FIRST_ACCUMULATION,
    CallTable,
    ModuleCall,
    ModuleRow,
    RunningPass,
    ThreadCalls,
    current_node,
    current_pass,
    next_number,
)
from commlens.tracing.attribution.module_paths import ModulePaths
from commlens.tracing.patches import SharedPatch

log = logging.getLogger("commlens")

# calls recorded by removed trackers: their backward may run under another one
_earlier_tables: collections.deque[list[CallTable]] = collections.deque(maxlen=4)


class ModuleTracker:
    """Follows module calls while it is installed. Several trackers may be installed at once, each
    with its own rows.
    """

    def __init__(self) -> None:
        self.paths = ModulePaths()
        self.on_enter: list[Callable[[ModuleCall, Module], Any]] = []
        self.on_leave: list[Callable[[ModuleCall], None]] = []
        self._tables: list[CallTable] = []  # one for each thread
        self._thread = ThreadCalls(self._tables)
        self._failed = False

    # --- install and remove

    def install(self) -> None:
        """Start following calls."""
        for patch in (_calls, _passes):
            patch.add(self)

    def remove(self) -> None:
        """Stop following calls, including those that are running."""
        for patch in (_calls, _passes):
            patch.remove(self)
        if self._tables not in _earlier_tables:
            _earlier_tables.appendleft(self._tables)
        self._thread.table.close(next_number())
        for table in list(self._tables):
            table.close()
        self._thread = ThreadCalls(self._tables)

    def step_ended(self) -> None:
        """Drop calls that only the ended optimizer step's backward needed."""
        for table in list(self._tables):
            table.step_ended()

    # --- the calls

    def enter(self, module: Module) -> ModuleCall | None:
        """Record the start of a module call on this thread. Return None if it does not count: of a
        part that a compiler made, or of what a wrapper wraps, called by the wrapper.
        """
        call: ModuleCall | None = None
        try:
            thread = self._thread
            recomputed_by, parent = self._surroundings()
            row, is_wrapper = self._row(module, parent)
            if row is None:
                return None
            if parent is not None and parent.wraps(row, recomputed_by):
                for listener in self.on_enter:
                    listener(parent, module)
                return None  # already recorded
            if recomputed_by is None:
                number = row.calls = row.calls + 1
            else:
                number = row.recomputed = row.recomputed + 1
            call = ModuleCall(row, number, parent, recomputed_by, next_number(), is_wrapper)
            thread.table.add(call)
            thread.stack.append(call)
            for listener in self.on_enter:
                listener(call, module)
        except Exception as error:
            self._fail(error)
        return call

    def _surroundings(self) -> tuple[int | None, ModuleCall | None]:
        """Return the number of the autograd node that runs on this thread, if any, and the
        innermost module call: the running one, or in a backward pass the one that made the node.
        """
        stack, node = self._thread.stack, current_node()
        call = stack[-1] if stack else None
        if node is None:
            return None, call
        number = node._sequence_nr()
        return number, self.locate_node(number, call)[1]

    def _row(self, module: Module, parent: ModuleCall | None) -> tuple[ModuleRow | None, bool]:
        """Return the row of a module that is called inside a call, and whether the module is a
        wrapper, which has the row of what it wraps. There is no row for a part of the caller that a
        compiler made.
        """
        if parent is None:
            inner = self.paths.unwrapped(module)
            return self.paths.row_of(inner, None), inner is not module
        row = parent.row.children.get(id(module))
        if row is not None and row.ref() is module:
            return row, False
        if isinstance(module, GraphModule) and not self.paths.paths_of(module):
            return None, False
        inner = self.paths.unwrapped(module)
        row = self.paths.row_of(inner, parent.row)
        if inner is module and row is not parent.row:
            parent.row.children[id(module)] = row
        return row, inner is not module

    def leave(self, call: ModuleCall | None) -> None:
        """Record the end of a call, normal or by an exception."""
        if call is None:
            return
        try:
            stack, table = self._thread.stack, self._thread.table
            if not stack or stack[-1] is not call:
                if call not in stack:
                    return  # the tracker was removed while the call ran
                del stack[stack.index(call) + 1 :]
            stack.pop()
            call.end = next_number()
            if call.end == call.start and table.calls[-1:] == [call]:
                del table.calls[-1:]  # no node was made: inference
            for listener in self.on_leave:
                listener(call)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            log.warning(
                "commlens: could not follow a module call: %s: %s", type(error).__name__, error
            )

    # --- backward passes that begin inside another one, as that of reentrant checkpointing does
    # after it has recomputed a forward

    def pass_begins(self) -> bool:
        """Note that the running node begins such a pass. Return whether it is noted."""
        try:
            number, call = self._surroundings()
            self._thread.nested.append(RunningPass(number, call, current_pass()))
        except Exception as error:
            self._fail(error)
            return False
        return True

    def pass_ended(self) -> None:
        """Note the end of the pass that was noted last, normal or by an exception."""
        if self._thread.nested:
            self._thread.nested.pop()

    def outermost_pass(self) -> int:
        """Return the number of this thread's backward pass that no other one contains; -1 outside
        of any.
        """
        nested = self._thread.nested
        return nested[0].inside if nested else current_pass()

    # --- where the thread is

    def locate(self) -> tuple[Phase, ModuleCall | None]:
        """Return this thread's phase, as far as modules and autograd show it, and its module
        call.
        """
        stack, node = self._thread.stack, current_node()
        call = stack[-1] if stack else None
        if node is not None:
            return self.locate_node(node._sequence_nr(), call)
        if call is None:
            return Phase.OUTSIDE, None
        return (Phase.RECOMPUTATION if call.recomputed_by is not None else Phase.FORWARD), call

    def locate_node(self, number: int, call: ModuleCall | None) -> tuple[Phase, ModuleCall | None]:
        """Return phase and module call while the autograd node with this number runs, inside it
        perhaps a call.
        """
        if call is not None and call.recomputed_by == number:
            return Phase.RECOMPUTATION, call
        return Phase.BACKWARD, self._find_node(number)

    def _find_node(self, number: int) -> ModuleCall | None:
        """Return the call whose forward made the autograd node with this number."""
        if number >= FIRST_ACCUMULATION:
            return None
        thread = self._thread
        call = thread.find(number)
        if thread.nested or (call is not None and call.recomputed_by is None):
            return call
        # The node was made by another thread, or by a graph that was recomputed on this one. Both
        # number their nodes from 0, so several calls may cover the number: then none is right.
        for tables in (self._tables, *_earlier_tables):
            others = [table.find(number) for table in list(tables) if table is not thread.table]
            found = {each for each in others if each is not None and each.recomputed_by is None}
            if found:
                return found.pop() if len(found) == 1 else None
        return call if len(self._tables) == 1 else None


# --- the wrappers around nn.Module.__call__ and the function that runs a backward pass


def _followed_call(original: Any) -> Any:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        trackers = _calls.users
        if not trackers or is_compiling():
            return original(self, *args, **kwargs)
        if len(trackers) == 1:  # in most programs, and faster
            tracker = trackers[0]
            call = tracker.enter(self)
            try:
                return original(self, *args, **kwargs)
            finally:
                tracker.leave(call)
        calls = [(tracker, tracker.enter(self)) for tracker in trackers]
        try:
            return original(self, *args, **kwargs)
        finally:
            for tracker, call in reversed(calls):
                tracker.leave(call)

    return __call__


def _followed_pass(original: Any) -> Any:
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        if current_node() is None or is_compiling():
            return original(*args, **kwargs)
        trackers = [tracker for tracker in _passes.users if tracker.pass_begins()]
        try:
            return original(*args, **kwargs)
        finally:
            for tracker in trackers:
                tracker.pass_ended()

    return run_backward


def _update_dynamo(before: Any, after: Any) -> None:
    """Make dynamo treat our ``__call__`` as the unpatched one, for which it calls a module's
    forward directly.

    Otherwise compiled code would contain our wrapper and be guarded on it.
    """
    skip = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if skip is not None and hasattr(skip, "skip_code"):
        skip.skip_code(after.__code__)
    for name in ("torch._dynamo.utils", "torch._dynamo.variables.nn_module"):
        module = sys.modules.get(name)
        if getattr(module, "unpatched_nn_module_call", None) is before:
            setattr(module, "unpatched_nn_module_call", after)  # noqa: B010


_calls = SharedPatch(Module, "__call__", _followed_call, _update_dynamo)
_passes = SharedPatch(torch.autograd, "_engine_run_backward", _followed_pass, _update_dynamo)
