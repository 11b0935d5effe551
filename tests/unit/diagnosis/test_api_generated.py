"""Generated dumps, of thousands of ranks if need be, have the form that torch gives them, and every
injected fault is found in them.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from pathlib import Path

import pytest
from _diagnosing import commlens, grade
from chosen import WHOLE, long
from dumpgen import MESHES, Conditions, Job
from dumpgen.faults import Fault, Injection, Site, Truth, by_name, possible, swapped
from dumpgen.mesh import FLAT_MESHES, MEGATRON_MESHES, Mesh

from commlens import diagnose

TORCH_WRITES = {
    "PROTO",
    "EMPTY_DICT",
    "EMPTY_LIST",
    "MARK",
    "BINUNICODE",
    "BINPUT",
    "LONG_BINPUT",
    "BINGET",
    "LONG_BINGET",
    "BININT1",
    "BININT2",
    "BININT",
    "LONG1",
    "NONE",
    "NEWTRUE",
    "NEWFALSE",
    "TUPLE2",
    "APPENDS",
    "SETITEMS",
    "BINFLOAT",
    "STOP",
}
"""The opcodes of torch's own pickler, as real dumps show them."""

ENTRY = [
    "frames",
    "record_id",
    "pg_id",
    "process_group",
    "thread_name",
    "thread_id",
    "collective_seq_id",
    "p2p_seq_id",
    "op_id",
    "profiling_name",
    "time_created_ns",
    "input_sizes",
    "input_dtypes",
    "output_sizes",
    "output_dtypes",
    "state",
    "time_discovered_started_ns",
    "time_discovered_completed_ns",
    "retired",
    "timeout_ms",
    "is_p2p",
]
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
        assert (
            (entry["state"] == "completed")
            == (entry["time_discovered_completed_ns"] is not None)
            == entry["retired"]
        )


def test_versions_differ_as_torchs_do() -> None:
    for version, keys in {
        "2.3": {"pg_status"},
        "2.7": {"pg_status", "nccl_version"},
        "2.10": {"pg_status", "comm_lib_version"},
    }.items():
        dump = load(
            next(
                Job(
                    MESHES[16],
                    by_name("healthy-done"),
                    Conditions(version=version, history=1, timing=True),
                ).files()
            )[1]
        )
        assert set(dump) == {"version", "pg_config", "entries", *keys}
        assert ("thread_id" in dump["entries"][0]) == (version == "2.10")
        assert dump["entries"][0]["duration_ms"] > 0


def test_ranks_meet_in_what_they_completed(hanging: dict[int, bytes]) -> None:
    """Members of a group agree on what each sequence number was; the culprit has completed all that
    it issued, the others have not.
    """
    asked: dict[tuple[str, int], set[tuple[object, ...]]] = {}
    for rank, data in hanging.items():
        entries = load(data)["entries"]
        assert (all(entry["state"] == "completed" for entry in entries)) == (rank == 11)
        for entry in entries:
            if not entry["is_p2p"]:
                about = (
                    entry["profiling_name"],
                    str(entry["input_sizes"]),
                    str(entry["output_sizes"]),
                )
                asked.setdefault(
                    (entry["process_group"][0], entry["collective_seq_id"]), set()
                ).add(about)
    assert len(asked) > 1000
    assert all(len(different) == 1 for different in asked.values())


@pytest.mark.launches
def test_a_job_is_the_same_each_time_and_in_several_processes(tmp_path: Path) -> None:
    for name, processes in (("one", 1), ("two", 2)):
        Job(MESHES[16], by_name("swap"), Conditions(history=2)).write(
            tmp_path / name, processes=processes
        )
    assert len(list((tmp_path / "one").iterdir())) == 16
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def assert_right(mesh: Mesh, fault: str, folder: Path, conditions: Conditions) -> None:
    job = Job(mesh, by_name(fault), conditions)
    job.write(folder)
    answer = commlens(folder)
    assert grade(answer, job.truth) == "right", f"{answer}, the truth is {job.truth}"


SHORT = Conditions(history=6, ring=800)


QUICK = Conditions(history=3, ring=800)
WIDE = Conditions(history=10) if WHOLE else QUICK
OF_OTHER_DIMENSIONS = {
    "stuck-before-dp",
    "stuck-before-world",
    "dead-before-world",
    "mismatch-shape-tp",
    "skipped-dp",
    "extra-world",
    "lost-send-backward",
    "stuck-inside-dp",
    "stuck-inside-world",
    "several-apart",
}
"""Faults like others, in another dimension of the mesh or on more ranks."""


FAULTS = [fault.name for fault in possible(MESHES[16])]
IN_8 = {fault.name for fault in possible(MESHES[8])} - OF_OTHER_DIMENSIONS


@pytest.mark.parametrize(
    ("fault", "size"),
    [
        *[(fault, 8) for fault in FAULTS if fault in IN_8],
        *[long(fault, 16, when=fault in IN_8 | OF_OTHER_DIMENSIONS) for fault in FAULTS],
    ],
)
def test_every_fault_is_found(tmp_path: Path, fault: str, size: int) -> None:
    assert_right(MESHES[size], fault, tmp_path, QUICK if size == 8 else WIDE)


@pytest.mark.parametrize(
    "fault",
    [long("stuck-before-tp"), "swap", long("mismatch-op"), "lost-send", "healthy-running"],
)
def test_faults_are_found_without_history_stacks_and_common_clocks(
    tmp_path: Path, fault: str
) -> None:
    assert_right(
        MESHES[16], fault, tmp_path, Conditions(version="2.3", stacks=False, history=4, skew_s=2.0)
    )


@pytest.mark.parametrize(
    "mesh",
    [long(MEGATRON_MESHES[16]), long(FLAT_MESHES[16]), FLAT_MESHES[8]],
    ids=["megatron", "flat", "flat-8"],
)
@pytest.mark.parametrize(
    "fault",
    [
        "stuck-before-tp",
        long("two-stuck"),
        long("mismatch-shape"),
        "stuck-inside-tp",
        "straggler",
        "healthy-running",
    ],
)
def test_faults_are_found_in_other_jobs(tmp_path: Path, mesh: Mesh, fault: str) -> None:
    assert_right(mesh, fault, tmp_path, Conditions(timing=True, batched_p2p=True, history=4))


@pytest.mark.parametrize("conditions", [Conditions(), SHORT], ids=["plain", "short"])
def test_a_job_half_of_whose_ranks_are_in_what_others_completed_is_running(
    tmp_path: Path, conditions: Conditions
) -> None:
    assert_right(FLAT_MESHES[8], "healthy-running", tmp_path, conditions)


@pytest.mark.parametrize("mesh", [MESHES[16], MEGATRON_MESHES[16]], ids=["plain", "megatron"])
def test_a_running_job_shows_in_dumps_of_what_is_in_flight(tmp_path: Path, mesh: Mesh) -> None:
    assert_right(
        mesh,
        "healthy-running",
        tmp_path,
        Conditions(version="2.9", stacks=False, in_flight_only=True),
    )


_TIMEOUT = (
    "[rank1]:[E1122 07:21:08 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective"
    " operation timeout: WorkNCCL(SeqNum=41, OpType=ALLREDUCE, NumelIn=100, NumelOut=100,"
    " Timeout(ms)=600000) ran for 600009 milliseconds before timing out.\n"
)


@pytest.mark.parametrize("mesh", [MESHES[8], FLAT_MESHES[16]], ids=["8", "flat-16"])
def test_groups_in_one_collective_may_be_running_unless_a_log_tells_of_a_timeout(
    tmp_path: Path, mesh: Mesh
) -> None:
    Job(mesh, by_name("healthy-running"), QUICK).write(tmp_path)
    verdict = diagnose(tmp_path)
    assert (verdict.is_fault, verdict.culprits, verdict.confidence) == (False, [], "low")
    assert verdict.summary.endswith(
        "groups named mesh_fsdp; these dumps do not tell whether it is stuck or was under way"
    )
    (tmp_path / "train.log").write_text(_TIMEOUT)
    assert diagnose(tmp_path).kind == "stuck-inside"


@pytest.mark.long  # as stuck-and-mismatch above
def test_two_faults_of_64_ranks_are_two_root_causes(tmp_path: Path) -> None:
    assert_right(MESHES[64], "stuck-and-mismatch", tmp_path, SHORT)


@pytest.mark.parametrize("history", [0, 3], ids=["first-step", "later"])
@pytest.mark.parametrize(
    ("mesh", "ranks", "site"),
    [
        (Mesh(1, 4, 4), (4, 14), "clip_gradients"),
        long(Mesh(1, 4, 8), (10, 19), "reduce_gradients"),
        long(Mesh(1, 8, 8), (21, 27), "reduce_gradients"),
    ],
    ids=["16", "32", "64"],
)
def test_both_ranks_that_swap_two_groups_are_named(
    tmp_path: Path, mesh: Mesh, ranks: tuple[int, int], site: str, history: int
) -> None:
    """Of all others, most wait in the same collectives as these two; only the order in which they
    were enqueued tells them apart.
    """

    def inject(at: Site) -> Injection:
        ops = at.steps[0]
        place = max(
            i
            for i in range(len(ops) - 1)
            if ops[i].site == site and {ops[i].role, ops[i + 1].role} == {"tp", "dp"}
        )
        return Injection(
            Truth(("cycle",), ranks), edits=dict.fromkeys(ranks, lambda ops: swapped(ops, place))
        )

    for in_flight_only in (False, True) if history else (False,):
        conditions = Conditions(history=history, ring=800, in_flight_only=in_flight_only)
        folder = tmp_path / str(in_flight_only)
        Job(
            mesh,
            Fault("two-swap", "two ranks call two groups in the other order", inject),
            conditions,
        ).write(folder)
        verdict = diagnose(folder)
        assert (verdict.kind, tuple(verdict.culprits)) == ("cycle", ranks), verdict.summary
        assert not re.search(r"rank (\d+) waits[^;.]*for rank \1\b", verdict.explanation)
