"""The verdict that rank 0 hands over."""

from __future__ import annotations

from pathlib import Path

from commlens.blackbox import job_dirs
from commlens.model.verdict import Verdict
from commlens.watch.diverged import take_verdict


def hand_over(folder: Path, content: bytes) -> None:
    (folder / f"{job_dirs.NUMBERS_VERDICT}17").write_bytes(job_dirs.NUMBERS_HEAD + content)


def test_it_is_taken_once(tmp_path: Path) -> None:
    verdict = Verdict(kind="diverged", summary="rank 3 differs")
    hand_over(tmp_path, verdict.to_json())
    taken = take_verdict([tmp_path / "none", tmp_path])
    assert taken is not None
    assert (taken.kind, taken.summary) == ("diverged", "rank 3 differs")
    assert take_verdict([tmp_path]) is None


def test_a_damaged_one_is_removed(tmp_path: Path) -> None:
    hand_over(tmp_path, b'{"kind": 3')
    assert take_verdict([tmp_path]) is None
    assert not list(tmp_path.iterdir())
