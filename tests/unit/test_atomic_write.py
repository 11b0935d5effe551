"""Files are written whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from traces import one_event, training

import commlens
from commlens.atomic_write import write_whole
from commlens.model.collective import Frame


def test_save_replaces_whole_files_only(tmp_path, monkeypatch):
    path = tmp_path / "new" / "x.json"
    commlens.Trace(training()).save(path)
    commlens.Trace(training(steps=1)).save(str(path))
    assert commlens.Trace.load(path).data.steps == 1
    assert [file.name for file in path.parent.iterdir()] == ["x.json"]

    def full(self: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(
        commlens.OutputError, match=r"x.json could not be written: No space left on device"
    ):
        commlens.Trace(training()).save(path)
    monkeypatch.undo()
    assert commlens.Trace.load(path).data.steps == 1
    assert [file.name for file in path.parent.iterdir()] == ["x.json"]


def test_what_cannot_be_written_is_said(tmp_path):
    with pytest.raises(commlens.OutputError, match="is a folder"):
        commlens.Trace(training()).save(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(commlens.OutputError, match="could not be written"):
        commlens.Trace(training()).save(tmp_path / "file" / "x.json")
    with pytest.raises(commlens.OutputError, match="will not overwrite without --force"):
        write_whole(tmp_path / "file", b"", overwrite=False)
    write_whole(Path("/dev/null"), b"text")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


def test_a_symbolic_link_stays_one(tmp_path):
    (tmp_path / "real.json").write_text("")
    (tmp_path / "link.json").symlink_to("real.json")
    commlens.Trace(training()).save(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink() and commlens.Trace.load(
        tmp_path / "real.json"
    ).calls == 32


def test_a_file_name_that_is_not_text(tmp_path):
    odd = os.fsdecode(b"/home/\xff/train.py")
    path = tmp_path / "x.json"
    commlens.Trace(one_event(source=Frame(odd, 3, "f"))).save(path)
    assert commlens.Trace.load(path).events[0].source == Frame(r"/home/\udcff/train.py", 3, "f")
