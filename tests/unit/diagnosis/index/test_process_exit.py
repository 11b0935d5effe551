"""How a rank ended, and whether because of another one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from builders import Job, S, Stay, Step, all_reduce
from goldens import hold
from judging import judge
from starting_ranks import call

from commlens.diagnosis.index.process_exit import process_exit_of
from commlens.model.collective import Frame, State
from commlens.model.ranklog import End, Observation, RankLog


@pytest.mark.parametrize("ended", [3, 2], ids=["all", "but one"])
def test_ranks_whose_wait_fails_while_a_peer_shuts_down_waited_for_it(ended: int) -> None:
    """Rank 3 left out a step and is still exiting when its closed connections have ended the
    others, or all but one, which still waits.
    """

    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(7 if rank == 3 else 8):
            yield all_reduce(job.world, line=40)
            yield Step()

    job = Job(4).run(program)
    logs = job.logs()
    for log in logs[3 - ended : 3]:
        failed = log.collectives[-1]
        failed.state, failed.error = (
            State.FAILED,
            "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4242",
        )
        log.exception, log.observation = (
            f"RuntimeError: {failed.error}",
            Observation(End.FAILED, 1, ended_ns=job.now),
        )
    logs[3].closed, logs[3].observation = True, Observation(End.RUNNING)
    logs[3].captured_ns, logs[3].heartbeat_ns = job.now, job.now - S
    verdict = judge(logs)
    assert (verdict.kind, verdict.why, verdict.culprits, verdict.confidence) == (
        "missing",
        "finished",
        [3],
        "high",
    )
    assert verdict.cause.processes == ["leaving"]
    if ended == 3:
        hold("missing/finished-and-still-exiting", verdict)


def test_a_wait_that_fails_in_another_group_is_over_too() -> None:
    """Ranks 0-1 still wait for rank 3, which is still exiting; rank 2 failed in another group."""
    job = Job(4)
    most, pair = job.group("most", [0, 1, 3]), job.group("pair", [2, 3])

    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(7 if rank == 3 else 8):
            for group in (most, pair):
                if rank in group.ranks:
                    yield all_reduce(group, line=40)
            yield Step()

    logs = job.run(program).logs()
    failed = logs[2].collectives[-1]
    failed.state, failed.error = State.FAILED, "Connection closed by peer [127.0.0.1]:4242"
    logs[2].exception = f"RuntimeError: {failed.error}"
    logs[2].observation = Observation(End.FAILED, 1, ended_ns=job.now)
    logs[3].closed, logs[3].observation = True, Observation(End.RUNNING)
    logs[3].captured_ns, logs[3].heartbeat_ns = job.now, job.now - S
    verdict = judge(logs)
    assert (verdict.kind, verdict.why, verdict.culprits) == ("missing", "finished", [3])
    assert not verdict.cause.works_too_long
    assert (verdict.confidence, verdict.cause.doubt) == ("high", None)


def test_ranks_that_ctrl_c_ends_in_a_wait_were_waiting() -> None:
    """The one that does not end, in C++, does not wait for them."""
    job = Job(4)
    again = job.group("again", range(4))

    def program(job: Job, rank: int) -> Iterator[object]:
        for i in range(6):
            yield all_reduce(again, line=19)
            if (rank, i) != (3, 4):
                yield all_reduce(job.world, line=20)
            yield Step()

    logs = job.run(program).logs()
    for log in logs[:3]:
        log.collectives[-1].state, log.collectives[-1].error = State.FAILED, "KeyboardInterrupt:"
        log.exception = "KeyboardInterrupt"
    assert judge(logs).culprits == [3]


def of_a_wrapper(*, later_step: bool = False, error: str = "AssertionError") -> list[RankLog]:
    """Rank 1 comes late; rank 0 has timed out, a wrapper kept that to itself and asserts."""

    def program(job: Job, rank: int) -> Iterator[object]:
        for i in range(6):
            if (rank, i) == (1, 5):
                yield Stay(25, "wait_for_batch")
            yield all_reduce(job.world, line=40)
            yield Step()

    job = Job(2).run(program)
    logs = job.logs()
    failed = logs[0].collectives[-1]
    failed.state, failed.error = State.FAILED, "Timed out waiting 12000ms for recv operation"
    logs[0].steps += later_step
    logs[0].exception = error
    logs[0].exception_stack = (Frame("/lib/torchft/ddp.py", 76, "_comm_hook"),)
    logs[0].observation = Observation(End.FAILED, 1, ended_ns=job.now)
    return logs


def test_what_a_wrapper_raises_after_a_failed_collective_is_a_consequence() -> None:
    found = judge(of_a_wrapper())
    assert (found.kind, found.culprits) == ("missing", [1])
    hold("missing/a-wrapper-raises", found)


@pytest.mark.parametrize(
    ("later_step", "error"),
    [(True, "AssertionError"), (False, "torch.OutOfMemoryError: CUDA out of memory.")],
)
def test_an_error_of_its_own_after_a_failed_collective_is_a_cause(
    later_step: bool, error: str
) -> None:
    found = judge(of_a_wrapper(later_step=later_step, error=error))
    assert (found.kind, found.culprits) == ("dead", [0])


@pytest.mark.parametrize(
    ("other_exits", "created", "culprits"),
    [(True, State.FAILED, [0]), (False, State.FAILED, [1]), (True, State.COMPLETED, [0, 1])],
)
def test_what_a_program_raises_without_its_group_tells_no_cause(
    other_exits: bool, created: State, culprits: list[int]
) -> None:
    """Rank 0 ends while the ranks make a group in a thread; rank 1 then lacks it."""

    def program(job: Job, _: int) -> Iterator[object]:
        for _ in range(6):
            yield all_reduce(job.world, line=40)

    job = Job(2).run(program)
    logs = job.logs()
    made = call("new_group", (0, 1), 30)
    made.state = created
    logs[1].setups, logs[1].exception = [made], "IndexError: list index out of range"
    logs[1].exception_stack = (Frame("/home/me/train.py", 203, "quorums"),)
    logs[1].observation = Observation(End.FAILED, 1, ended_ns=job.now + S)
    if other_exits:
        logs[0].observation = Observation(End.FAILED, 7, ended_ns=job.now)
    found = judge(logs)
    roots = {rank for one in found.findings if one.root_cause for rank in one.culprits}
    assert sorted(roots) == culprits


@pytest.mark.parametrize(("error", "kind"), [("TypeError", "own"), ("RuntimeError", "peer")])
def test_a_wrong_argument_is_no_consequence_of_a_peer(error: str, kind: str) -> None:
    stack = (Frame("/torch/distributed/distributed_c10d.py", 854, "_check_valid_timeout"),)
    log = RankLog(
        0,
        2,
        exception=f"{error}: Expected timeout argument to be of type datetime.timedelta, got None",
        exception_stack=stack,
        observation=Observation(End.FAILED, 1, ended_ns=S),
    )
    assert process_exit_of(log).kind == kind
