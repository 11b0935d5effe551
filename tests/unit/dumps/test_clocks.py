"""Hosts whose wall clocks differ: their times are corrected by the collectives that they completed
together.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from builders import MS, START, Job, Stay, Step, all_reduce

from commlens.diagnosis.examine import diagnose_logs
from commlens.dumps.clocks import _shift, align_clocks
from commlens.model.health import HealthEvent, NodeHealth
from commlens.model.nccl import NcclCommunicator, NcclOp, NcclRecord, NcclTransfer
from commlens.model.ranklog import RankLog

S = 1_000_000_000


def logs() -> list[RankLog]:
    """Four ranks on two hosts; one of them hangs in its data loader, while the others wait."""

    def program(job: Job, rank: int) -> Iterator[object]:
        for step in range(40):
            if (rank, step) == (3, 39):
                yield Stay(57, "load_batch")
            yield all_reduce(job.world, 100, line=20)
            yield Step()

    made = Job(4).run(program).logs(after_s=60)
    for log in made:
        log.host = f"n{log.rank // 2}"
    return made


def copied(all_logs: list[RankLog]) -> list[RankLog]:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(all_logs), type=list[RankLog])


@pytest.mark.parametrize("offset", [10 * S, -3600 * S, 80 * MS])
def test_a_clock_that_is_ahead_or_behind_changes_nothing(offset: int) -> None:
    right = logs()
    wrong = copied(right)
    for log in wrong[2:]:
        _shift(log, offset)
    ahead = align_clocks(wrong)
    assert abs(ahead["n1"] - offset) < 10 * MS, "the simulated collectives take some ms"
    for mine, theirs in zip(right[2:], wrong[2:], strict=True):
        moved = [
            after.announced_ns - before.announced_ns
            for before, after in zip(mine.collectives, theirs.collectives, strict=True)
        ]
        assert moved == [theirs.captured_ns - mine.captured_ns] * len(moved), (
            "all times move together"
        )
        assert abs(moved[0]) < 10 * MS
    assert diagnose_logs(wrong).summary == diagnose_logs(right).summary
    assert diagnose_logs(wrong).explanation == diagnose_logs(right).explanation


def test_the_calls_of_a_store_move_with_the_collectives() -> None:
    log = copied(logs())[0]
    log.store_wait, log.keys_written = (
        copied(logs())[0].collectives[-1],
        copied(logs())[0].collectives[:2],
    )
    before = [op.announced_ns for op in (log.collectives[-1], log.store_wait, *log.keys_written)]
    _shift(log, 5 * S)
    assert [op.announced_ns for op in (log.collectives[-1], log.store_wait, *log.keys_written)] == [
        at + 5 * S for at in before
    ]


def test_clocks_that_may_be_right_are_left_alone() -> None:
    right = logs()
    same = copied(right)
    assert align_clocks(same) == {}
    assert same == right


def test_hosts_without_a_common_collective_are_left_alone() -> None:
    some = logs()
    for log in some[2:]:
        log.collectives = []
        _shift(log, 5 * S)
    before = copied(some)
    assert align_clocks(some) == {}
    assert some == before


def test_what_a_node_told_of_its_hardware_moves_with_its_ranks() -> None:
    wrong = copied(logs())
    event = HealthEvent(what="link-down", fault="network-down", part="eth0", at_ns=START + S)
    wrong[2].health = NodeHealth("n1", taken_ns=START + 2 * S, events=[event])
    for log in wrong[2:]:
        _shift(log, 5 * S)
    ahead = align_clocks(wrong)["n1"]
    told = wrong[2].health
    assert told is not None
    assert told.events[0].at_ns == START + 6 * S - ahead
    assert told.taken_ns == START + 7 * S - ahead


def test_what_nccl_recorded_moves_with_the_ranks_records() -> None:
    transfer = NcclTransfer(1, 0, True, 8, 3, moved_ns=START + 2 * S)
    op = NcclOp(
        1, "AllReduce", "ncclFloat32", 4, called_ns=START, device_ns=7, transfers=(transfer,)
    )
    communicator = NcclCommunicator("abc", "", 2, 0, 1, ops=(op,))
    log = RankLog(rank=0, world_size=2, nccl=NcclRecord(1, 1, communicators=(communicator,)))
    _shift(log, 5 * S)
    assert log.nccl is not None
    (moved,) = log.nccl.communicators[0].ops
    assert (moved.called_ns, moved.launched_ns, moved.device_ns) == (START + 5 * S, 0, 7)
    assert moved.transfers[0].moved_ns == START + 7 * S
