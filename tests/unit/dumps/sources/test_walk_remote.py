"""Dumps in stores, and lists of paths."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import fsspec
import pytest
from taken_sources import taken, tar

from commlens.errors import CommandError, MissingDependency


class TestStoresAndLists:
    def test_an_object_store(self) -> None:
        store = fsspec.filesystem("memory")
        store.pipe(
            {
                "/job/n0/rank_0": b"zero",
                "/job/n1/rank_1.gz": gzip.compress(b"one"),
                "/job/n1/.hidden": b"x",
            }
        )
        try:
            contents, problems = taken("memory://job")
            assert contents == {
                "memory:///job/n0/rank_0": b"zero",
                "memory:///job/n1/rank_1.gz": b"one",
            }
            assert problems == []
            assert list(taken("memory://job/n0/rank_0")[0].values()) == [b"zero"]
            with pytest.raises(CommandError, match="There is no file at memory://nothing"):
                taken("memory://nothing")
        finally:
            store.rm("/job", recursive=True)

    def test_an_archive_in_an_object_store(self, tmp_path: Path) -> None:
        store = fsspec.filesystem("memory")
        store.pipe("/dumps.tgz", tar(tmp_path / "x", {"rank_0": b"zero"}, "w:gz").read_bytes())
        try:
            assert list(taken("memory://dumps.tgz")[0].values()) == [b"zero"]
        finally:
            store.rm("/dumps.tgz")

    def test_a_store_that_is_not_known(self) -> None:
        with pytest.raises(CommandError, match="nosuchstore"):
            taken("nosuchstore://bucket/x")

    def test_a_store_whose_package_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
        with pytest.raises(MissingDependency, match="s3"):
            taken("s3://bucket/x")

    def test_a_local_url_is_a_path(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "rank_0").write_bytes(b"zero")
        contents, problems = taken(f"file://{tmp_path}")
        assert list(contents.values()) == [b"zero"]
        assert len(problems) == 1
