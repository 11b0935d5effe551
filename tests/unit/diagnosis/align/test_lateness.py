"""Ranks that come late to collectives, and ranks that were only late when the others ended."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import Job, S, Stay, all_reduce, at, training
from flight_recorder_dumps import columns_from_table, dump, entry
from judging import blame, judge

from commlens import diagnose
from commlens.diagnosis.align.lateness import lateness
from commlens.diagnosis.index.columns import reduce_all
from commlens.diagnosis.index.dump_index import index_dumps
from commlens.model.collective import State
from commlens.model.ranklog import End, Observation

SLEEP = Stay(57, "load_batch")
MS = 1_000_000
BEGAN_NS = 1_700_000_000_000_000_000


@pytest.mark.parametrize(("waited_s", "culprits"), [(2, [1]), (30, [2])])
def test_a_rank_that_was_ended_with_the_others_may_only_have_been_late(
    waited_s: int, culprits: list[int]
) -> None:
    """Rank 1 is killed unseen while it waits for rank 2, and the launcher ends the others."""

    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, line=40)
        if rank == 2:
            yield SLEEP
        yield all_reduce(job.world, line=50)

    job = Job(3).run(program)
    logs = job.logs()
    for log in logs:
        log.captured_ns = logs[0].collectives[-1].announced_ns + waited_s * S
        log.observation = (
            Observation(End.GONE)
            if log.rank == 1
            else Observation(End.KILLED, signal="SIGTERM", ended_ns=job.now)
        )
    assert judge(logs).culprits == culprits


def test_stuck_until_the_timeout_then_ended_by_the_launcher() -> None:
    """The one that the launcher stopped slept; those that failed first waited for it."""
    job = Job(4).run(training(at(2, 5, SLEEP)))
    logs = job.logs()
    for log in logs:
        last = log.collectives[-1]
        if log.rank == 2:
            log.observation = Observation(
                End.KILLED, signal="SIGTERM", ended_ns=job.now + 26_000_000_000
            )
        else:
            last.state, last.error = (
                State.FAILED,
                "RuntimeError: Timed out waiting 25000ms for recv operation to complete",
            )
            last.done_ns = job.now + 25_000_000_000
            log.exception = last.error
            log.observation = Observation(End.FAILED, 1, ended_ns=job.now + 25_000_000_000)
    assert blame(judge(logs)) == ("missing", "data-loading", [2], "train.py:57")


def arrivals(*lateness_ms: int) -> dict[int, list[int]]:
    """Return the arrivals of two ranks, rank 1 so late to each collective, in ms after it begins."""
    return {0: [0] * len(lateness_ms), 1: [*lateness_ms]}


@pytest.mark.parametrize(
    ("arrivals_ms", "late"),
    [
        (arrivals(*[60, 0, 0] * 8), {1: 8 * 60}),
        (arrivals(*[60, 60, 0] * 8), {}),  # or rank 0 is late to each third one, by another clock
        (arrivals(*[60] * 24), {}),
        (arrivals(*[150] * 24), {1: 24 * 150}),
        (arrivals(*[150, 0, 0] * 8), {1: 8 * 150}),
        ({**arrivals(*[60, 60, 0] * 8), 2: [0] * 24}, {}),
        ({**arrivals(*[150] * 24), 2: [0] * 24}, {1: 24 * 150}),
    ],
)
@pytest.mark.parametrize("clock_ms", [0, 50, -7_000])
def test_a_rank_is_late_only_if_no_error_of_the_recorder_can_be_the_reason(
    arrivals_ms: dict[int, list[int]], late: dict[int, int], clock_ms: int
) -> None:
    """A recorder may notice all completions of a rank up to 100 ms late."""
    dumps = []
    for rank, came_ms in arrivals_ms.items():
        entries = []
        for number, after_ms in enumerate(came_ms):
            began_ms = number * 500 + (clock_ms if rank == 1 else 0)
            entries.append(
                entry(
                    number,
                    time_created_ns=BEGAN_NS + (began_ms + after_ms) * MS,
                    time_discovered_completed_ns=BEGAN_NS + (began_ms + 200) * MS,
                )
            )
        config = {"0": {"name": "0", "desc": "default_pg", "ranks": str([*arrivals_ms])}}
        rows = columns_from_table(dump(entries, pg_config=config))
        rows.rank = rank
        dumps.append(rows)
    found = lateness(index_dumps(reduce_all(dumps), 60.0))
    assert {one.rank: one.lost_ns // MS for one in found} == late


@pytest.mark.parametrize(
    ("late_ms", "culprits"),
    [
        ([*[(1, 300), (1, 100)] * 5, (0, 300), *[(0, 100)] * 3], []),  # 10 of 14
        ([(1, 300)] * 16, [1]),
        ([(1, 300)] * 10 + [(0, 80)] * 5, [1]),  # and by more
        ([*[(1, 300), (1, 100)] * 20, *[(0, 300)] * 4, *[(0, 100)] * 12], [1]),
    ],
)
def test_one_of_two_ranks_is_often_late_by_chance(
    tmp_path: Path, late_ms: list[tuple[int, int]], culprits: list[int]
) -> None:
    for rank in (0, 1):
        entries = [
            entry(
                number,
                time_created_ns=BEGAN_NS + (number * 1000 + (by if late == rank else 0)) * MS,
                time_discovered_completed_ns=BEGAN_NS + (number * 1000 + 400) * MS,
            )
            for number, (late, by) in enumerate(late_ms)
        ]
        config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
        path = tmp_path / f"rank_{rank}"
        path.write_bytes(pickle.dumps(dump(entries, pg_config=config, pg_status={}), 2))
    assert diagnose([tmp_path]).culprits == culprits
