"""Keeps torch.compile out of our functions."""

from __future__ import annotations

from typing import Any

import torch


def leave_to_eager(code: Any) -> bool:
    """Make dynamo skip a function and everything it calls. Return False if this torch cannot."""
    frames = torch._C._dynamo.eval_frame
    try:
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))
    except AttributeError:
        return False
    return True
