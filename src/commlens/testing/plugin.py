"""The pytest plugin: ``--commlens``, ``--commlens-update`` and the fixture ``run_on_ranks``.

pytest loads it in every environment that has commlens, so this module imports only pytest and the
standard library, and uses nothing of pytest that an old version lacks. Without ``--commlens`` it
does nothing. docs/pytest.md describes it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("commlens", "commlens: hanging and failing distributed tests")
    group.addoption(
        "--commlens",
        action="store_true",
        help=(
            "record the ranks that tests start, and add the verdict to the report of a test that"
            " fails or times out"
        ),
    )
    group.addoption(
        "--commlens-update",
        action="store_true",
        help="make assert_matches_golden write its golden files instead of comparing with them",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Set the variables before any conftest.py imports torch."""
    options = early_config.known_args_namespace
    if options.commlens_update:
        from commlens.traces.assertions import UPDATE_VARIABLE

        os.environ[UPDATE_VARIABLE] = "1"
    if not options.commlens:
        return
    from commlens.errors import CommlensError
    from commlens.testing.observation import VerdictReports

    try:
        observation = VerdictReports()
    except (CommlensError, OSError) as error:
        raise pytest.UsageError(f"--commlens cannot record: {error}") from None
    early_config.pluginmanager.register(observation, "commlens-observation")


@pytest.fixture(name="run_on_ranks")
def run_on_ranks_fixture() -> Callable[..., list[Any]]:
    """``run_on_ranks(function, *args, world_size=2, backend="gloo", timeout_s=60)``: run a function
    on several ranks.

    See commlens.testing.run_on_ranks.
    """
    from commlens.testing.ranks import run_on_ranks

    return run_on_ranks
