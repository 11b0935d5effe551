"""The pytest plugin: ``--commlens``, ``--commlens-update`` and the fixture ``run_on_ranks``.

pytest loads it in every environment that has commlens, so this module imports only pytest and the standard library. Without
``--commlens`` it does nothing. docs/pytest.md describes it.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from commlens.testing.observer_client import Answer, ObserverClient

UPDATE_VARIABLE: Final = "COMMLENS_UPDATE_GOLDEN"
_observer = pytest.StashKey["ObserverClient"]()
_variables = pytest.StashKey["dict[str, str | None]"]()  # as they were before


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("commlens", "commlens: hanging and failing distributed tests")
    group.addoption(
        "--commlens",
        action="store_true",
        help="record the ranks that tests start, and add the verdict to the report of a test that fails or times out",
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
        _set(early_config, {UPDATE_VARIABLE: "1"})
    if not options.commlens:
        return
    from commlens.errors import CommlensError
    from commlens.testing.observer_client import ObserverClient

    try:
        client = ObserverClient()
    except (CommlensError, OSError) as error:
        raise pytest.UsageError(f"--commlens cannot record: {error}") from None
    early_config.stash[_observer] = client
    _set(early_config, client.variables)


def _set(config: pytest.Config, variables: dict[str, str]) -> None:
    before = config.stash.setdefault(_variables, {})
    for name, value in variables.items():
        before.setdefault(name, os.environ.get(name))
        os.environ[name] = value


def pytest_configure(config: pytest.Config) -> None:
    """Start the observer: here standard error is the terminal, since pytest captures nothing yet."""
    if (client := config.stash.get(_observer, None)) is None:
        return
    if getattr(config.option, "dist", "no") == "no" or hasattr(config, "workerinput"):  # with pytest-xdist, the workers run the tests
        client.start()
    if "torch" in sys.modules:  # its entry point found nothing to do
        from commlens.launch import recording

        recording.start_from_environment()
    config.pluginmanager.register(_Reports(client), "commlens-reports")


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the observer, and restore the environment."""
    if (client := config.stash.get(_observer, None)) is not None:
        client.close()
    for name, value in config.stash.get(_variables, {}).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(name="run_on_ranks")
def run_on_ranks_fixture() -> Callable[..., list[Any]]:
    """``run_on_ranks(function, *args, world_size=2, backend="gloo", timeout_s=60)``: run a function on several ranks.

    See commlens.testing.run_on_ranks.
    """
    from commlens.testing.ranks import run_on_ranks

    return run_on_ranks


class _Reports:
    """Adds verdicts to the reports of failed tests. An error of commlens is a warning, and the tests go on."""

    def __init__(self, client: ObserverClient) -> None:
        self._client = client
        self._has_failed = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._safely(lambda: self._client.begin(nodeid))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._safely(lambda: self._client.end(nodeid))

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> None:
        """pytest-timeout starts its clock: it returns None, so that the timer is set after this."""
        self._safely(lambda: self._client.limit(item.nodeid, float(settings.timeout or 0), str(settings.method)))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed:
            answer = self._safely(self._client.ask)
            if answer is not None and answer.summary:
                self._safely(lambda: _add(item, report, answer))
        return report

    def _safely(self, call: Callable[[], Any]) -> Any:
        if self._has_failed:
            return None
        try:
            return call()
        except Exception as error:
            self._has_failed = True
            warnings.warn(f"commlens steps aside: {type(error).__name__}: {error}", stacklevel=1)
            return None


def _add(item: pytest.Item, report: pytest.TestReport, answer: Answer) -> None:
    """Add the verdict as a section, as a property (JUnit XML), and in front of the message in the short summary."""
    report.sections.append(("commlens", answer.text))
    item.user_properties.append(("commlens", answer.summary))  # of the next phase's report, which junitxml reads
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        first, newline, rest = crash.message.partition("\n")
        crash.message = f"commlens: {answer.summary} ({first}){newline}{rest}"
