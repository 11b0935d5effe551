"""A rank that makes the others wait again and again."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from flight_recorder_dumps import dump, entry
from goldens import hold

from commlens.diagnosis.api import diagnose


@pytest.mark.parametrize(("late", "kind"), [(4, "healthy"), (9, "straggler")])
def test_a_rank_that_was_last_a_few_times_is_no_straggler(
    tmp_path: Path, late: int, kind: str
) -> None:
    for rank in range(4):
        entries = []
        for number in range(24):
            at = 1_700_000_000_000_000_000 + number * 15_000_000
            came = at + (11_000_000 if rank == 2 and number % 2 and number // 2 < late else 0)
            entries.append(
                entry(number, time_created_ns=came, time_discovered_completed_ns=at + 12_000_000)
            )
        status = {
            "0": {
                "last_enqueued_collective": 24,
                "last_started_collective": 24,
                "last_completed_collective": 24,
            }
        }
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(
            pickle.dumps(dump(entries, pg_status=status))
        )
    verdict = diagnose(tmp_path)
    assert (verdict.kind, verdict.culprits) == (kind, [2] if kind == "straggler" else [])
    hold(f"{kind}/last-{late}-times", verdict)
