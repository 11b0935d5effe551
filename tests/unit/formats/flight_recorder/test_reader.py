"""Flight Recorder dumps, read into columns."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from flight_recorder_dumps import as_json, columns_from_table, dump, entry, operation

from commlens.diagnosis.index.columns import reduce_all
from commlens.dumps import detect
from commlens.formats.flight_recorder.pickle_data import read_pickle
from commlens.formats.flight_recorder.reader import (
    read_flight_recorder_json,
    read_flight_recorder_pickle,
)
from commlens.model.collective import State

REAL = "megatron_moe_16ranks/*/_dump_*"


def test_entries_become_columns_and_objects_only_when_asked_for():
    stuck = entry(
        2,
        "nccl:_all_gather_base",
        state="scheduled",
        retired=False,
        time_discovered_completed_ns=None,
    )
    rows = columns_from_table(dump([entry(0), entry(1, duration_ms=1.5), stuck]))
    assert (len(rows), rows.world_size, rows.version, rows.problems) == (3, 4, "2.10", [])
    assert rows.possible_ranks == (0, 1, 2, 3) and rows.rank == -1
    assert rows.sequence.tolist() == [1, 2, 3] and rows.duration_ns.tolist() == [-1, 1_500_000, -1]
    assert rows.status == {"0": (3, -1, 2)}
    assert len(rows.args) == 2, "equal operations share what they asked for"
    last = operation(rows, 2)
    assert (last.op, last.args.dispatcher_op, last.state, last.sequence_number) == (
        "all_gather",
        "_all_gather_base",
        State.ISSUED,
        3,
    )
    assert (
        last.args.inputs[0].dtype == "float32"
        and last.channel.device == "cuda"
        and last.channel.group.ranks == (0, 1, 2, 3)
    )
    assert last.source is not None and last.source.where == "train.py:81"


def test_point_to_point_names_the_peer_and_the_rank_itself():
    rows = columns_from_table(
        dump(
            [
                entry(0, "nccl:send 1->0", process_group=("7", "pipe")),
                entry(1, "nccl:recv 1<-0", process_group=("7", "pipe")),
            ],
            pg_config={"7": {"name": "7", "desc": "pipe", "ranks": "[4, 6]"}},
        )
    )
    assert rows.peer.tolist() == [4, 4] and rows.rank == 6 and rows.p2p.all()
    assert [rows.args[index].op for index in rows.args_index] == ["send", "recv"]


def test_a_batch_ends_as_the_entry_that_closes_it():
    unfinished = {
        "state": "scheduled",
        "retired": False,
        "time_discovered_completed_ns": None,
        "p2p_seq_id": 5,
    }
    rows = columns_from_table(
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
    assert rows.coalesced.tolist() == [0, 1, 1, 1, 0] and rows.closes.tolist() == [
        False,
        False,
        False,
        True,
        False,
    ]
    assert set(rows.state.tolist()) == {2}


OPEN = {"state": "scheduled", "retired": False, "time_discovered_completed_ns": None}


def batch(
    number: int, message: int, *, collective: int, closing: dict[str, Any], bumps: int = 0
) -> list[dict[str, Any]]:
    """A send and a receive in a batch, as NCCL records them: the closing entry alone shows their
    state.

    ``bumps``: the batch uses up so many numbers of collectives, as in torch 2.4 to 2.6.
    """
    numbers = {"collective_seq_id": collective + bumps, "p2p_seq_id": message}
    return [
        entry(number, "nccl:send 0->1", **OPEN, **numbers),
        entry(number + 1, "nccl:recv 0<-1", **OPEN, **numbers),
        entry(
            number + 2,
            "nccl:coalesced",
            input_sizes=[],
            output_sizes=[],
            input_dtypes=[],
            output_dtypes=[],
            **numbers,
            **closing,
        ),
    ]


@pytest.mark.parametrize("bumps", [0, 1])
@pytest.mark.parametrize("read", ["pickle", "json"])
def test_the_entry_that_closes_a_batch_has_nothing_to_do_with_the_collective_of_its_number(
    bumps, read
):
    """NCCL gives the closing entry the number of the last collective, and does not mark it as point
    to point.
    """
    done = {"state": "completed"}
    entries = [
        entry(0, **OPEN),
        *batch(1, 7, collective=1, closing=done, bumps=bumps),
        entry(4, collective_seq_id=2 + bumps),
    ]
    value = dump(entries)
    rows = (
        columns_from_table(value)
        if read == "pickle"
        else read_flight_recorder_json(as_json(value), "rank_3.json")
    )
    assert rows.state.tolist() == [0, 2, 2, 2, 2], (
        "the collective is in flight still, the messages have completed"
    )
    assert rows.p2p.tolist() == [False, True, True, True, False] and rows.coalesced.tolist() == [
        0,
        1,
        1,
        1,
        0,
    ]
    (reduced,) = reduce_all([rows])
    assert [reduced.args[index].op for index in reduced.args_index] == [
        "all_reduce",
        "send",
        "recv",
        "all_reduce",
    ]


@pytest.mark.parametrize("state", ["scheduled", "started"])
def test_a_batch_in_flight_does_not_take_back_a_collective_that_completed(state):
    entries = [entry(0), *batch(1, 7, collective=1, closing={**OPEN, "state": state})]
    rows = columns_from_table(dump(entries))
    assert rows.state.tolist() == [2, *[{"scheduled": 0, "started": 1}[state]] * 3]
    (reduced,) = reduce_all([rows])
    assert [reduced.args[index].op for index in reduced.args_index] == [
        "all_reduce",
        "send",
        "recv",
    ]


def test_the_rest_of_a_batch_whose_members_are_overwritten_is_no_collective():
    entries = [
        *batch(40, 7, collective=5, closing={"state": "completed"}),
        entry(43, collective_seq_id=6, p2p_seq_id=7),
    ]
    (reduced,) = reduce_all([columns_from_table(dump(entries[2:]))])
    assert reduced.sequence.tolist() == [6]
    after = [entry(39, collective_seq_id=5, p2p_seq_id=6), entries[2]]  # its members are unreadable
    (reduced,) = reduce_all([columns_from_table(dump([*after, {}]))])
    assert reduced.sequence.tolist() == [5] and [
        reduced.args[index].op for index in reduced.args_index
    ] == ["all_reduce"]


def coalesced(number: int, names: list[str], closing: str, **end: Any) -> list[dict[str, Any]]:
    """Coalesced collectives, from torch 2.7 on: the members one by one, then the entry with their
    state.
    """
    same = {"collective_seq_id": 5, "p2p_seq_id": 2}
    return [
        *(entry(number + i, name, **OPEN, **same) for i, name in enumerate(names)),
        entry(number + len(names), closing, **same, **end),
    ]


@pytest.mark.parametrize(
    ("members", "closing", "op"),
    [
        (["nccl:all_reduce"] * 2, "nccl:coalesced", "all_reduce"),
        (["nccl:_reduce_scatter_base", "nccl:all_reduce"], "nccl2:coalesced", "coalesced"),
        (["nccl:_broadcast_oop"] * 3, "nccl:ALLGATHER_coalesced", "all_gather"),
        (["nccl:_reduce_oop"] * 3, "nccl:REDUCE_SCATTER_coalesced", "reduce_scatter"),
        ([], "nccl:coalesced", "coalesced"),  # torch 2.4 to 2.6
    ],
)
@pytest.mark.parametrize("state", ["completed", "started"])
def test_coalesced_collectives_are_one_with_the_state_of_the_entry_that_closes_them(
    members, closing, op, state
):
    names = [name.replace("nccl:", closing.partition(":")[0] + ":") for name in members]
    end = {"state": state, "retired": state == "completed"}
    entries = [
        entry(
            3,
            "nccl2:all_reduce" if "nccl2" in closing else "nccl:all_reduce",
            collective_seq_id=4,
            p2p_seq_id=2,
        )
    ]
    rows = columns_from_table(dump([*entries, *coalesced(4, names, closing, **end)]))
    assert (
        rows.state[1:].tolist() == [2 if state == "completed" else 1] * (len(members) + 1)
        and rows.state[0] == 2
    )
    (reduced,) = reduce_all([rows])
    assert reduced.sequence.tolist() == [4, 5] and reduced.args[int(reduced.args_index[1])].op == op
    assert len(reduced.args[int(reduced.args_index[1])].inputs) == (len(members) or 1)


def test_native_gloo_knows_only_what_it_let_go_of():
    entries = [
        entry(0, "gloo:all_reduce", state="scheduled", time_discovered_completed_ns=None),
        entry(
            1,
            "gloo:all_reduce",
            state="scheduled",
            time_discovered_completed_ns=None,
            retired=False,
            process_group=("4", "undefined"),
        ),
    ]
    rows = columns_from_table(
        dump(entries, pg_config={"": {"name": "", "desc": "", "ranks": "[]"}})
    )
    assert rows.origin == "gloo-recorder" and rows.state.tolist() == [3, 0]
    assert [operation(rows, row).state for row in (0, 1)] == [State.COMPLETED, State.ISSUED]
    assert [
        (one.group.name, one.group.ranks, one.group.description, one.device)
        for one in rows.channels
    ] == [("0", (), "default_pg", "cpu"), ("4", (), "", "cpu")]


def test_what_nccl_let_go_of_without_completing_has_timed_out():
    unfinished = {"state": "started", "time_discovered_completed_ns": None}
    rows = columns_from_table(
        dump([entry(0, **unfinished), entry(1, "nccl2:all_reduce", **unfinished)])
    )
    assert rows.state.tolist() == [1, 3] and rows.retired.all()


def test_old_and_future_versions_are_read():
    old = entry(0)
    for key in (
        "collective_seq_id",
        "p2p_seq_id",
        "is_p2p",
        "timeout_ms",
        "thread_id",
        "thread_name",
    ):
        del old[key]
    rows = columns_from_table(
        {"version": "2.2", "entries": [{**old, "seq_id": 5, "process_group": "3"}]}
    )
    assert (
        rows.sequence.tolist() == [5] and rows.problems == [] and rows.channels[0].group.name == "3"
    )
    rows = columns_from_table(
        dump([entry(0, "newlib:shuffle", something_new=[1])], version="3.1", more={"a": 1})
    )
    assert rows.problems == ["the format version 3.1 is unknown; it was read like 2.10"]
    assert (
        rows.args[0].op == "shuffle"
        and rows.channels[0].group.backend == "newlib"
        and rows.channels[0].device == ""
    )


def test_an_entry_that_is_none_is_left_out_and_counted():
    odd = [
        None,
        3,
        {},
        entry(1, process_group=[1, 2]),
        entry(1, input_sizes=[["a"]]),
        entry(1, profiling_name=None),
        entry(1, frames=[5]),
    ]
    rows = columns_from_table(
        dump([entry(0), *odd, entry(1, state="lost"), entry(2, record_id=1 << 80)])
    )
    assert rows.sequence.tolist() == [1, 3] and rows.record_id.tolist() == [0, -1]
    assert rows.problems == [
        "7 entries are malformed and were skipped",
        "1 entries are in an unknown state and were skipped",
    ]


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (pickle.dumps(dump([]), 2), detect.FLIGHT_RECORDER_PICKLE),
        (pickle.dumps(dump([]), 0), detect.FLIGHT_RECORDER_PICKLE),
        (pickle.dumps(dump([]), 5), detect.FLIGHT_RECORDER_PICKLE),
        (as_json(dump([entry(0)])), detect.FLIGHT_RECORDER_JSON),
        (json.dumps(dump([]), indent=1).encode(), detect.FLIGHT_RECORDER_JSON),
        (b"COMMLENS\x01\0\0\0", detect.BLACK_BOX),
        (b'{\n "schema": "commlens.observed/1", "host": "a"}', detect.OBSERVED),
        (b'{"schema": "commlens.trace/1"}', None),
        (b"step 1 loss 2.5\n\x1b[31m[rank0]: ...\n", detect.TEXT),
        (b"\x7fELF\x02\x01", None),
        (b"", None),
        (bytes(4096), None),
    ],
)
def test_files_are_told_by_their_beginning(head, kind):
    assert detect.detect_kind(head) is kind


def test_real_dumps_of_16_ranks(shared_data: Path):
    paths = sorted(shared_data.glob(REAL))
    assert len(paths) == 32
    for path in paths:
        data = path.read_bytes()
        assert read_pickle(data) == (pickle.loads(data), False)
        rows = read_flight_recorder_pickle(data, str(path))
        assert (rows.problems, rows.world_size, rows.version) == ([], 16, "2.9")
        assert path.name == f"_dump_{rows.rank}", "its groups and its sends say whose dump it is"
        assert len(rows.status) == len(rows.groups), "also of the ranks that hold no entries"
