"""Waits and transfers on devices, from durations alone, in simulated jobs."""

from __future__ import annotations

from collections import Counter

import pytest
from builders import SCRIPT, START, S
from chosen import long
from device_jobs import DeviceJob, Fault, PipelineJob

from commlens.diagnosis.causes.straggler import find_straggler
from commlens.model.collective import Frame, Stack
from commlens.model.ranklog import RankLog
from commlens.speed.device_times import (
    are_timed,
    device_times,
    find_slow_link,
    is_message,
    payload_by_place,
    timed_collectives,
    timed_until,
    usual_transfers,
)
from commlens.speed.pace import Pace, PaceMeter, SlowRanks, find_slow_ranks, recent, with_since


def seen(job: DeviceJob, until_s: float) -> list[RankLog]:
    """The job's records at the end."""
    return [logs for _, logs in job.looks(until_s)][-1]


def whole(logs: list[RankLog]) -> tuple[int, int]:
    return START, min(timed_until(log) for log in logs)


def followed(job: DeviceJob, until_s: float) -> tuple[list[Pace], SlowRanks | None]:
    """What the watcher measures of it, and whom it finds last."""
    meter, paces = PaceMeter(START), []
    for _, logs in job.looks(until_s):
        paces += meter.measure(logs, 2, 5.0)
    return paces, find_slow_ranks(recent(paces))


def test_the_member_that_comes_last_waits_for_nobody() -> None:
    logs = seen(DeviceJob(4, fault=Fault("device", 2, 1.5)), 20.0)
    begin, end = whole(logs)
    ((waited, sent),) = device_times(timed_collectives(logs, (begin, end)), (begin, end))
    assert waited[2] < 0.02 * (end - begin)
    assert all(waited[rank] > 0.2 * (end - begin) for rank in (0, 1, 3))
    assert len({*sent.values()}) == 1 and 0.03 < sent[0] / (end - begin) < 0.06


def test_a_transfer_is_what_the_last_member_measures() -> None:
    logs = seen(DeviceJob(4, fault=Fault("device", 2, 1.5), jitter=0.0), 20.0)
    for groups in usual_transfers(timed_collectives(logs, whole(logs))).values():
        for _, ns, _ in groups.values():
            assert ns == pytest.approx(0.006 * S, rel=0.01), "6% of a step of 0.1 s"


def test_members_on_other_nodes_leave_the_whole_duration() -> None:
    logs = seen(DeviceJob(4, jitter=0.0), 20.0)[:2]
    found = list(timed_collectives(logs, whole(logs)))
    assert found and all(each.transfer_ns == 0 for each in found)
    assert all(
        ns == pytest.approx(0.006 * S, rel=0.01) for each in found for ns in each.waited_ns.values()
    )


def test_untimed_collectives_are_no_evidence() -> None:
    logs = seen(DeviceJob(2), 20.0)
    ops = [op for op in logs[0].collectives if op.announced_ns < timed_until(logs[0])]
    assert are_timed(ops)
    for op in ops[: len(ops) // 4]:
        op.duration_ns = None
    assert not are_timed(ops)
    for op in logs[0].collectives:
        op.duration_ns = None
    assert timed_until(logs[0]) == 0, "nothing is known yet"


@pytest.mark.parametrize(
    ("kind", "tp", "syncs"), [("device", 1, True), ("device", 2, False), ("host", 2, True)]
)
def test_the_slow_rank_is_named_and_since_when(kind: str, tp: int, syncs: bool) -> None:
    job = DeviceJob(
        8, tp=tp, fault=Fault(kind, 5, 1.3, begins_s=20.0), syncs=syncs, ahead=1, step_s=0.2
    )
    paces, slow = followed(job, 70.0)
    assert slow is not None and slow.ranks == [5]
    assert slow.cost == pytest.approx(0.2, abs=0.08)
    assert with_since(slow, paces).since_ns / S - START / S == pytest.approx(20.0, abs=8.0)


def test_a_difference_of_a_tenth_is_named_on_a_device() -> None:
    assert (slow := followed(DeviceJob(8, fault=Fault("device", 5, 1.1)), 60.0)[1]) is not None
    assert slow.ranks == [5]


@pytest.mark.parametrize("seed", range(2))
def test_healthy_ranks_are_not_named(seed: int) -> None:
    job = DeviceJob(8, tp=2, seed=seed, jitter=0.08, experts=True, syncs=seed == 0)
    job.step_s = 0.2
    assert followed(job, 60.0)[1] is None


def test_a_host_that_runs_ahead_of_its_device_is_not_slow() -> None:
    job = DeviceJob(4, fault=Fault("host", 1, 1.3), syncs=False, ahead=30)
    assert followed(job, 60.0)[1] is None, "its device always has work"


def test_a_slow_link_is_told_by_its_sibling_groups() -> None:
    logs = seen(DeviceJob(8, tp=2, fault=Fault("link", 3, 1.3)), 30.0)
    link = find_slow_link(logs, whole(logs), [2, 3])
    assert link is not None and link.ratio > 5 and link.group.ranks == (2, 3)
    assert find_slow_link(logs, whole(logs), [3]) is None, "the group has another member"
    healthy = seen(DeviceJob(8, tp=2), 30.0)
    link = find_slow_link(healthy, whole(healthy), [2, 3])
    assert link is None or link.ratio < 1.1


def test_transfers_are_compared_with_the_best_of_the_job() -> None:
    """All ranks are in one group: nobody waits for anybody, and the link is slow for all."""
    for fault in (Fault("link", 0, 1.5, begins_s=40.0), None):
        meter = PaceMeter(START)
        for _, logs in DeviceJob(4, fault=fault).looks(100.0):
            meter.measure(logs, 2, 5.0)
        slower = meter.transfers.slower()
        if fault is None:
            assert slower is None
            continue
        assert slower is not None and slower.kind.op == "all_reduce"
        assert slower.group.ranks == (0, 1, 2, 3) and not slower.is_alone
        assert slower.now_ns / slower.best_ns > 5
        assert slower.share == pytest.approx(0.33, abs=0.1)
        assert (slower.since_ns - START) / S == pytest.approx(40.0, abs=8.0)


@pytest.mark.parametrize(
    ("batched", "kind"), [(True, "link"), long(False, "link"), (True, "device")]
)
def test_messages_between_two_stages_are_compared_with_the_best_of_the_job(
    batched: bool, kind: str
) -> None:
    """A slow rank makes others wait in their receives; the data takes no longer."""
    meter = PaceMeter(START)
    fault = Fault(kind, 2, 1.5, begins_s=40.0)
    job = PipelineJob(8, fault=fault, batched=batched, microbatches=4, step_s=0.4)
    for _, logs in job.looks(80.0):
        meter.measure(logs, 2, 5.0)
    slower = meter.transfers.slower()
    if kind == "device":
        assert slower is None
        return
    assert slower is not None and slower.kind.op == "recv" and slower.is_alone
    assert {*slower.group.ranks} == {2, 4} and slower.now_ns / slower.best_ns > 5


def test_the_work_of_a_line_is_counted() -> None:
    logs = seen(DeviceJob(4, experts=True, fault=Fault("work", 1, 1.5)), 20.0)
    more, usual = (payload_by_place(logs[rank], whole(logs)) for rank in (1, 0))
    ratios = {place[0]: more[place] / usual[place] for place in usual}
    assert ratios["all_to_all"] == pytest.approx(1.5, abs=0.02)
    assert ratios["all_reduce"] == pytest.approx(1.0, abs=0.02)


LOAD, WAIT = (Frame(SCRIPT, 7, "load_batch"),), (Frame(SCRIPT, 30, "main"),)
ALIKE: dict[int, Counter[Stack]] = {rank: Counter({LOAD: 4, WAIT: 996}) for rank in range(8)}
PIPELINES = [
    (Fault("device", 2, 1.6, 20.0), True, [2], "slow-device"),
    (Fault("stage", 2, 1.6), False, [2, 3], "uneven-work"),
    long(Fault("stage", 7, 1.6, 20.0), True, [6, 7], "slow-device"),
    (Fault("link", 2, 1.5, 20.0), False, [], ""),
    long(None, True, [], ""),
]


@pytest.mark.parametrize(("fault", "batched", "ranks", "why"), PIPELINES)
def test_stages_of_a_pipeline(
    fault: Fault | None, batched: bool, ranks: list[int], why: str
) -> None:
    """A stage that others wait for is named, and no neighbour."""
    job = PipelineJob(8, fault=fault, batched=batched, microbatches=4, step_s=0.4)
    meter, paces, found = PaceMeter(START), [], []
    for _, logs in job.looks(80.0):
        paces += meter.measure(logs, 2, 5.0)
        slow = find_slow_ranks(recent(paces))
        if slow is not None:
            cause = find_straggler(with_since(slow, paces), logs, ALIKE, range(8)).cause
            found.append((cause.culprits, cause.why))
    assert {tuple(culprits) for culprits, _ in found} == ({tuple(ranks)} if ranks else set())
    assert {reason for _, reason in found} <= {why}


@pytest.mark.parametrize("batched", [True, long(False)])
def test_a_stage_that_waits_until_its_message_is_received(batched: bool) -> None:
    """The stages before a late one wait in their sends."""
    fault = Fault("host", 1, 1.3, 20.0)
    job = PipelineJob(
        3, pp=3, fault=fault, batched=batched, microbatches=4, step_s=0.4, waits_for_sends=True
    )
    _, slow = followed(job, 70.0)
    assert slow is not None and slow.ranks == [1]
    span = whole(job.logs)
    seen_ns = device_times(timed_collectives(job.logs, span), span)[0].waited[0]
    for op in job.logs[0].collectives:
        op.wait_began_ns = 0
    ns = device_times(timed_collectives(job.logs, span), span)[0].waited[0]
    assert ns < 0.75 * seen_ns, "the waits of rank 0 are in its sends"


@pytest.mark.parametrize(
    ("fault", "waits_for_sends"),
    [
        (None, True),
        (Fault("device", 0, 1.5, 20.0), True),
        long(None, False),
        long(Fault("host", 2, 1.4, 20.0), True),
        long(Fault("device", 1, 1.5, 20.0), True),
        long(Fault("device", 0, 1.5, 20.0), False),
    ],
)
def test_large_messages_of_a_pipeline(fault: Fault | None, waits_for_sends: bool) -> None:
    """A stage in the middle has twice as many messages as the first and the last: it waits as long
    as they do. The data of each takes a third of a forward pass.
    """
    job = PipelineJob(3, fault=fault, pp=3, waits_for_sends=waits_for_sends, data=0.09)
    paces, slow = followed(job, 80.0)
    if fault is not None:
        assert slow is not None and slow.ranks == [fault.rank]
        return
    assert slow is None
    waits = [sum(pace.waited_s[rank] for pace in paces) for rank in range(3)]
    assert max(waits) < 1.1 * min(waits)


def test_an_uneven_stage_is_no_slow_device_after_a_warm_up() -> None:
    """Others did not wait for it in the first sample, but steps take no longer since then."""
    logs = seen(PipelineJob(8, fault=Fault("stage", 2, 1.6), microbatches=4, step_s=0.4), 40.0)
    slow = SlowRanks([2, 3], 0.2, 50, 0.3, 0.0, 0.0, logs[0].captured_ns - 20 * S, 9)
    for slower, why in ((None, "uneven-work"), (1.03, "uneven-work"), (1.3, "slow-device")):
        cause = find_straggler(slow._replace(slower=slower), logs, ALIKE, range(8)).cause
        assert cause.why == why, slower


def test_messages_without_durations_are_no_evidence() -> None:
    logs = seen(PipelineJob(4, pp=2, microbatches=4, step_s=0.4), 20.0)
    ops = [op for op in logs[0].collectives if op.announced_ns < timed_until(logs[0])]
    assert are_timed(ops)
    for op in ops:
        if is_message(op):
            op.duration_ns = None
    assert not are_timed(ops)
