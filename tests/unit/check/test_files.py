"""Tests of src/commlens/check/files.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from commlens.check.files import Files, changing
from commlens.check.sequence import FileLook
from commlens.model.collective import Frame
from commlens.tracing.patches import Patches


@pytest.fixture
def files() -> Iterator[Files]:
    found, patches = Files(), Patches()
    found.install(patches)
    yield found
    patches.restore()


@pytest.mark.parametrize(
    "look",
    [
        lambda path: os.path.exists(path),  # noqa: PTH110
        lambda path: os.path.isfile(path),  # noqa: PTH113
        lambda path: path.exists(),
        lambda path: path.is_file(),
    ],
)
def test_the_first_look_for_a_file_is_noted(
    files: Files, tmp_path: Path, look: Callable[[Path], bool]
) -> None:
    path = tmp_path / "last.pt"
    assert not look(path)
    path.touch()
    assert look(path)
    noted = files.looks[str(path)]
    assert not noted.found and noted.frame.file == __file__


def test_directories_do_not_matter(files: Files, tmp_path: Path) -> None:
    assert tmp_path.exists()
    assert str(tmp_path) not in files.looks


def test_a_file_that_some_ranks_found_was_written_by_others() -> None:
    frame = Frame("/home/me/train.py", 5, "main")
    missing = {"/last.pt": FileLook(found=False, frame=frame)}
    there = {"/last.pt": FileLook(found=True, frame=frame)}
    assert changing([missing, there, there]) == [frame]
    assert changing([there, there, {}]) == changing([missing, missing]) == []
