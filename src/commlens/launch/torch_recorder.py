"""Switch torch's own recorder on: only it knows which collectives on an accelerator are complete,
and nothing may query the device.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import MutableMapping
from typing import Final

from commlens.config import RECORDER_ENTRIES, RECORDER_MARK, RECORDER_VARIABLES

TIMING: Final = "TORCH_NCCL_ENABLE_TIMING"


def switch_on(environ: MutableMapping[str, str] = os.environ, *, timing: bool = False) -> None:
    """Set the size of torch's recorder in an environment, unless the user has set one, 0 included.

    The recorder is off by default until about torch 2.10. It reads the variable when it is first
    used: for the first process group.

    Args:
        environ: the environment.
        timing: torch also measures how long each collective takes on the device.
    """
    if timing:
        environ.setdefault(TIMING, "1")
    if any(name in environ for name in RECORDER_VARIABLES):
        return
    import torch

    with contextlib.suppress(ValueError):
        version = tuple(int(part) for part in torch.__version__.split(".")[:2])
        # Torch warns of the older name where it prefers the newer one.
        name = "TORCH_FR_BUFFER_SIZE" if version >= (2, 9) else "TORCH_NCCL_TRACE_BUFFER_SIZE"
        environ[name] = str(RECORDER_ENTRIES)
        environ[RECORDER_MARK] = "1"


def switch_on_here(*, timing: bool) -> None:
    """Switch it on for this process and its children, if there is no process group yet. Never
    raises.
    """
    with contextlib.suppress(Exception):
        dist = sys.modules.get("torch.distributed")
        if dist is None or not dist.is_available() or not dist.is_initialized():
            switch_on(timing=timing)
