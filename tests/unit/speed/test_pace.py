"""Ranks that make a running job slow: simulated jobs whose ranks compute for known times."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest
from builders import MS, SCRIPT, START
from paced_jobs import job

from commlens.commands import main
from commlens.diagnosis.examine import examine_logs
from commlens.diagnosis.straggler import find_stretch, straggler_verdict
from commlens.model.collective import (
    Frame,
    FrameKind,
)
from commlens.model.ranklog import RankLog
from commlens.processes import profile
from commlens.speed import pace
from commlens.speed.job_pace import judge, packed
from commlens.speed.pace import (
    Pace,
    condensed,
    find_slow_in_records,
    find_slow_ranks,
    measure,
    recent,
)


def samples(logs: list[RankLog], number: int = 6, least: int = 2) -> list[Pace]:
    """What ``number`` samples of the job's time show."""
    begin, end = START, logs[0].captured_ns
    edges = [begin + (end - begin) * part // number for part in range(number + 1)]
    return [
        pace
        for first, last in pairwise(edges)
        if (pace := measure(logs, first, last, least=least)) is not None
    ]


def late(rank: int, step: int) -> float:
    return 150.0 if rank == 2 else 100.0


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


@pytest.mark.parametrize("how", ["wait", "cpp"])
def test_the_stretch_is_found(how: str) -> None:
    stretch = find_stretch(job(4, 50, late, how=how), [2])
    assert stretch is not None
    assert (
        stretch.words
        == "between all_reduce in train.py:20 train and all_reduce in train.py:10 train"
    )
    assert stretch.phase == "after an optimizer step: in data loading or the forward pass"
    assert stretch.extra_s == pytest.approx(0.050, abs=0.002)


def test_records_of_a_dump() -> None:
    verdict = examine_logs(job(4, 200, late), slow=True).verdict
    assert (verdict.kind, verdict.culprits) == ("straggler", [2])
    assert examine_logs(job(4, 200, lambda rank, step: 100.0), slow=True).verdict.kind == "healthy"
    assert examine_logs(job(4, 200, late)).verdict.kind == "healthy", (
        "the watcher judges a job that runs by itself"
    )


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


def test_clocks_of_several_hosts_are_not_compared() -> None:
    """The second host's clock is 30 ms behind."""
    logs = job(4, 300, lambda rank, step: 100.0, how="cpp")
    for log in logs[2:]:
        log.host = "other"
        for op in log.collectives:
            op.announced_ns -= 30 * MS
            op.returned_ns -= 30 * MS
    assert find_slow_in_records(logs) is None
    late_there = job(4, 300, lambda rank, step: 150.0 if rank == 3 else 100.0, how="cpp")
    for log in late_there[2:]:
        log.host = "other"
    assert find_slow_in_records(late_there) is None, "only rank 2 is known to wait for it"


@pytest.mark.parametrize("per_node", [1, 2])
def test_the_ranks_of_several_nodes_are_compared(per_node: int) -> None:
    """Each node measures its own ranks' waits on its own clock; the second node's is an hour
    behind.
    """
    before = None
    for compute, slow in (
        (late, [2]),
        (lambda rank, step: 108.0 if rank == 2 else 100.0, [2]),
        (lambda rank, step: 100.0, None),
    ):
        logs = job(4, 400, compute)
        nodes = [logs[first : first + per_node] for first in range(0, 4, per_node)]
        paces = [condensed(samples(node, least=1)) for node in nodes]
        before = judge([packed(each) for each in paces], before)
        assert before is not None and before.ranks == [0, 1, 2, 3]
        assert (before.slow.ranks if before.slow is not None else None) == slow, (
            "half the cost suffices to remain slow"
        )


def test_nodes_that_wait_for_each_other_unseen_are_not_compared() -> None:
    """DDP waits in C++: how long for ranks of another node, their clocks alone would tell."""
    logs = job(4, 400, late, how="cpp")
    assert condensed(samples(logs)), "of one node"
    assert condensed(samples(logs[:2])) == []
    assert (
        judge([packed(condensed(samples(logs[:2]))), packed(condensed(samples(logs[2:])))], None)
        is None
    )


def test_a_slow_rank_that_is_alone_on_its_node() -> None:
    load = Frame(SCRIPT, 7, "load_batch")
    slow = find_slow_ranks(samples(job(4, 200, late)))
    assert slow is not None
    log = job(4, 200, late)[2]
    verdict = straggler_verdict(slow, [log], {2: Counter({(load,): 40, (): 60})}, compared=range(4))
    assert verdict.summary == "rank 2 makes the job slow: all others wait for 33% of the time"
    assert (verdict.source, verdict.victims) == (
        None,
        [0, 1, 3],
    ), "no other rank's profile shows what is usual"
    assert "Rank 2 spends 40% of the time in train.py:7 load_batch." in verdict.explanation


def found(logs: list[RankLog]) -> pace.Slow:
    slow = find_slow_ranks(samples(logs))
    assert slow is not None
    return slow


def test_the_verdict_with_records_alone() -> None:
    logs = job(4, 200, late)
    verdict = straggler_verdict(found(logs), logs)
    assert (verdict.kind, verdict.culprits, verdict.victims, verdict.confidence) == (
        "straggler",
        [2],
        [0, 1, 3],
        "medium",
    )
    assert verdict.summary == "rank 2 makes the job slow: all others wait for 33% of the time"
    assert (
        verdict.explanation
        == "In each step of 155 ms, ranks 0-1,3 wait 51 ms longer than rank 2 (194 steps seen)."
        " Rank 2 takes 50 ms longer in each step between all_reduce in train.py:20 train and"
        " all_reduce in train.py:10 train (after an optimizer step: in data loading or the"
        " forward pass)."
    )
    assert verdict.next_step.startswith(
        "profile rank 2 before train.py:10 train (`py-spy record --duration 10 --pid 102`)"
    )


def test_the_verdict_on_the_ranks_of_one_node_says_so() -> None:
    logs = job(4, 200, late)
    for log in logs:
        log.host, log.world_size = "n03", 8
    assert (
        straggler_verdict(found(logs), logs).summary
        == "rank 2 makes the job slow: all others on n03 wait for 33% of the time"
    )


def test_the_verdict_with_profiles() -> None:
    main, load, read = (
        Frame(SCRIPT, 30, "main"),
        Frame(SCRIPT, 7, "load_batch"),
        Frame("/lib/python3/io.py", 3, "read", FrameKind.LIBRARY),
    )
    profiles = {
        2: Counter({(read, load, main): 40, (main,): 60}),
        0: Counter({(read, load, main): 2, (main,): 98}),
    }
    logs = job(4, 200, late)
    verdict = straggler_verdict(found(logs), logs, profiles)
    assert verdict.why == "data-loading"
    assert verdict.source == "train.py:7"
    assert (
        "Rank 2 spends 40% of the time in train.py:7 load_batch, rank 0 2%." in verdict.explanation
    )
    assert verdict.next_step == "look at load_batch (train.py:7) on rank 2"


def test_a_rank_without_a_cpu() -> None:
    logs = job(4, 200, late)
    paces = [
        each._replace(
            no_cpu_s={rank: (0.3 if rank == 2 else 0.01) * each.window_s for rank in range(4)}
        )
        for each in samples(logs)
    ]
    slow = find_slow_ranks(paces)
    assert slow is not None
    verdict = straggler_verdict(slow, logs)
    assert verdict.why == "no-cpu"
    assert "Rank 2 was ready to run but had no CPU for 30% of the time." in verdict.explanation
    assert verdict.next_step.startswith("find out what else runs on its cores")


def test_the_profile_of_py_spy() -> None:
    text = (
        "thread (7): MainThread;main (/home/me/train.py:30);Loader.__next__ (/lib/x.py:5) 12\n"
        "thread (8): worker;run (/lib/threading.py:3) 50\n"
        "thread (7): MainThread;main (/home/me/train.py:31) 3\n"
        "broken\n"
    )
    taken = profile.parse(
        text, 7, lambda file: FrameKind.USER if file.startswith("/home") else FrameKind.LIBRARY
    )
    outer = Frame("/home/me/train.py", 30, "main")
    assert taken == {
        (Frame("/lib/x.py", 5, "__next__", FrameKind.LIBRARY), outer): 12,
        (Frame("/home/me/train.py", 31, "main"),): 3,
    }
