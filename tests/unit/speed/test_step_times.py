"""Where the communication time of a step goes: simulated jobs whose ranks compute and send for
known times.
"""

from __future__ import annotations

import msgspec
import pytest
from builders import MS, S
from device_jobs import DeviceJob, Fault, PipelineJob
from paced_jobs import job

from commlens.model.collective import LearnedHow
from commlens.model.ranklog import RankLog
from commlens.model.worlds import JobWorld, Worlds
from commlens.reports.step_table import step_table
from commlens.speed.device_times import timed_until
from commlens.speed.rhythm import first_moments
from commlens.speed.step_times import RankTime, StepTimes, step_times
from commlens.text import naming_worlds


def compute(rank: int, step: int) -> float:
    """10 ms before the first collective; rank 2 takes 15 ms."""
    return 15.0 if rank == 2 else 10.0


def ms(ns: float) -> float:
    return round(ns / MS, 2)


def test_exposed_waits():
    """A step: 10 or 15 ms, an all_reduce of 0.5 ms that all wait for, 2 ms, another one."""
    times = step_times(job(4, 20, compute))
    assert (times.steps, times.first_step, times.last_step) == (18, 1, 18), (
        "neither the first step nor the last one, whose end is not known"
    )
    assert ms(times.step_ns) == 18
    assert {rank: ms(waited) for rank, waited in times.waited_by_rank.items()} == {
        0: 6,
        1: 6,
        2: 1,
        3: 6,
    }
    assert (ms(times.waited_ns), times.hidden_ns, times.device_ns) == (4.75, 0, None)
    whole, *places = times.parts
    assert (whole.group, whole.place, whole.calls, ms(whole.waited_ns)) == (
        "default group",
        "",
        2,
        4.75,
    )
    assert [(part.place, part.calls, ms(part.waited_ns)) for part in places] == [
        ("all_reduce at train.py:10 train", 1, 4.25),
        ("all_reduce at train.py:20 train", 1, 0.5),
    ]
    assert [(each.rank, ms(each.waited_ns), each.sent_ns) for each in times.ranks] == [
        (0, 6, 0),
        (1, 6, 0),
        (2, 1, 0),
        (3, 6, 0),
    ]
    table = step_table(times)
    assert [(bar.rank, bar.waits, bar.sends, bar.text) for bar in table.bars][1:3] == [
        ("rank 1", 33.3, 0.0, "waits 6.0 ms"),
        ("rank 2", 5.5, 0.0, "waits 998 us"),
    ]
    assert (
        table.answer
        == "A step takes 18 ms (steps 1 to 18). A rank waits in collectives for 4.7 ms of it (26%)."
        " Rank 2 waits least (998 us), rank 0 most (6.0 ms)."
    )
    with naming_worlds(Worlds((JobWorld("trainer", 0, 2), JobWorld("rollout", 2, 2)))):
        assert "Rollout 0 waits least (998 us), trainer 0 most" in step_table(times).answer
    assert table.headings == ["group", "where", "calls", "waited", "of the step"], (
        "no column without content"
    )
    assert table.rows[1] == ["", "all_reduce at train.py:10 train", "1", "4.2 ms", "24%"]


def test_a_collective_that_runs_while_its_rank_computes():
    """The first all_reduce of a step is waited for 1 ms before the second one is issued, instead of
    at once.
    """
    logs = job(2, 10, lambda rank, step: 10.0)
    for log in logs:
        for op, following in zip(log.collectives[::2], log.collectives[1::2], strict=True):
            op.wait_began_ns, op.wait_ended_ns = following.announced_ns - MS, following.announced_ns
    times = step_times(logs)
    assert (ms(times.waited_ns), ms(times.hidden_ns)) == (1.5, 1.5), (
        "in flight for 2.5 ms, waited for during the last one"
    )
    assert "another 1.5 ms of collectives are hidden behind its work" in step_table(times).answer
    assert times.unknown == [
        "A collective may have ended before the rank waited for it, so less may be hidden than"
        " shown."
    ]


def test_a_wait_for_another_collective_hides_nothing():
    """While a rank waits for one collective, another one is in flight: that time is exposed, not
    hidden.
    """
    logs = job(2, 10, lambda rank, step: 10.0)
    for log in logs:
        for op, following in zip(log.collectives[::2], log.collectives[1::2], strict=True):
            op.announced_ns = op.returned_ns = following.wait_began_ns - 1000
            op.wait_began_ns = op.wait_ended_ns = following.wait_ended_ns
    assert step_times(logs).hidden_ns == 0


def test_a_wait_that_nobody_records_is_said():
    logs = job(2, 10, lambda rank, step: 10.0 + rank, how="cpp")
    times = step_times(logs)
    assert times.waited_by_rank[0] - times.waited_by_rank[1] == 1_000_000, (
        "rank 0 issues its first one 1 ms earlier"
    )
    assert all(op.learned_how is LearnedHow.POLL for op in logs[0].collectives)
    assert not any("no wait" in sentence for sentence in times.unknown)
    unseen = step_times(job(2, 10, lambda rank, step: 10.0 + rank, how="unseen"))
    assert "Some collectives ended and no wait for them is recorded" in unseen.unknown[0]


@pytest.mark.parametrize("timed", [True, False])
def test_an_accelerator(timed: bool):
    times = step_times(job(2, 10, lambda rank, step: 10.0, device="cuda", timed=timed))
    assert (times.waited_ns, times.hidden_ns, bool(times.device_ns)) == (0, 0, timed)
    assert ("on the device" in step_table(times).headings) is timed
    assert ("without the setting timing" in times.unknown[0]) is not timed
    assert "hidden behind computation is not known" in times.unknown[0]


def test_too_little_is_said():
    assert step_table(step_times([])).notes == ["No collective is recorded."]
    logs = job(2, 2, compute)
    assert step_times(logs).steps == 0
    assert "do not reach back to one whole step" in step_table(step_times(logs)).notes[0]
    for log in logs:
        log.steps = 0
    assert "step() of a torch optimizer" in step_table(step_times(logs)).notes[0]
    assert step_table(step_times(logs)).rows == []


def test_ranks_that_reach_back_differently():
    """Rings wrap at different places; only steps that all ranks have as a whole count."""
    logs = job(3, 30, compute)
    del logs[1].collectives[:31]
    del logs[2].collectives[-5:]
    times = step_times(logs)
    assert (times.first_step, times.last_step) == (16, 26)
    alone = step_times([msgspec.structs.replace(logs[0], world_size=3)])
    assert alone.unknown == ["Ranks 1-2 are not counted."]


def test_a_large_job_is_sampled():
    logs: list[RankLog] = []
    for host in range(12):
        for log in job(8, 6, lambda rank, step: 10.0):
            log.rank, log.host, log.world_size = 8 * host + log.rank, f"n{host}", 96
            logs.append(log)
    times = step_times(logs)
    assert len(times.waited_by_rank) == 64 and times.unknown == ["Ranks 64-95 are not counted."]


def test_of_many_ranks_those_that_wait_least_are_drawn():
    ranks = [RankTime(rank, 1000 if rank != 90 else 10, 0) for rank in range(100)]
    waited = {each.rank: each.waited_ns for each in ranks}
    table = step_table(StepTimes(steps=5, step_ns=2000, waited_by_rank=waited, ranks=ranks))
    drawn = [bar.rank for bar in table.bars]
    assert len(drawn) == 64 and drawn[-1] == "rank 90"
    assert table.notes[0] == "Of 100 ranks, the 64 that wait least are drawn."


def test_it_can_be_written_as_json():
    times = step_times(job(2, 10, compute))
    assert msgspec.json.decode(msgspec.json.encode(times), type=StepTimes) == times


def test_each_rank_waits_and_sends_on_its_device():
    times = step_times(job(4, 20, compute, device="cuda"))
    shown = {
        each.rank: (round(ms(each.waited_ns)), round(ms(each.sent_ns))) for each in times.ranks
    }
    assert shown == {0: (5, 1), 1: (5, 1), 2: (0, 1), 3: (5, 1)}
    assert step_table(times).bars[0].text == "waits 5.0 ms, sends 1.0 ms"


def test_steps_whose_durations_are_not_known_yet_are_left_out():
    *_, (_, logs) = DeviceJob(4, fault=Fault("device", 2, 1.5), reading_s=14.0).looks(50.0)
    known = min(timed_until(log) for log in logs)
    assert known < logs[0].captured_ns - 2 * S
    times = step_times(logs)
    assert first_moments(logs[0])[times.last_step] < known
    waits = {each.rank: each.waited_ns / times.step_ns for each in times.ranks}
    assert waits[2] < 0.02 and min(waits[rank] for rank in (0, 1, 3)) > 0.25


@pytest.mark.parametrize(
    ("fault", "least"),
    [
        (None, ""),
        (Fault("device", 1, 1.5), "Rank 1 waits least"),
        (Fault("device", 2, 1.5), "Rank 2 waits least"),
    ],
)
def test_the_data_of_messages_is_sent_and_not_waited_for(fault: Fault | None, least: str):
    *_, (_, logs) = PipelineJob(
        3, pp=3, fault=fault, batched=False, waits_for_sends=True, data=0.09, jitter=0.01
    ).looks(30.0)
    times = step_times(logs)
    sent = {each.rank: each.sent_ns / times.step_ns for each in times.ranks}
    waited = {each.rank: each.waited_ns / times.step_ns for each in times.ranks}
    assert sent[1] - sent[0] > 0.08, "rank 1 has twice as many messages"
    if fault is None:
        gap = waited[0] - waited[1]
        assert sent[1] - sent[0] == pytest.approx(gap, abs=0.02), "as many kernels"
    answer = step_table(times).answer
    assert least in answer and ("waits least" in answer) is bool(least)


@pytest.mark.parametrize("here", [2, 4])
def test_waits_for_ranks_on_other_nodes_are_left_out(here: int):
    """Nobody is late: the ranks send for most of the step."""
    *_, (_, logs) = DeviceJob(4, fault=Fault("link", 0, 1.9), jitter=0.01).looks(30.0)
    times = step_times(logs[:here])
    table = step_table(times)
    note = "How long a device waits in a group with ranks that are not counted is not known."
    assert (note in table.notes) is times.waits_left_out is (here < 4)
    assert [each.waited_ns < 0.05 * times.step_ns for each in times.ranks] == [True] * here
    assert len(table.bars) == (0 if here < 4 else 4), "the rest of a bar would be the rank's work"
    assert ("for at least 0 us of it (0%); they take" in table.answer) is (here < 4)


def test_of_waits_of_which_some_are_left_out_none_is_called_the_least():
    *_, (_, logs) = DeviceJob(4, tp=2, fault=Fault("device", 0, 1.5), jitter=0.01).looks(30.0)
    assert "rank 0 waits least" in step_table(step_times(logs)).answer.lower()
    assert "waits least" not in step_table(step_times(logs[:2])).answer
