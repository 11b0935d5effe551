"""Ranks with equal stacks are told together."""

from __future__ import annotations

from seen_ranks import call, sample, stay

from commlens.model.collective import Frame
from commlens.model.ranklog import ThreadStack
from commlens.model.worlds import JobWorld, Worlds
from commlens.reports.stacks_terminal import merge_stacks
from commlens.text import naming_worlds


def test_equal_stacks_are_one_class_and_the_odd_ones_come_first():
    logs = [
        sample(rank, stay("load_batch", 57) if rank == 7 else call("all_reduce", 81)).log
        for rank in range(10_000)
    ]
    classes = merge_stacks(logs)
    assert [(len(each.ranks), each.frames[0].function) for each in classes] == [
        (1, "load_batch"),
        (9_999, "all_reduce"),
    ]


def test_another_thread_is_named_by_the_world_of_its_rank():
    log = sample(2, stay("load_batch", 57)).log
    beside = ThreadStack(9, "Thread-3", (Frame("/home/me/data.py", 8, "read"),), 1, False)
    log.observation.stacks.append(beside)
    with naming_worlds(Worlds((JobWorld("trainer", 0, 2), JobWorld("rollout", 2, 2)))):
        assert merge_stacks([log])[0].others == ["rollout 0, Thread-3: data.py:8 read"]
