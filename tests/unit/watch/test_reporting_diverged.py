"""The verdict that rank 0 hands over."""

from __future__ import annotations

from pathlib import Path

from commlens.blackbox import job_dirs
from commlens.model.verdict import Finding, Verdict
from commlens.watch.reporting import take_handed_over, together


def hand_over(folder: Path, content: bytes) -> None:
    (folder / f"{job_dirs.NUMBERS_VERDICT}17").write_bytes(job_dirs.NUMBERS_HEAD + content)


def test_it_is_taken_once(tmp_path: Path) -> None:
    verdict = Verdict(kind="diverged", summary="rank 3 differs")
    hand_over(tmp_path, verdict.to_json())
    taken = take_handed_over([tmp_path / "none", tmp_path])
    assert taken is not None
    assert (taken.kind, taken.summary) == ("diverged", "rank 3 differs")
    assert take_handed_over([tmp_path]) is None


def test_a_damaged_one_is_removed(tmp_path: Path) -> None:
    hand_over(tmp_path, b'{"kind": 3')
    assert take_handed_over([tmp_path]) is None
    assert not list(tmp_path.iterdir())


def of(kind: str, *summaries: str) -> Verdict:
    findings = [
        Finding(
            kind=kind,  # type: ignore[arg-type]
            why="parameter",
            root_cause=True,
            culprits=[],
            victims=[],
            confidence="high",
            summary=each,
        )
        for each in summaries
    ]
    return Verdict.from_findings(findings, looked_at=f"{len(summaries)} tensors")


def test_the_first_difference_stays_the_verdict() -> None:
    both = together(of("diverged", "one", "two"), of("diverged", "three"))
    assert (both.summary, both.looked_at) == ("one", "2 tensors")
    assert [each.summary for each in both.findings] == ["one", "two", "three"]
    many = of("diverged", *map(str, range(100)))
    assert len(together(many, many).findings) == 50


def test_another_kind_of_verdict_is_replaced() -> None:
    later = of("diverged", "later")
    assert together(None, later) is later
    assert together(of("mismatch/shape", "before"), later) is later
