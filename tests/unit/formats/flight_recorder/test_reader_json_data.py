"""The JSON that torch writes of its recorder."""

from __future__ import annotations

from flight_recorder_dumps import as_json, columns_from_table, dump, entry

from commlens.formats.flight_recorder.reader import read_flight_recorder_json


def test_json_says_the_same_but_for_the_stacks():
    value = dump(
        [
            entry(0),
            entry(1, "nccl:recv 1<-0"),
            entry(2, state="started", retired=False, time_discovered_completed_ns=None),
        ]
    )
    pickled, text = (
        columns_from_table(value),
        read_flight_recorder_json(as_json(value), "rank_3.json"),
    )
    for name in pickled.__struct_fields__:
        if name in ("source", "stack", "call_stacks"):
            continue
        left, right = getattr(pickled, name), getattr(text, name)
        assert (left.tolist() == right.tolist()) if hasattr(left, "tolist") else left == right, name
    assert text.stack.tolist() == [-1, -1, -1]


def test_json_that_is_cut_gives_the_entries_before_the_cut():
    data = as_json(dump([entry(number) for number in range(20)]))
    rows = read_flight_recorder_json(data[: len(data) // 2], "rank_3.json")
    assert 5 < len(rows) < 15 and "cut off" in rows.problems[0] and len(rows.problems) == 1
