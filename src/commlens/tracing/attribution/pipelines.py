"""The pass and microbatch of a pipeline's messages.

A schedule of ``torch.distributed.pipelining`` batches the messages of several microbatches and both
passes. Only the method of the stage that makes a message knows them, so each ``P2POp`` that it
creates is marked, while a tracer runs. Tried on torch 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, NamedTuple

from torch.distributed.distributed_c10d import P2POp

from commlens.model.trace import Phase
from commlens.tracing.attribution.modules import ModuleTracker
from commlens.tracing.attribution.stacks import StackInfo, values_of
from commlens.tracing.patches import SharedPatch
from commlens.tracing.raw_event import RawEvent

_STAGE = "torch/distributed/pipelining/stage.py"
_MADE_BY = {
    "get_fwd_recv_ops": (Phase.FORWARD, "fwd_chunk_id"),
    "get_fwd_send_ops": (Phase.FORWARD, "fwd_chunk_id"),
    "get_bwd_recv_ops": (Phase.BACKWARD, "bwd_chunk_id"),
    "get_bwd_send_ops": (Phase.BACKWARD, "bwd_chunk_id"),
}
_FRAMES = 5  # at most so many lie between a stage's method and the message


class Message(NamedTuple):
    """What a message of a stage is for."""

    phase: Phase
    microbatch: int
    module: Any  # the stage's


def set_microbatch(
    event: RawEvent, info: StackInfo, frame: FrameType | None, modules: ModuleTracker
) -> None:
    """Set the microbatch of an event that a schedule issues, and the phase and path of a
    message.
    """
    if "message" not in info.markers:
        (chunk,) = info.values("microbatch", frame)
        event.microbatch = chunk if isinstance(chunk, int) else None
        return
    (operation,) = info.values("message", frame)
    message: Message | None = getattr(operation, "_commlens_message", None)
    if message is not None:
        event.phase, event.microbatch, event.call = message.phase, message.microbatch, None
        event.path = modules.paths.name_root(message.module) if message.module is not None else None


def _marking(original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _mark(self, sys._getframe(1))

    return __init__


marked_messages = SharedPatch(P2POp, "__init__", _marking)
"""While it has users, the messages of stages are marked."""


def _mark(message: Any, frame: FrameType | None) -> None:
    for _ in range(_FRAMES):
        if frame is None:
            return
        made_by = _MADE_BY.get(frame.f_code.co_name)
        if made_by is not None and frame.f_code.co_filename.endswith(_STAGE):
            phase, name = made_by
            microbatch, stage = values_of(frame, (name, "self"))
            if isinstance(microbatch, int) and stage is not None:
                module = getattr(stage, "submod", None)
                message._commlens_message = Message(phase, microbatch, module)
            return
        frame = frame.f_back
