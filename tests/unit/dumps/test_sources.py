"""Files, folders, archives, object stores and lists as sources: streaming, bounded, and a sentence
for what cannot be taken.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import pickle
import socket
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
import zstandard
from chosen import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from commlens.dumps.sources import Source, archives, compression, open_sources
from commlens.dumps.sources import source as source_module
from commlens.errors import CommandError, FormatError, MissingDependency

CONTENT = b"".join(
    b"entry %d of a dump that says %d\n" % (number, zlib.crc32(b"%d" % number))
    for number in range(20_000)
)
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": zstandard.ZstdCompressor().compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
}


def taken(*paths: object, prefix: str = "") -> tuple[dict[str, bytes], list[str]]:
    """Names (without the common folder) and contents, and everything that was said."""
    problems: list[str] = []
    contents: dict[str, bytes] = {}
    for source in open_sources([str(path) for path in paths], problems, prefix=prefix):
        source = pickle.loads(pickle.dumps(source))  # as it goes to another process
        contents[source.name] = source.read()
        problems += source.problems
    return contents, problems


def tar(path: Path, files: dict[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
    return path


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


class TestCompressed:
    @pytest.mark.parametrize("kind", PACKERS)
    def test_whole_by_content_not_by_name(self, tmp_path: Path, kind: str) -> None:
        (tmp_path / "dump").write_bytes(PACKERS[kind](CONTENT))
        assert taken(tmp_path) == ({str(tmp_path / "dump"): CONTENT}, [])

    @pytest.mark.parametrize("kind", PACKERS)
    def test_several_frames_and_within_each_other(self, tmp_path: Path, kind: str) -> None:
        pack = PACKERS[kind]
        (tmp_path / "dump").write_bytes(gzip.compress(pack(CONTENT) + pack(b"and more")))
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
        (tmp_path / "dump").write_bytes(PACKERS[kind](bytes(100 << 20)))
        contents, problems = taken(tmp_path)
        assert 1 << 20 <= len(*contents.values()) < 70 << 20
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

    def test_members_that_are_compressed_and_archives_in_archives(self, tmp_path: Path) -> None:
        inner = tar(
            tmp_path / "inner", {"rank_0.zst": PACKERS["zst"](CONTENT)}, "w:gz"
        ).read_bytes()
        (tmp_path / "inner").unlink()
        tar(tmp_path / "outer.tar", {"rank_1.gz": gzip.compress(b"one"), "inner.tgz": inner})
        contents, problems = taken(tmp_path)
        assert list(contents.values()) == [b"one", CONTENT]
        assert list(contents)[1].endswith("outer.tar!inner.tgz!rank_0.zst")
        assert problems == []

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
        for member in archives.members(source, problems, archives.Allowance(len(image))) or ():
            member.read()


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

    @pytest.mark.parametrize("separator", [b"\n", b"\0"])
    def test_a_list_on_standard_input(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, separator: bytes
    ) -> None:
        for rank in (0, 1):
            (tmp_path / f"rank {rank}").write_bytes(b"%d" % rank)
        listed = (
            separator.join(os.fsencode(tmp_path / f"rank {rank}") for rank in (1, 0, 7)) + separator
        )
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(listed)))
        contents, problems = taken("-")
        assert list(contents.values()) == [b"0", b"1"]
        assert len(problems) == 1
        assert "rank 7 cannot be read" in problems[0]

    @pytest.mark.parametrize(
        "content", [b"", b"\n\n", b"\x80\x02}q\x00X\x07\x00", b'{"entries": []}', b"x" * 100_000]
    )
    def test_what_is_no_list(self, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
        with pytest.raises(CommandError, match="tandard input"):
            taken("-")
