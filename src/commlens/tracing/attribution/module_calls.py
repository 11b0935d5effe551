"""Calls of modules, and which of them made an autograd node.

Autograd numbers its nodes per thread in the order of creation. Each call remembers the numbers
assigned during the call. A node belongs to the innermost call that covers its number: if an MLP's
call covers 10 to 13 and that of its ``net1`` covers 10 and 11, node 11 is of ``net1``, and node 12
of the MLP itself.

Tried on torch 2.6.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import bisect
import operator
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import Module

current_node: Callable[[], Any] = torch._C._current_autograd_node
next_number: Callable[[], int] = torch.autograd._get_sequence_nr
FIRST_ACCUMULATION = 2**63
"""Nodes with this number or a higher one accumulate gradients; no forward made them."""
current_pass: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of this thread's innermost backward pass; -1 outside of any."""
_KEPT_CALLS = 100_000


class ModuleRow:
    """A module under one path: one row for all its calls."""

    __slots__ = (
        "__weakref__",
        "calls",
        "children",
        "index",
        "parent",
        "path",
        "recomputed",
        "ref",
        "root",
        "type",
    )

    def __init__(self, index: int, path: str, module: Module, parent: ModuleRow | None) -> None:
        kind = type(module)
        self.index = index
        self.path = path
        self.type = f"{kind.__module__}.{kind.__qualname__}"
        self.calls = 0
        self.recomputed = 0
        self.parent = parent  # of its first call
        self.root: ModuleRow = parent.root if parent is not None else self
        self.ref = weakref.ref(module)
        self.children: dict[int, ModuleRow] = {}  # by id of the module called inside this one


@dataclass(slots=True, eq=False)
class ModuleCall:
    """One call of a module."""

    row: ModuleRow
    number: int  # counts the module's calls from 1; recomputations are counted separately
    parent: ModuleCall | None
    recomputed_by: int | None  # number of the autograd node that recomputes it, else None
    start: int
    # a call of a wrapper, such as torch.compile(module)'s result, which may call the module itself
    wrapper: bool
    end: int | None = None  # None while it is running

    def wraps(self, row: ModuleRow, recomputed_by: int | None) -> bool:
        """Return whether this is the call of a wrapper that calls what it wraps: one call of both.
        It is another one where only the module is recomputed.
        """
        return self.wrapper and row is self.row and self.recomputed_by == recomputed_by


class CallTable:
    """One thread's calls that made autograd nodes, in the order of their starts."""

    __slots__ = ("_step_start", "calls")

    def __init__(self) -> None:
        self.calls: list[ModuleCall] = []
        self._step_start = 0  # index of the first call since the last step

    def add(self, call: ModuleCall) -> None:
        """Add a call that begins."""
        if len(self.calls) >= _KEPT_CALLS:
            self._forget(_KEPT_CALLS // 2)
        self.calls.append(call)

    def close(self, number: int | None = None) -> None:
        """Stop following running calls: nodes from ``number`` on are not attributed to them."""
        calls = self.calls.copy()  # another thread may drop some meanwhile
        for call in calls:
            if call.end is None:
                call.end = calls[-1].start if number is None else number

    def find(self, number: int) -> ModuleCall | None:
        """Return the innermost call that covers a node's number."""
        at = bisect.bisect_right(self.calls, number, key=_start_of)
        if not at:
            return None
        found = self.calls[at - 1 : at]
        if not found or found[0].start > number:
            return self.find(number)  # another thread has dropped calls meanwhile
        call: ModuleCall | None = found[0]
        while call is not None and call.end is not None and call.end <= number:
            # A recomputed call's parent ran before, perhaps on a thread with other numbers.
            outer = call.parent
            is_near = outer is not None and outer.recomputed_by == call.recomputed_by
            call = outer if is_near else None
        return call

    def step_ended(self) -> None:
        """Keep only the last step: graphs rarely outlive two optimizer steps."""
        self._forget(self._step_start)
        self._step_start = len(self.calls)

    def _forget(self, count: int) -> None:
        del self.calls[:count]
        self._step_start = max(0, self._step_start - count)


_start_of: Callable[[ModuleCall], int] = operator.attrgetter("start")


class RunningPass(NamedTuple):
    """A backward pass that a node began inside another one, as reentrant checkpointing's does."""

    by: int | None  # the node's number
    call: ModuleCall | None  # that made the node
    inside: int  # the number of the pass in which the node runs


class ThreadCalls(threading.local):
    """The calling thread's running calls and nested passes, and the table of the calls that made
    nodes.
    """

    def __init__(self, tables: list[CallTable]) -> None:
        self.stack: list[ModuleCall] = []
        self.nested: list[RunningPass] = []
        self.table = CallTable()
        tables.append(self.table)

    def find(self, number: int) -> ModuleCall | None:
        """Return the call that made a node with this number, if it was made on this thread.

        A nested pass runs the graph that its node has just made: what no call in it covers belongs
        to the node's own call.
        """
        call = self.table.find(number)
        if not self.nested:
            return call
        begun = self.nested[-1]
        is_of_pass = call is not None and (call.end is not None or call.recomputed_by == begun.by)
        return call if is_of_pass else begun.call or call
