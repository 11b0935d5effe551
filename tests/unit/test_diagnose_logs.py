"""Text logs alone: what torch's watchdog printed is often all there is."""

from __future__ import annotations

from pathlib import Path

import pytest

import commlens
from commlens.reports.terminal import render

TIMEOUT = (
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=41, OpType=ALLREDUCE, NumelIn=1024, NumelOut=1024, Timeout(ms)=600000)"
)
HEAD = "[rank{rank}]:[E1122 03:14:15.926535897 ProcessGroupNCCL.cpp:629] [PG ID 0 PG GUID 0(default_pg) Rank {rank}]"


def timed_out(rank: int) -> str:
    return f"{HEAD.format(rank=rank)} {TIMEOUT} ran for 600029 milliseconds before timing out.\n" + progress(rank, 41, 40)


def progress(rank: int, enqueued: int, completed: int) -> str:
    said = f"failure detected by watchdog at work sequence id: {enqueued} PG status:"
    return f"{HEAD.format(rank=rank)}  {said} last enqueued work: {enqueued}, last completed work: {completed}\n"


def test_the_rank_that_did_not_come(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text("".join([timed_out(0), timed_out(1), progress(2, 40, 40), timed_out(3)]))
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("missing", [2], [0, 1, 3])
    assert verdict.collective is not None and (verdict.collective.op, verdict.collective.sequence_number) == ("all_reduce", 41)
    assert "1024 elements" in render(verdict)


def test_a_log_of_each_rank(tmp_path: Path) -> None:
    for rank in (0, 1, 3):
        (tmp_path / f"rank{rank}.log").write_text(timed_out(rank))
    (tmp_path / "rank2.log").write_text(progress(2, 40, 40))
    assert commlens.diagnose(tmp_path).culprits == [2]


def test_a_timeout_in_a_group_that_is_not_named_blames_nobody(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text(f"[rank1]:[E ProcessGroupNCCL.cpp:587] [Rank 1] {TIMEOUT} ran for 600029 milliseconds before timing out.\n")
    verdict = commlens.diagnose(log)
    assert (verdict.kind, verdict.culprits, verdict.victims, verdict.confidence) == ("missing", [], [1], "low")
    assert verdict.is_fault
    assert verdict.summary.startswith("rank 1: all_reduce #41 timed out after 600 s")
    log.write_text(f"[E ProcessGroupNCCL.cpp:587] {TIMEOUT} ran for 600029 milliseconds before timing out.\n")
    verdict = commlens.diagnose(log)
    assert (verdict.culprits, verdict.victims) == ([], [])
    assert verdict.summary.startswith("all_reduce #41 timed out after 600 s")


def test_beside_a_cause_it_is_told_as_what_is_not_known(tmp_path: Path) -> None:
    unplaced = f"[rank5]:[E ProcessGroupNCCL.cpp:587] [Rank 5] {TIMEOUT} ran for 600029 milliseconds before timing out.\n"
    (tmp_path / "job.log").write_text("".join([timed_out(0), timed_out(1), progress(2, 40, 40), timed_out(3), unplaced]))
    verdict = commlens.diagnose(tmp_path)
    assert verdict.culprits[:1] == [2]
    assert any(text.startswith("rank 5: all_reduce #41 timed out") for text in verdict.missing_evidence)


@pytest.mark.parametrize("group", ["default_pg", "tp", "undefined"])
@pytest.mark.parametrize("ranks", [1, 3, 60])
def test_ranks_that_time_out_in_a_group_of_their_own_are_not_healthy(tmp_path: Path, ranks: int, group: str) -> None:
    lines = []
    for rank in range(ranks):
        head = f"[rank{rank}]:[E1122 03:14:15.926535897 ProcessGroupNCCL.cpp:629] [PG ID 0 PG GUID g{rank}({group}) Rank {rank}]"
        lines.append(f"{head} {TIMEOUT.replace('SeqNum=41', f'SeqNum={rank}')} ran for 600029 milliseconds before timing out.\n")
    (tmp_path / "job.log").write_text("".join(lines))
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.culprits, verdict.confidence) == ("missing", [], "low")
    assert verdict.victims == list(range(ranks))
    assert len(verdict.findings) == 1


@pytest.mark.parametrize(
    ("op", "sizes", "kind", "said"),
    [
        ("ALLTOALL_BASE", [(64, 64), (64, 32)], "mismatch/splits", "together, they send 128 elements and expect 96"),
        ("ALLTOALL_BASE", [(64, 64), (32, 32)], "stuck-inside", "not known whether they agree on its splits"),
        ("ALLTOALL", [(64, 64), (64, 32)], "stuck-inside", "not known whether they agree on its splits"),
        ("BROADCAST", [(64, 64), (64, 64)], "stuck-inside", "not known whether they agree on its root"),
        ("ALLREDUCE", [(64, 64), (64, 64)], "stuck-inside", "and agree on its sizes, but no rank has completed it"),
    ],
)
def test_the_watchdog_tells_sizes_but_no_splits_and_no_root(
    tmp_path: Path, op: str, sizes: list[tuple[int, int]], kind: str, said: str
) -> None:
    lines = []
    for rank, (sent, received) in enumerate(sizes):
        work = f"OpType={op}, NumelIn={sent}, NumelOut={received}"
        lines.append(timed_out(rank).replace("OpType=ALLREDUCE, NumelIn=1024, NumelOut=1024", work))
    (tmp_path / "job.log").write_text("".join(lines))
    verdict = commlens.diagnose(tmp_path)
    assert (verdict.kind, verdict.culprits) == (kind, [])
    assert said in verdict.summary
    assert ("network" in verdict.next_step) == (op == "ALLREDUCE")
