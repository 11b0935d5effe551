"""``commlens convert``: from files of any origin to files for other tools."""

from __future__ import annotations

import csv
import json
import pickle
import tarfile
from pathlib import Path

import pytest
from boxes import busy_box
from builders import Job, Stay, at, mixed

from commlens import commands
from commlens.formats.rank_log_columns import columns_from_log
from commlens.reports.converted.flight_recorder import to_json, to_pickle


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    """Flight Recorder dumps of four ranks, one of them as JSON."""
    folder = tmp_path / "dumps"
    folder.mkdir()
    for log in Job(4).run(mixed(at(2, 3, Stay(57, "load_batch")))).logs():
        rows = columns_from_log(log)
        (folder / f"_dump_{log.rank}").write_bytes(
            (to_json if log.rank == 3 else to_pickle)(rows, [])
        )
    return folder


def convert(*arguments: object) -> int:
    return commands.main(["convert", *map(str, arguments)])


def lines(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_foreign_dumps(dumps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(dumps, "--to", "csv", "-o", tmp_path / "joined.csv") == 0
    found = lines(tmp_path / "joined.csv")
    assert sorted({line["rank"] for line in found}) == ["0", "1", "2", "3"]
    assert (
        f"Wrote {len(found)} operations of 4 ranks to {tmp_path}/joined.csv"
        in capsys.readouterr().err
    )


def test_black_boxes_in_an_archive(tmp_path: Path) -> None:
    for rank in range(4):
        busy_box(rank).write(tmp_path / "boxes")
    with tarfile.open(tmp_path / "boxes.tgz", "w:gz") as archive:
        archive.add(tmp_path / "boxes", "boxes")
    assert convert(tmp_path / "boxes.tgz", "--to", "fr-pickle", "-o", tmp_path / "fr") == 0
    assert sorted(path.name for path in (tmp_path / "fr").iterdir()) == [
        f"nccl_trace_rank_{rank}" for rank in range(4)
    ]
    dump = pickle.loads((tmp_path / "fr" / "nccl_trace_rank_1").read_bytes())
    assert [entry["state"] for entry in dump["entries"]] == ["completed"] * 9 + ["scheduled"]
    assert dump["entries"][0]["frames"][1] == {
        "name": "step",
        "filename": "/home/me/train.py",
        "line": 81,
    }


def test_ranks_and_groups(dumps: Path, tmp_path: Path) -> None:
    assert (
        convert(
            dumps, "--to", "csv", "-o", tmp_path / "a", "--ranks", "1-2", "--group", "default_pg"
        )
        == 0
    )
    assert {line["rank"] for line in lines(tmp_path / "a")} == {"1", "2"}
    assert convert(dumps, "--to", "csv", "-o", tmp_path / "b", "--group", "dp") == 2
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("to", ["fr-json", "perfetto", "parquet"])
def test_every_format(dumps: Path, tmp_path: Path, to: str) -> None:
    assert convert(dumps, "--to", to, "-o", tmp_path / "out") == 0
    if to == "perfetto":
        assert json.loads((tmp_path / "out").read_bytes())["traceEvents"]
    elif to == "fr-json":
        assert json.loads((tmp_path / "out" / "nccl_trace_rank_3.json").read_bytes())["entries"]


def test_it_overwrites_only_with_force(
    dumps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").write_text("mine")
    assert convert(dumps, "--to", "csv", "-o", tmp_path / "out") == 2
    assert "without --force" in capsys.readouterr().err
    assert (tmp_path / "out").read_text() == "mine"
    assert convert(dumps, "--to", "csv", "-o", tmp_path / "out", "--force") == 0
    assert convert(dumps, "--to", "fr-pickle", "-o", tmp_path / "out") == 2
    assert convert(dumps, "--to", "csv", "-o", tmp_path) == 2


def test_unreadable_files_are_reported_and_the_rest_is_converted(
    dumps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = (dumps / "_dump_1").read_bytes()
    (dumps / "_dump_1").write_bytes(whole[: len(whole) * 3 // 4])
    (dumps / "holiday.jpg").write_bytes(b"\xff\xd8\xff\xe0" + bytes(100))
    anonymous = pickle.loads((dumps / "_dump_0").read_bytes())
    anonymous["entries"] = [entry for entry in anonymous["entries"] if not entry["is_p2p"]]
    (dumps / "of-nobody").write_bytes(pickle.dumps(anonymous))
    (dumps / "again_2").write_bytes((dumps / "_dump_2").read_bytes())
    assert convert(dumps, "--to", "csv", "-o", tmp_path / "out") == 0
    said = capsys.readouterr().err
    for words in (
        "holiday.jpg is not a dump",
        "neither its name nor its content",
        "of-nobody",
        "is a second dump of rank 2",
        "_dump_1: the file ends in the middle",
    ):
        assert words in said


def test_nothing_to_convert(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    assert convert(tmp_path / "x", "--to", "csv", "-o", tmp_path / "out") == 3
    assert convert(tmp_path / "nowhere", "--to", "csv", "-o", tmp_path / "out") == 2
