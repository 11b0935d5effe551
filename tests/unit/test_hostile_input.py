"""Hostile and broken input: each command says one sentence, with exit status 2 or 3, and still reads the rest."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from flight_recorder_dumps import dump, entry

from commlens.commands import main
from commlens.dumps.sources import archives, compression, open_sources
from commlens.formats import trace_json
from commlens.formats.columns import RankColumns
from commlens.formats.flight_recorder.entries import build_table
from commlens.formats.flight_recorder.to_columns import columns_from_table
from commlens.launch.torchrun import _join_trace, _split_trace
from commlens.reports.converted import table
from commlens.reports.trace_csv import to_csv


def write_dumps(folder: Path, **changes: object) -> Path:
    """Two ranks' dumps, of which rank 0's entries are changed."""
    folder.mkdir(exist_ok=True)
    for rank in (0, 1):
        entries = [entry(number, **(changes if rank == 0 else {})) for number in range(3)]
        (folder / f"rank_{rank}").write_bytes(pickle.dumps(dump(entries), protocol=2))
    return folder


def columns(*entries: dict[str, object], **changes: object) -> RankColumns:
    return columns_from_table(build_table(dump(list(entries), **changes)), "rank_0")


class TestFlightRecorder:
    def test_entries_that_are_all_malformed(self) -> None:
        rows = columns(entry(0, "nccl:send 0->1", input_sizes="no list"), entry(1, "nccl:send 2->3", process_group=7))
        assert len(rows) == 0
        assert rows.possible_ranks == (0, 1, 2, 3)  # not 0 or 2, which only the skipped entries name

    @pytest.mark.parametrize("key", ["record_id", "collective_seq_id", "op_id", "time_created_ns"])
    def test_integers_that_no_recorder_writes(self, key: str) -> None:
        rows = columns(*[entry(number, **{key: value}) for number, value in enumerate([-(1 << 63) + 1, (1 << 63) - 1, 5])])
        changed = {"record_id": rows.record_id, "collective_seq_id": rows.sequence, "op_id": rows.op_id, "time_created_ns": rows.created_ns}
        assert np.maximum(changed[key], 0).tolist() == [0, 0, 5]

    @pytest.mark.parametrize(
        "changes",
        [
            {"pg_config": {"0": {"ranks": "[99999999999]"}}},
            {"pg_config": {"9" * 5000: {}}},
            {"pg_status": {"0": {"last_enqueued_collective": "--5"}}},
        ],
    )
    def test_groups_that_no_recorder_writes(self, changes: dict[str, object]) -> None:
        assert len(columns(entry(0), **changes)) == 1

    def test_the_diagnosis_of_such_integers(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        numbers = iter([-(1 << 63) + 1, (1 << 63) - 1, -(1 << 62) - 5])
        folder = write_dumps(tmp_path / "dumps")
        entries = [entry(number, collective_seq_id=next(numbers)) for number in range(3)]
        (folder / "rank_0").write_bytes(pickle.dumps(dump(entries), protocol=2))
        assert main(["diagnose", str(folder)]) in (0, 1)
        assert "Traceback" not in capsys.readouterr().err


def sources(path: Path) -> tuple[dict[str, int], list[str]]:
    """Names of the sources at a path, with the number of bytes, and the problems."""
    problems: list[str] = []
    found = {}
    for one in open_sources(path, problems):
        found[one.name.removeprefix(f"{path}!")] = len(one.read())
        problems += one.problems
    return found, problems


def tar_member(name: str, content: bytes = b"", **changes: object) -> bytes:
    about = tarfile.TarInfo(name)
    about.size = len(content)
    for key, value in changes.items():
        setattr(about, key, value)
    return about.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % 512)


class TestArchives:
    @pytest.mark.parametrize("packed", [False, True])
    @pytest.mark.parametrize(
        ("hostile", "why"),
        [
            (tar_member("header", type=tarfile.XHDTYPE, size=1 << 60), "claims 1152921504606846976 bytes"),
            (tar_member("header", type=tarfile.GNUTYPE_LONGNAME, size=1 << 40), "claims 1099511627776 bytes"),
            (tar_member("name", b"x\0", type=tarfile.GNUTYPE_LONGNAME) * 5000, "more than 100 extension headers"),
            (tar_member("negative", size=-1024), "claims -1024 bytes"),
        ],
        ids=["pax", "long name", "nested", "negative"],
    )
    def test_absurd_headers(self, tmp_path: Path, hostile: bytes, why: str, packed: bool) -> None:
        content = tar_member("rank_0", b"first") + hostile + bytes(10240)
        (tmp_path / "dumps.tar").write_bytes(gzip.compress(content) if packed else content)
        found, problems = sources(tmp_path / "dumps.tar")
        assert found == {"rank_0": 5}
        assert len(problems) == 1
        assert why in problems[0]

    def test_the_rest_of_the_input_is_read(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = write_dumps(tmp_path / "dumps")
        (folder / "more.tar").write_bytes(tar_member("header", type=tarfile.XHDTYPE, size=1 << 60))
        assert main(["diagnose", str(folder)]) in (0, 1)
        assert main(["diagnose", str(folder / "more.tar")]) == 3
        assert capsys.readouterr().err.count("\n") <= 4

    def test_all_members_have_one_limit_with_archives_in_archives(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compression, "UNSUSPICIOUS_BYTES", 3 << 20)
        monkeypatch.setattr(compression, "RATIO_MAX", 1)
        inner = io.BytesIO()
        with zipfile.ZipFile(inner, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("rank_0", bytes(1 << 20))
        with zipfile.ZipFile(tmp_path / "dumps.zip", "w") as archive:
            for number in range(10):
                archive.writestr(f"{number}.zip", inner.getvalue())
        found, problems = sources(tmp_path / "dumps.zip")
        assert 3 <= len(found) <= 4
        assert "limit: 3 MiB" in problems[-1]

    def test_a_member_has_a_limit(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(archives, "HELD_MAX", 1 << 20)
        with zipfile.ZipFile(tmp_path / "dumps.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("rank_0", bytes(2 << 20))
            archive.writestr("rank_1", b"whole")
        found, problems = sources(tmp_path / "dumps.zip")
        assert found == {"rank_0": 1 << 20, "rank_1": 5}
        assert problems[0].endswith("only its first 1 MiB were read. To read all of it, unpack the archive first.")

    def test_a_compressed_file_has_a_limit(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compression, "UNPACKED_MAX", 1 << 20)
        (tmp_path / "rank_0.gz").write_bytes(gzip.compress(os.urandom(3 << 20), 1))
        found, problems = sources(tmp_path / "rank_0.gz")
        assert 1 << 20 <= sum(found.values()) <= 2 << 20
        assert "and 1 MiB). To read all of it, unpack it first." in problems[0]

    def test_a_compressed_trace_has_a_limit(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(trace_json, "UNPACKED_MAX", 1 << 20)
        (tmp_path / "x.json.gz").write_bytes(gzip.compress(bytes(4 << 20)))
        assert main(["view", str(tmp_path / "x.json.gz")]) == 2
        assert "unpacks to more than 1 MiB" in capsys.readouterr().err


class TestPipes:
    @pytest.mark.parametrize("verb", ["diagnose", "compare", "convert", "view"])
    @pytest.mark.parametrize("kind", ["pipe", "device"])
    def test_is_refused(self, tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str, kind: str) -> None:
        path = "/dev/zero"
        if kind == "pipe":
            path = str(tmp_path / "pipe")
            os.mkfifo(path)
        more = {"compare": [path], "convert": ["--to", "csv", "-o", str(tmp_path / "out.csv")]}.get(verb, [])
        assert main([verb, path, *more]) in (2, 3)
        error = capsys.readouterr().err
        assert path in error
        assert "Traceback" not in error


class TestCsv:
    @pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\tx", "\rx"])
    def test_texts_that_begin_like_a_formula(self, tmp_path: Path, text: str) -> None:
        assert to_csv([{"source": text, "count": -1}], ["source", "count"]).splitlines()[1].lstrip('"').startswith("'")
        assert ",-1" in to_csv([{"source": text, "count": -1}], ["source", "count"])
        rows = columns(entry(0, process_group=(text, ""), collective_seq_id=-1))
        rows.host = text
        cells = b"".join(table.to_csv([rows])).decode()
        assert cells.count(f"'{text}") == 2
        assert ",-1," in cells


class TestTraceOption:
    @pytest.mark.parametrize(
        ("given", "passed"),
        [
            (["--trace", "all", "train.py"], ["--trace=all ", "train.py"]),
            (["--trace", "2:4", "train.py"], ["--trace=2:4 ", "train.py"]),
            (["--trace", "train.py"], ["--trace= all ", "train.py"]),
            (["--trace=2:4", "train.py"], ["--trace=2:4", "train.py"]),
            (["all", "--trace"], ["all", "--trace= all "]),
        ],
    )
    def test_takes_a_value_or_none(self, given: list[str], passed: list[str]) -> None:
        assert _join_trace(given) == passed
        assert _split_trace(passed) == given  # the script's own arguments are as they were
