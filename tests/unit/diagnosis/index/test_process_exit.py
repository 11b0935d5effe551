"""How a rank ended, and whether because of another one."""

from __future__ import annotations

from collections.abc import Iterator

from builders import Job, Step, all_reduce
from goldens import hold
from judging import judge

from commlens.model.collective import State
from commlens.model.ranklog import End, Observation


def test_ranks_whose_wait_fails_while_a_peer_shuts_down_waited_for_it() -> None:
    """Rank 3 left out a step and is still exiting when its closed connections have ended the
    others.
    """

    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(7 if rank == 3 else 8):
            yield all_reduce(job.world, line=40)
            yield Step()

    job = Job(4).run(program)
    logs = job.logs()
    for log in logs[:3]:
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
    logs[3].captured_ns = logs[3].heartbeat_ns = job.now
    verdict = judge(logs)
    assert (verdict.kind, verdict.why, verdict.culprits, verdict.confidence) == (
        "missing",
        "finished",
        [3],
        "high",
    )
    assert verdict.cause.processes == ["leaving"]
    hold("missing/finished-and-still-exiting", verdict)


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
