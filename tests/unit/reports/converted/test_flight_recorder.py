"""Our black boxes as Flight Recorder dumps: torchfrtrace itself reads them, and so do we."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from builders import Job, Op, Stay, Step, all_reduce, at, mixed, spec
from flight_recorder_dumps import columns_from_table, dump, entry

from commlens.formats.columns import RankColumns
from commlens.formats.flight_recorder.reader import read_flight_recorder_pickle
from commlens.formats.rank_log_columns import columns_from_log
from commlens.model.collective import CollectiveArgs
from commlens.reports.converted.flight_recorder import to_json, to_pickle


def every_op(job: Job, rank: int) -> Iterator[object]:
    """What only the root has, and a barrier, which has an input and no output."""
    everything = [spec(10)] * 4
    for i in range(3):
        yield all_reduce(job.world, 100, line=20)
        for op, dispatched, inputs, outputs in (
            ("scatter", "scatter_", everything if rank == 0 else [], [spec(10)]),
            ("barrier", "barrier", [spec(1, "uint8")], []),
            ("gather", "gather_", [spec(10)], everything if rank == 0 else []),
            ("monitored_barrier", "monitored_barrier_", [spec(1)], []),
            ("all_gather", "allgather_", [spec(10)], everything),
            ("all_to_all", "alltoall_", everything, everything),
        ):
            root = 0 if op in ("scatter", "gather") else None
            if op == "barrier" and (rank, i) == (3, 2):
                yield Stay(57, "load_batch")
            yield Op(
                job.world,
                CollectiveArgs(op, dispatched, tuple(inputs), tuple(outputs), root=root),
                30,
            )
        yield Step()


def written(folder: Path, job: Job, **options: float) -> list[RankColumns]:
    several = [columns_from_log(log) for log in job.logs(**options)]
    for rows in several:
        problems: list[str] = []
        (folder / f"nccl_trace_rank_{rows.rank}").write_bytes(to_pickle(rows, problems))
        assert problems == []
    return several


# torchfrtrace prints its tables through the package tabulate, and does not work without it.
TORCHFRTRACE = """
import sys, types
sys.modules["tabulate"] = types.SimpleNamespace(tabulate=lambda rows, headers=(): f"{headers} {rows}")
from torch.distributed.flight_recorder.fr_trace import main
main(sys.argv[1:])
"""


def torchfrtrace(folder: Path, *options: str) -> str:
    pytest.importorskip(
        "torch.distributed.flight_recorder", reason="this torch has no torchfrtrace"
    )
    done = subprocess.run(
        [sys.executable, "-c", TORCHFRTRACE, str(folder), *options],
        capture_output=True,
        text=True,
        timeout=110,
        env=os.environ | {"COMMLENS": "0"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.launches
def test_torchfrtrace_finds_the_rank_that_is_missing(tmp_path: Path) -> None:
    written(tmp_path, Job(4).run(mixed(at(2, 3, Stay(57, "load_batch")))))
    said = torchfrtrace(tmp_path)
    assert "Not all ranks joining collective" in said
    assert "missing ranks: {2}" in said


@pytest.mark.launches
def test_torchfrtrace_reads_ops_without_inputs_or_outputs(tmp_path: Path) -> None:
    written(tmp_path, Job(4).run(every_op))
    said = torchfrtrace(tmp_path)
    assert said.count("Not all ranks joining collective") == 1, said
    assert "collective: gloo:barrier" in said and "missing ranks: {3}" in said


@pytest.mark.launches
def test_torchfrtrace_finds_nothing_wrong_with_a_healthy_job_and_prints_its_entries(
    tmp_path: Path,
) -> None:
    written(tmp_path, Job(4).run(mixed(lambda *_: None)))
    said = torchfrtrace(tmp_path, "-j")
    assert "all_reduce(input_sizes=[[" in said


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    for before in written(tmp_path, Job(4).run(mixed(at(2, 3, Stay(57, "load_batch"))))):
        name = f"nccl_trace_rank_{before.rank}"
        after = read_flight_recorder_pickle((tmp_path / name).read_bytes(), name)
        assert len(after) == len(before)
        collective = ~before.p2p
        assert np.array_equal(after.sequence[collective], before.sequence[collective])
        for column in (
            "record_id",
            "state",
            "created_ns",
            "completed_ns",
            "p2p",
            "peer",
            "retired",
        ):
            assert np.array_equal(getattr(after, column), getattr(before, column)), column
        assert [after.args[index].op for index in after.args_index] == [
            before.args[index].op for index in before.args_index
        ]
        shapes = [
            [
                [tensor.shape for tensor in rows.args[index].inputs or rows.args[index].outputs]
                for index in rows.args_index
            ]
            for rows in (after, before)
        ]
        assert shapes[0] == shapes[1]
        assert [one.file for one in after.call_stacks[int(after.stack[0])]] == [
            one.file for one in before.call_stacks[int(before.stack[0])]
        ]


def test_json_is_the_same_but_for_what_torch_writes_differently(tmp_path: Path) -> None:
    rows, *_ = written(tmp_path, Job(4).run(mixed(at(2, 3, Stay(57, "load_batch")))))
    one, other = pickle.loads(to_pickle(rows, [])), json.loads(to_json(rows, []))
    assert other["pg_status"]["0"]["last_enqueued_collective"] == str(
        one["pg_status"]["0"]["last_enqueued_collective"]
    )
    assert [entry["profiling_name"] for entry in one["entries"]] == [
        entry["profiling_name"] for entry in other["entries"]
    ]
    assert other["entries"][-1]["time_discovered_completed_ns"] == 0
    assert one["entries"][-1]["time_discovered_completed_ns"] is None


@pytest.mark.parametrize("kind", ["pickle", "json"])
def test_an_empty_log(kind: str) -> None:
    log, *_ = Job(4).run(mixed(lambda *_: None)).logs()
    log.collectives = []
    content = (to_pickle if kind == "pickle" else to_json)(columns_from_log(log), [])
    found = pickle.loads(content) if kind == "pickle" else json.loads(content)
    assert (found["entries"], found["pg_config"], found["version"]) == ([], {}, "2.10")


@pytest.mark.parametrize(
    ("names", "ranks", "left_out"),
    [
        (["nccl:send 0->1"], "", "1 message to or from an unknown rank was left out"),
        (
            ["nccl2:recv 1<-?", "nccl2:recv 1<-?"],
            "[0, 1]",
            "2 messages to or from an unknown rank were left out",
        ),
    ],
)
def test_messages_with_an_unknown_rank_are_left_out_and_told(
    names: list[str], ranks: str, left_out: str
) -> None:
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": ranks}}
    entries = [entry(number, name) for number, name in enumerate(names)]
    problems: list[str] = []
    rows = columns_from_table(dump([*entries, entry(5)], pg_config=groups))
    rows.rank = 1
    written = pickle.loads(to_pickle(rows, problems))
    assert [each["profiling_name"] for each in written["entries"]] == ["nccl:all_reduce"]
    assert problems == [f"rank 1: {left_out}: the format cannot represent them."]
