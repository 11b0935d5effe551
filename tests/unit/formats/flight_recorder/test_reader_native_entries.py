"""The reader in C and the reader in Python: one result, whatever the file; and no file does any
harm.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chosen import examples
from flight_recorder_dumps import dump, entry
from hypothesis import given, settings
from hypothesis import strategies as st

from commlens.errors import FormatError
from commlens.formats.flight_recorder import entries, pickle_data, reader
from commlens.formats.flight_recorder.reader import read_flight_recorder_pickle
from commlens.formats.flight_recorder.table import COLUMNS, EntryColumns
from commlens.formats.flight_recorder.to_columns import columns_from_table

needs_native = pytest.mark.skipif(not reader.AVAILABLE, reason="the reader in C was not built here")


def in_python(data: bytes) -> EntryColumns:
    value, truncated = pickle_data.read_pickle(data)
    return entries.build_table(value, truncated=truncated)


def plain(table: EntryColumns) -> dict[str, Any]:
    """A table as lists, whoever made it."""
    columns = {}
    for name, kind in COLUMNS.items():
        value = table.columns.get(name, ())
        packed = isinstance(value, bytes)
        columns[name] = (np.frombuffer(value, kind) if packed else np.asarray(value, kind)).tolist()
    return {name: getattr(table, name) for name in EntryColumns.__slots__} | {"columns": columns}


def a_step(number: int) -> list[dict[str, Any]]:
    first = 10 * number
    stack = [
        {"name": "all_reduce", "filename": "/x/torch/distributed/distributed_c10d.py", "line": 3},
        *entry(0)["frames"],
    ]
    return [
        entry(first, frames=stack, duration_ms=0.25 * number),
        entry(
            first + 1,
            "nccl:_all_gather_base",
            input_sizes=[[1024, 1024]],
            output_sizes=[[4096, 1024]],
            state="started",
        ),
        entry(first + 2, "nccl:send 0->1", process_group=("3", "pipe"), pg_id=1),
        entry(
            first + 3,
            "nccl:coalesced",
            input_sizes=[],
            output_sizes=None,
            input_dtypes=[],
            frames=[],
            is_p2p=True,
        ),
        entry(
            first + 4,
            state="scheduled",
            retired=False,
            time_discovered_completed_ns=None,
            pg_id=1 << 40,
        ),
    ]


def a_dump(steps: int = 8) -> dict[str, Any]:
    return dump(
        [one for step in range(steps) for one in a_step(step)],
        nccl_comm_state={"0x5": {"rank": "3", "list": [1, 2.5, None]}},
    )


def all_read_alike(data: bytes) -> None:
    """What C makes of it, Python makes of it too; and Python knows no way to fail but one."""
    fast = reader.read_table(data)
    try:
        slow = in_python(data)
    except FormatError as error:
        assert fast is None, f"Python refuses what C reads: {error}"
        return
    if fast is not None:
        assert plain(fast) == plain(slow)
    columns_from_table(slow, "file")  # cleans the table's texts


@needs_native
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_both_read_the_same(protocol):
    data = pickle.dumps(a_dump(300), protocol)
    fast = reader.read_table(data)
    assert fast is not None and len(fast) == 1500
    assert plain(fast) == plain(in_python(data))


@needs_native
def test_both_read_the_same_of_real_dumps(shared_data: Path):
    for path in sorted(shared_data.glob("megatron_moe_16ranks/*/_dump_*")):
        data = path.read_bytes()
        fast = reader.read_table(data)
        assert fast is not None, path
        assert plain(fast) == plain(in_python(data)), path


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(a_dump(), 0),
        pickle.dumps(dump([entry(0, state="lost")]), 2),
        pickle.dumps(dump([entry(0), None]), 2),
        pickle.dumps(dump([entry(0)] * 2), 2),
        pickle.dumps(dump([entry(1 << 70)]), 2),
        pickle.dumps(dump([entry(0, something=entry(1))]), 2),
        pickle.dumps(
            {1: 2, **dump([entry(0, frames=[{"name": "\udc80", "filename": "", "line": None}])])}, 4
        ),
        pickle.dumps(
            dump([entry(0, duration_ms=float("nan")), entry(1, duration_ms=float("inf"))]), 4
        ),
        pickle.dumps({"version": "2.2", "entries": [{**entry(0), "seq_id": 7}]}, 2),
        pickle.dumps([entry(0)], 2),
        pickle.dumps(a_dump(), 2)[:-40],
        b"\x80\x02.",
        b"\x80\x02}q\x00.",
        b"",
    ],
)
def test_what_is_odd_python_reads_alone_or_nobody(data):
    all_read_alike(data)


DATA = [pickle.dumps(a_dump(3), protocol) for protocol in (2, 4)]


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_damaged_files(data):
    damaged = bytearray(data.draw(st.sampled_from(DATA)))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        what = data.draw(st.sampled_from(["set", "cut", "insert", "swap", "opcode"]))
        if what == "set":
            damaged[at] = data.draw(st.integers(0, 255))
        elif what == "opcode":
            damaged[at] = data.draw(
                st.sampled_from(b"hjKMJ\x8aGNX\x8cqr\x94(]}eastu\x85\x86\x87.0")
            )
        elif what == "cut":
            del damaged[at : at + data.draw(st.integers(1, 40))]
        elif what == "insert":
            damaged[at:at] = data.draw(st.binary(min_size=1, max_size=12))
        else:
            other = data.draw(st.integers(0, len(damaged) - 1))
            damaged[at : at + 9], damaged[other : other + 9] = (
                damaged[other : other + 9],
                damaged[at : at + 9],
            )
        if not damaged:
            damaged = bytearray(b".")
    all_read_alike(bytes(damaged))


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(
        st.dictionaries(
            st.sampled_from([*entry(0), "duration_ms", "seq_id", "id"]), values, max_size=3
        ),
        max_size=4,
    ),
    st.dictionaries(
        st.sampled_from(["version", "pg_config", "pg_status", "entries", "more"]),
        values,
        max_size=2,
    ),
    st.integers(2, 5),
)
def test_any_value_in_any_place(changes, others, protocol):
    value = {
        **dump([{**entry(number), **change} for number, change in enumerate(changes)]),
        **others,
    }
    all_read_alike(pickle.dumps(value, protocol))


class Harm:
    """Unpickled as pickle does it, this makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_nothing_is_called(protocol, tmp_path):
    path = tmp_path / "made"
    data = pickle.dumps(dump([entry(0)], more=Harm(path)), protocol)
    assert reader.read_table(data) is None
    with pytest.raises(FormatError, match="asks to import or call something"):
        read_flight_recorder_pickle(data, "evil")
    assert not path.exists()


def shared(levels: int) -> Any:
    value: Any = ["laugh"] * 10
    for _ in range(levels):
        value = [value] * 10
    return value


def tuples(levels: int) -> Any:
    value: Any = ()
    for _ in range(levels):
        value = (value, value)
    return value


BOMBS = {
    "an index of the memo": b"\x80\x02}q\x00X\x07\x00\x00\x00entriesr\xff\xff\xff\x7f]s.",
    "a text that is not there": b"\x80\x02}X\xff\xff\xff\x7fabc",
    "bytes that are not there": b"\x80\x04}\x8e\xff\xff\xff\xff\xff\xff\xff\x7fabc",
    "a long integer": (
        b"\x80\x02}X\x07\x00\x00\x00entries\x8b\x00\x00\x10\x00" + b"\x7f" * (1 << 20) + b"s."
    ),
    "lists in lists": (
        b"\x80\x02}X\x07\x00\x00\x00entries" + b"]" * 200_000 + b"a" * 199_999 + b"s."
    ),
    "marks in marks": b"\x80\x02" + b"(" * 200_000,
    "a list that holds itself": b"\x80\x02}X\x07\x00\x00\x00entries]q\x01h\x01as.",
    "a dump that holds itself": b"\x80\x02}q\x00X\x07\x00\x00\x00entries]h\x00as.",
    "sizes of sizes": pickle.dumps(dump([entry(0, input_sizes=shared(12))]), 4),
    "sizes shared by all": pickle.dumps(
        dump(
            [
                entry(n, input_sizes=s, output_sizes=s)
                for s in [[[1] * 3000] * 300]
                for n in range(30)
            ]
        ),
        4,
    ),
    "frames shared by all": pickle.dumps(
        dump([entry(n, frames=f) for f in [entry(0)["frames"] * 30_000] for n in range(800)]), 4
    ),
    "groups of groups": pickle.dumps(dump([], pg_config=shared(12), pg_status=tuples(40)), 4),
    "tuples as keys": (
        pickle.dumps(dump([entry(0, profiling_name=tuples(60), process_group=tuples(60))]), 4)[:-1]
        + pickle.dumps(tuples(60), 4)[2:-1]
        + b"Ns."
    ),
    "ranks": pickle.dumps(
        dump([entry(0)], pg_config={"0": {"name": "0", "desc": "", "ranks": "[" + "[" * 100_000}}),
        4,
    ),
}


@pytest.mark.launches
@pytest.mark.parametrize("name", BOMBS)
def test_no_file_takes_much_time_or_memory(name):
    code = textwrap.dedent("""
        import resource, sys
        from commlens.diagnosis.index.columns import reduce_all
        from commlens.errors import FormatError
        import commlens.formats.flight_recorder.reader as fr
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
        data = sys.stdin.buffer.read()
        try:
            rows = fr.read_flight_recorder_pickle(data, "bomb")
            reduce_all([rows])
        except FormatError as error:
            print(error)
        """)
    began = time.monotonic()
    environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # its threads take address space
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=BOMBS[name],
        env=environ,
        capture_output=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    assert time.monotonic() - began < 100
