"""The DTensor op and redistribution behind a collective, read from the frames that issue it."""

from __future__ import annotations

import functools
from types import FrameType
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

from commlens.model.trace import Redistribution
from commlens.tracing.attribution.stacks import StackInfo

_CACHE_LIMIT = 10_000
_name = functools.lru_cache(maxsize=_CACHE_LIMIT)(str)


class Causes:
    """The causes seen so far, interned because programs repeat them."""

    def __init__(self) -> None:
        self._known: dict[Any, Redistribution] = {}
        self._meshes: Any = WeakIdKeyDictionary()  # by mesh: its text

    def find(self, info: StackInfo, frame: FrameType | None) -> Redistribution | None:
        """Return the cause of a collective in whose stack ``frame`` is the innermost frame; None if
        no DTensor is involved.
        """
        op: str | None = None
        if "DTensor op" in info.markers:
            (op_call,) = info.values("DTensor op", frame)
            op = _name(op_call) if op_call is not None else None
        if "redistribution" not in info.markers:
            return self._intern(op, "", "", implicit=True, mesh="") if op is not None else None
        before, after, explicit = info.values("redistribution", frame)
        if before is None or after is None:
            return None
        mesh = self._meshes.get(before.mesh)
        if mesh is None:
            mesh = self._meshes[before.mesh] = str(before.mesh)
        # without an op it was requested, also in to_local's backward
        implicit = op is not None and not (explicit or info.explicit)
        return self._intern(op, before.placements, after.placements, implicit=implicit, mesh=mesh)

    def _intern(
        self, op: str | None, before: Any, after: Any, *, implicit: bool, mesh: str
    ) -> Redistribution:
        key = op, before, after, implicit, mesh
        cause = self._known.get(key)
        if cause is None:
            if len(self._known) >= _CACHE_LIMIT:
                self._known = {}
            cause = self._known[key] = Redistribution(op, str(before), str(after), implicit, mesh)
        return cause
