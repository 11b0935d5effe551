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
import itertools
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.fx import GraphModule
from torch.nn import DataParallel, Module
from torch.nn.parallel import DistributedDataParallel

from commlens.model.trace import Phase
from commlens.tracing.attribution.module_calls import (
    FIRST_ACCUMULATION,
    CallTable,
    ModuleCall,
    ModuleRow,
    ThreadCalls,
    current_node,
    current_pass,
    next_number,
)
from commlens.tracing.patches import SharedPatch

log = logging.getLogger("commlens")

_FORWARD, _BACKWARD, _RECOMPUTATION, _OUTSIDE = (
    Phase.FORWARD,
    Phase.BACKWARD,
    Phase.RECOMPUTATION,
    Phase.OUTSIDE,
)


class ModuleTracker:
    """Follows module calls while it is installed. Several trackers may be installed at once, each
    with its own rows.
    """

    def __init__(self) -> None:
        self.rows: list[ModuleRow] = []
        self.on_enter: list[Callable[[ModuleCall, Module], Any]] = []
        self.on_leave: list[Callable[[ModuleCall], None]] = []
        self._tables: list[CallTable] = []
        self._thread = ThreadCalls(self._tables)
        self._by_path: dict[tuple[int, str], ModuleRow] = {}  # by id of the module, and path
        self._roots: list[ModuleRow] = []
        self._class_names: dict[str, int] = {}  # number of roots per class
        self._paths: dict[int, tuple[weakref.ref[Module], list[str]]] = {}  # by id of the module
        # by id of the parameter: weak reference and name under its root
        self._parameters: dict[int, tuple[Any, str]] = {}
        self._failed = False
        self.names_wrappers = False
        """Whether wrappers are modules with names of their own, as in CommDebugMode; else their
        calls count as the wrapped module's.
        """

    # --- install and remove

    def install(self) -> None:
        """Start following calls."""
        for patch in (_calls, _passes):
            patch.add(self)

    def remove(self) -> None:
        """Stop following calls, including those that are running."""
        for patch in (_calls, _passes):
            patch.remove(self)
        if self._tables and self._tables not in _earlier_tables:
            # their backward may run under another tracker
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
        try:
            thread = self._thread
            stack = thread.stack
            recomputed_by, parent = self._parent(stack)
            wrapper = False
            row = parent.row.children.get(id(module)) if parent is not None else None
            if row is None or row.ref() is not module:
                inner = self._unwrapped(module)
                wrapper = inner is not module
                if parent is not None and self._is_made_by_compiler(module):
                    return None
                row = self._row(inner, parent)
                if parent is not None and parent.wraps(row, recomputed_by):
                    for listener in self.on_enter:
                        listener(parent, module)
                    return None  # already recorded
                # what a wrapper wraps has the wrapper's own row, and is no child of it
                if parent is not None and not wrapper and row is not parent.row:
                    parent.row.children[id(module)] = row
            if recomputed_by is None:
                number = row.calls = row.calls + 1
            else:
                number = row.recomputed = row.recomputed + 1
            call = ModuleCall(row, number, parent, recomputed_by, next_number(), wrapper)
            thread.table.add(call)
            stack.append(call)
            for listener in self.on_enter:
                listener(call, module)
        except Exception as error:
            self._fail(error)
            return None
        return call

    def _parent(self, stack: list[ModuleCall]) -> tuple[int | None, ModuleCall | None]:
        """Return what the next call begins in: the number of the autograd node that recomputes it
        (None outside of backward), and the call around it.
        """
        node, parent = current_node(), stack[-1] if stack else None
        if node is None:
            return None, parent
        number = node._sequence_nr()
        if parent is None or parent.recomputed_by != number:
            parent = self.find_node(number)
        return number, parent

    def leave(self, call: ModuleCall | None) -> None:
        """Record the end of a call, normal or by an exception."""
        if call is None:
            return
        try:
            thread = self._thread
            stack, table = thread.stack, thread.table
            if not stack or stack[-1] is not call:
                if call not in stack:
                    return  # the tracker was removed while the call ran
                del stack[stack.index(call) + 1 :]
            stack.pop()
            call.end = next_number()
            if call.end == call.start and table.calls and table.calls[-1] is call:
                table.drop_last()  # no node was made: inference
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

    def pass_begins(self, node: Any) -> bool:
        """Note that the running node begins a backward pass of its own, as that of reentrant
        checkpointing does after it has recomputed a forward. Return whether it is noted.
        """
        try:
            thread = self._thread
            number = node._sequence_nr()
            call = thread.stack[-1] if thread.stack else None
            if call is None or call.recomputed_by != number:
                call = self.find_node(number)
            if not thread.nested:
                thread.outermost = current_pass()
            thread.nested.append((number, call))
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
        return self._thread.outermost if self._thread.nested else current_pass()

    def locate(self) -> tuple[Phase | None, ModuleCall | None]:
        """Return this thread's phase, as far as modules and autograd show it, and its module
        call.
        """
        stack, node = self._thread.stack, current_node()
        call = stack[-1] if stack else None
        if node is not None:
            return self.locate_node(node._sequence_nr(), call)
        if call is None:
            return _OUTSIDE, None
        return (_RECOMPUTATION if call.recomputed_by is not None else _FORWARD), call

    def locate_node(self, number: int, call: ModuleCall | None) -> tuple[Phase, ModuleCall | None]:
        """Return phase and module call while the autograd node with this number runs, inside it
        perhaps a call.
        """
        if call is not None and call.recomputed_by == number:
            return _RECOMPUTATION, call
        return _BACKWARD, self.find_node(number)

    def find_node(self, number: int) -> ModuleCall | None:
        """Return the call whose forward made the autograd node with this number."""
        if number >= FIRST_ACCUMULATION:
            return None
        thread = self._thread
        call = thread.find_node(number)
        if thread.nested or (call is not None and call.recomputed_by is None):
            return call
        # The node was made by another thread, or by a graph that was recomputed on this one. Both
        # number their nodes from 0, so several calls may cover the number: then none is right.
        for tables in (self._tables, *_earlier_tables):
            others = [
                other
                for table in list(tables)
                if table is not thread.table and (other := table.find(number)) is not None
            ]
            found = {other for other in others if other.recomputed_by is None}
            if found:
                return found.pop() if len(found) == 1 else None
        return call if len(self._tables) == 1 else None

    def accumulating_path(self, node: Any) -> str | None:
        """Return the path of the module whose parameter's gradient a node accumulates; None for
        other nodes.
        """
        parameter = getattr(node, "variable", None)
        path = self.parameter_path(parameter) if parameter is not None else None
        return path.rpartition(".")[0] if path is not None else None

    # --- rows and paths

    def _row(self, module: Module, parent: ModuleCall | None) -> ModuleRow:
        """Return the row of a module that is called inside a call."""
        path = self._path(module, parent.row if parent is not None else None)
        row = self._by_path.get((id(module), path))
        if row is None or row.ref() is not module:
            row = ModuleRow(
                len(self.rows), path, module, parent.row if parent is not None else None
            )
            self.rows.append(row)
            self._by_path[id(module), path] = row
            if row.parent is None:
                self._roots.append(row)
        return row

    def _path(self, module: Module, parent: ModuleRow | None) -> str:
        """Return a module's path: the class of its root and the names of the children,
        ``"MLP.net1"``. Of several paths of a shared module, it is the one nearest to the parent's.
        A module that is no child of the root is named by its class, ``"MLP.(Helper)"``, and the
        second root of a class ``"MLP#2"``.
        """
        paths = self._known_paths(module)
        if not paths and parent is not None:
            root = parent
            while root.parent is not None:
                root = root.parent
            top = root.ref()
            if top is not None:  # the module was added after its root's first call
                self._learn_paths(top, root.path)
                paths = self._known_paths(module)
        if parent is not None and len(paths) > 1:
            return max(paths, key=lambda path: (_shared_parts(path, parent.path), -len(path)))
        if paths:
            return paths[0]
        name = type(module).__name__
        if parent is not None:
            return f"{parent.path}.({name})"
        count = self._class_names[name] = self._class_names.get(name, 0) + 1
        path = name if count == 1 else f"{name}#{count}"
        self._learn_paths(module, path)
        return path

    def _known_paths(self, module: Module) -> list[str]:
        """Return the paths of a module under all roots that were called."""
        reference, paths = self._paths.get(id(module), (None, []))
        return paths if reference is not None and reference() is module else []

    def _learn_paths(self, root: Module, name: str) -> None:
        for path, module in self._named_modules(root, name):
            reference, paths = self._paths.get(id(module), (None, []))
            if reference is None or reference() is not module:
                self._paths[id(module)] = (weakref.ref(module), [path])
            elif path not in paths:
                paths.append(path)

    def _wrapped(self, module: Module) -> Module | None:
        """Return the module that a wrapper wraps, if its calls count as that module's: always of
        torch.compile's, and with ``names_wrappers`` only of that one, as PyTorch's mode does.
        """
        inside = module.__dict__.get("_modules", {})
        if self.names_wrappers and "_orig_mod" not in inside:
            return None
        for name in _WRAPPED:
            if name in inside:
                found = inside[name]
                return found if isinstance(found, Module) else None
        return inside.get("module") if isinstance(module, _WRAPPERS) else None

    def _is_made_by_compiler(self, module: Module) -> bool:
        """Return whether a compiler made this from its caller: then it is not part of the model."""
        return isinstance(module, GraphModule) and not self._known_paths(module)

    def _unwrapped(self, module: Module) -> Module:
        """Return the module inside all wrappers."""
        while (inner := self._wrapped(module)) is not None:
            module = inner
        return module

    def _named_modules(self, module: Module, path: str) -> Iterator[tuple[str, Module]]:
        """Yield a module and all inside it under all paths without wrappers."""
        yield path, module
        wrapped = self._wrapped(module)
        for name, child in module._modules.items():
            if child is not None:
                yield from self._named_modules(
                    child, path if child is wrapped else f"{path}.{name}"
                )

    def name_root(self, module: Module) -> str:
        """Return the path of a module, which is taken for a root if no call has shown otherwise."""
        return self._path(self._unwrapped(module), None)

    def other_paths(self, row: ModuleRow) -> tuple[str, ...]:
        """Return the other paths of a row's module under which no row counts its calls: those calls
        are in this row.
        """
        module = row.ref()
        paths = self._known_paths(module) if module is not None else []
        if module is None or len(paths) < 2:
            return ()
        return tuple(
            path for path in paths if path != row.path and (id(module), path) not in self._by_path
        )

    def path_of(self, module: Module) -> str | None:
        """Return the path of a module whose root has been called."""
        return next(iter(self._known_paths(module)), None)

    def parameter_path(self, parameter: Any) -> str | None:
        """Return a parameter's path, ``"MLP.net1.weight"``, if its root has been called; None for
        other tensors.
        """
        reference, path = self._parameters.get(id(parameter), (None, ""))
        if reference is None or reference() is not parameter:  # new, or replaced: read all anew
            self._parameters = {}
            for row in self._roots:
                root = row.ref()
                if root is not None:
                    for path, module in self._named_modules(root, row.path):
                        for name, tensor in module._parameters.items():
                            if tensor is not None:
                                self._parameters.setdefault(
                                    id(tensor), (weakref.ref(tensor), f"{path}.{name}")
                                )
            reference, path = self._parameters.get(id(parameter), (None, ""))
        return path if reference is not None and reference() is parameter else None


def _shared_parts(path: str, other: str) -> int:
    """Count the parts with which two paths begin alike."""
    return sum(
        1
        for _ in itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(path.split("."), other.split("."), strict=False)
        )
    )


_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_WRAPPERS = (DistributedDataParallel, DataParallel)


# --- the wrappers around nn.Module.__call__ and the function that runs a backward pass

# calls recorded by removed trackers
_earlier_tables: collections.deque[list[CallTable]] = collections.deque(maxlen=4)


def _followed_call(original: Any) -> Any:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        trackers = _calls.users
        if not trackers or is_compiling():
            return original(self, *args, **kwargs)
        if len(trackers) == 1:
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
        node = current_node()
        if node is None or is_compiling():
            return original(*args, **kwargs)
        trackers = [tracker for tracker in _passes.users if tracker.pass_begins(node)]
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
