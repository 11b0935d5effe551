"""Finding the jobs on this node, and removing forgotten ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from watch_ranks import Rank

from commlens.blackbox import job_dirs
from commlens.watch.jobs import discard_forgotten

pytestmark = pytest.mark.launches


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[dict[str, Rank]]:
    folder = job_dirs.user_folder(tmp_path)
    made = {name: Rank(folder / name, 0, 1) for name in ("train-1", "train-2", "other")}
    yield made
    for rank in made.values():
        rank.end()


def test_the_memory_of_jobs_that_ended_long_ago_is_freed(
    tmp_path: Path, ranks: dict[str, Rank]
) -> None:
    folder = job_dirs.user_folder(tmp_path)
    for name in ("train-1", "train-2"):
        ranks[name].end()
    discard_forgotten([folder / "train-2"])
    assert {job.name for job in folder.iterdir()} == {"train-1", "train-2", "other"}, (
        "a day has not passed"
    )
    discard_forgotten([folder / "train-2"], after_s=0.0)
    assert {job.name for job in folder.iterdir()} == {"train-2", "other"}, (
        "its own stays, and the one that lives"
    )
