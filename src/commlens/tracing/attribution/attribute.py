"""Where and why a collective is issued: its phase, module, owner and cause.

What the running modules and autograd nodes show comes first. Frames of torch's libraries in the
stack, the *markers*, then correct it. For example, FSDP2 gathers the parameters of a block in the
forward of the block before: the path is that of the forward, and the owner is the next block.
"""

from __future__ import annotations

import functools
from types import FrameType
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

from commlens.model.trace import Phase, Redistribution
from commlens.tracing.attribution.module_calls import current_node
from commlens.tracing.attribution.modules import ModuleTracker
from commlens.tracing.attribution.owners import Owners
from commlens.tracing.attribution.pipelines import set_microbatch
from commlens.tracing.attribution.stacks import StackInfo
from commlens.tracing.raw_event import RawEvent

_CACHE_LIMIT = 10_000
_name = functools.lru_cache(maxsize=_CACHE_LIMIT)(str)


class Causes:
    """The DTensor ops and redistributions seen so far, read from the frames that issue them, and
    interned because programs repeat them.
    """

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


class Attribution:
    """Sets what an event's place in the program says about it."""

    def __init__(self, modules: ModuleTracker) -> None:
        self._modules = modules
        self._owners = Owners(modules)
        self._causes = Causes()

    def attribute(self, event: RawEvent, frame: FrameType | None) -> None:
        """Set phase, module call, path, microbatch, cause and owner of an event with a known stack,
        whose innermost frame is ``frame``; None: C++ issues it, without Python.
        """
        info = event.info
        event.phase, event.call = self._modules.locate()
        event.owner = event.cause = event.path = event.microbatch = None
        if info.phase is not None and event.phase in (Phase.OUTSIDE, Phase.BACKWARD):
            # the stack knows more: in final callbacks, recomputed functions and optimizers, also
            # those that run in a gradient's hook
            event.phase = info.phase
            event.call = event.call if info.phase is not Phase.OPTIMIZER else None
        if "message" in info.markers or "microbatch" in info.markers:  # of a pipeline's schedule
            set_microbatch(event, info, frame, self._modules)
        if event.call is not None:
            if "FSDP2 state" in info.markers:  # a hook of a block, which runs in a child's node
                event.call = self._owners.hooked_call(info, frame, event.call)
            event.path = event.call.row.path
        if "redistribution" in info.markers or "DTensor op" in info.markers:
            event.cause = self._causes.find(info, frame)
        self._set_owner(event, frame)

    def _set_owner(self, event: RawEvent, frame: FrameType | None) -> None:
        """Set the owner: the library, and the module whose parameters or gradients are sent."""
        args = event.args
        event.owner, its_path = self._owners.find(event.info, frame, args.op, args.first_tensor)
        if its_path is not None and (event.path is None or event.is_bucket):
            # autograd issues a bucket at one parameter, but it carries gradients of many modules
            event.path, event.call = its_path, None
        elif event.path is None and event.phase is Phase.BACKWARD:
            # in the hook of a parameter's gradient
            event.path = self._modules.paths.accumulating_path(current_node())
        if frame is None and event.phase is Phase.OUTSIDE:
            # a thread of C++: that of DDP's reducer, in backward, or an unknown one
            event.phase = Phase.BACKWARD if its_path is not None else None
