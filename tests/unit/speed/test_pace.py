"""Ranks that make a running job slow: simulated jobs whose ranks compute for known times."""

from __future__ import annotations

import random
import re
from datetime import datetime, timezone

import pytest
from builders import MS, START, S
from device_jobs import DeviceJob, Fault
from paced_jobs import job
from paced_samples import late, samples

from commlens.commands import main
from commlens.diagnosis.examine import examine_logs
from commlens.model.cause import Straggler
from commlens.speed.pace import find_slow_in_records, find_slow_ranks, measure, recent
from commlens.speed.rhythm import first_moments
from commlens.text import utc


@pytest.mark.parametrize(("how", "device"), [("wait", "cpu"), ("cpp", "cpu"), ("wait", "cuda")])
def test_the_slow_rank_is_found(how: str, device: str) -> None:
    slow = find_slow_ranks(samples(job(4, 200, late, how=how, device=device)))
    assert slow is not None
    assert slow.ranks == [2]
    assert slow.cost == pytest.approx(50 / 153, abs=0.02)
    assert slow.step_s == pytest.approx(0.153, abs=0.002)


def test_several_slow_ranks() -> None:
    slow = find_slow_ranks(
        samples(job(8, 200, lambda rank, step: 150.0 if rank in (1, 6) else 100.0))
    )
    assert slow is not None
    assert slow.ranks == [1, 6]


def test_too_little_is_not_judged() -> None:
    assert find_slow_ranks(samples(job(4, 40, late))) is None, "40 steps"
    assert find_slow_ranks(samples(job(4, 200, late), 4)) is None, "4 samples"
    assert (
        find_slow_ranks(samples(job(4, 100, lambda rank, step: late(rank, step) / 10))) is None
    ), "2 seconds"
    assert measure(job(1, 200, late)) is None, "one rank"
    assert measure(job(2, 200, late, device="cuda", timed=False)) is None, (
        "the host does not wait, and no duration is known"
    )


def test_a_small_difference_is_not_judged() -> None:
    assert (
        find_slow_ranks(samples(job(4, 300, lambda rank, step: 108.0 if rank == 2 else 100.0)))
        is None
    )


def test_one_long_pause_is_not_judged() -> None:
    """A checkpoint that rank 0 writes now and then."""
    assert (
        find_slow_ranks(
            samples(job(4, 300, lambda rank, step: 30_000.0 if (rank, step) == (0, 150) else 100.0))
        )
        is None
    )


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_random_lateness_names_nobody(ranks: int) -> None:
    """On a busy machine, each rank is late now and then."""
    for seed in range(32 // ranks):
        draw = random.Random(seed)
        times = [[100 + draw.expovariate(1 / 40) for _ in range(ranks)] for _ in range(200)]
        assert (
            find_slow_ranks(
                samples(job(ranks, 200, lambda rank, step, times=times: times[step][rank]))
            )
            is None
        ), seed  # type: ignore[misc]


def test_only_the_newest_samples_count() -> None:
    before, after = (
        samples(job(4, 400, lambda rank, step: 100.0), 12),
        samples(job(4, 400, late), 12),
    )
    assert find_slow_ranks([*before, *after]) is None
    slow = find_slow_ranks(recent([*before, *after]))
    assert slow is not None
    assert slow.ranks == [2]


def test_ranks_that_come_and_go_are_not_mixed() -> None:
    assert find_slow_ranks([*samples(job(4, 200, late)), *samples(job(3, 200, late))]) is None


def test_records_of_a_dump() -> None:
    verdict = examine_logs(job(4, 200, late), slow=True).verdict
    assert (verdict.kind, verdict.culprits) == ("straggler", [2])
    assert examine_logs(job(4, 200, lambda rank, step: 100.0), slow=True).verdict.kind == "healthy"
    assert examine_logs(job(4, 200, late)).verdict.kind == "healthy", (
        "the watcher judges a job that runs by itself"
    )


def test_records_of_a_dump_whose_durations_end_long_before_it() -> None:
    """Torch's recorder is read every 14 s: a dump holds records whose durations are not known."""
    for fault in (Fault("device", 3, 1.3, begins_s=40.0), None):
        *_, (_, logs) = DeviceJob(8, fault=fault, reading_s=14.0).looks(90.0)
        verdict = examine_logs(logs, slow=True).verdict
        if fault is None:
            assert verdict.kind == "healthy"
            continue
        assert (verdict.kind, verdict.culprits) == ("straggler", [3])
        assert isinstance(verdict.cause, Straggler)
        assert (verdict.cause.since_ns - START) / S == pytest.approx(40.0, abs=6.0)


def test_diagnose_shows_how_long_each_rank_waits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "commlens.diagnosis.api.examine_paths",
        lambda *_, **__: examine_logs(job(4, 200, late), slow=True),
    )
    assert main(["diagnose", ".", "--slow"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines if "%" in line][-3:-1] == [
        ["rank", "2", "1%"],
        ["ranks", "0-1,3", "33%"],
    ]
    assert lines[-1].startswith(
        "Rank 2 waits least: 33% of the time less than all others. A difference of 10% or more, over"
        " at least 50 steps"
    )
    monkeypatch.setattr(
        "commlens.diagnosis.api.examine_paths",
        lambda *_, **__: examine_logs(job(1, 200, late), slow=True),
    )
    assert main(["diagnose", ".", "--slow"]) == 0
    assert "How long each rank waits is unknown" in capsys.readouterr().out
    assert main(["diagnose", ".", "--slow", "--json"]) == 2


def test_diagnose_shows_how_long_each_rank_waits_since_a_step_or_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank that is slow in the second half of the job waits least since then by more than in
    all.
    """
    logs = job(4, 400, lambda rank, step: 100.0 + 50.0 * (rank == 2 and step >= 200))
    monkeypatch.setattr(
        "commlens.diagnosis.api.examine_paths", lambda *_, **__: examine_logs(logs, slow=True)
    )
    changed_ns = first_moments(logs[0])[200]
    clock, day = utc(changed_ns), datetime.fromtimestamp(changed_ns / 1e9, timezone.utc).date()

    def shown(*options: str) -> str:
        main(["diagnose", ".", "--slow", *options])
        return capsys.readouterr().out.split("In the last ")[1]

    assert "(399 steps)" in shown()
    for when in ("200", clock, clock.removesuffix(" UTC"), f"{day}T{clock[:8]}Z"):
        text = shown("--since", when)
        steps = int(re.findall(r"\((\d+) steps\)", text)[0])
        assert 190 <= steps <= 210, text
        assert re.search(r"Rank 2 waits least: 3[23]% of the time less", text), text
        assert "Since step" not in text, "no step before is looked at"

    assert main(["diagnose", ".", "--slow", "--since", "9,000"]) == 2
    assert "the last is of step 399 (" in capsys.readouterr().err
    assert main(["diagnose", ".", "--since", "200"]) == 2
    assert "give --slow, too" in capsys.readouterr().err
    for wrong in ("noon", "-1", "25:00", ""):
        assert main(["diagnose", ".", "--slow", f"--since={wrong}"]) == 2
        assert "is neither a step such as 4120 nor a time" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["cpp", "unseen"])
def test_clocks_of_several_hosts_are_not_compared(how: str) -> None:
    """The second host's clock is 30 ms behind."""
    for slow in (None, 3):
        logs = job(4, 300, lambda rank, step: 150.0 if rank == slow else 100.0, how=how)  # noqa: B023
        for log in logs[2:]:
            log.host = "other"
            for op in log.collectives:
                op.announced_ns -= 30 * MS
                op.returned_ns -= 30 * MS
                if op.wait_began_ns:
                    op.wait_began_ns -= 30 * MS
                    op.wait_ended_ns -= 30 * MS
        found = find_slow_in_records(logs)
        named = found.ranks if found is not None else []
        assert named == ([3] if slow is not None and how == "cpp" else []), slow
