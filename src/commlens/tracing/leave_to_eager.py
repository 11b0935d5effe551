"""Keeps torch.compile out of our functions and dispatch modes."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def leave_to_eager(code: Any) -> bool:
    """Make dynamo skip a function and everything it calls. Return False if this torch cannot."""
    frames = torch._C._dynamo.eval_frame
    try:
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))
    except AttributeError:
        return False
    return True


class EagerMode(TorchDispatchMode):  # type: ignore[misc]
    """A dispatch mode that torch.compile leaves alone, and that sees higher-order operators."""

    supports_higher_order_operators = True
    is_left_to_eager = False
    """Whether dynamo skips ``__torch_dispatch__`` already. Torch's own way to skip it costs
    more.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave torch.compile alone (torch 2.9 and later)."""
        return True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Leave torch.compile alone (torch before 2.9)."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return not cls.is_left_to_eager
