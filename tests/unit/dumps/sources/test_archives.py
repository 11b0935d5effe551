"""Dumps in archives."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import zipfile
from pathlib import Path
from typing import ClassVar

import pytest
from chosen import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from taken_sources import CONTENT, PACKERS, taken, tar

from commlens.diagnosis.api import diagnose
from commlens.dumps.sources import Source, archives, compression
from commlens.dumps.sources import source as source_module
from commlens.errors import EvidenceError


class TestArchives:
    FILES: ClassVar = {
        "node0/rank_0": CONTENT,
        "./node1/rank_1": b"one",
        "node1/empty": b"",
        ".hidden": b"x",
    }

    @pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
    def test_tar(self, tmp_path: Path, mode: str) -> None:
        path = tar(tmp_path / "dumps", self.FILES, mode)
        contents, problems = taken(tmp_path)
        assert contents == {f"{path}!node0/rank_0": CONTENT, f"{path}!./node1/rank_1": b"one"}
        assert problems == []

    @pytest.mark.parametrize("mode", ["w", "w:gz"])
    def test_members_that_are_compressed(self, tmp_path: Path, mode: str) -> None:
        packed = {"rank_0.zst": PACKERS["zst"](CONTENT), "rank_1.gz": gzip.compress(b"one")}
        tar(tmp_path / "dumps.tar", packed, mode)
        contents, problems = taken(tmp_path)
        assert list(contents.values()) == [CONTENT, b"one"]
        assert problems == []

    @pytest.mark.parametrize("mode", ["w", "w:gz"])
    def test_an_archive_in_an_archive_is_named_and_left_out(
        self, tmp_path: Path, mode: str
    ) -> None:
        inner = tar(tmp_path / "inner", {"rank_0": b"zero"}, mode).read_bytes()
        (tmp_path / "inner").unlink()
        path = tar(tmp_path / "dumps.tar", {"n1.tar": inner})
        with pytest.raises(EvidenceError) as raised:
            diagnose(tmp_path)
        assert f"{path}!n1.tar is not a dump that commlens can read" in str(raised.value)

    @pytest.mark.parametrize("mode", ["w", "w:gz"])
    def test_a_tar_that_is_cut_off(self, tmp_path: Path, mode: str) -> None:
        noise = os.urandom(100_000)
        whole = tar(tmp_path / "dumps", {"rank_0": noise, "rank_1": noise}, mode).read_bytes()
        (tmp_path / "dumps").write_bytes(whole[:160_000])
        contents, problems = taken(tmp_path)
        first, second = contents.values()
        assert first == noise
        assert noise.startswith(second)
        assert len(second) > 30_000
        assert any("cut off" in text for text in problems)

    def test_what_a_tar_may_hold_besides(self, tmp_path: Path) -> None:
        with tarfile.open(tmp_path / "dumps.tar", "w") as archive:
            for name, kind in (
                ("pipe", tarfile.FIFOTYPE),
                ("device", tarfile.CHRTYPE),
                ("link", tarfile.SYMTYPE),
                ("folder", tarfile.DIRTYPE),
            ):
                about = tarfile.TarInfo(name)
                about.type = kind
                about.linkname = "/etc/passwd"
                archive.addfile(about)
            about = tarfile.TarInfo("../../etc/passwd")
            about.size = 3
            archive.addfile(about, io.BytesIO(b"abc"))
        contents, problems = taken(tmp_path)
        assert contents == {f"{tmp_path}/dumps.tar!../../etc/passwd": b"abc"}
        assert len(problems) == 3

    def test_zip(self, tmp_path: Path) -> None:
        with zipfile.ZipFile(tmp_path / "dumps", "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in self.FILES.items():
                archive.writestr(name, content)
        contents, problems = taken(tmp_path)
        assert list(contents.values()) == [CONTENT, b"one"]
        assert problems == []

    def test_a_checkpoint_is_no_dump(self, tmp_path: Path) -> None:
        with zipfile.ZipFile(tmp_path / "model.pt", "w") as archive:
            archive.writestr("model/data.pkl", b"\x80\x02}q\x00.")
        assert taken(tmp_path) == (
            {},
            [f"{tmp_path}/model.pt was written by torch.save, is not a dump, and is left out."],
        )

    def test_a_zip_that_is_cut_off(self, tmp_path: Path) -> None:
        with zipfile.ZipFile(tmp_path / "dumps.zip", "w") as archive:
            archive.writestr("rank_0", CONTENT)
        os.truncate(tmp_path / "dumps.zip", 1000)
        contents, problems = taken(tmp_path)
        assert contents == {}
        assert "is a truncated or damaged zip file" in problems[0]

    def test_a_zip_bomb_is_bounded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compression, "UNSUSPICIOUS_BYTES", 1 << 20)
        with zipfile.ZipFile(tmp_path / "dumps.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for number in range(4):
                archive.writestr(f"rank_{number}", bytes(10 << 20))
        contents, problems = taken(tmp_path)
        assert sum(map(len, contents.values())) < 25 << 20
        assert "unpacks to far more" in problems[-1]

    def test_many_small_bombs_are_bounded_together(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compression, "EXCESS_MAX", 8 << 20)
        bomb, honest = gzip.compress(bytes(4 << 20)), gzip.compress(CONTENT)
        with tarfile.open(tmp_path / "dumps.tar", "w") as archive:
            for number in range(20):
                for name, content in ((f"bomb_{number}", bomb), (f"rank_{number}", honest)):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
        contents, problems = taken(tmp_path)
        bombs = [len(content) for name, content in contents.items() if "!bomb" in name]
        assert sum(bombs) < (8 << 20) + 20 * (2 << 20)
        assert sum(content == CONTENT for content in contents.values()) == 20
        assert (
            "unpacks to far more than a dump holds" in problems[-1]
            and "8 MiB beyond" in problems[-1]
        )
        assert taken(tmp_path)[0] == contents, "each walk has its own allowance"

    @settings(max_examples=examples(60), deadline=None)
    @given(st.sampled_from(["tar", "gz", "zip"]), st.integers(0, 3000), st.binary(max_size=40))
    def test_any_damage(self, kind: str, at: int, noise: bytes) -> None:
        held = io.BytesIO()
        if kind == "zip":
            with zipfile.ZipFile(held, "w") as archive:
                archive.writestr("rank_0", b"zero")
                archive.writestr("rank_1", CONTENT[:500])
        else:
            with tarfile.open(fileobj=held, mode="w:gz" if kind == "gz" else "w") as packed:
                for name in ("rank_0", "rank_1"):
                    about = tarfile.TarInfo(name)
                    about.size = 500
                    packed.addfile(about, io.BytesIO(CONTENT[:500]))
        image = bytearray(held.getvalue())
        image[at : at + len(noise)] = noise
        problems: list[str] = []
        source = Source("x", source_module.Held(bytes(image)))
        for member in archives.members(source, problems) or ():
            member.read()
