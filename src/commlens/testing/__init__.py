"""For tests of distributed programs: assertions on traces, functions run on several ranks, and the
pytest plugin.

The names are imported when they are first used, so that pytest can load the plugin without
importing torch or anything else that is heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commlens.check.api import check
    from commlens.testing.ranks import assert_replicas_agree, run_on_ranks
    from commlens.traces.assertions import assert_collectives, assert_matches_golden

__all__ = [
    "assert_collectives",
    "assert_matches_golden",
    "assert_replicas_agree",
    "check",
    "run_on_ranks",
]

_FROM = {
    "assert_collectives": "traces.assertions",
    "assert_matches_golden": "traces.assertions",
    "assert_replicas_agree": "testing.ranks",
    "check": "check.api",
    "run_on_ranks": "testing.ranks",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _FROM:
        raise AttributeError(f"module 'commlens.testing' has no attribute {name!r}")
    value = getattr(import_module(f"commlens.{_FROM[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
