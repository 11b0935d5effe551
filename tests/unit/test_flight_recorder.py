"""Flight Recorder dumps, read into columns."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from commlens.errors import FormatError
from commlens.formats.flight_recorder import read_flight_recorder_pickle
from commlens.formats.flight_recorder.pickle_data import read_pickle
from commlens.model.collective import State

REAL = "megatron_moe_16ranks/*/_dump_*"


def entry(number: int, name: str = "nccl:all_reduce", **changes: Any) -> dict[str, Any]:
    """One entry as torch 2.13 writes it."""
    point_to_point = "->" in name or "<-" in name
    return {
        "frames": [{"name": "step", "filename": "/work/train.py", "line": 81}],
        "record_id": number,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "thread_name": "python",
        "thread_id": "140",
        "collective_seq_id": 0 if point_to_point else number + 1,
        "p2p_seq_id": number + 1 if point_to_point else 0,
        "op_id": number + 1,
        "profiling_name": name,
        "time_created_ns": 1_700_000_000_000_000_000 + number,
        "input_sizes": [[4, 2]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4, 2]],
        "output_dtypes": ["Float"],
        "state": "completed",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": 1_700_000_000_100_000_000 + number,
        "retired": True,
        "timeout_ms": 600000,
        "is_p2p": point_to_point,
        **changes,
    }


def dump(entries: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    return {
        "version": "2.10",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}},
        "comm_lib_version": "2.27.3",
        "pg_status": {"0": {"last_enqueued_collective": 3, "last_started_collective": -1, "last_completed_collective": 2}},
        "entries": entries,
        **changes,
    }


def rows_of(value: Any, protocol: int = 2):
    return read_flight_recorder_pickle(pickle.dumps(value, protocol), "rank_3")


def test_entries_become_columns_and_objects_only_when_asked_for():
    stuck = entry(2, "nccl:_all_gather_base", state="scheduled", retired=False, time_discovered_completed_ns=None)
    rows = rows_of(dump([entry(0), entry(1, duration_ms=1.5), stuck]))
    assert (len(rows), rows.world_size, rows.version, rows.problems) == (3, 4, "2.10", [])
    assert rows.possible_ranks == (0, 1, 2, 3) and rows.rank == -1
    assert rows.sequence.tolist() == [1, 2, 3] and rows.duration_ns.tolist() == [-1, 1_500_000, -1]
    assert rows.status == {"0": (3, -1, 2)} and rows.status_groups == {"0": "0"}
    assert len(rows.asked) == 2, "equal operations share what they asked for"
    last = rows.log([2]).collectives[0]
    assert (last.op, last.asked.dispatcher_op, last.state, last.sequence_number) == ("all_gather", "_all_gather_base", State.ISSUED, 3)
    assert last.asked.inputs[0].dtype == "float32" and last.channel.device == "cuda" and last.channel.group.ranks == (0, 1, 2, 3)
    assert last.source is not None and last.source.where == "train.py:81"


def test_point_to_point_names_the_peer_and_the_rank_itself():
    rows = rows_of(
        dump(
            [entry(0, "nccl:send 1->0", process_group=("7", "pipe")), entry(1, "nccl:recv 1<-0", process_group=("7", "pipe"))],
            pg_config={"7": {"name": "7", "desc": "pipe", "ranks": "[4, 6]"}},
        )
    )
    assert rows.peer.tolist() == [4, 4] and rows.rank == 6 and rows.p2p.all()
    assert [rows.asked[index].op for index in rows.asked_index] == ["send", "recv"]


def test_a_batch_ends_as_the_entry_that_closes_it():
    unfinished = {"state": "scheduled", "retired": False, "time_discovered_completed_ns": None, "p2p_seq_id": 5}
    rows = rows_of(
        dump(
            [
                entry(0),
                entry(1, "nccl:send 0->1", **unfinished),
                entry(2, "nccl:recv 0<-1", **unfinished),
                entry(3, "nccl:coalesced", is_p2p=True, collective_seq_id=1, p2p_seq_id=5),
                entry(4),
            ]
        )
    )
    assert rows.coalesced.tolist() == [0, 1, 1, 1, 0] and rows.closes.tolist() == [False, False, False, True, False]
    assert set(rows.state.tolist()) == {2}
    assert rows.log([3]).collectives[0].coalesced_members == 2


@pytest.mark.parametrize("protocol", range(6))
def test_any_protocol_that_python_saves_again(protocol):
    value = dump([entry(number) for number in range(1200)])
    data = pickle.dumps(value, protocol)
    assert read_pickle(data).value == value
    rows = read_flight_recorder_pickle(data, "rank_3")
    assert len(rows) == 1200 and len(rows.stacks) == 1


@pytest.mark.parametrize("protocol", [2, 4])
def test_what_would_import_or_call_is_refused(protocol):
    with pytest.raises(FormatError, match=r"rank_3 .* asks to import or call something \(the pickle instruction (STACK_)?GLOBAL\)"):
        rows_of(dump([entry(0, state=OrderedDict(a=1))]), protocol)


def test_a_cut_file_gives_what_came_before_the_cut():
    data = pickle.dumps(dump([entry(number) for number in range(50)]), 2)
    lengths = set()
    for end in range(len(data) // 8, len(data), 61):
        try:
            rows = read_flight_recorder_pickle(data[:end], "rank_3")
        except FormatError:
            continue
        assert "cut off" in rows.problems[0]
        assert rows.record_id.tolist() == list(range(len(rows)))
        lengths.add(len(rows))
    assert {0, 10, 20, 30, 40} & lengths and len(lengths) > 40


def test_real_dumps_of_16_ranks(shared_data: Path):
    paths = sorted(shared_data.glob(REAL))
    assert len(paths) == 32
    for path in paths:
        data = path.read_bytes()
        assert read_pickle(data).value == pickle.loads(data)
        rows = read_flight_recorder_pickle(data, str(path))
        assert (rows.problems, rows.world_size, rows.version) == ([], 16, "2.9")
        assert path.name == f"_dump_{rows.rank}", "its groups and its sends say whose dump it is"
        assert len(rows.status_groups) == len(rows.status), "also of the ranks that hold no entries"
