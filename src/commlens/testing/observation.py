"""The part of the pytest plugin that ``--commlens`` adds: it starts the observer, and puts its
verdicts into the reports.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Generator
from typing import Any

import pytest

from commlens.testing.observer_client import ObserverAnswer, ObserverClient


class VerdictReports:
    """Adds verdicts to the reports of failed tests. An error of commlens is a warning, and the
    tests go on.

    Raises:
        CommlensError: the settings do not let commlens record.
    """

    def __init__(self) -> None:
        self._client = ObserverClient()
        self._before = {name: os.environ.get(name) for name in self._client.variables}
        os.environ.update(self._client.variables)
        self._has_failed = False

    def pytest_configure(self, config: pytest.Config) -> None:
        """Start the observer: here standard error is the terminal, since pytest captures nothing
        yet.
        """
        # with pytest-xdist, the workers run the tests
        if getattr(config.option, "dist", "no") == "no" or hasattr(config, "workerinput"):
            self._client.start()
        if "torch" in sys.modules:  # its entry point found nothing to do
            from commlens.launch import recording

            recording.start_from_environment()

    def pytest_unconfigure(self) -> None:
        """End the observer, and restore the environment."""
        self._client.close()
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self._safely(lambda: self._client.begin(nodeid))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """It has ended."""
        self._safely(lambda: self._client.end(nodeid))

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> None:
        """pytest-timeout starts its clock: it returns None, so that the timer is set after this."""
        self._safely(
            lambda: self._client.limit(
                item.nodeid, float(settings.timeout or 0), str(settings.method)
            )
        )

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, None]:
        """Add the verdict to the report of a failed test, before its fixtures end the ranks."""
        outcome = yield
        if outcome.excinfo is None and (report := outcome.get_result()).failed:
            answer = self._safely(self._client.ask)
            if answer is not None and answer.summary:
                self._safely(lambda: _add(item, report, answer))

    def _safely(self, call: Callable[[], Any]) -> Any:
        if self._has_failed:
            return None
        try:
            return call()
        except Exception as error:
            self._has_failed = True
            warnings.warn(f"commlens steps aside: {type(error).__name__}: {error}", stacklevel=1)
            return None


def _add(item: pytest.Item, report: pytest.TestReport, answer: ObserverAnswer) -> None:
    """Add the verdict as a section, as a property (JUnit XML), and in front of the message in the
    short summary.
    """
    report.sections.append(("commlens", answer.text))
    # of the next phase's report, which junitxml reads
    item.user_properties.append(("commlens", answer.summary))
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        first, newline, rest = crash.message.partition("\n")
        crash.message = f"commlens: {answer.summary} ({first}){newline}{rest}"
