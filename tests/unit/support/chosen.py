"""Which tests run: what starts one process for many tests prepares only theirs, and what takes long
is left to ``make test-all``.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

WHOLE = os.environ.get("HYPOTHESIS_PROFILE") in ("all", "explore")


def chosen(request: pytest.FixtureRequest, *names: str) -> list[tuple[Any, ...]]:
    """Return the parameters of these names, each once, of the module's tests that run and ask for
    the fixture that calls this.
    """
    found: dict[tuple[Any, ...], None] = {}
    for item in request.session.items:
        values = getattr(getattr(item, "callspec", None), "params", {})
        if item.path == request.path and request.fixturename in getattr(item, "fixturenames", ()):
            found[tuple(values.get(name) for name in names)] = None
    return list(found)


def long(*values: object, when: object = True, **options: Any) -> Any:
    """Return a row of parameters that is left to ``make test-all`` if ``when``."""
    return pytest.param(*values, marks=pytest.mark.long if when else (), **options)


def examples(number: int) -> int:
    """Return how many examples a randomised test draws: a third of the number in ``make test``."""
    return number if WHOLE else max(number // 3, 10)


NATIVE_FIRST = pytest.mark.parametrize(
    "engine_environment", [long("python"), "native"], indirect=True, scope="module"
)
"""Under both engines, of which the one in Python is left to ``make test-all``."""
