"""Two dumps of one job: which ranks made progress, and which are in the same place."""

from __future__ import annotations

import json
import pickle
from importlib import resources
from pathlib import Path

import jsonschema
import pytest
from boxes import busy_box
from builders import Job, Stay, at, training
from flight_recorder_dumps import dump, entry

from commlens import commands
from commlens.diagnosis.views.dump_diff import (
    DumpPosition,
    Moved,
    Movement,
    RankInDump,
    compare_positions,
    other_job,
    position_of,
)
from commlens.formats.flight_recorder.entries import build_table
from commlens.formats.flight_recorder.to_columns import columns_from_table
from commlens.formats.rank_log_columns import columns_from_log
from commlens.model.ranklog import RankLog


def progress(before: list[RankLog], after: list[RankLog]) -> Movement:
    return compare_positions(
        [position_of(columns_from_log(log)) for log in before],
        [position_of(columns_from_log(log)) for log in after],
    )


def stuck(step: int = 5, after_s: float = 30.0) -> list[RankLog]:
    return Job(4).run(training(at(2, step, Stay(57, "load_batch")))).logs(after_s=after_s)


def test_nothing_moved() -> None:
    movement = progress(stuck(after_s=5), stuck(after_s=47))
    assert not movement
    assert movement.answer == "No rank moved in 42 s: 4 ranks are in the same place."
    assert [one.sentence for one in movement.ranks] == [
        "ranks 0-1,3 are still in all_reduce #11 of the default group [0-3] (train.py:20 step).",
        "rank 2 issued nothing, and has nothing in flight.",
    ]


def test_all_moved() -> None:
    movement = progress(stuck(step=3), stuck(step=5))
    assert movement.answer.startswith("All 4 ranks moved")
    assert (
        movement.ranks[0].sentence
        == "ranks 0-1,3 moved on from all_reduce #7 of the default group [0-3] to all_reduce #11 of"
        " the default group [0-3] (train.py:20 step): issued 4 more operations."
    )


def test_some_moved() -> None:
    before, after = stuck(), stuck()
    after[2].collectives = after[0].collectives
    after[2].issued = after[0].issued
    movement = progress(before, after)
    assert movement.answer == "Rank 2 moved, ranks 0-1,3 did not."


def test_a_rank_that_was_between_operations() -> None:
    after = stuck()
    before = stuck(step=1)[:1]
    before[0].collectives = [op for op in before[0].collectives if not op.in_flight]
    before[0].issued = len(before[0].collectives)
    assert progress(before, after[:1]).ranks[0].sentence == (
        "rank 0 was between operations, and is now in all_reduce #11 of the default group [0-3]"
        " (train.py:20 step): issued 9 more operations."
    )


def test_missing_dumps() -> None:
    before, after = stuck(), stuck(step=3)
    movement = progress(before[:3], after[1:])
    assert {one.kind for one in movement.ranks} == {"again", "only-before", "only-after"}
    assert (
        progress(before[:1], after[1:]).answer
        == "No rank has a dump in both sets: nothing was compared."
    )


def foreign(
    rank: int = 0, *, program: str = "/work/train.py", job: str = "", **groups: str
) -> RankInDump:
    described = {"0": ("default_pg", "[0, 1, 2, 3]")} | {
        str(at): one for at, one in enumerate(groups.items(), start=1)
    }
    config = {
        name: {"name": name, "desc": text, "ranks": ranks}
        for name, (text, ranks) in described.items()
    }
    frames = [
        {"name": "step", "filename": program, "line": 81},
        {"name": "<module>", "filename": program, "line": 9},
    ]
    rows = columns_from_table(
        build_table(dump([entry(0, frames=frames)], pg_config=config)), f"rank_{rank}"
    )
    rows.rank, rows.job = rank, job
    return position_of(rows)


def test_dumps_of_one_job_may_differ_in_groups_and_ranks() -> None:
    assert other_job([foreign(0)], [foreign(0, dp="[0, 1]")]) == ""
    assert other_job([foreign(0, dp="[0, 1]", tp="[0, 2]")], [foreign(0, dp="[0, 1]")]) == ""
    assert other_job([foreign(0, dp="[0, 1]")], [foreign(2, dp="[2, 3]")]) == ""
    assert other_job([foreign(0, job="a")], [foreign(0)]) == ""


@pytest.mark.parametrize(
    ("before", "after", "difference"),
    [
        ({"job": "a"}, {"job": "b"}, "a and b"),
        (
            {"dp": "[0, 1]"},
            {"dp": "[0, 2]"},
            "the group dp of rank 0 has the ranks 0-1 in one, 0,2 in the other",
        ),
        ({"dp": "[0, 1]"}, {"pp": "[0, 1]"}, "rank 0 has the group dp in one, pp in the other"),
        (
            {},
            {"program": "/work/eval.py"},
            "rank 0 ran /work/train.py in one, /work/eval.py in the other",
        ),
    ],
)
def test_dumps_of_different_jobs(
    before: dict[str, str], after: dict[str, str], difference: str
) -> None:
    assert other_job([foreign(**before)], [foreign(**after)]) == difference


class TestCommand:
    @pytest.fixture
    def two(self, tmp_path: Path) -> tuple[str, str]:
        for name, records in (("first", 10), ("second", 12)):
            for rank in range(4):
                busy_box(rank, records=records if rank else 10).write(tmp_path / name)
        return str(tmp_path / "first"), str(tmp_path / "second")

    def test_dumps_are_distinguished_from_traces_by_their_content(
        self, two: tuple[str, str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert commands.main(["compare", two[0], two[0]]) == 0
        assert "No rank moved" in capsys.readouterr().out
        assert commands.main(["compare", *two]) == 1
        assert "Ranks 1-3 moved" in capsys.readouterr().out

    def test_json_follows_its_schema(
        self, two: tuple[str, str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert commands.main(["compare", *two, "--json"]) == 1
        printed = json.loads(capsys.readouterr().out)
        schema = json.loads(
            resources.files("commlens.reports")
            .joinpath("schemas", "movement-1.schema.json")
            .read_bytes()
        )
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.validate(printed, schema)
        assert list(schema["properties"]) == list(Movement.__struct_fields__)
        for kind in (Moved, DumpPosition):
            assert list(schema["$defs"][kind.__name__]["properties"]) == list(
                kind.__struct_fields__
            )

    def test_dumps_of_different_jobs_are_refused(
        self, two: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for rank in range(2):
            busy_box(rank, 2).write(tmp_path / "other")
        assert commands.main(["compare", two[0], str(tmp_path / "other")]) == 2
        assert (
            "are dumps of different jobs: one has 4 ranks, the other 2 ranks. Give two dumps of one"
            " job." in capsys.readouterr().err
        )

    def test_a_dump_and_a_trace(
        self, two: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "x.json").write_text("{}")
        assert commands.main(["compare", two[0], str(tmp_path / "x.json")]) == 2
        assert "is a dump and" in capsys.readouterr().err


def test_a_dump_that_is_cut_off_does_not_show_that_its_rank_moved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = pickle.dumps(dump([entry(number) for number in range(20)]), 2)
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
        for rank in range(2):
            content = whole[: len(whole) // 2] if (name, rank) == ("after", 1) else whole
            (tmp_path / name / f"nccl_trace_rank_{rank}").write_bytes(content)
    assert commands.main(["compare", str(tmp_path / "before"), str(tmp_path / "after")]) == 1
    said = capsys.readouterr().out
    assert (
        "rank 1 has a readable dump only in the first set" in said
        and "moved on" not in said
        and "cut off" in said
    )


def test_dumps_without_a_readable_rank_are_too_little_evidence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "nccl_trace_rank_0").write_bytes(b"\x80\x02}q\x00.")
    assert commands.main(["compare", str(tmp_path / "before"), str(tmp_path / "after")]) == 3
    assert "nothing was compared" in capsys.readouterr().out
