"""Progress of long operations: only on a terminal, only after two seconds, and nothing stays."""

from __future__ import annotations

import io
import sys
import time

import pytest

from commlens.commands import progress
from commlens.commands.progress import ProgressBar, working


class Terminal(io.StringIO):
    """Standard error on a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_QUIET_S", 0.05)
    monkeypatch.setenv("TERM", "xterm-256color")


def long_work(stream: io.StringIO, seconds: float) -> str:
    """Work until something is shown, for at most some seconds, and return what is on the terminal
    then.
    """
    with working("Reading traces") as say:
        say("3 files")
        until = time.monotonic() + seconds
        while not stream.getvalue() and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.15)
        return stream.getvalue()


def test_long_work_is_shown_on_a_terminal_and_removed(
    monkeypatch: pytest.MonkeyPatch, soon: None
) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    assert "Reading traces: 3 files" in long_work(stream, 10)
    # the line is erased, the cursor shown
    assert stream.getvalue().endswith("\x1b[2K") or "\x1b[?25h" in stream.getvalue()


def test_nothing_is_shown_in_a_pipe(monkeypatch: pytest.MonkeyPatch, soon: None) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    assert long_work(stream, 0.2) == stream.getvalue() == ""
    with ProgressBar("reading") as seen:
        time.sleep(0.1)
        seen(1, 2)
    assert stream.getvalue() == ""


def test_short_work_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with working("Reading traces"), ProgressBar("reading") as seen:
        seen(1, 2)
    assert stream.getvalue() == ""


def test_a_failure_passes_through_and_leaves_no_line(
    monkeypatch: pytest.MonkeyPatch, soon: None
) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with pytest.raises(ValueError, match="broken"), working("Reading traces"):
        time.sleep(0.3)
        raise ValueError("broken")
    assert "\x1b[?25h" in stream.getvalue()
