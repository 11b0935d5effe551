"""Packed boxes, of which dumps consist: small, equal to the box, and readable up to the damage."""

from __future__ import annotations

import random
import struct
import zlib
from pathlib import Path

import pytest
from boxes import MONO, Box, busy_box
from chosen import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from commlens.blackbox.packed import MAGIC, unpack
from commlens.blackbox.reader import OpenBox, read_box
from commlens.errors import FormatError
from commlens.model.ranklog import RankLog


def log_of(content: bytes | Path) -> RankLog:
    return read_box(content, name="x.box", captured_ns=1)


def full_box(records: int = 2403) -> Box:
    """A ring buffer of 2000 records of a training: several ops, call sites and groups, and times
    that never repeat.
    """
    rng = random.Random(7)
    box = Box(capacity=2000)
    groups = [box.group(), box.group("1", "0-1", desc="dp"), box.group("2", "0,2", desc="tp")]
    asked = [box.asked(shape=(size, 64)) for size in range(1, 60)]
    stacks = [
        box.stack(
            *((f"/home/me/model/layer{site}.py", 10 * site + at, "forward") for at in range(9))
        )
        for site in range(60)
    ]
    at = MONO
    for number in range(records):
        at += rng.randrange(80_000, 900_000)
        site = number % 59
        index = box.record(
            group=groups[number % 3],
            asked=asked[site],
            stack=stacks[site],
            seq=number // 3 + 1,
            step=number // 59,
            at=at,
        )
        box.complete(index, after=rng.randrange(30_000, 400_000))
    return box


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return full_box().write(tmp_path_factory.mktemp("full"))


def packed(path: Path, newest: int | None = None) -> bytes:
    with OpenBox(path) as box:
        return box.packed(newest=newest)


def test_a_full_ring_buffer_is_small_and_reads_the_same(full: Path):
    content = packed(full)
    assert len(content) < 60_000 < full.stat().st_size // 30
    assert log_of(content) == log_of(full) and log_of(full).problems == []


@pytest.mark.parametrize("records", [0, 1, 16, 17, 40])
def test_boxes_with_few_records_and_those_that_went_round(tmp_path: Path, records: int):
    path = busy_box(records=records).write(tmp_path)
    assert log_of(packed(path)) == log_of(path)


@pytest.mark.parametrize("newest", [1, 255, 257, 2000, 5000])
def test_only_the_newest_records(full: Path, newest: int):
    log = log_of(packed(full, newest))
    assert (log.collectives, log.problems) == (log_of(full).collectives[-newest:], [])
    assert (log.issued, log.stacks) == (2403, log_of(full).stacks)


def test_fewer_records_than_asked_for(tmp_path: Path):
    path = busy_box(records=3).write(tmp_path)
    assert log_of(packed(path, 10)) == log_of(path)


@pytest.mark.parametrize("newest", [None, 8])
def test_a_torn_record_is_left_out(tmp_path: Path, newest: int | None):
    box = busy_box(records=12)
    box.data[box.slot(9)] ^= 1
    path = box.write(tmp_path)
    log = log_of(packed(path, newest))
    assert [each.index for each in log.collectives] == [
        index for index in range(1 if newest is None else 5, 13) if index != 9
    ]
    assert log.problems == log_of(path).problems or newest


def test_cut_off_anywhere(full: Path):
    content, whole = packed(full), log_of(full)
    kept = []
    for size in (10, 100, 1500, 6000, 20_000, len(content) - 300, len(content) - 3):
        try:
            log = log_of(content[:size])
        except FormatError as error:
            assert "cut off" in str(error)
            continue
        assert "the file is cut off or damaged" in log.problems[0]
        assert all(
            each in whole.collectives for each in log.collectives[:: len(log.collectives) // 20 + 1]
        )
        kept.append(len(log.collectives))
    assert kept == sorted(kept) and 0 < kept[-3] < kept[-1] <= 2000, "whole blocks"


SMALL = busy_box(records=40)


@settings(deadline=None, max_examples=examples(150))
@given(st.lists(st.tuples(st.integers(0, 20_000), st.integers(1, 255)), min_size=1, max_size=4))
def test_damage_is_never_taken_for_a_record(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]]
):
    content = bytearray(packed(SMALL.write(tmp_path_factory.getbasetemp())))
    for at, mask in flips:
        content[at % len(content)] ^= mask
    try:
        log = log_of(bytes(content))
    except FormatError as error:
        assert str(error).startswith("x.box ")
        return
    good = {each.index: each.sequence_number for each in log_of(SMALL.bytes()).collectives}
    assert all(good.get(each.index) == each.sequence_number for each in log.collectives)


def test_sizes_that_contradict_the_header(full: Path):
    content = packed(full)
    plain = bytearray(zlib.decompress(content[12:]))
    for field in range(6):
        changed = bytearray(plain)
        struct.pack_into("<I", changed, 4096 + 8 + 4 * field, 1 << 31)
        again = content[:12] + zlib.compress(bytes(changed), 1)
        if field == 0:
            assert log_of(again).issued == 2403
        else:
            with pytest.raises(FormatError, match="larger than the black box"):
                unpack(again, "x.box")


def test_another_version_says_so():
    with pytest.raises(FormatError, match="packed in version 7, but this commlens reads version 1"):
        unpack(MAGIC + struct.pack("<I", 7) + zlib.compress(bytes(5000)), "x.box")
