"""What the verbs say of jobs that nothing records."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from commlens.commands import main
from commlens.outside.find_ranks import FoundWorld
from commlens.processes.ranks import RankProcess


@pytest.mark.parametrize("verb", ["status", "top", "dump"])
def test_a_job_that_nothing_records_gets_the_command_that_looks_at_it(
    verb: str, tmp_path: Path, monkeypatch, capsys
):
    def ranks(first: int, numbers: list[int]) -> FoundWorld:
        return FoundWorld(
            [
                RankProcess(rank, first + at, 1, 2, rank, command="python train.py")
                for at, rank in enumerate(numbers)
            ],
            [],
        )

    monkeypatch.setenv("COMMLENS_BOX_DIR", str(tmp_path))
    for jobs, said in (
        (
            [ranks(41, [0, 1])],
            (
                "Ranks 0-1 of train.py (pid 41) run here without commlens, so nothing is recorded:"
                " `commlens attach 41` says"
            ),
        ),
        (
            [ranks(41, [1])],
            (
                "Rank 1 of train.py (pid 41) runs here without commlens, so nothing is recorded:"
                " `commlens attach 41` says"
            ),
        ),
        (
            [ranks(41, [0]), ranks(51, [-1, -1])],
            "2 processes of train.py (pid 51). `commlens attach PID` says whether one is stuck",
        ),
        ([], "Start one with `commlens launch`"),
    ):
        monkeypatch.setattr("commlens.outside.find_ranks.all_worlds", lambda jobs=jobs: jobs)
        assert main([verb]) == 3
        assert said in capsys.readouterr().err
    monkeypatch.setattr(
        "commlens.outside.find_ranks.find_worlds", lambda wanted: [ranks(41, [0, 1])]
    )
    assert main([verb, str(os.getpid())]) == 3
    assert "`commlens attach 41` says whether they are stuck, and where" in capsys.readouterr().err
