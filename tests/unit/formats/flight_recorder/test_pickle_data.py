"""Pickles are read without running what is in them."""

from __future__ import annotations

import pickle
from collections import OrderedDict

import pytest
from flight_recorder_dumps import columns_from_table, dump, entry

from commlens.errors import FormatError
from commlens.formats.flight_recorder.pickle_data import read_pickle
from commlens.formats.flight_recorder.reader import read_flight_recorder_pickle


@pytest.mark.parametrize("protocol", range(2, 6))
def test_any_protocol_that_python_saves_again(protocol):
    value = dump([entry(number) for number in range(1200)])
    data = pickle.dumps(value, protocol)
    assert read_pickle(data) == (value, False)
    rows = read_flight_recorder_pickle(data, "rank_3")
    assert len(rows) == 1200 and len(rows.call_stacks) == 1


@pytest.mark.parametrize("protocol", [0, 1])
def test_the_protocols_that_torch_never_wrote_are_refused(protocol):
    with pytest.raises(
        FormatError,
        match="It holds the pickle instruction (PUT|DICT|LONG), which no dump that torch writes does",
    ):
        columns_from_table(dump([entry(0)]), protocol)


@pytest.mark.parametrize("protocol", [2, 4])
def test_what_would_import_or_call_is_refused(protocol):
    with pytest.raises(
        FormatError,
        match=(
            r"rank_3 .* asks to import or call something \(the pickle instruction (STACK_)?GLOBAL\)"
        ),
    ):
        columns_from_table(dump([entry(0, state=OrderedDict(a=1))]), protocol)


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
