"""The state of a process in words."""

from __future__ import annotations

import pytest

from commlens.model.ranklog import UNREMARKABLE, End, Observation
from commlens.text import process_phrase


@pytest.mark.parametrize(
    ("seen", "words", "is_notable"),
    [
        (Observation(End.KILLED, signal="SIGKILL"), "killed by SIGKILL", True),
        (Observation(End.FAILED, 3), "exited with status 3", True),
        (Observation(End.FAILED), "died of an exception", True),
        (Observation(End.CLEAN), "finished", True),
        (Observation(), "not visible from here", False),
        (Observation(End.RUNNING, proc_state="T", stopped_fraction=1.0), "stopped", True),
        (
            Observation(End.RUNNING, proc_state="t", stopped_fraction=1.0),
            "stopped by a debugger",
            True,
        ),
        (Observation(End.RUNNING, proc_state="R", holds_gil=True), "holds the GIL", True),
        (Observation(End.RUNNING, proc_state="S", cpu_s=4.0, window_s=5.0), "computing", False),
        (Observation(End.RUNNING, proc_state="D"), "in uninterruptible I/O", True),
        (Observation(End.RUNNING, proc_state="S"), "sleeping", False),
    ],
)
def test_states(seen: Observation, words: str, is_notable: bool) -> None:
    assert process_phrase(seen) == words
    assert (seen.state not in UNREMARKABLE) == is_notable
