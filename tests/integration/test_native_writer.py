"""The native code's own test in short: tests/native has all of it, and `make native-check` runs it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "native"))
import killed_board
import killed_box
import stepped


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return stepped.build(tmp_path_factory.mktemp("native"), "driver")
    except stepped.LeftOutError as error:
        pytest.skip(str(error))


@pytest.mark.long
def test_readers_meet_whole_records_only(driver: Path):
    said = stepped.run([driver, "crowd", "2000"])
    assert said.count("records by 4 threads") == 2


def test_ranks_meet_and_agree_only_on_what_all_ask_for(driver: Path):
    said = stepped.run([driver, "meet", "100"])
    assert said.count("met 100 times") == 2
    assert said.count("verified 100 collectives on 2 channels, and saw all 9 disagreements") == 2


def test_a_writer_killed_at_any_instruction_leaves_a_readable_box(driver: Path, tmp_path: Path):
    try:
        killed_box.step_through(driver, tmp_path, records=14)
    except stepped.LeftOutError as error:
        pytest.skip(str(error))


def test_a_writer_killed_at_any_instruction_leaves_a_readable_board(driver: Path, tmp_path: Path):
    try:
        killed_board.step_through(driver, tmp_path)
    except stepped.LeftOutError as error:
        pytest.skip(str(error))


def test_threads_killed_at_random_leave_a_readable_box(driver: Path, tmp_path: Path):
    killed_box.kill_at_random(driver, tmp_path, 12)
