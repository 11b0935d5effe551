"""Compressed dumps."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from chosen import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from taken_sources import CONTENT, PACKERS, taken

from commlens.dumps.sources import Source, compression, open_sources
from commlens.dumps.sources import source as source_module


class TestCompressed:
    @pytest.mark.parametrize("kind", PACKERS)
    def test_whole_by_content_not_by_name(self, tmp_path: Path, kind: str) -> None:
        (tmp_path / "dump").write_bytes(PACKERS[kind](CONTENT))
        assert taken(tmp_path) == ({str(tmp_path / "dump"): CONTENT}, [])

    @pytest.mark.parametrize("kind", PACKERS)
    def test_several_frames(self, tmp_path: Path, kind: str) -> None:
        pack = PACKERS[kind]
        (tmp_path / "dump").write_bytes(pack(CONTENT) + pack(b"and more"))
        assert taken(tmp_path) == ({str(tmp_path / "dump"): CONTENT + b"and more"}, [])

    @pytest.mark.parametrize("kind", PACKERS)
    def test_cut_off_gives_what_there_is(self, tmp_path: Path, kind: str) -> None:
        packed = PACKERS[kind](CONTENT)
        (tmp_path / "dump").write_bytes(packed[: len(packed) * 4 // 5])
        contents, problems = taken(tmp_path)
        (content,) = contents.values()
        assert CONTENT.startswith(content)
        assert len(content) > (len(CONTENT) // 4 if kind != "bz2" else -1)
        assert len(problems) == 1
        assert "dump is cut off: " in problems[0]

    @pytest.mark.parametrize("kind", PACKERS)
    def test_damaged(self, tmp_path: Path, kind: str) -> None:
        packed = bytearray(PACKERS[kind](CONTENT))
        middle = len(packed) // 2
        packed[middle : middle + 4000] = b"\xff" * 4000
        (tmp_path / "dump").write_bytes(packed)
        _, problems = taken(tmp_path)
        assert len(problems) == 1
        assert "is damaged" in problems[0] or "is cut off" in problems[0]

    @pytest.mark.parametrize("kind", PACKERS)
    def test_a_bomb_is_bounded(
        self, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compression, "UNSUSPICIOUS_BYTES", 1 << 20)
        (tmp_path / "dump").write_bytes(PACKERS[kind](bytes(50 << 20)))
        contents, problems = taken(tmp_path)
        assert 1 << 20 <= len(*contents.values()) < 35 << 20
        assert "unpacks to far more than a dump holds" in problems[0]

    def test_the_head_of_a_damaged_one_complains_about_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "dump").write_bytes(gzip.compress(CONTENT)[:-5000])
        (source,) = open_sources([tmp_path], [])
        assert source.head(10) == CONTENT[:10]
        assert source.problems == []

    def test_more_than_is_read(self, tmp_path: Path) -> None:
        (tmp_path / "dump").write_bytes(CONTENT)
        (source,) = open_sources([tmp_path], [])
        assert source.read(1 << 10) == CONTENT[: 1 << 10]
        assert "is too large" in source.problems[0]

    def test_without_zstandard(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "dump").write_bytes(PACKERS["zst"](CONTENT))
        monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
        problems: list[str] = []
        assert list(open_sources([tmp_path], problems)) == []
        assert "pip install zstandard" in problems[0]

    @settings(max_examples=examples(60), deadline=None)
    @given(
        st.binary(max_size=300),
        st.sampled_from(sorted(PACKERS)),
        st.integers(0, 200),
        st.binary(max_size=3),
    )
    def test_any_bytes(self, content: bytes, kind: str, at: int, noise: bytes) -> None:
        packed = bytearray(PACKERS[kind](content))
        packed[at : at + len(noise)] = noise
        for name, data in (("a", content), ("b", bytes(packed))):
            assert isinstance(Source(name, source_module.Held(data)).read(), bytes)
