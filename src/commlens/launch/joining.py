"""Switch recording on in a rank of a running job, at a moment that its program knows nothing of:
for ``commlens attach --inject``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from commlens import config
from commlens.capture import session
from commlens.launch.recording import start


def join(settings: Mapping[str, Any]) -> str:
    """Record this process from now on.

    Args:
        settings: those that differ from the defaults and from the settings in force here.

    Returns:
        Why the process is not recorded, in a clause; empty if it is.
    """
    if "torch" not in sys.modules:
        return "has not imported torch"
    import torch.distributed as dist

    current = session.session()
    if session.is_started() and current is not None and current.is_open:
        return "is recorded already"  # commlens.outside.inject.ALREADY
    if not dist.is_available() or not dist.is_initialized():
        return "has not called init_process_group"
    start(config.load_settings(overrides=dict(settings), strict=False).settings, joins=True)
    current = session.session()
    return (
        ""
        if current is not None and current.is_recording
        else "could not open its black box: its log says why"
    )
