"""Dumps in folders."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from taken_sources import taken

from commlens.dumps.sources import open_sources
from commlens.errors import CommandError, FormatError


class TestFolders:
    def test_nested_folders_in_one_order(self, tmp_path: Path) -> None:
        for name in ("b/rank_1", "a/x/y/rank_0", "c"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(name.encode())
        contents, problems = taken(tmp_path / "c", tmp_path)
        assert list(contents) == [
            str(tmp_path / name) for name in ("a/x/y/rank_0", "b/rank_1", "c")
        ]
        assert contents[str(tmp_path / "b/rank_1")] == b"b/rank_1"
        assert problems == []

    def test_what_is_no_file_is_said(self, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "real" / "dump").write_bytes(b"x")
        (tmp_path / "link").symlink_to(tmp_path / "real")
        (tmp_path / "loop").symlink_to(tmp_path)
        (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
        (tmp_path / "again").symlink_to(tmp_path / "real" / "dump")
        (tmp_path / "empty").touch()
        (tmp_path / ".hidden").write_bytes(b"x")
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "null").symlink_to("/dev/null")
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(tmp_path / "socket"))
            contents, problems = taken(tmp_path)
        assert len(contents) == 1
        said = "\n".join(problems)
        for words in (
            "link is a link to a folder",
            "loop is a link to a folder",
            "gone is a link to nothing",
            "empty is empty.",
            "pipe is a named pipe",
            "null is a device",
            "socket is a socket",
        ):
            assert words in said
        assert len(problems) == 7

    def test_a_pipe_that_is_named_does_not_block(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        assert taken(tmp_path / "pipe") == (
            {},
            [f"{tmp_path / 'pipe'} is a named pipe and is left out."],
        )

    def test_a_path_that_does_not_exist(self, tmp_path: Path) -> None:
        with pytest.raises(CommandError, match="nowhere cannot be read \\(no such file"):
            taken(tmp_path / "nowhere")

    def test_standard_input_is_no_list_of_paths(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(CommandError, match="^- cannot be read .* Give dump folders, files"):
            taken("-")

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
    def test_no_permission(self, tmp_path: Path) -> None:
        (tmp_path / "secret").write_bytes(b"x")
        (tmp_path / "secret").chmod(0)
        (tmp_path / "closed").mkdir(mode=0)
        contents, problems = taken(tmp_path)
        (tmp_path / "closed").chmod(0o700)
        assert contents == {}
        assert len(problems) == 2

    def test_a_file_that_goes_away(self, tmp_path: Path) -> None:
        (tmp_path / "dump").write_bytes(b"x")
        (source,) = open_sources([tmp_path], [])
        (tmp_path / "dump").unlink()
        with pytest.raises(FormatError, match="could not be opened: no such file"):
            source.read()

    def test_strange_names_can_be_printed(self, tmp_path: Path) -> None:
        (tmp_path / os.fsdecode(b"d\xff\n\x1b[31m")).write_bytes(b"x")
        (source,) = open_sources([tmp_path], [])
        assert source.name.isprintable()
        assert source.read() == b"x"

    def test_prefix(self, tmp_path: Path) -> None:
        for name in ("run1_0", "run1_1", "run2_0"):
            (tmp_path / name).write_bytes(b"x")
        assert [Path(name).name for name in taken(tmp_path, prefix="run1_")[0]] == [
            "run1_0",
            "run1_1",
        ]
