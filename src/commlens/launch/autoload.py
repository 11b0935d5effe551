"""Whether PyTorch will load commlens in a worker, through its ``torch.backends`` entry point."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping


def obstacle(environ: Mapping[str, str] | None = None) -> str | None:
    """Return why the entry point cannot work in a worker with this environment; None if it can.

    A commlens that is only on ``PYTHONPATH`` has no entry point, since that is part of the metadata
    of an installed distribution.
    """
    environ = os.environ if environ is None else environ
    if environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return "TORCH_DEVICE_BACKEND_AUTOLOAD is not 1"
    if not any(
        point.value.startswith("commlens_autoload")
        for point in importlib.metadata.entry_points(group="torch.backends")
    ):
        return "commlens is importable but not installed"
    return None
