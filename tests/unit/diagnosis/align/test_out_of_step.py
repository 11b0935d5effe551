"""Dumps of one job that were not taken at one moment: a rank is not blamed for what it issued after
its dump.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import Job, Step, all_reduce
from flight_recorder_dumps import dump, entry
from goldens import hold

from commlens import diagnose
from commlens.diagnosis.examine import diagnose_logs
from commlens.model.verdict import Verdict

START_NS = 1_700_000_000_000_000_000
STEP_NS = 1_000_000_000
GROUPS = {
    "0": "0",
    "1": "gradients",
    "2": "statistics",
    "3": "edge-1-2",
    "4": "edge-1-3",
    "5": "edge-2-3",
}
RANKS = {"edge-1-2": [1, 2], "edge-1-3": [1, 3], "edge-2-3": [2, 3]}
Entries = list[dict[str, Any]]


def issued(groups: Iterable[str], waits: bool) -> Entries:
    """All_reduces of these groups in this order, one a second; the last one is in flight if the
    rank waits.
    """
    numbers: dict[str, int] = {}
    found: Entries = []
    names = list(groups)
    for place, description in enumerate(names):
        numbers[description] = numbers.get(description, 0) + 1
        name = next(name for name, each in GROUPS.items() if each == description)
        line = {"name": "step", "filename": "/work/train.py", "line": 20 + int(name)}
        found.append(
            entry(
                place,
                "gloo:all_reduce",
                process_group=(name, description),
                pg_id=int(name),
                collective_seq_id=numbers[description],
                state="scheduled",
                time_created_ns=START_NS + place * STEP_NS,
                time_discovered_completed_ns=None,
                retired=not waits or place < len(names) - 1,
                frames=[line],
            )
        )
    return found


def write(
    folder: Path, entries: dict[int, Entries], written: dict[int, int] | None = None
) -> Verdict:
    """Write gloo's dumps, which hold no time of their own, and diagnose them; ``written``: the
    files' times, in seconds.
    """
    config = {
        name: {"name": name, "desc": each, "ranks": str(RANKS.get(each, [0, 1, 2, 3]))}
        for name, each in GROUPS.items()
    }
    for rank, each in entries.items():
        path = folder / f"rank_{rank}"
        path.write_bytes(pickle.dumps(dump(each, pg_config=config, pg_status={}), 2))
        if written is not None:
            os.utime(path, ns=(0, START_NS + written[rank] * STEP_NS + 1))
    return diagnose([folder])


@pytest.mark.parametrize("odd", [[5], [2, 5, 9], [2, 3, 5, 8, 9]])
def test_alike_ranks_out_of_step_are_a_minority_of_all_ranks(
    tmp_path: Path, odd: list[int]
) -> None:
    """Only a few ranks of each kind are compared, and each stands for others of its kind."""
    verdict = skip_once(tmp_path, range(16), odd, "some wait")
    assert (verdict.kind, verdict.why, verdict.culprits) == ("missing", "skipped", odd)
    assert verdict.source == "train.py:22"


@pytest.mark.parametrize(
    ("end", "kind"),
    [("some wait", "missing"), ("all wait", "stuck-inside"), ("none waits", "healthy")],
)
@pytest.mark.parametrize("size", [4, 16])
def test_two_halves_may_have_lines_of_their_own(
    tmp_path: Path, size: int, end: str, kind: str
) -> None:
    """Between two halves is no majority, and a branch for each half looks the same as a skip."""
    verdict = skip_once(tmp_path, range(size), range(0, size, 2), end)
    assert (verdict.kind, verdict.why == "skipped") == (kind, False)


def lines_of_each_rank(*lines: list[int], size: int, step_at: Collection[int] = ()) -> Verdict:
    """Diagnose a job in which rank 0 issues all_reduces from the first lines, and the other ranks
    from the second. At the places ``step_at``, rank 0 steps before them, and the others after.
    """

    def program(job: Job, rank: int) -> Iterator[object]:
        for number, line in enumerate(lines[min(rank, 1)]):
            if number in step_at and rank == 0:
                yield Step()
            yield all_reduce(job.world, 1, line=line)
            if number in step_at and rank > 0:
                yield Step()

    return diagnose_logs(Job(size).run(program).logs())


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    "lines",
    [
        ([50, 50, 10, 10, 10, 10], [20, 21, 20, 21, 20, 21]),
        ([50, 50, 50, 10, 11, 10], [25, 25, 20, 20, 20, 20]),
        ([10, 11] * 6, [11, 10] * 6),  # two roles, by turns
        ([5, *[10, 11] * 6], [5, *[11, 10] * 6]),
        ([10] * 6 + [11] * 6, [10] * 7 + [11] * 5),
    ],
)
def test_lines_that_differ_by_rank_are_no_skip(lines: tuple[list[int], ...], size: int) -> None:
    assert lines_of_each_rank(*lines, size=size).kind == "healthy"


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("step_at", [range(1, 7), range(3, 7), [2]])
@pytest.mark.parametrize("own", [10, 20])
def test_ranks_may_step_at_different_places(size: int, step_at: range, own: int) -> None:
    lines = [5, *[own] * 6], [5, *[10] * 6]
    assert lines_of_each_rank(*lines, size=size, step_at=step_at).kind == "healthy"


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("at", "why"), [(9, "skipped"), (2, "finished")])
def test_lines_that_all_ranks_share_show_a_skip(size: int, at: int, why: str) -> None:
    """In the first round, it could be the program of a rank: no line has met itself before."""
    usual = [20, 21, 22, 23] * 4
    verdict = lines_of_each_rank(usual[:at] + usual[at + 1 :], usual, size=size)
    if (size, why) == (2, "skipped"):
        why = "in-collective"  # of one rank; or the other one issued one too many
    assert (verdict.kind, verdict.why) == ("missing", why)


def skip_once(folder: Path, ranks: Collection[int], odd: Collection[int], end: str) -> Verdict:
    """Diagnose dumps of ranks that issue lines 20 to 23 in turn. The odd ones skip a line 21."""
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": str([*ranks])}}
    for rank in ranks:
        lines = [line for _ in range(6) for line in (20, 21, 22, 23)]
        if rank in odd:
            del lines[13]
        entries = [
            entry(number, frames=[{"name": "step", "filename": "/work/train.py", "line": line}])
            for number, line in enumerate(lines if end == "some wait" else lines[:23])
        ]
        if end == "all wait" or (end == "some wait" and rank not in odd):
            entries[-1].update(state="scheduled", retired=False, time_discovered_completed_ns=None)
        path = folder / f"rank_{rank}"
        path.write_bytes(pickle.dumps(dump(entries, pg_config=config, pg_status={}), 2))
    return diagnose([folder])


def in_a_cycle() -> dict[int, Entries]:
    """Return the entries of four ranks. In the seventh step, rank 2 uses its two edges in the other
    order than before.
    """
    steps = {
        0: ["gradients"] * 6,
        1: ["edge-1-2", "edge-1-3", *["gradients"] * 6],
        2: ["edge-1-2", "edge-2-3", *["gradients"] * 6],
        3: ["edge-1-3", "edge-2-3", *["gradients"] * 6],
    }
    last = {0: "gradients", 1: "edge-1-2", 2: "edge-2-3", 3: "edge-1-3"}
    return {rank: issued([*steps[rank] * 6, last[rank]], waits=True) for rank in steps}


@pytest.mark.parametrize("older", range(6))
@pytest.mark.parametrize("rank", range(4))
def test_in_a_cycle_of_three_no_rank_but_the_one_that_departs_is_blamed(
    tmp_path: Path, rank: int, older: int
) -> None:
    entries = in_a_cycle()
    entries[rank] = entries[rank][: len(entries[rank]) - older]
    verdict = write(tmp_path, entries)
    assert verdict.is_fault
    assert verdict.culprits in ([2], [])
    assert verdict.culprits or older > 1
    if older == 0:
        assert (verdict.kind, verdict.cause.ranks) == ("cycle", [1, 2, 3])


def test_a_rank_that_has_not_come_where_another_departed_is_not_known_to_be_missing(
    tmp_path: Path,
) -> None:
    entries = in_a_cycle()
    verdict = write(tmp_path, {**entries, 3: entries[3][:-1]})
    assert (verdict.kind, verdict.culprits) == ("cycle", [2])
    assert verdict.cause.perhaps_come == [3]
    hold("cycle/one-dump-may-be-older", verdict)


@pytest.mark.parametrize("older", range(6))
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_of_two_groups_in_the_other_order(tmp_path: Path, rank: int, older: int) -> None:
    usual = ["gradients", "statistics"] * 8
    entries = {
        each: issued([*usual, "statistics" if each == 2 else "gradients"], waits=True)
        for each in range(4)
    }
    entries[rank] = entries[rank][: len(entries[rank]) - older]
    assert write(tmp_path, entries).culprits == [2]


def one_missing() -> dict[int, Entries]:
    """Return the entries of four ranks, of which rank 2 does not come to the ninth collective."""
    return {
        rank: issued(["gradients"] * (8 if rank == 2 else 9), waits=rank != 2) for rank in range(4)
    }


@pytest.mark.parametrize("older", [2, 3, 5])
def test_collectives_that_the_others_completed_show_that_a_dump_is_older(
    tmp_path: Path, older: int
) -> None:
    entries = one_missing()
    verdict = write(tmp_path, {**entries, 1: entries[1][:-older]})
    assert verdict.culprits == [2]


@pytest.mark.parametrize("older", [1, 2, 5])
def test_a_rank_with_an_outdated_dump_is_not_blamed(tmp_path: Path, older: int) -> None:
    """Whether it came is unknown, also if it is the one that did not come."""
    entries = one_missing()
    verdict = write(tmp_path, {**entries, 2: entries[2][:-older]})
    assert (verdict.kind, verdict.culprits, verdict.confidence, verdict.is_fault) == (
        "missing",
        [],
        "low",
        True,
    )
    assert verdict.cause.reason == "outdated"
    if older == 1:
        hold("missing/dump-outdated", verdict)


def test_an_outdated_dump_says_nothing_of_what_it_has_in_flight(tmp_path: Path) -> None:
    entries = one_missing()
    entries[1] = entries[1][:-3]
    entries[1][-1]["retired"] = False
    assert write(tmp_path, entries).culprits == [2]


@pytest.mark.parametrize(
    ("written", "culprits"),
    [
        ({0: 70, 1: 60, 2: 65, 3: 99}, [2]),
        ({0: 70, 1: 60, 2: 7, 3: 99}, []),  # before the others issued the collective
        # times that say nothing: the files are older than what they hold
        ({0: 0, 1: 0, 2: 0, 3: 0}, [2]),
        ({0: 70, 1: 7, 2: 7, 3: 70}, [2]),
    ],
    ids=["later", "earlier", "meaningless", "meaningless for one"],
)
def test_the_time_of_a_file_is_the_latest_that_its_dump_can_be_of(
    tmp_path: Path, written: dict[int, int], culprits: list[int]
) -> None:
    assert write(tmp_path, one_missing(), written).culprits == culprits


@pytest.mark.parametrize("early", [0, 3])
def test_a_dump_is_older_if_any_rank_issued_the_collective_after_it(
    tmp_path: Path, early: int
) -> None:
    """One rank waits since the 8th second, two came in the 30th: nothing tells when rank 2 did."""
    entries = one_missing()
    for rank in {0, 1, 3} - {early}:
        entries[rank][-1]["time_created_ns"] = START_NS + 30 * STEP_NS
    verdict = write(tmp_path, entries, {0: 70, 1: 70, 2: 20, 3: 70})
    assert (verdict.kind, verdict.culprits) == ("missing", [])


def test_a_message_that_was_not_sent_before_the_dump(tmp_path: Path) -> None:
    ranks = [0, 1]
    entries = {
        0: [entry(each, "nccl:send 0->1") for each in range(5)],
        1: [entry(each, "nccl:recv 1<-0") for each in range(6)],
    }
    entries[1][-1].update(
        state="scheduled",
        retired=False,
        time_discovered_completed_ns=None,
        time_created_ns=START_NS + 9 * STEP_NS,
    )
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(ranks)}}
    for seconds, culprits in ((60, [0]), (5, [])):
        for rank in ranks:
            path = tmp_path / f"rank_{rank}"
            path.write_bytes(pickle.dumps(dump(entries[rank], pg_config=config, pg_status={}), 2))
            os.utime(path, ns=(0, START_NS + (seconds if rank == 0 else 60) * STEP_NS + 1))
        assert diagnose([tmp_path]).culprits == culprits
