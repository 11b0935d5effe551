"""One process counts for each rank."""

from __future__ import annotations

import pytest

from commlens.processes import ranks
from commlens.processes.ranks import RankProcess, one_of_each


@pytest.mark.parametrize(
    ("parents", "with_torch", "counts"),
    [
        ({}, {10, 20}, 20),
        ({}, set(), 20),
        ({}, {10}, 10),
        ({}, {20}, 20),
        ({20: 10}, {10, 20}, 10),
        ({20: 10}, set(), 10),
        ({20: 10}, {20}, 20),
    ],
    ids=[
        "unrelated: the newest",
        "unrelated, neither has torch yet: the newest",
        "unrelated: the one with torch",
        "unrelated: the newest, and it has torch",
        "a rank and its child",
        "a rank and its child, neither has torch yet",
        "a program that starts the rank",
    ],
)
def test_of_two_processes_with_one_rank(
    monkeypatch: pytest.MonkeyPatch, parents: dict[int, int], with_torch: set[int], counts: int
) -> None:
    monkeypatch.setattr(ranks.process, "has_torch", with_torch.__contains__)
    monkeypatch.setattr(ranks.job_dirs, "parent_of", lambda pid: parents.get(pid, 1))
    both = [RankProcess(0, pid, start_ticks=pid) for pid in (20, 10)]
    assert [one.pid for one in one_of_each(both)] == [counts]


def test_the_memory_map_of_a_process_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def has_torch(pid: int) -> bool:
        read.append(pid)
        return True

    monkeypatch.setattr(ranks.process, "has_torch", has_torch)
    monkeypatch.setattr(ranks.job_dirs, "parent_of", lambda pid: 10 if pid > 10 else 1)
    workers = [RankProcess(0, pid, start_ticks=pid) for pid in range(10, 14)]
    assert [one.pid for one in one_of_each([*workers, RankProcess(1, 9, 9)])] == [10, 9]
    assert sorted(read) == [10, 11, 12, 13]


def test_processes_from_before_a_restart_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks.process, "has_torch", {10}.__contains__)
    monkeypatch.setattr(ranks.job_dirs, "parent_of", lambda _: 1)
    found = one_of_each(
        [
            RankProcess(1, 30, start_ticks=30, restart=1),
            RankProcess(0, 20, start_ticks=20, restart=1),
            RankProcess(0, 10, start_ticks=10),
        ]
    )
    assert [one.pid for one in found] == [20, 30]
