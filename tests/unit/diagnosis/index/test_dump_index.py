"""Dumps of torch 2.15's hook recorders: they see what is issued, and of NCCL's own backends also
which collectives complete.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from flight_recorder_dumps import dump, entry
from goldens import hold

from commlens import Verdict, diagnose

OPEN = {"state": "scheduled", "retired": False, "time_discovered_completed_ns": None}
ISSUED = {"state": "scheduled", "retired": True, "time_discovered_completed_ns": None}
STATUS = {
    "0": {
        "last_enqueued_collective": 40,
        "last_started_collective": -1,
        "last_completed_collective": 40,
    }
}
"""It counts all calls of the group, messages and captured ones, too."""


def judge(folder: Path, ranks: dict[int, list[dict[str, Any]]]) -> Verdict:
    for rank, entries in ranks.items():
        for place, one in enumerate(entries):
            one["record_id"] = place
        groups = {"0": {"name": "0", "desc": "default_pg", "ranks": str([*ranks])}}
        content = dump(entries, pg_config=groups, pg_status=STATUS)
        (folder / f"rank_{rank}").write_bytes(pickle.dumps(content, 2))
    return diagnose([folder])


def collectives(backend: str, count: int, **last: Any) -> list[dict[str, Any]]:
    """All completed but the last one, if that is given."""
    common = ISSUED if backend not in ("nccl2", "nccl-lazy") else {}
    found = [entry(number, f"{backend}:all_reduce", **common) for number in range(count)]
    found[-1].update(last)
    return found


@pytest.mark.parametrize("backend", ["nccl2", "nccl-lazy"])
def test_a_rank_did_not_issue_what_its_status_seems_to_count(tmp_path: Path, backend: str) -> None:
    """Captured collectives have no entry, and are counted there."""
    ranks = {rank: collectives(backend, 5, **OPEN) for rank in range(3)}
    ranks[1] = collectives(backend, 4)
    verdict = judge(tmp_path, ranks)
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("missing", [1], [0, 2])
    assert verdict.collective is not None and verdict.collective.sequence_number == 5


@pytest.mark.parametrize("backend", ["ucc", "mpi", "myplugin"])
def test_a_backend_that_tells_no_completion(tmp_path: Path, backend: str) -> None:
    """A collective that not all have issued is in flight, whatever its state."""
    (tmp_path / "hung").mkdir()
    ranks = {rank: collectives(backend, 4 if rank == 1 else 5) for rank in range(3)}
    verdict = judge(tmp_path / "hung", ranks)
    assert (verdict.kind, verdict.culprits, verdict.confidence) == ("missing", [1], "low")
    assert verdict.collective is not None and verdict.collective.sequence_number == 5
    (tmp_path / "alike").mkdir()
    verdict = judge(tmp_path / "alike", {rank: collectives(backend, 5) for rank in range(3)})
    assert (verdict.kind, verdict.culprits) == ("undetermined", [])
    if backend == "ucc":
        hold("undetermined/only-issued", verdict)


@pytest.mark.parametrize("backend", ["nccl2", "nccl-lazy"])
def test_the_messages_of_a_batch_are_completed_when_issued(tmp_path: Path, backend: str) -> None:
    def batch(rank: int, step: int) -> list[dict[str, Any]]:
        ahead, behind = (rank + 1) % 3, (rank - 1) % 3
        names = f"{backend}:send {rank}->{ahead}", f"{backend}:recv {rank}<-{behind}"
        return [entry(2 * step + place, name) for place, name in enumerate(names)]

    steps = {0: 3, 1: 2, 2: 3}
    (tmp_path / "hung").mkdir()
    verdict = judge(
        tmp_path / "hung",
        {
            rank: [one for step in range(many) for one in batch(rank, step)]
            for rank, many in steps.items()
        },
    )
    assert (verdict.kind, verdict.culprits) == ("missing", [1])
    (tmp_path / "alike").mkdir()
    alike = {rank: [one for step in range(3) for one in batch(rank, step)] for rank in steps}
    verdict = judge(tmp_path / "alike", alike)
    assert (verdict.kind, verdict.culprits) == ("undetermined", [])


def test_a_call_that_the_backend_rejected_is_no_wait(tmp_path: Path) -> None:
    """Its entry stays "scheduled" for ever, and the program goes on."""
    ranks = {rank: collectives("nccl2", 8, **OPEN) for rank in range(3)}
    ranks[1] = collectives("nccl2", 7)
    for entries in ranks.values():
        entries[2].update(OPEN)
    verdict = judge(tmp_path, ranks)
    assert (verdict.kind, verdict.culprits) == ("missing", [1])
    assert verdict.collective is not None and verdict.collective.sequence_number == 8


def of_torchcomms(calls: list[tuple[str, str]], *, lost: int = 0) -> dict[str, Any]:
    """A dump of torchcomms' recorder, which numbers the calls of all communicators in one row."""
    entries = [
        entry(
            number,
            f"nccl:{op}",
            **ISSUED,
            process_group=(name, "ncclx"),
            collective_seq_id=number,
            p2p_seq_id=0,
            is_p2p=False,
        )
        for number, (name, op) in enumerate(calls)
    ]
    ranks = {"world": "0,1,2", "tp": "0,1"}
    groups = {name: {"name": name, "desc": "ncclx", "ranks": ranks[name]} for name, _ in calls}
    return dump(entries[lost:], pg_config=groups, pg_status={})


@pytest.mark.parametrize("lost", [0, 1])
def test_torchcomms_numbers_all_communicators_in_one_row(tmp_path: Path, lost: int) -> None:
    """Calls of another communicator and messages do not shift the numbers of a communicator; where
    entries are lost, nothing tells which calls are the same.
    """
    steps = [("world", "all_reduce")] * 3
    ranks = {
        0: [("tp", "all_reduce"), ("tp", "send"), *steps, ("world", "broadcast")],
        1: [("tp", "all_reduce"), ("tp", "recv"), *steps],
        2: [*steps, ("world", "broadcast")],
    }
    for rank, calls in ranks.items():
        content = of_torchcomms(calls, lost=lost)
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps(content, 2))
    verdict = diagnose([tmp_path])
    if lost:
        assert (verdict.kind, verdict.culprits) == ("undetermined", [])
    else:
        assert (verdict.kind, verdict.culprits, verdict.victims) == ("missing", [1], [0, 2])
        assert verdict.collective is not None
        assert (verdict.collective.op, verdict.collective.sequence_number) == ("broadcast", 4)
