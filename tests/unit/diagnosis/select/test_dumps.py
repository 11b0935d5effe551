"""A rank of torch 2.14 leaves a file for each backend: they are one dump, whatever their names."""

from __future__ import annotations

import pickle

import pytest
from flight_recorder_dumps import dump, entry
from goldens import hold

from commlens import diagnose


@pytest.mark.parametrize("group", [("0", "default_pg"), ("1", "dp")])
def test_a_rank_without_a_dump_is_the_suspect_not_the_rank_that_still_waits(tmp_path, group):
    """After a crash, gloo's works end on the ranks that notice it. Its dumps do not list the
    groups' ranks.
    """
    for rank in (0, 2, 3):
        entries = [
            entry(number, "gloo:all_reduce", process_group=group, state="scheduled")
            for number in range(7)
        ]
        entries[-1]["retired"] = rank != 3
        (tmp_path / f"rank_{rank}").write_bytes(
            pickle.dumps(dump(entries, pg_config={"": {}}, pg_status={}), 2)
        )
    verdict = diagnose([tmp_path])
    assert (verdict.culprits, verdict.victims, verdict.collective.sequence_number) == ([1], [3], 7)
    if group[1] == "dp":
        hold("dead/left-no-record-of-a-group", verdict)


def test_the_rings_of_two_backends_are_one_rank(tmp_path):
    stuck = {"state": "scheduled", "retired": False, "time_discovered_completed_ns": None}
    for rank in range(4):
        device = [entry(number, "nccl2:all_reduce") for number in range(20)]
        host = [
            entry(number, "gloo:all_reduce", process_group=("1", "host"), pg_id=1)
            for number in range(10)
        ]
        if rank != 2:
            host.append(entry(10, "gloo:all_reduce", process_group=("1", "host"), pg_id=1, **stuck))
        groups = {
            name: {"name": name, "desc": desc, "ranks": "[0, 1, 2, 3]"}
            for name, desc in (("0", "default_pg"), ("1", "host"))
        }
        for backend, entries in (("nccl2", device), ("gloo", host)):
            (tmp_path / f"{backend}_rank_{rank}").write_bytes(
                pickle.dumps(dump(entries, pg_config=groups, pg_status={}), 2)
            )
    verdict = diagnose([tmp_path])
    assert (verdict.kind, verdict.culprits, verdict.collective.op) == ("missing", [2], "all_reduce")
    assert not any(
        "left out" in text or "newest is used" in text for text in verdict.missing_evidence
    ), verdict.missing_evidence
