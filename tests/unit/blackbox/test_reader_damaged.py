"""However a black box is damaged, reading it gives a FormatError or a log that says what is
missing, soon and in little memory.
"""

from __future__ import annotations

import contextlib
import time
import tracemalloc
from collections.abc import Callable

import msgspec
import pytest
from boxes import MONO, Box, busy_box
from chosen import examples
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from commlens.blackbox import layout as L
from commlens.blackbox.reader import read_box, read_status
from commlens.errors import FormatError
from commlens.formats.rank_log_columns import columns_from_log
from commlens.model.ranklog import RankLog

GOOD = busy_box(records=40)
GOOD_BYTES = GOOD.bytes()
GOOD_LOG = read_box(GOOD_BYTES, captured_ns=1)
USED = [
    (0, 4096),
    (4096, 4096 + 16 * 192),
    (GOOD.side_at, GOOD.side_at + GOOD.head),
    (GOOD.evidence_at, GOOD.evidence_at + 300),
]

relaxed = settings(
    deadline=None, max_examples=examples(120), suppress_health_check=[HealthCheck.too_slow]
)
places = st.sampled_from(USED).flatmap(lambda part: st.integers(part[0], part[1] - 1))


def read(content: bytes) -> RankLog | None:
    """The log, or None where it is refused. Whatever comes out can be written and diagnosed."""
    try:
        log = read_box(content, name="x.box", captured_ns=1)
    except FormatError as error:
        assert str(error).startswith("x.box ")
        assert str(error).endswith(".")
        return None
    msgspec.json.encode(log)
    assert len(columns_from_log(log)) == len(log.collectives)
    assert all(len(problem) < 300 for problem in log.problems)
    return log


@relaxed
@given(st.integers(0, len(GOOD_BYTES) - 1))
@example(0)
@example(4095)
@example(4096)
def test_cut_off_at_any_byte(size: int) -> None:
    log = read(GOOD_BYTES[:size])
    assert (log is None) == (size < 4096)
    if log is not None:
        assert any("cut off" in problem for problem in log.problems)
        known = {collective.index: collective for collective in GOOD_LOG.collectives}
        assert all(
            collective.args in (known[collective.index].args,)
            for collective in log.collectives
            if collective.op != "unknown"
        )


@relaxed
@given(st.lists(st.tuples(places, st.integers(0, 7)), min_size=1, max_size=12, unique=True))
def test_bit_flips(flips: list[tuple[int, int]]) -> None:
    content = bytearray(GOOD_BYTES)
    for at, bit in flips:
        content[at] ^= 1 << bit
    log = read(bytes(content))
    if log is None:
        assert any(at < 128 for at, _ in flips)
        return
    known = {collective.index: collective for collective in GOOD_LOG.collectives}
    for collective in log.collectives:
        # Nothing that carries a checksum is ever wrong: it is right or it is absent.
        true = known[collective.index]
        assert (collective.sequence_number, collective.channel, collective.step) == (
            true.sequence_number,
            true.channel,
            true.step,
        )
        assert collective.args.inputs in (true.args.inputs, ())
        assert collective.stack in (true.stack, ())


@relaxed
@given(st.lists(st.tuples(places, st.binary(min_size=1, max_size=300)), min_size=1, max_size=5))
def test_stretches_of_other_bytes(stretches: list[tuple[int, bytes]]) -> None:
    content = bytearray(GOOD_BYTES)
    for at, stretch in stretches:
        content[at : at + len(stretch)] = stretch
    read(bytes(content[: len(GOOD_BYTES)]))


@relaxed
@given(st.binary(max_size=9000), st.booleans())
def test_random_bytes(content: bytes, magic: bool) -> None:
    assert read((b"COMMLENS" if magic else b"") + content) is None
    with contextlib.suppress(FormatError):
        read_status((b"COMMLENS" if magic else b"") + content)


FIELDS = (
    "header",
    "record",
    "capacity",
    "side_at",
    "side_size",
    "evidence_at",
    "evidence_slot",
    "total",
    "pid",
    "world_size",
    "start_ticks",
    "mono",
    "unix",
)
NARROW = ("header", "record", "capacity", "pid", "world_size")
sizes = st.sampled_from(
    [0, 1, 8, 191, 192, 4095, 4096, 65_000, 65_536, 1 << 24, (1 << 31) - 1, (1 << 32) - 1]
) | st.integers(0, (1 << 32) - 1)
wide = sizes | st.integers(0, (1 << 64) - 1)


@relaxed
@given(
    st.dictionaries(st.sampled_from(FIELDS), wide, max_size=4),
    st.integers(-(1 << 31), (1 << 31) - 1),
)
def test_headers_with_hostile_numbers_and_a_right_checksum(
    fields: dict[str, int], rank: int
) -> None:
    box = busy_box()
    box.write_header(
        rank=rank,
        **{key: value % (1 << 32) if key in NARROW else value for key, value in fields.items()},
    )
    read(box.bytes())


@relaxed
@given(
    st.dictionaries(
        st.sampled_from(range(256, 384, 8)), st.integers(0, (1 << 64) - 1), min_size=1, max_size=14
    )
)
def test_live_words_of_any_value(words: dict[int, int]) -> None:
    box = busy_box()
    for offset, value in words.items():
        box.word(offset, value)
    log = read(box.bytes())
    assert log is not None
    assert len(log.collectives) == 10 or 280 in words  # a wrong side head makes blobs seem dead


@relaxed
@given(
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                **{
                    key: st.integers(0, (1 << 64) - 1)
                    for key in (
                        "group",
                        "asked",
                        "stack",
                        "module",
                        "seq",
                        "step",
                        "coalescing_id",
                        "at",
                        "index",
                    )
                },
                **{key: st.integers(0, (1 << 32) - 1) for key in ("thread", "flags", "members")},
                "peer": st.integers(-(1 << 31), (1 << 31) - 1),
                "tag": st.integers(-(1 << 63), (1 << 63) - 1),
            },
        ),
        max_size=20,
    ),
    st.lists(
        st.tuples(
            st.integers(1, 16), st.sampled_from(range(120, 192, 8)), st.integers(0, (1 << 64) - 1)
        ),
        max_size=20,
    ),
)
def test_records_of_any_content_with_right_checksums(
    records: list[dict[str, int]], words: list[tuple[int, int, int]]
) -> None:
    box = Box()
    good = {"group": box.group(), "asked": box.asked(), "stack": box.stack(("/a.py", 1, "f"))}
    for record in records:
        box.record(**({"at": MONO} | good | record))
        box.index %= 1 << 32
    for index, offset, value in words:
        box.word(box.slot(index) + offset, value)
    assert read(box.bytes()) is not None


json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=8,
)
changes = st.dictionaries(
    st.sampled_from(
        [
            "k",
            "name",
            "ranks",
            "inc",
            "device",
            "desc",
            "op",
            "dop",
            "in",
            "out",
            "root",
            "is",
            "os",
            "async",
            "rop",
            "f",
            "text",
        ]
    ),
    json,
    max_size=3,
)


@relaxed
@given(
    changes,
    changes,
    changes,
    changes,
    st.lists(json, max_size=3),
    st.dictionaries(
        st.sampled_from(["job", "host", "restart", "prefixes", "torch", "script", "boot_id"]),
        json,
        max_size=4,
    ),
)
def test_json_of_any_shape(
    group: dict, asked: dict, stack: dict, text: dict, threads: list, about: dict
) -> None:  # type: ignore[type-arg]
    box = Box()
    exception = box.blob({"k": "exception", "text": "x", "f": []} | text)
    box.word(336, exception)
    box.word(344, exception)
    box.record(
        group=box.blob({"k": "group", "name": "0", "ranks": "0-3"} | group),
        asked=box.blob({"k": "asked", "op": "all_reduce"} | asked),
        stack=box.blob({"k": "stack", "f": [["/a.py", 1, "f"]]} | stack),
        module=box.blob({"k": "text", "text": "x"} | text),
    )
    box.evidence(threads)
    box.about |= about
    box.write_header()
    assert read(box.bytes()) is not None


# --- contents made to cost as much as they can, all with right checksums


def full(capacity: int, *, blobs: Callable[[Box], int], what: str) -> Box:
    """A ring full of records, each with a blob of its own as long as there is room."""
    box = Box(capacity=capacity)
    good = {"group": box.group(), "asked": box.asked()}
    for _ in range(capacity):
        if box.head < box.side_size - 2 * 65_536:
            good[what] = blobs(box)
        box.record(**good)
    return box


def overlapping() -> Box:
    """Each record refers to another place of one long blob that claims a length of 64 KiB."""
    box = Box(capacity=2000)
    group, asked = box.group(), box.asked()
    for number in range(2000):
        position = box.head + 1 + number * 16
        at = box.side_at + position - 1
        box.data[at : at + 16] = (
            (65_536).to_bytes(4, "little") + bytes(4) + position.to_bytes(8, "little")
        )
        box.record(group=group, asked=asked, stack=position)
    box.word(280, box.head + 2000 * 16 + 65_536)
    return box


HOSTILE = {
    "many large sets of ranks": lambda: full(
        2000, what="group", blobs=lambda box: box.group(ranks=f"0-{499_999 - box.index}")
    ),
    "ranks refused late": lambda: full(
        2000, what="group", blobs=lambda box: box.group(ranks=f"0-400000,1-400{box.index}")
    ),
    "long stacks": lambda: full(
        2000, what="stack", blobs=lambda box: box.stack(*[("", 1, "")] * 6500)
    ),
    "many tensors": lambda: full(
        2000, what="asked", blobs=lambda box: box.asked(**{"in": [[[], ""]] * 9000})
    ),
    "long splits": lambda: full(
        2000,
        what="asked",
        blobs=lambda box: box.asked(**{"is": [1] * 20_000, "op": str(box.index)}),
    ),
    "overlapping blobs": overlapping,
    "many prefixes": lambda: Box(about={"prefixes": {"torch": ["/x"] * 200}}),
}


def reduce_codes() -> Box:
    """One large blob of what was asked, with another reduce op for each record."""
    box = Box(capacity=2000)
    group, asked = box.group(), box.asked(**{"in": [[[], ""]] * 9000})
    for number in range(2000):
        box.value(box.record(group=group, asked=asked), 176, number)
    return box


HOSTILE["reduce codes"] = reduce_codes


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_contents_cost_little(what: str) -> None:
    content = HOSTILE[what]().bytes()
    started = time.process_time()
    read_box(content)
    assert time.process_time() - started < 1.5  # 0.2 s at most; the rest is for slow machines
    tracemalloc.start()
    read_box(content)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 40 << 20


def test_the_largest_box_is_read() -> None:
    box = Box(capacity=L.CAPACITY_MAX)
    group, asked = box.group(), box.asked()
    for _ in range(1000):
        box.record(group=group, asked=asked, at=MONO)
    assert len(read_box(box.bytes()).collectives) == 1000
    box.write_header(capacity=L.CAPACITY_MAX + 1)
    with pytest.raises(FormatError):
        read_box(box.bytes())
