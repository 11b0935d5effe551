"""Wake-ups between real processes that share one page."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from commlens.boards.wakeup import LAST_WORD, Bells, Futexes, _bell

pytestmark = pytest.mark.launches

PAGE = 4096
LONG_NS = 20_000_000_000
OPENED = """
import mmap, sys
from commlens.boards.wakeup import Bells, Futexes
with open(sys.argv[1], "r+b") as file:
    page = mmap.mmap(file.fileno(), 4096)
words = memoryview(page).cast("Q")
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "page"
    path.write_bytes(bytes(PAGE))
    return path


@pytest.fixture
def page(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), PAGE)


@contextmanager
def another_process(path: Path, program: str) -> Iterator[subprocess.Popen[bytes]]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", OPENED + program, str(path)], env=environ
    ) as process:
        try:
            yield process
            assert process.wait(60) == 0
        finally:
            process.kill()


@pytest.fixture(params=["futex", "polling"])
def futexes(page: mmap.mmap, request: pytest.FixtureRequest) -> Futexes:
    found = Futexes(page)
    if request.param == "polling":
        found.works = False
    elif not found.works:
        pytest.skip("this system does not allow futexes")
    return found


def test_a_wait_returns_at_once_if_the_word_has_changed(page: mmap.mmap, futexes: Futexes) -> None:
    memoryview(page).cast("Q")[7] = 1 << 40 | 3
    began = time.monotonic()
    futexes.wait(7, 2, LONG_NS)
    assert time.monotonic() - began < 10


def test_a_sleeper_is_woken_by_another_process(
    path: Path, page: mmap.mmap, futexes: Futexes
) -> None:
    words = memoryview(page).cast("Q")
    with another_process(path, "import time; time.sleep(0.1); words[7] = 5; Futexes(page).wake(7)"):
        began = time.monotonic()
        while words[7] == 0:
            futexes.wait(7, 0, LONG_NS)
        assert time.monotonic() - began < LONG_NS / 1e9, "the sleep ended by its timeout"


def test_a_sleep_ends_after_its_timeout(futexes: Futexes) -> None:
    futexes.wait(7, 0, 1_000_000)


def test_a_rank_is_woken_by_the_bell_of_the_peer_that_it_waits_for(
    path: Path, page: mmap.mmap
) -> None:
    ours, words = Bells(page, 0), memoryview(page).cast("Q")
    heard = ours.listen(1, thread=1)
    assert words[_bell(0) + 1] == _bell(1)
    with another_process(path, "Bells(page, 1).ring([0])"):
        while ours.listen(1, thread=1) == heard:
            ours.sleep(1, heard)
    ours.awake(thread=1)
    assert words[_bell(0) + 1] == 0


def test_threads_of_one_rank_sleep_on_different_bells(page: mmap.mmap) -> None:
    bells, words = Bells(page, 0), memoryview(page).cast("Q")
    bells.listen(1, thread=1)
    bells.listen(2, thread=2)
    assert words[_bell(0) + 1] not in (_bell(1), _bell(2), 0)
    bells.awake(thread=1)
    assert words[_bell(0) + 1] == _bell(2)
    bells.awake(thread=2)
    assert words[_bell(0) + 1] == 0


def test_a_restarted_rank_does_not_repeat_a_value_of_its_bell(page: mmap.mmap) -> None:
    first = Bells(page, 3)
    first.ring([])
    heard = first.listen(3, thread=1)
    Bells(page, 3).ring([])
    assert first.listen(3, thread=1) != heard


def test_all_bells_are_within_the_page() -> None:
    assert all(_bell(rank) + 1 < LAST_WORD for rank in range(10_000))
    assert len({_bell(rank) for rank in range(252)}) == 252
