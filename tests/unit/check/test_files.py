"""Tests of src/commlens/check/files.py."""

from __future__ import annotations

import glob
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from commlens.check.files import Files, lines_of_changed_files, misses_a_file
from commlens.check.sequence import FileLookup
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
    noted = files.lookups[str(path)]
    assert not noted.found and noted.frame.file == __file__


def try_to_open(path: Path) -> bool:
    try:
        with open(path):  # noqa: PTH123
            return True
    except FileNotFoundError:
        return False


def try_to_load(path: Path) -> bool:
    try:
        torch.load(path)
    except FileNotFoundError:
        return False
    except EOFError:
        pass
    return True


@pytest.mark.parametrize(
    "look",
    [
        try_to_open,
        try_to_load,
        lambda path: path.name in os.listdir(path.parent),  # noqa: PTH208
        lambda path: path in list(path.parent.iterdir()),
        lambda path: path.name in [entry.name for entry in os.scandir(path.parent)],
        lambda path: any(path.name in names for _, _, names in os.walk(path.parent)),
        lambda path: str(path) in glob.glob(f"{path.parent}/*.pt"),  # noqa: PTH207
        lambda path: any(glob.iglob(f"{path.parent}/*.pt")),  # noqa: PTH207
        lambda path: any(path.parent.glob("*.pt")),
        lambda path: any(path.parent.parent.rglob("*.pt")),
    ],
)
def test_what_ranks_find_in_other_ways_is_compared(
    tmp_path: Path, look: Callable[[Path], bool]
) -> None:
    path = tmp_path / "runs" / "last.pt"
    path.parent.mkdir()

    def look_as_a_rank() -> tuple[bool, dict[str, FileLookup]]:
        files, patches = Files(), Patches()
        files.install(patches)
        try:
            return look(path), files.lookups
        finally:
            patches.restore()

    found, before = look_as_a_rank()
    _, again = look_as_a_rank()
    path.touch()
    found_then, after = look_as_a_rank()
    assert (found, found_then) == (False, True)
    assert not lines_of_changed_files([before, again])
    (frame,) = lines_of_changed_files([before, after])
    assert frame.file == __file__


def test_a_file_that_is_written_is_no_look(files: Files, tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("a")
    with (tmp_path / "log.txt").open("a") as log:
        log.write("b")
    assert not files.lookups


def test_directories_do_not_matter(files: Files, tmp_path: Path) -> None:
    assert tmp_path.exists()
    assert str(tmp_path) not in files.lookups


def test_a_look_that_cannot_succeed_raises_nothing(files: Files) -> None:
    assert not os.path.exists("x" * 5000)  # noqa: PTH110
    assert not any(look.found for look in files.lookups.values())


def test_a_thread_that_looks_hides_no_look_of_another_one(files: Files, tmp_path: Path) -> None:
    reached, go_on = threading.Event(), threading.Event()

    class Slow(os.PathLike[str]):
        def __fspath__(self) -> str:
            reached.set()
            assert go_on.wait(60)
            return str(tmp_path)

    thread = threading.Thread(target=os.listdir, args=(Slow(),))
    thread.start()
    assert reached.wait(60)
    assert not (tmp_path / "last.pt").exists()
    go_on.set()
    thread.join(60)
    assert str(tmp_path / "last.pt") in files.lookups


def test_a_file_that_some_ranks_found_was_written_by_others() -> None:
    frame = Frame("/home/me/train.py", 5, "main")
    missing = {"/last.pt": FileLookup(found=0, frame=frame)}
    there = {"/last.pt": FileLookup(found=1, frame=frame)}
    assert lines_of_changed_files([missing, there, there]) == [frame]
    assert (
        lines_of_changed_files([there, there, {}])
        == lines_of_changed_files([missing, missing])
        == []
    )


def test_an_error_is_due_to_a_missing_file_if_one_before_it_is(tmp_path: Path) -> None:
    def load(*, hide: bool) -> None:
        try:
            (tmp_path / "last.pt").read_bytes()
        except OSError as error:
            if not hide:
                raise
            raise RuntimeError("no checkpoint") from error

    for hide in (False, True):
        with pytest.raises((OSError, RuntimeError)) as raised:
            load(hide=hide)
        assert misses_a_file(raised.value)
    assert not misses_a_file(RuntimeError("no checkpoint"))
