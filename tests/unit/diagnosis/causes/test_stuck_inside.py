"""A collective that all ranks have entered, and that does not complete."""

from __future__ import annotations

import msgspec
import pytest
from builders import Job, training
from goldens import hold
from judging import judge
from starting_ranks import WORLD, groups, init
from starting_ranks import rank as starting_rank

from commlens.model.collective import Channel, CollectiveArgs, LearnedHow, State
from commlens.model.ranklog import End, Observation, RankLog


def stuck_inside() -> list[RankLog]:
    logs = Job(4).run(training(lambda *_: None)).logs()
    for log in logs:
        del log.collectives[11:]
        log.issued = 11
        last = log.collectives[-1]
        last.state, last.done_ns, last.wait_ended_ns = State.ISSUED, 0, 0
        log.closed = False
        log.observation = Observation(End.RUNNING, window_s=5, cpu_s=0.0, stack_moved=False)
    return logs


def test_all_arrived_and_nobody_completes() -> None:
    verdict = judge(stuck_inside())
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("stuck-inside", [], [0, 1, 2, 3])
    hold("stuck-inside/no-progress", verdict)


def test_stopped_inside() -> None:
    logs = stuck_inside()
    logs[1].observation = Observation(End.RUNNING, window_s=5, proc_state="T", stopped_fraction=1.0)
    verdict = judge(logs)
    assert (verdict.kind, verdict.why, verdict.culprits) == ("stuck-inside", "stopped", [1])
    hold("stuck-inside/stopped", verdict)


def completion_unknown(completion: str) -> list[RankLog]:
    logs = stuck_inside()
    for log in logs:
        for op in log.collectives:
            group = msgspec.structs.replace(op.channel.group, backend="xyz")
            op.channel = Channel(group, "cuda", runs_ahead=True, completion=completion)
        last = log.collectives[-1]
        last.state, last.learned_how = State.UNKNOWN, LearnedHow.UNKNOWN
    return logs


@pytest.mark.parametrize("completion", ["status", "hooks", "unknown"])
def test_why_completion_is_unknown_depends_on_the_backend(completion: str) -> None:
    """Advice that does not help with a backend is not given."""
    verdict = judge(completion_unknown(completion))
    assert (verdict.kind, verdict.culprits, verdict.confidence) == ("waiting", [], "low")
    hold(f"stuck-inside/completion-{completion}", verdict)


def stop(log: RankLog, seconds: float, *, by: str = "T", window_s: float = 10.0) -> None:
    """Let a process be stopped until now."""
    share = min(1.0, seconds / window_s)
    log.observation = Observation(
        End.RUNNING, window_s=window_s, cpu_s=0.0, proc_state=by, stopped_fraction=share
    )
    log.heartbeat_ns = log.captured_ns - int(seconds * 1e9)


def test_a_rank_that_stays_stopped_decides_where_completion_is_unknown() -> None:
    logs = completion_unknown("hooks")
    stop(logs[1], 29.0)
    verdict = judge(logs)
    assert (verdict.kind, verdict.why, verdict.culprits) == ("stuck-inside", "stopped", [1])
    assert (verdict.victims, verdict.confidence) == ([0, 2, 3], "medium")
    hold("stuck-inside/stopped-unknown-stopped", verdict)
    stop(logs[1], 29.0, by="t")
    assert judge(logs).culprits == [], "a debugger looks at a victim"


def then_in_messages(logs: list[RankLog], peers: dict[int, int]) -> list[RankLog]:
    """Let ranks complete the collective and issue a recv of which nothing tells whether it is."""
    for log in logs:
        if log.rank in peers:
            complete(log)
            args = CollectiveArgs("recv", "recv_")
            message = msgspec.structs.replace(
                log.collectives[-1], index=12, peer=peers[log.rank], args=args,
                state=State.UNKNOWN, learned_how=LearnedHow.UNKNOWN,
            )  # fmt: skip
            log.collectives.append(message)
    return logs


def complete(log: RankLog) -> None:
    last = log.collectives[-1]
    last.state, last.learned_how = State.COMPLETED, LearnedHow.NATIVE_RECORDER


@pytest.mark.parametrize("completed", [False, True])
def test_a_rank_that_stays_stopped_decides_where_others_stand_in_messages(
    *, completed: bool
) -> None:
    """Their collective completed; what they do since then needs the stopped rank, whether or not
    that is known of its own collective.
    """
    logs = completion_unknown("hooks")
    stop(logs[1], 29.0)
    if completed:
        complete(logs[1])
    verdict = judge(then_in_messages(logs, {0: 1, 2: 0, 3: 2}))
    assert (verdict.why, verdict.culprits, verdict.victims) == ("stopped", [1], [0, 2, 3])
    assert verdict.confidence == "medium"
    for log in logs:
        if log.rank != 1:
            log.collectives.pop()
    verdict = judge(logs)
    assert verdict.culprits == [], "the others may compute, and not need it yet"


@pytest.mark.parametrize(
    ("peers", "seconds"),
    [
        ({0: 2, 2: 3, 3: 0}, 29.0),  # no message is with the stopped rank
        ({0: 1, 2: 0}, 29.0),  # rank 3 may compute
        ({0: 1, 2: 0, 3: 2}, 9.0),  # it was not stopped for most of their wait
    ],
)
def test_a_stopped_rank_that_others_may_not_need_is_not_named(
    peers: dict[int, int], seconds: float
) -> None:
    logs = completion_unknown("hooks")
    stop(logs[1], seconds)
    for log in logs:
        complete(log)
    assert judge(then_in_messages(logs, peers)).culprits == []


@pytest.mark.parametrize(
    ("stopped", "seconds", "window_s"),
    [
        ([1], 1.5, 2.0),  # a debugger that looks at it
        ([1], 9.0, 10.0),  # in a step that has lasted for 30 s
        ([1], 3.0, 10.0),  # not for most of the time in which it was observed
        ([0, 1, 2, 3], 29.0, 10.0),  # the job is paused
    ],
)
def test_no_rank_is_named_for_a_short_stop_or_a_pause(
    stopped: list[int], seconds: float, window_s: float
) -> None:
    logs = completion_unknown("hooks")
    for rank in stopped:
        stop(logs[rank], seconds, window_s=window_s)
    verdict = judge(logs)
    assert (verdict.kind, verdict.culprits) == ("waiting", [])


def test_ranks_that_lose_the_store_while_they_make_a_group() -> None:
    """Rank 0, which serves the store, has finished. No rank waits for another one."""
    logs = []
    for number in range(WORLD):
        log = starting_rank(
            number, init(), *(groups([1, 2, 3]) if number else []), inside=bool(number)
        )
        ended = Observation(End.CLEAN if number == 0 else End.FAILED, 1 if number else 0)
        log.observation = msgspec.structs.replace(ended, ended_ns=log.captured_ns)
        if number:
            log.setups[-1].state, log.exception = State.FAILED, "DistNetworkError: Broken pipe"
        logs.append(log)
    found = judge(logs)
    assert (found.kind, found.culprits, found.victims) == ("stuck-inside", [], [1, 2, 3])
    hold("stuck-inside/store-lost", found)
