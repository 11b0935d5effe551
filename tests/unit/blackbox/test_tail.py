"""Following a box that is being written: each record once, and nothing that is not whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from boxes import Box, busy_box
from live_boxes import Memory

from commlens.blackbox.blobs import ArgsJson
from commlens.blackbox.reader import OpenBox
from commlens.blackbox.tail import BoxTail, reduce_code

ALL = 1 << 16


@pytest.fixture
def box() -> Box:
    return Box(capacity=16)


@pytest.fixture
def tail(box: Box) -> BoxTail:
    return BoxTail(Memory(box))  # type: ignore[arg-type]


def write(box: Box, count: int) -> None:
    group, asked = box.group(), box.asked()
    for _ in range(count):
        box.record(group=group, asked=asked, seq=box.index + 1)


def indices(tail: BoxTail, at_most: int = ALL) -> list[int]:
    return [raw[0] for raw in tail.poll(at_most)]


def test_each_record_is_given_once(box: Box, tail: BoxTail) -> None:
    assert indices(tail) == []
    write(box, 5)
    assert indices(tail) == [1, 2, 3, 4, 5]
    assert indices(tail) == []
    write(box, 14)  # around the ring's end
    assert indices(tail) == list(range(6, 20))
    assert tail.missed == 0


def test_what_was_overwritten_is_counted(box: Box, tail: BoxTail) -> None:
    write(box, 40)
    assert indices(tail) == list(range(25, 41))
    assert tail.missed == 24


def test_of_too_many_the_newest_are_read(box: Box, tail: BoxTail) -> None:
    write(box, 10)
    assert indices(tail, 3) == [8, 9, 10]
    assert tail.missed == 7
    write(box, 2)
    assert indices(tail, 3) == [11, 12]


def test_a_torn_record_comes_when_it_is_whole(box: Box, tail: BoxTail) -> None:
    write(box, 3)
    at = box.slot(2) + 40
    whole = bytes(box.data[at : at + 8])
    box.data[at : at + 8] = b"\xff" * 8
    assert indices(tail) == [1, 3]
    assert indices(tail) == []
    box.data[at : at + 8] = whole
    assert indices(tail) == [2]
    assert tail.missed == 0


def test_a_record_that_never_becomes_whole_is_given_up(box: Box, tail: BoxTail) -> None:
    write(box, 3)
    box.data[box.slot(2) + 40] ^= 0xFF
    for _ in range(40):
        tail.poll(ALL)
    assert tail.missed == 1
    assert not tail._torn


def test_a_number_that_a_thread_drew_and_has_not_written(box: Box, tail: BoxTail) -> None:
    group, asked = box.group(), box.asked()
    box.record(group=group, asked=asked, index=2)
    assert indices(tail) == [2]
    box.record(group=group, asked=asked, index=1)
    assert indices(tail) == [1]
    box.record(group=group, asked=asked, index=3)
    assert indices(tail) == [3]


def test_blobs(box: Box, tail: BoxTail) -> None:
    short, long = box.asked(), box.text("x" * 5000)
    assert isinstance(tail.decoded(short), ArgsJson)
    assert len(tail.blob(long) or b"") > 5000
    assert tail.blob(0) is None
    assert tail.blob(short + 8) is None
    assert tail.blob(short + 1) is None
    box.data[box.side_at + long + 40] ^= 1
    assert tail.blob(long) is None
    assert tail.decoded(box.blob("not an object")) is None


def test_a_blob_that_was_overwritten_is_none(box: Box, tail: BoxTail) -> None:
    first = box.asked()
    while box.head < box.side_size + 4096:
        box.text("y" * 60_000)
    assert tail.blob(first) is None


def test_reduce_ops(box: Box, tail: BoxTail) -> None:
    write(box, 20)
    box.value(18, 176, 1)
    box.value(19, 176, 5)
    words = tail.reduce_words(15, 20)
    assert [reduce_code(word, index) for index, word in enumerate(words, 15)] == [0, 0, 0, 1, 5, 0]
    assert reduce_code(99 << 16 | 3, 3) == 0, "no reduce op has this code"
    assert reduce_code(1 << 16 | 4, 3) == 0, "another record's"


def test_a_log_of_the_newest_records(tmp_path: Path) -> None:
    box = busy_box(records=40, capacity=16)
    with OpenBox(box.write(tmp_path)) as opened:
        log = opened.log(newest=5)
        assert [op.index for op in log.collectives] == [36, 37, 38, 39, 40]
        assert log.issued == 40
        assert log.problems == []
        assert len(opened.log(newest=100).collectives) == 16
        assert [op.index for op in opened.log().collectives] == list(range(25, 41))
