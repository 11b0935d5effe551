"""Tests of src/commlens/check/processes.py, with real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from object_chain import SIZE, chain

from commlens.check import processes
from commlens.check.processes import Ranks
from commlens.check.run_rank import warm_up


@pytest.mark.parametrize("memory", [1 << 30, 0])
def test_each_rank_starts_once_if_the_memory_suffices(
    memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_WAITING_MAX", memory)
    warm_up()
    ranks = Ranks(chain(tmp_path))
    sequences = ranks.run(range(SIZE))
    starts = (tmp_path / "starts").read_text().split()
    assert set(starts) == {"0", "1", "2", "3"}
    assert (len(starts) == SIZE) is (memory > 0)
    assert [ranks.outputs[rank] for rank in range(SIZE)] == [
        f"rank {rank} has {5 + rank}\n" for rank in range(SIZE)
    ]
    assert not any(sequence.problem for sequence in sequences.values())
