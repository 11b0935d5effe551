"""Generated dumps, of thousands of ranks if need be, have the form that torch gives them, and every injected fault is found in them."""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path

import pytest
from dumpgen import MESHES, Conditions, Job
from dumpgen.faults import by_name

TORCH_WRITES = {
    "PROTO", "EMPTY_DICT", "EMPTY_LIST", "MARK", "BINUNICODE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "BININT1", "BININT2",
    "BININT", "LONG1", "NONE", "NEWTRUE", "NEWFALSE", "TUPLE2", "APPENDS", "SETITEMS", "BINFLOAT", "STOP",
}  # fmt: skip
"""The opcodes of torch's own pickler, as real dumps show them."""

ENTRY = [
    "frames", "record_id", "pg_id", "process_group", "thread_name", "thread_id", "collective_seq_id", "p2p_seq_id", "op_id",
    "profiling_name", "time_created_ns", "input_sizes", "input_dtypes", "output_sizes", "output_dtypes", "state",
    "time_discovered_started_ns",
    "time_discovered_completed_ns", "retired", "timeout_ms", "is_p2p",
]  # fmt: skip
"""The keys of an entry in format 2.10, in torch's order."""


def load(data: bytes) -> dict:
    return pickle.Unpickler(io.BytesIO(data)).load()


@pytest.fixture(scope="module")
def hanging() -> dict[int, bytes]:
    return dict(Job(MESHES[16], by_name("stuck-before-tp")).files())


def test_files_are_as_torch_writes_them(hanging: dict[int, bytes]) -> None:
    assert {opcode.name for opcode, _, _ in pickletools.genops(hanging[0])} <= TORCH_WRITES
    dump = load(hanging[0])
    assert list(dump) == ["version", "pg_config", "comm_lib_version", "pg_status", "entries"]
    assert len(dump["entries"]) == 2000
    assert [entry["record_id"] for entry in dump["entries"]] == list(
        range(dump["entries"][0]["record_id"], dump["entries"][-1]["record_id"] + 1)
    )
    for entry in dump["entries"]:
        assert list(entry) == ENTRY
        assert dump["pg_config"][entry["process_group"][0]]["desc"] == entry["process_group"][1]
        assert (entry["state"] == "completed") == (entry["time_discovered_completed_ns"] is not None) == entry["retired"]


def test_versions_differ_as_torchs_do() -> None:
    for version, keys in {"2.3": {"pg_status"}, "2.7": {"pg_status", "nccl_version"}, "2.10": {"pg_status", "comm_lib_version"}}.items():
        dump = load(next(Job(MESHES[16], by_name("healthy-done"), Conditions(version=version, history=1, timing=True)).files())[1])
        assert set(dump) == {"version", "pg_config", "entries", *keys}
        assert ("thread_id" in dump["entries"][0]) == (version == "2.10")
        assert dump["entries"][0]["duration_ms"] > 0


def test_ranks_meet_in_what_they_completed(hanging: dict[int, bytes]) -> None:
    """Members of a group agree on what each sequence number was; the culprit has completed all that it issued, the others have not."""
    asked: dict[tuple[str, int], set[tuple[object, ...]]] = {}
    for rank, data in hanging.items():
        entries = load(data)["entries"]
        assert (all(entry["state"] == "completed" for entry in entries)) == (rank == 11)
        for entry in entries:
            if not entry["is_p2p"]:
                about = (entry["profiling_name"], str(entry["input_sizes"]), str(entry["output_sizes"]))
                asked.setdefault((entry["process_group"][0], entry["collective_seq_id"]), set()).add(about)
    assert len(asked) > 1000
    assert all(len(different) == 1 for different in asked.values())


def test_a_job_is_the_same_each_time_and_in_several_processes(tmp_path: Path) -> None:
    for name, processes in (("one", 1), ("two", 2)):
        Job(MESHES[16], by_name("swap"), Conditions(history=2)).write(tmp_path / name, processes=processes)
    assert len(list((tmp_path / "one").iterdir())) == 16
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
