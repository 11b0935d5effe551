"""Messages that never meet: other tags, a wrong destination, a wrong source; and those that are
only late.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from builders import Die, Job, Stay, Step, all_reduce, recv, send
from goldens import hold

from commlens.diagnosis.examine import diagnose_logs
from commlens.model.collective import State
from commlens.model.ranklog import End, Observation
from commlens.model.verdict import Verdict


def judge(size: int, program: object) -> Verdict:
    verdict = diagnose_logs(Job(size).run(program).logs())
    assert [finding.root_cause for finding in verdict.findings].count(True) == 1
    return verdict


@pytest.mark.parametrize(
    ("sent", "received", "culprits", "left"),
    [
        ([7, 7, 7, 7], [7, 7, 7, 9], [1], (7, 9)),
        ([7, 7, 7, 8], [7, 7, 7, 7], [0], (8, 7)),
        ([7, 7], [9, 9], [], (7, 9)),  # they never agreed
        ([0, 1, 2, 4, 5], [0, 1, 2, 3, 4], [0], (4, 3)),
        ([0, 1, 2, 3, 4], [0, 1, 3, 4, 5], [1], (2, 5)),
    ],
)
def test_both_tags_are_named(
    sent: list[int], received: list[int], culprits: list[int], left: tuple[int, int]
) -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        for out, into in zip(sent, received, strict=True):
            if rank < 2:
                yield (
                    send(job.world, 1, line=30, tag=out)
                    if rank == 0
                    else recv(job.world, 0, line=40, tag=into)
                )
            yield Step()
        yield all_reduce(job.world, line=50)

    verdict = judge(3, program)
    assert (verdict.kind, verdict.culprits) == ("mismatch/p2p", culprits)
    assert all(f"with tag {tag}" in verdict.summary for tag in left)
    if left == (7, 9):
        hold(f"mismatch/p2p-tags-{'of-nobody' if not culprits else 'differ'}", verdict)


def test_a_tag_that_may_still_come_is_no_mismatch() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        for i in range(4):
            for tag in (7, 9):
                if (rank, i, tag) == (0, 3, 9):
                    yield Stay(57, "load_batch")
                if rank == 0:
                    yield send(job.world, 1, line=30, tag=tag)
            for tag in (9, 7):
                if rank == 1:
                    yield recv(job.world, 0, line=40, tag=tag)
            yield Step()

    verdict = judge(2, program)
    assert (verdict.kind, verdict.culprits, verdict.source) == ("missing", [0], "train.py:57")


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("wrong", ["send", "recv"])
@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize("sync", [True, False])
def test_a_ring_with_a_wrong_offset(size: int, wrong: str, first: int, sync: bool) -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        for i in range(7):
            further = 2 if rank == 2 and i >= first else 1
            yield send(job.world, (rank + (further if wrong == "send" else 1)) % size, line=30)
            yield recv(job.world, (rank - (further if wrong == "recv" else 1)) % size, line=31)
            if sync:
                yield all_reduce(job.world, line=50)
            yield Step()

    verdict = judge(size, program)
    assert (verdict.kind, verdict.culprits, verdict.source) == (
        "mismatch/p2p",
        [2],
        f"train.py:{30 if wrong == 'send' else 31}",
    )
    if (size, first, sync) == (4, 4, False):
        hold(f"mismatch/p2p-wrong-{wrong}", verdict)


def test_a_lost_send_in_a_ring_is_no_wrong_offset() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        for i in range(7):
            if (rank, i) != (2, 4):
                yield send(job.world, (rank + 1) % 4, line=30)
            yield recv(job.world, (rank - 1) % 4, line=31)
            yield all_reduce(job.world, line=50)

    verdict = judge(4, program)
    [left] = verdict.cause.left_order
    assert (left.rank, left.instead_of.op, left.instead_of.peer) == (2, "send", 3)


def test_one_wrong_line_is_one_fault() -> None:
    """Each rank of a ring receives with its own tag: no pair of ranks is a fault of its own."""

    def program(job: Job, rank: int) -> Iterator[object]:
        yield send(job.world, (rank + 1) % 4, line=30, tag=rank)
        yield recv(job.world, (rank - 1) % 4, line=31, tag=rank)
        yield all_reduce(job.world, line=40)

    verdict = judge(4, program)
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("mismatch/p2p", [], [0, 1, 2, 3])
    hold("mismatch/p2p-one-wrong-line", verdict)


@pytest.mark.parametrize("dies", [True, False])
def test_a_loop_over_destinations_names_no_wrong_one(dies: bool) -> None:
    """Rank 2 does not come to its receive: the message for it is no reason why others wait for rank
    0.
    """

    def program(job: Job, rank: int) -> Iterator[object]:
        if rank == 2:
            yield Die(Observation(End.KILLED, signal="SIGKILL")) if dies else Stay(57, "load_batch")
        for other in range(1, 6):
            if rank == 0:
                yield send(job.world, other, line=30)
            elif rank == other:
                yield recv(job.world, 0, line=31)
        yield send(job.world, (rank + 1) % 6, line=40)
        yield recv(job.world, (rank - 1) % 6, line=41)
        yield recv(job.world, rank - 1, line=50) if rank else send(job.world, 1, line=51)

    verdict = judge(6, program)
    assert (verdict.kind, verdict.culprits) == ("dead" if dies else "missing", [2])


@pytest.mark.parametrize("lines", [(30, 40), (31, 41)])
def test_a_ring_in_which_one_goes_the_wrong_way(lines: tuple[int, int]) -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        way, (out, into) = (-1, lines) if rank == 2 else (1, (30, 40))
        yield send(job.world, (rank + way) % 4, line=out)
        yield recv(job.world, (rank - way) % 4, line=into)

    verdict = judge(4, program)
    assert (verdict.kind, verdict.culprits) == ("mismatch/p2p", [2])
    assert verdict.source == f"train.py:{lines[0]}"


def test_a_receive_from_the_wrong_side_that_failed_when_that_rank_ended() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        yield send(job.world, (rank + 1) % 4, line=30)
        yield recv(job.world, (rank + (1 if rank == 2 else -1)) % 4, line=40)

    job = Job(4).run(program)
    failed = job.ranks[2].log.collectives[-1]
    failed.state, failed.error, failed.done_ns = State.FAILED, "Connection closed by peer", job.now
    [finding] = [one for one in diagnose_logs(job.logs()).findings if one.root_cause]
    assert (finding.kind, finding.culprits, finding.source) == ("mismatch/p2p", [2], "train.py:40")


def test_a_rank_with_other_partners_than_the_ring_is_not_blamed() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        # rank 0 gives its last result to rank 2, which loads data
        if rank == 2:
            yield Stay(57, "load_batch")
        if rank == 0:
            yield send(job.world, 2, line=20)
        yield recv(job.world, (rank - 1) % 4, line=40)
        yield send(job.world, (rank + 1) % 4, line=30)

    verdict = judge(4, program)
    assert (verdict.kind, verdict.culprits) == ("missing", [2])
