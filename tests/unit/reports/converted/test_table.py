"""The joined table as CSV and Parquet, and the timeline for Perfetto."""

from __future__ import annotations

import csv
import io
import itertools
import json
from pathlib import Path

import pyarrow.parquet
import pytest
from builders import Job, Stay, at, mixed

from commlens.errors import MissingDependency
from commlens.formats.columns import RankColumns
from commlens.formats.rank_log_columns import columns_from_log
from commlens.reports.converted.perfetto import to_perfetto
from commlens.reports.converted.table import COLUMNS, to_csv, write_parquet


@pytest.fixture(scope="module")
def stuck() -> list[RankColumns]:
    """Rank 2 stays away from the fourth all_reduce."""
    return [
        columns_from_log(log) for log in Job(4).run(mixed(at(2, 3, Stay(57, "load_batch")))).logs()
    ]


def test_csv_has_a_line_for_each_operation(stuck: list[RankColumns]) -> None:
    lines = list(csv.DictReader(io.StringIO(b"".join(to_csv(stuck)).decode())))
    assert len(lines) == sum(map(len, stuck))
    last = [line for line in lines if line["rank"] == "0"][-1]
    assert tuple(last) == COLUMNS
    about = {
        name: last[name]
        for name in (
            "op",
            "group_ranks",
            "sequence",
            "state",
            "input_shapes",
            "input_dtypes",
            "line",
            "completed_ns",
        )
    }
    assert about == {
        "op": "all_reduce",
        "group_ranks": "0-3",
        "sequence": "4",
        "state": "scheduled",
        "input_shapes": "100",
        "input_dtypes": "float32",
        "line": "train.py:20",
        "completed_ns": "",
    }


def test_parquet_is_the_same_table(stuck: list[RankColumns], tmp_path: Path) -> None:
    write_parquet(stuck, tmp_path / "joined.parquet")
    table = pyarrow.parquet.read_table(tmp_path / "joined.parquet")
    lines = list(csv.DictReader(io.StringIO(b"".join(to_csv(stuck)).decode())))
    assert table.column_names == list(COLUMNS)
    for name in COLUMNS:
        values = [
            (
                ""
                if value is None
                else str(value).lower()
                if value in (True, False) and name == "p2p"
                else str(value)
            )
            for value in table[name].to_pylist()
        ]
        assert values == [line[name] for line in lines], name


def test_parquet_without_pyarrow(
    stuck: list[RankColumns], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(MissingDependency, match="pip install pyarrow"):
        write_parquet(stuck, tmp_path / "joined.parquet")


def test_the_timeline_has_a_track_for_each_rank_and_group_and_open_slices_for_what_is_stuck(
    stuck: list[RankColumns],
) -> None:
    events = json.loads(b"".join(to_perfetto(stuck)))["traceEvents"]
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert [name.split(" (")[0] for name in processes] == [f"rank {rank}" for rank in range(4)]
    opened = [event for event in events if event["ph"] == "B"]
    assert sorted(
        event["pid"] for event in opened if event["name"] == "all_reduce #4 never ended"
    ) == [0, 1, 3]
    assert not [event for event in events if event["ph"] == "E"]
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] in "XB":
            tracks.setdefault((event["pid"], event["tid"]), []).append(
                (event["ts"], event["ts"] + event.get("dur", 1e18))
            )
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert set(tracks) == named
    for slices in tracks.values():
        for (_, end), (began, later) in itertools.pairwise(slices):
            assert began >= end or later <= end or end > 1e17, (
                "slices of a track lie beside or within one another"
            )


def test_a_timeline_of_nothing_is_valid() -> None:
    assert json.loads(b"".join(to_perfetto([])))["traceEvents"] == []
