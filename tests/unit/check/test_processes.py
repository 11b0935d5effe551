"""Tests of src/commlens/check/processes.py, with real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from object_chain import SIZE, chain

from commlens.check import processes
from commlens.check.processes import RankProcesses
from commlens.check.run_rank import warm_up

pytestmark = pytest.mark.launches  # forks ranks


@pytest.mark.parametrize("memory", [1 << 30, 0])
def test_each_rank_starts_once_if_the_memory_suffices(
    memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_WAITING_MAX", memory)
    warm_up()
    ranks = RankProcesses(chain(tmp_path))
    sequences = ranks.sequences_of(range(SIZE))
    starts = (tmp_path / "starts").read_text().split()
    assert set(starts) == {"0", "1", "2", "3"}
    assert (len(starts) == SIZE) is (memory > 0)
    assert [ranks.outputs[rank] for rank in range(SIZE)] == [
        f"rank {rank} has {5 + rank}\n" for rank in range(SIZE)
    ]
    assert not any(sequence.problem for sequence in sequences.values())


def test_what_ranks_know_does_not_depend_on_the_number_of_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_WAITING_MAX", 0)
    warm_up()
    starts = []
    for cpus in (1, SIZE):
        monkeypatch.setattr(processes.os, "sched_getaffinity", lambda pid, n=cpus: range(n))
        folder = tmp_path / str(cpus)
        folder.mkdir()
        RankProcesses(chain(folder)).sequences_of(range(SIZE))
        starts.append(sorted((folder / "starts").read_text().split()))
    assert starts[0] == starts[1]


def test_others_need_not_import_what_a_first_rank_that_waits_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported: list[tuple[str, ...]] = []
    monkeypatch.setattr(processes, "import_modules", imported.append)
    warm_up()
    RankProcesses(chain(tmp_path)).sequences_of([1, 2])
    assert len(imported) == 1
