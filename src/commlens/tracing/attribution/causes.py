"""The DTensor op and redistribution behind a collective, read from the frames that issue it."""

from __future__ import annotations

from types import FrameType
from typing import Any

from commlens.model.trace import Cause
from commlens.tracing.attribution.stacks import StackInfo, local_values

_CACHE_LIMIT = 10_000
_OP = ("op_call",)
_SPECS = ("current_spec", "target_spec", "is_explicit")


class Causes:
    """The causes seen so far, interned because programs repeat them."""

    def __init__(self) -> None:
        self._known: dict[Any, Cause] = {}
        self._names: dict[Any, str] = {}  # by op

    def find(self, info: StackInfo, frame: FrameType | None) -> Cause | None:
        """Return the cause of a collective whose stack starts at ``frame``; None if no DTensor is
        involved.
        """
        op: str | None = None
        if info.dispatch_depth >= 0:
            (op_call,) = local_values(info, frame, info.dispatch_depth, _OP)
            op = self._name(op_call) if op_call is not None else None
        if info.redistribute_depth < 0:
            return (
                self._intern((op, None, None, False, ""), op, "", "", True, None)
                if op is not None
                else None
            )
        before, after, explicit = local_values(info, frame, info.redistribute_depth, _SPECS)
        if before is None or after is None:
            return None
        mesh = before.mesh
        # without an op it was requested, also in to_local's backward
        implicit = op is not None and not (explicit or info.explicit)
        return self._intern(
            (op, before.placements, after.placements, implicit, id(mesh)),
            op,
            before.placements,
            after.placements,
            implicit,
            mesh,
        )

    def _name(self, op: Any) -> str:
        name = self._names.get(op)
        if name is None:
            name = self._names[op] = str(op)
        return name

    def _intern(
        self, key: Any, op: str | None, before: Any, after: Any, implicit: bool, mesh: Any
    ) -> Cause:
        cause = self._known.get(key)
        if cause is None:
            if len(self._known) >= _CACHE_LIMIT:
                self._known = {}
            cause = self._known[key] = Cause(
                op, str(before), str(after), implicit, str(mesh) if mesh is not None else ""
            )
        return cause
