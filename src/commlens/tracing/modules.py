"""Which module is being called, on every thread, and whose forward made the autograd node that runs now.

``nn.Module.__call__`` is wrapped while a tracker is installed: the wrapper encloses the module's own hooks (a tensor-parallel
plan communicates in those) and is left through ``finally`` when the module raises. No hook is registered, no tensor touched.

Backward: autograd numbers its nodes, per thread, in the order of their creation. Each call remembers which numbers were given
out while it ran; the node that runs now belongs to the innermost call that saw its number.

Tried on torch 2.6.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import bisect
import collections
import functools
import logging
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.fx import GraphModule
from torch.nn import Module

from commlens.model.trace import Phase

log = logging.getLogger("commlens")

current_node: Callable[[], Any] = torch._C._current_autograd_node
_next_number: Callable[[], int] = torch.autograd._get_sequence_nr
_NO_FORWARD_MADE_IT = 2**63
"""Nodes numbered from here on accumulate gradients: no forward made them."""
_KEPT_CALLS = 100_000


class ModuleRow:
    """A module under one path: one row, however often it is called."""

    __slots__ = ("__weakref__", "calls", "children", "index", "parent", "path", "recomputed", "ref", "type")

    def __init__(self, index: int, path: str, module: Module, parent: ModuleRow | None) -> None:
        kind = type(module)
        self.index = index
        self.path = path
        self.type = f"{kind.__module__}.{kind.__qualname__}"
        self.calls = 0
        self.recomputed = 0
        self.parent = parent  # of its first call
        self.ref = weakref.ref(module)
        self.children: dict[int, ModuleRow] = {}  # by id of the module that is called inside this one


class ModuleCall:
    """One call of a module."""

    __slots__ = ("compiled", "end", "number", "parent", "row", "run_by", "start")

    def __init__(self, row: ModuleRow, number: int, parent: ModuleCall | None, run_by: int | None, start: int, compiled: bool) -> None:
        self.row = row
        self.compiled = compiled  # of what torch.compile(module) returned, which may call the module in turn
        self.number = number  # which call of the module it is, from 1; recomputations are counted by themselves
        self.parent = parent
        self.run_by = run_by  # number of the autograd node that runs it again, else None
        self.start = start
        self.end: int | None = None  # None while it runs

    @property
    def in_backward(self) -> bool:
        """Whether it is a recomputation."""
        return self.run_by is not None


class _Table:
    """Calls of one thread that made autograd nodes, by the first number that they could have given out."""

    __slots__ = ("_fresh", "calls", "starts")

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.calls: list[ModuleCall] = []
        self._fresh = 0  # where the calls since the last step begin

    def add(self, call: ModuleCall) -> None:
        if len(self.calls) >= _KEPT_CALLS:
            self._forget(_KEPT_CALLS // 2)
        self.starts.append(call.start)
        self.calls.append(call)

    def close(self, number: int | None = None) -> None:
        """Calls that run on are followed no more: what they make from ``number`` on is not theirs, as far as anybody can tell."""
        for call in self.calls:
            if call.end is None:
                call.end = self.starts[-1] if number is None else number

    def drop_last(self) -> None:
        del self.starts[-1], self.calls[-1]

    def find(self, number: int) -> ModuleCall | None:
        at = bisect.bisect_right(self.starts, number) - 1
        call = self.calls[at] if at >= 0 else None
        while call is not None and call.end is not None and call.end <= number:
            call = call.parent
        return call

    def step_ended(self) -> None:
        """Forget all but the last step: a graph that outlives two optimizer steps is rare."""
        self._forget(self._fresh)
        self._fresh = len(self.calls)

    def _forget(self, count: int) -> None:
        del self.starts[:count], self.calls[:count]
        self._fresh = max(0, self._fresh - count)


class _Here(threading.local):
    """A thread's open calls."""

    def __init__(self, tables: list[_Table]) -> None:
        self.stack: list[ModuleCall] = []
        self.table = _Table()
        tables.append(self.table)


class ModuleTracker:
    """Follows the calls of modules while it is installed. Several may be at once, each with rows of its own."""

    def __init__(self) -> None:
        self.rows: list[ModuleRow] = []
        self.on_enter: list[Callable[[ModuleCall, Module], None]] = []
        self.on_leave: list[Callable[[ModuleCall], None]] = []
        self._tables: list[_Table] = []
        self._here = _Here(self._tables)
        self._by_path: dict[tuple[int, str], ModuleRow] = {}  # by id of the module, and path
        self._roots: list[ModuleRow] = []
        self._class_names: dict[str, int] = {}  # how many roots of a class there are
        self._paths: dict[int, tuple[weakref.ref[Module], list[str]]] = {}  # by id of the module
        self._parameters: dict[int, tuple[Any, str]] = {}  # by id of the parameter: weak reference and name under its root
        self._failed = False

    # --- on and off

    def install(self) -> None:
        """Follow calls from now on."""
        global _trackers
        with _lock:
            _wrap_call()
            _trackers = (*_trackers, self)

    def remove(self) -> None:
        """Stop. Calls under way end unseen."""
        global _trackers
        with _lock:
            _trackers = tuple(other for other in _trackers if other is not self)
            if not _trackers:
                _unwrap_call()
            if self._tables and self._tables not in _earlier:
                _earlier.appendleft(self._tables)  # somebody may go backward under another tracker
        self._here.table.close(_next_number())
        for table in list(self._tables):
            table.close()
        self._here = _Here(self._tables)

    def step_ended(self) -> None:
        """An optimizer's step has ended: what was needed for its backward may go."""
        for table in list(self._tables):
            table.step_ended()

    # --- the calls

    def enter(self, module: Module) -> ModuleCall | None:
        """A module is being called on this thread. None where it is to be passed over."""
        try:
            here = self._here
            stack = here.stack
            node = current_node()
            run_by = None
            compiled = False
            if node is not None:
                run_by = node._sequence_nr()
                parent = stack[-1] if stack and stack[-1].run_by == run_by else self.find_node(node)
            else:
                parent = stack[-1] if stack else None
            if parent is not None:
                row = parent.row.children.get(id(module))
                if row is None or row.ref() is not module:
                    if isinstance(module, GraphModule) and not self._known_paths(module):
                        return None  # what a compiler made of the parent: not a module of the model
                    row = self._row(inner := _compiled(module), parent)
                    if row is parent.row and parent.compiled:
                        return None  # one call, seen already
                    compiled = inner is not module
                    if not compiled:
                        parent.row.children[id(module)] = row
            else:
                row = self._row(inner := _compiled(module), None)
                compiled = inner is not module
            if run_by is None:
                number = row.calls = row.calls + 1
            else:
                number = row.recomputed = row.recomputed + 1
            call = ModuleCall(row, number, parent, run_by, _next_number(), compiled)
            here.table.add(call)
            stack.append(call)
            for listener in self.on_enter:
                listener(call, module)
        except Exception as error:
            self._fail(error)
            return None
        return call

    def leave(self, call: ModuleCall | None) -> None:
        """That call is over, or raised."""
        if call is None:
            return
        try:
            here = self._here
            if call not in here.stack[-1:]:
                if call not in here.stack:
                    return
                del here.stack[here.stack.index(call) + 1 :]
            here.stack.pop()
            call.end = _next_number()
            if call.end == call.start and here.table.calls and here.table.calls[-1] is call:
                here.table.drop_last()  # no node was made: inference
            for listener in self.on_leave:
                listener(call)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            log.warning("commlens: a module's call could not be followed: %s: %s", type(error).__name__, error)

    def locate(self) -> tuple[Phase | None, ModuleCall | None]:
        """Where this thread is: the phase as far as modules and autograd tell it, and the module's call."""
        stack = self._here.stack
        node = current_node()
        if node is None:
            if not stack:
                return Phase.OUTSIDE, None
            return (Phase.RECOMPUTATION if stack[-1].run_by is not None else Phase.FORWARD), stack[-1]
        if stack and stack[-1].run_by == node._sequence_nr():
            return Phase.RECOMPUTATION, stack[-1]
        return Phase.BACKWARD, self.find_node(node)

    def find_node(self, node: Any) -> ModuleCall | None:
        """The call whose forward made an autograd node."""
        number = node._sequence_nr()
        if number >= _NO_FORWARD_MADE_IT:
            return None
        own = self._here.table
        call = own.find(number)
        for tables in () if call is not None else (self._tables, *_earlier):
            found = {other for table in list(tables) if table is not own and (other := table.find(number)) is not None}
            if found:
                return found.pop() if len(found) == 1 else None
        return call

    # --- rows and paths

    def _row(self, module: Module, parent: ModuleCall | None) -> ModuleRow:
        path = self._path(module, parent.row if parent is not None else None)
        row = self._by_path.get((id(module), path))
        if row is None or row.ref() is not module:
            row = ModuleRow(len(self.rows), path, module, parent.row if parent is not None else None)
            self.rows.append(row)
            self._by_path[id(module), path] = row
            if row.parent is None:
                self._roots.append(row)
        return row

    def _path(self, module: Module, parent: ModuleRow | None) -> str:
        paths = self._known_paths(module)
        if not paths and parent is not None:
            root = parent
            while root.parent is not None:
                root = root.parent
            top = root.ref()
            if top is not None:  # a module that was added since
                self._learn_paths(top, root.path)
                paths = self._known_paths(module)
        if parent is not None:
            inside = [path for path in paths if path.startswith(parent.path + ".") or path == parent.path]
            if inside:
                return min(inside, key=len)
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
        reference, paths = self._paths.get(id(module), (None, []))
        return paths if reference is not None and reference() is module else []

    def _learn_paths(self, root: Module, name: str) -> None:
        for inner_name, module in root.named_modules(remove_duplicate=False):
            path = _without_wrappers(f"{name}.{inner_name}" if inner_name else name)
            reference, paths = self._paths.get(id(module), (None, []))
            if reference is None or reference() is not module:
                self._paths[id(module)] = (weakref.ref(module), [path])
            elif path not in paths:
                paths.append(path)

    def path_of(self, module: Module) -> str | None:
        """The path of a module of a tree that has been called."""
        return next(iter(self._known_paths(module)), None)

    def parameter_path(self, parameter: Any) -> str | None:
        """``"MLP.net1.weight"`` of a parameter of a module that has been called; None for any other tensor."""
        reference, path = self._parameters.get(id(parameter), (None, ""))
        if reference is None or reference() is not parameter:
            self._parameters = {}
            for row in self._roots:
                root = row.ref()
                if root is not None:
                    for name, tensor in root.named_parameters():
                        self._parameters[id(tensor)] = (weakref.ref(tensor), _without_wrappers(f"{row.path}.{name}"))
            reference, path = self._parameters.get(id(parameter), (None, ""))
        return path if reference is not None and reference() is parameter else None


def _compiled(module: Module) -> Module:
    """The module that ``torch.compile(module)`` wrapped, else the module itself."""
    inner = module.__dict__.get("_modules", {}).get("_orig_mod")
    return inner if isinstance(inner, Module) else module


def _without_wrappers(path: str) -> str:
    return path.replace("._orig_mod", "")


# --- the wrapper around nn.Module.__call__

_trackers: tuple[ModuleTracker, ...] = ()
_earlier: collections.deque[list[_Table]] = collections.deque(maxlen=4)  # calls that removed trackers saw
_lock = threading.Lock()
_wrapped: list[tuple[Any, Any]] = []  # the wrapper in place and what it wraps: at most one


def _wrap_call() -> None:
    if _wrapped:
        return
    original = Module.__call__

    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        trackers = _trackers
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

    _wrapped.append((__call__, original))
    _tell_dynamo(original, __call__)
    setattr(Module, "__call__", __call__)  # noqa: B010


def _unwrap_call() -> None:
    wrapper, original = _wrapped[0]
    if Module.__dict__.get("__call__") is not wrapper:
        return  # somebody has wrapped ours since: it stays, and does nothing
    setattr(Module, "__call__", original)  # noqa: B010
    _wrapped.clear()
    _tell_dynamo(wrapper, original)


def _tell_dynamo(before: Any, after: Any) -> None:
    """Dynamo goes straight to a module's forward where ``__call__`` is as it has always been.

    It shall do so with ours in place, too: else what is compiled now would hold, and be guarded on, our wrapper.
    """
    skip = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if skip is not None and hasattr(skip, "skip_code"):
        skip.skip_code(after.__code__)
    for name in ("torch._dynamo.utils", "torch._dynamo.variables.nn_module"):
        module = sys.modules.get(name)
        if getattr(module, "unpatched_nn_module_call", None) is before:
            setattr(module, "unpatched_nn_module_call", after)  # noqa: B010
