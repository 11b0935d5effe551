"""The pass and microbatch of a pipeline's messages.

A schedule of ``torch.distributed.pipelining`` batches the messages of several microbatches and both
passes. Only the method of the stage that makes a message knows them, so each ``P2POp`` that it
creates is marked, while a tracer runs. Tried on torch 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import functools
import sys
import threading
from types import FrameType
from typing import Any, NamedTuple

from torch.distributed.distributed_c10d import P2POp

from commlens.model.trace import Phase
from commlens.tracing.attribution.modules import ModuleTracker
from commlens.tracing.attribution.stacks import StackInfo, local_values, values_of
from commlens.tracing.raw_event import RawEvent

_STAGE = "torch/distributed/pipelining/stage.py"
_MADE_BY = {
    "get_fwd_recv_ops": (Phase.FORWARD, "fwd_chunk_id"),
    "get_fwd_send_ops": (Phase.FORWARD, "fwd_chunk_id"),
    "get_bwd_recv_ops": (Phase.BACKWARD, "bwd_chunk_id"),
    "get_bwd_send_ops": (Phase.BACKWARD, "bwd_chunk_id"),
}
_FRAMES = 5  # at most so many lie between a stage's method and the message

_users = 0
_original: Any = None
_lock = threading.Lock()


class Message(NamedTuple):
    """What a message of a stage is for."""

    phase: Phase
    microbatch: int
    module: Any  # the stage's


def mark_messages() -> None:
    """Mark messages from now on; counted."""
    global _users, _original
    with _lock:
        _users += 1
        if _original is None:
            _original = P2POp.__init__
            P2POp.__init__ = functools.wraps(_original)(_init)


def stop_marking() -> None:
    """Undo one call of :func:`mark_messages`."""
    global _users, _original
    with _lock:
        _users -= 1
        if (
            not _users
            and P2POp.__init__ is not _original
            and getattr(P2POp.__init__, "__wrapped__", None) is _original
        ):
            P2POp.__init__, _original = _original, None


def set_microbatch(
    event: RawEvent, info: StackInfo, frame: FrameType | None, modules: ModuleTracker
) -> None:
    """Set the microbatch of an event that a schedule issues, and the phase and path of a
    message.
    """
    if info.message_depth < 0:
        (chunk,) = local_values(info, frame, info.chunk_depth, (info.chunk_name,))
        event.microbatch = chunk if isinstance(chunk, int) else None
        return
    (operation,) = local_values(info, frame, info.message_depth, (info.message_name,))
    message: Message | None = getattr(operation, "_commlens_message", None)
    if message is not None:
        event.phase, event.microbatch, event.call = message.phase, message.microbatch, None
        event.path = modules.name_root(message.module) if message.module is not None else None


def _init(self: Any, *args: Any, **kwargs: Any) -> None:
    _original(self, *args, **kwargs)
    frame: Any = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None:
            return
        made_by = _MADE_BY.get(frame.f_code.co_name)
        if made_by is not None and frame.f_code.co_filename.endswith(_STAGE):
            phase, name = made_by
            microbatch, stage = values_of(frame, (name, "self"))
            if isinstance(microbatch, int) and stage is not None:
                self._commlens_message = Message(phase, microbatch, getattr(stage, "submod", None))
            return
        frame = frame.f_back
