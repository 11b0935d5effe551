"""``commlens.enable()``, ``commlens.disable()``, ``commlens.expect_slow()``. Imports torch only when recording is switched on."""

from __future__ import annotations

import importlib.util
from typing import Any

from commlens.capture.session import expect_slow
from commlens.errors import ConfigError, MissingDependency

__all__ = ["disable", "enable", "expect_slow"]


def enable(*, verify: bool | None = None, **settings: Any) -> None:
    """Record this process's collectives from its first ``init_process_group`` on (at once, if that has happened).

    It is what ``commlens launch`` does, for those who prefer a line of code. Where ``COMMLENS=1`` has switched recording on already,
    the settings apply as long as nothing is recorded yet; later, only verification can still be switched on.

    Args:
        verify: verify every collective before it is issued, as ``commlens launch --debug`` does: another name for ``debug``. All ranks
            must do it at the same point of the program. Where a group exists already they wait for each other there, for up to 10 s.
        settings: any of :class:`commlens.config.Settings`, for example ``stall_timeout=30``.

    Raises:
        ConfigError: an unknown setting or a bad value.
        MissingDependency: torch is not installed.
    """
    from commlens import config
    from commlens.capture import session

    if importlib.util.find_spec("torch") is None:
        raise MissingDependency.torch("commlens.enable()")
    if verify is not None and settings.setdefault("debug", verify) is not verify:
        raise ConfigError("commlens.enable got both verify and debug, which are two names for one setting: give one of them.")
    session.start(config.load_settings(overrides=settings, overrides_from="argument of commlens.enable", strict=True).settings)


def disable() -> None:
    """Stop recording in this process. The black box is closed as after a clean end."""
    from commlens.capture import session

    session.stop()
