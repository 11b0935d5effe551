"""Inside the training process: the tap, process groups, completion, and the black box. Imports torch when switched on."""

from __future__ import annotations

import importlib.util
from typing import Any

from commlens.capture.bootstrap import expect_slow
from commlens.errors import MissingDependency

__all__ = ["disable", "enable", "expect_slow"]


def enable(**settings: Any) -> None:
    """Record this process's collectives from its first ``init_process_group`` on (at once, if that has happened).

    It is what ``commlens launch`` does, for those who prefer a line of code.

    Args:
        settings: any of :class:`commlens.config.Settings`, for example ``stall_timeout=30``.

    Raises:
        ConfigError: an unknown setting or a bad value.
        MissingDependency: torch is not installed.
    """
    from commlens import config
    from commlens.capture import bootstrap

    if importlib.util.find_spec("torch") is None:
        raise MissingDependency.torch("commlens.enable()")
    bootstrap.start(config.load_settings(overrides=settings, overrides_from="argument of commlens.enable", strict=True).settings)


def disable() -> None:
    """Stop recording in this process. The black box is closed as after a clean end."""
    from commlens.capture import bootstrap

    bootstrap.stop()
