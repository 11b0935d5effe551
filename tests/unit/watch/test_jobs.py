"""Finding the jobs on this node, and removing forgotten ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from boxes import Box
from watch_ranks import Rank

from commlens.blackbox import job_dirs
from commlens.dumps.save import dump_name
from commlens.errors import CommandError, EvidenceError
from commlens.watch.jobs import discard_forgotten, find_jobs

pytestmark = pytest.mark.launches


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[dict[str, Rank]]:
    folder = job_dirs.user_folder(tmp_path)
    made = {name: Rank(folder / name, 0, 1) for name in ("train-1", "train-2", "other")}
    yield made
    for rank in made.values():
        rank.end()


def test_a_job_by_name_by_its_beginning_and_by_pid(tmp_path: Path, ranks: dict[str, Rank]) -> None:
    root = str(tmp_path)
    assert {job.name for job in find_jobs(None, root)} == {"train-1", "train-2", "other"}
    assert [job.name for job in find_jobs("train-2", root)] == ["train-2"]
    assert [job.name for job in find_jobs("oth", root)] == ["other"]
    assert [job.name for job in find_jobs(str(ranks["train-1"].pid), root)] == ["train-1"]
    assert find_jobs(str(job_dirs.user_folder(tmp_path) / "other"), root)[0].name == "other"
    with pytest.raises(CommandError, match=r"matches several jobs: \S+-train-1, \S+-train-2"):
        find_jobs("train", root)
    assert [
        job.name for job in find_jobs(dump_name([job_dirs.user_folder(tmp_path) / "other"]), root)
    ] == ["other"]
    with pytest.raises(CommandError, match=r"The jobs are .*other"):
        find_jobs("nothing-like-it", root)


def test_a_job_that_has_ended_is_found_by_name_only(tmp_path: Path, ranks: dict[str, Rank]) -> None:
    """Also if its pid is another process's now, or if its process ran in another container some
    minutes ago.
    """
    root, folder = str(tmp_path), job_dirs.user_folder(tmp_path)
    ranks["train-1"].end()
    reused = Box(
        0, 1, pid=ranks["other"].pid, job="reused", about=job_dirs.this_machine()._asdict()
    )
    reused.write(folder / "reused")
    Box(0, 1, pid=ranks["other"].pid, job="container").write(folder / "container")
    assert {job.name for job in find_jobs(None, root)} == {"train-2", "other"}
    assert [job.name for job in find_jobs(str(ranks["other"].pid), root)] == ["other"]
    assert [job.name for job in find_jobs("reused", root)] == ["reused"]
    for rank in ranks.values():
        rank.end()
    with pytest.raises(
        EvidenceError,
        match=(
            r"No recorded job runs on this machine\. These have ended and left black boxes:"
            r" .*train-1"
        ),
    ):
        find_jobs(None, root)


def test_a_process_that_is_not_recorded_gets_advice(tmp_path: Path, ranks: dict[str, Rank]) -> None:
    with pytest.raises(
        EvidenceError,
        match=rf"The process {os.getpid()} \(.*\) is not recorded.*COMMLENS=1.*py-spy dump",
    ):
        find_jobs(str(os.getpid()), str(tmp_path))


def test_no_job_at_all(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match="No job is recorded on this machine"):
        find_jobs(None, str(tmp_path))
    with pytest.raises(EvidenceError, match="no job is recorded on this machine"):
        find_jobs("train", str(tmp_path))


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
