"""The recording of a process, without a box."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from commlens.capture.recording import Recording
from commlens.config import Settings


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """The signals that the program itself has handled."""
    numbers: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize("pid", [None, 1])
def test_a_signal_makes_one_dump_however_often_the_box_was_made(
    tmp_path: Path, handled: list[int], pid: int | None
) -> None:
    """And none in a forked child without a box of its own."""
    dumps: list[str] = []

    def dump(directory: str, job_dir: Path, settings: Settings) -> Path:
        dumps.append(directory)
        return job_dir

    recording = Recording(Settings(), lambda: None, dump)
    recording.job_dir = tmp_path
    for _ in range(2):
        recording._dump_on_signal("SIGUSR2")
    recording.pid = pid or recording.pid
    signal.raise_signal(signal.SIGUSR2)
    for thread in threading.enumerate():
        if thread.name == "commlens-dump":
            thread.join()
    assert dumps == ([] if pid else ["commlens-dumps"])
    assert handled == [signal.SIGUSR2]
