"""When a whole job stands still, and when that is certain to last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from builders import SCRIPT, Job, Stay, all_reduce, at, collective, training

from commlens.diagnosis.examine import diagnose_logs
from commlens.diagnosis.standstill import Standstill, cannot_go_on, pose_key, pose_of
from commlens.model.collective import Channel, Frame, FrameKind, State
from commlens.model.ranklog import End, Observation, RankLog, ThreadStack


def deadlock() -> list[RankLog]:
    """Ranks 0 and 1 use two groups in opposite orders, and wait for each other."""

    def program(job: Job, rank: int) -> Iterator[object]:
        first, second = job.group("1", [0, 1], "first"), job.group("2", [0, 1], "second")
        for step in range(6):
            groups = (second, first) if (step, rank) == (5, 1) else (first, second)
            for group in groups:
                yield all_reduce(group, line=20 + int(group.name))

    return Job(2).run(program).logs()  # type: ignore[arg-type]


def look(standstill: Standstill, *at_s: float, logs: list[RankLog] | None = None) -> bool:
    for each in at_s:
        standstill.look(deadlock() if logs is None else logs, each)
    return standstill.is_proven


def test_three_looks_at_a_job_that_does_not_move_prove_it() -> None:
    assert not look(Standstill(), 100.0)
    assert not look(Standstill(), 100.0, 102.5), "two looks"
    assert not look(Standstill(), 100.0, 100.5, 101.0), "not for long enough"
    assert look(Standstill(), 100.0, 101.0, 102.0)


def test_one_move_begins_anew() -> None:
    standstill = Standstill()
    assert look(standstill, 100.0, 101.0, 102.0)
    moved = deadlock()
    moved[1].issued += 1
    assert not look(standstill, 103.0, logs=moved)
    assert not standstill.has_begun, "its newest record cannot be read"
    assert not look(standstill, 104.0, 105.0), "it counts from here"
    assert look(standstill, 106.0)


def moving_thread(log: RankLog) -> None:
    """Beside the main thread another one is in other lines at each look."""
    global _line
    _line += 1
    frames = (Frame(SCRIPT, _line, "write"),)
    log.stacks = [*log.stacks, ThreadStack(7, "writer", frames, log.stacks[0].taken_ns)]


_line = 0


def seen(**fields: Any) -> Any:
    def change(log: RankLog) -> None:
        log.observation = msgspec.structs.replace(log.observation, **fields)

    return change


def set_field(name: str, value: object) -> Any:
    return lambda log: setattr(log, name, value)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(seen(cpu_s=5.0), id="computes"),
        pytest.param(seen(children_cpu_s=5.0), id="child-compiles"),
        pytest.param(seen(running_fraction=0.6), id="waits-for-a-core"),
        pytest.param(seen(io_bytes=1 << 20), id="reads"),
        pytest.param(seen(net_bytes=1 << 20), id="downloads"),
        pytest.param(seen(proc_state="T"), id="stopped"),
        pytest.param(seen(stopped_fraction=0.9), id="was-stopped"),
        pytest.param(seen(proc_state="D"), id="waits-for-a-disk"),
        pytest.param(seen(memory_pressure=50.0), id="waits-for-memory"),
        pytest.param(seen(holds_gil=True), id="holds-the-gil"),
        pytest.param(seen(stack_moved=True), id="main-thread-moves"),
        pytest.param(seen(stack_moved=None), id="stack-unknown"),
        pytest.param(seen(window_s=0.1), id="not-watched"),
        pytest.param(set_field("observation", Observation()), id="not-observed"),
        pytest.param(set_field("expecting", "export"), id="expect-slow"),
        pytest.param(set_field("stacks", []), id="no-stacks"),
        pytest.param(set_field("issued", 99), id="newest-records-unreadable"),
        pytest.param(moving_thread, id="another-thread-moves"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_moves_or_was_not_seen_well_is_no_standstill(change: Any, rank: int) -> None:
    standstill = Standstill()
    for second in range(8):
        logs = deadlock()
        change(logs[rank])
        standstill.look(logs, 100.0 + second)
    assert not standstill.is_proven


def test_the_evidence_of_every_rank_is_needed() -> None:
    assert not look(Standstill(), 100.0, 101.0, 102.0, 103.0, logs=deadlock()[:1])
    assert not look(Standstill(), 100.0, 101.0, 102.0, 103.0, logs=[])


def test_a_process_that_does_not_know_its_rank_may_move() -> None:
    logs = [*deadlock(), deadlock()[0]]
    logs[2].rank = -1
    assert not look(Standstill(), 100.0, 101.0, 102.0, logs=logs)
    verdict = diagnose_logs(deadlock())
    assert cannot_go_on(verdict, deadlock())
    assert cannot_go_on(verdict, logs)


def test_a_rank_that_has_ended_does_not_move() -> None:
    log = deadlock()[0]
    log.observation = Observation(End.CLEAN)
    assert pose_of(log) is not None


def test_threads_whose_numbers_are_not_known_are_told_apart_by_their_order() -> None:
    logs = deadlock()
    for log in logs:
        taken_ns = log.stacks[0].taken_ns
        log.stacks = [
            *log.stacks,
            *(ThreadStack(0, name, (Frame(SCRIPT, 9, name),), taken_ns) for name in ("b", "a")),
        ]
    assert look(Standstill(), 100.0, 101.0, 102.0, logs=logs)


def test_a_device_is_given_more_time() -> None:
    logs = deadlock()
    for log in logs:
        op = log.collectives[-1]
        op.channel = Channel(op.channel.group, "cuda", runs_ahead=True)
    assert not look(Standstill(), 100.0, 101.0, 102.0, 103.0, logs=logs)
    assert look(Standstill(), 100.0, 102.0, 105.5, logs=logs)


def certain(logs: list[RankLog]) -> bool:
    return cannot_go_on(diagnose_logs(logs), logs)


def test_only_what_blocks_the_ranks_for_good_is_certain() -> None:
    assert certain(deadlock())
    asleep = Job(4).run(training(at(2, 5, Stay(57, "load_batch")))).logs()  # type: ignore[arg-type]
    assert diagnose_logs(asleep).kind == "missing" and not certain(asleep)
    other = at(2, 5, lambda job: collective("all_gather", job.world, 1, line=21))
    assert certain(Job(4).run(training(other)).logs())  # type: ignore[arg-type]
    assert not certain([])


def test_a_mismatch_of_collectives_whose_order_is_not_known_is_not_certain() -> None:
    other = at(2, 5, lambda job: collective("all_gather", job.world, 1, line=21))
    logs = Job(4).run(training(other)).logs()  # type: ignore[arg-type]
    for log in logs:
        log.collectives[-1].concurrent = True
    assert diagnose_logs(logs).certain and not certain(logs)


def elsewhere(log: RankLog, *frames: Frame) -> RankLog:
    """Let the main thread of a rank be in other lines than its waits, which another thread does."""
    [main] = log.stacks
    log.stacks = [msgspec.structs.replace(main, frames=(*frames, *main.frames[-1:]))]
    for op in log.collectives:
        op.wait_thread = op.issue_thread = 77
    return log


SLEEP = Frame(SCRIPT, 57, "load_batch")
QUEUE = Frame("/usr/lib/python3.11/queue.py", 171, "get", FrameKind.PYTHON)
REDUCER = Frame("/site/torch/nn/parallel/distributed.py", 99, "forward", FrameKind.TORCH)
LOAD = Frame("/site/torch/serialization.py", 99, "load", FrameKind.TORCH)


@pytest.mark.parametrize(
    ("frames", "waits_for", "is_certain"),
    [
        pytest.param((SLEEP,), "it sleeps", False, id="sleeps"),
        pytest.param((SLEEP,), "", False, id="is-in-user-code"),
        pytest.param((QUEUE, SLEEP), "", False, id="waits-for-a-thread"),
        pytest.param((REDUCER,), "", True, id="waits-in-torch"),
        pytest.param((LOAD,), "", False, id="loads-a-checkpoint"),
        pytest.param((REDUCER,), "it waits for data from a socket", False, id="reads-a-socket"),
        pytest.param((), "", False, id="without-a-stack"),
    ],
)
def test_a_rank_whose_main_thread_is_elsewhere_may_end_the_waits(
    frames: tuple[Frame, ...], waits_for: str, is_certain: bool
) -> None:
    logs = deadlock()
    verdict = diagnose_logs(logs)
    log = elsewhere(logs[1], *frames)
    log.observation.waits_for = waits_for
    if not frames:
        log.stacks = []
    assert verdict.kind == "cycle"
    assert cannot_go_on(verdict, logs) is is_certain


@pytest.mark.parametrize(
    ("issues", "waits", "is_certain"),
    [(True, False, False), (True, True, True), (False, False, True)],
)
def test_another_thread_that_issues_collectives_may_end_the_waits(
    issues: bool, waits: bool, is_certain: bool
) -> None:
    logs = deadlock()
    verdict = diagnose_logs(logs)
    log, first = logs[1], logs[1].collectives[0]
    log.stacks = [*log.stacks, ThreadStack(77, "prefetch", (SLEEP,), log.stacks[0].taken_ns)]
    if issues:
        first.issue_thread = 77
    if waits:
        first.state, first.wait_began_ns, first.wait_ended_ns = State.ISSUED, 1, 0
        first.wait_thread = 77
    assert cannot_go_on(verdict, logs) is is_certain


@pytest.mark.parametrize("waits_for", ["", "it sleeps"])
def test_a_line_that_waits_for_the_device_is_a_wait(waits_for: str) -> None:
    logs = deadlock()
    verdict = diagnose_logs(logs)
    log = elsewhere(logs[1], Frame(SCRIPT, 90, "log_loss"))
    log.observation.waits_for = waits_for
    op = log.collectives[-1]
    op.channel = Channel(op.channel.group, "cuda", runs_ahead=True)
    assert cannot_go_on(verdict, logs) is (waits_for == "")


def test_a_rank_that_waits_for_a_lock_of_a_waiting_rank_may_be_anywhere() -> None:
    def program(job: Job, rank: int) -> Iterator[object]:
        yield all_reduce(job.world, line=20)
        if rank == 1:
            yield Stay(40, "prepare")
        yield all_reduce(job.world, line=30)

    logs = Job(2).run(program).logs()  # type: ignore[arg-type]
    logs[1].observation.waits_for = "it waits for the lock of /data/x.lock"
    assert not certain(logs)
    logs[1].observation.waits_for_pid = logs[0].pid
    assert certain(logs)


@pytest.mark.parametrize("sleeps", [False, True])
def test_a_mismatch_that_blocks_no_rank_is_no_reason(sleeps: bool) -> None:
    """The results are wrong from step 3 on; at step 5 a rank may sleep."""

    def fault(job: Job, rank: int, step: int) -> Iterator[object] | None:
        if (rank, step) == (1, 3):
            return iter([all_reduce(job.world, 100, line=20, reduce_op="MAX")])
        stays = sleeps and (rank, step) == (2, 5)
        return iter([Stay(57, "load_batch")]) if stays else None

    logs = Job(4).run(training(fault)).logs()  # type: ignore[arg-type]
    verdict = diagnose_logs(logs)
    assert any(finding.kind == "mismatch/reduce-op" for finding in verdict.findings)
    assert sleeps or verdict.certain
    assert not cannot_go_on(verdict, logs)


def of_many(logs: list[RankLog]) -> dict[bytes, int]:
    """Return the poses of all ranks as the nodes tell them."""
    found: dict[bytes, int] = {}
    for log in logs:
        if (key := pose_key(log)) is not None:
            found[key] = found.get(key, 0) | 1 << log.rank
    return found


def test_ranks_without_a_log_stand_still_if_their_nodes_say_so() -> None:
    logs = deadlock()
    poses = of_many(logs)
    assert sum(poses.values()) == 0b11
    standstill = Standstill()
    for at_s in (100.0, 101.0, 102.0):
        standstill.look(logs[:1], at_s, poses)
    assert standstill.is_proven
    moved = deadlock()
    elsewhere = (Frame(SCRIPT, 99, "elsewhere"),)
    moved[1].stacks = [msgspec.structs.replace(moved[1].stacks[0], frames=elsewhere)]
    assert of_many(moved) != poses
    standstill.look(logs[:1], 103.0, of_many(moved))
    assert standstill.has_begun and not standstill.is_proven
    moved[1].observation.stack_moved = True
    assert pose_key(moved[1]) is None
    standstill.look(logs[:1], 104.0, of_many(moved))
    assert not standstill.has_begun, "nothing is known of a rank"


def test_a_rank_without_a_log_that_waits_for_no_rank_may_go_on() -> None:
    logs = deadlock()
    verdict = diagnose_logs(logs)
    assert cannot_go_on(verdict, logs, of_many(logs))
    sleeps = {bytes([0]) + b"12345678": 1 << 7}
    assert not cannot_go_on(verdict, logs, of_many(logs) | sleeps)
    assert cannot_go_on(verdict, logs, {bytes([0]) + b"12345678": 1}), "its log tells more"
