"""The wordings that every output shares."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlens import text
from commlens.model.collective import ProcessGroup


@pytest.mark.parametrize(
    ("ns", "expected"),
    [
        (-1, "0 ms"),
        (4e7, "40 ms"),
        (8e8, "800 ms"),
        (9.6e8, "1.0 s"),
        (31e9, "31 s"),
        (310e9, "5 min 10 s"),
        (7500e9, "2 h 5 min"),
    ],
)
def test_durations_use_the_unit_that_fits(ns, expected):
    assert text.duration(ns) == expected


@pytest.mark.parametrize(
    ("amount", "expected"),
    [(512, "512 B"), (4096, "4.1 kB"), (999_600, "1.0 MB"), (16_777_216, "16.8 MB")],
)
def test_sizes_are_decimal(amount, expected):
    assert text.size(amount) == expected


def test_counts_group_their_digits_and_agree_with_the_noun():
    assert [text.count(n, "rank") for n in (0, 1, 1024)] == ["0 ranks", "1 rank", "1,024 ranks"]
    assert text.count(2, "entry", "entries") == "2 entries"


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([], ""),
        ([3], "3"),
        ([3, 1, 0, 1], "0-1,3"),
        ([0, 8, 16], "0,8,16"),
        ([0, 8, 16, 24], "0-24:8"),
    ],
)
def test_sets_of_ranks_are_compressed(ranks, expected):
    assert text.format_ranks(ranks) == expected


@given(st.sets(st.integers(0, 5000)))
def test_a_compressed_set_reads_back_as_itself(ranks):
    assert set(text.parse_ranks(text.format_ranks(ranks))) == ranks


@pytest.mark.parametrize("damaged", ["x", "3-1", "0-9:0", "0-99999999", "1-"])
def test_a_damaged_set_of_ranks_is_refused(damaged):
    with pytest.raises(ValueError, match="not a set of ranks"):
        text.parse_ranks(damaged)


def test_a_long_set_of_ranks_is_cut_short_in_a_sentence():
    assert text.ranks_phrase([2]) == "rank 2"
    assert text.ranks_phrase(range(0, 100, 3)) == "ranks 0-99:3"
    phrase = text.ranks_phrase(n * n for n in range(100))
    assert (
        phrase.startswith("ranks 0-1,4,9,")
        and phrase.endswith("... (100 in all)")
        and len(phrase) < 100
    )


def test_groups_go_by_their_mesh_dimension_or_description():
    assert (
        text.group_phrase(ProcessGroup("1", (0, 1), "mesh_dp", mesh_dim="dp")) == "group dp [0-1]"
    )
    assert text.group_phrase(ProcessGroup("0", (0, 1), "default_pg")) == "the default group [0-1]"
    assert text.group_label(ProcessGroup("0", (0, 1), "default_pg")) == "default group"
    assert text.group_label(ProcessGroup("0", (0, 1)), "default") == "default"


def test_the_end_of_a_process():
    assert text.exit_phrase(3) == "exited with status 3"
    assert text.exit_phrase(-9) == "was killed by SIGKILL"
    assert text.signal_name(40) == "signal 40"
