"""A rank of torch 2.14 leaves a file for each backend: they are one dump, whatever their names."""

from __future__ import annotations

import pickle

from flight_recorder_dumps import dump, entry

from commlens import diagnose


def test_the_rings_of_two_backends_are_one_rank(tmp_path):
    stuck = {"state": "scheduled", "retired": False, "time_discovered_completed_ns": None}
    for rank in range(4):
        device = [entry(number, "nccl2:all_reduce") for number in range(20)]
        host = [entry(number, "gloo:all_reduce", process_group=("1", "host"), pg_id=1) for number in range(10)]
        if rank != 2:
            host.append(entry(10, "gloo:all_reduce", process_group=("1", "host"), pg_id=1, **stuck))
        groups = {name: {"name": name, "desc": desc, "ranks": "[0, 1, 2, 3]"} for name, desc in (("0", "default_pg"), ("1", "host"))}
        for backend, entries in (("nccl2", device), ("gloo", host)):
            (tmp_path / f"{backend}_rank_{rank}").write_bytes(pickle.dumps(dump(entries, pg_config=groups, pg_status={}), 2))
    verdict = diagnose([tmp_path])
    assert (verdict.kind, verdict.culprits, verdict.collective.op) == ("missing", [2], "all_reduce")
    assert not any("left out" in text or "newest is used" in text for text in verdict.missing_evidence), verdict.missing_evidence
