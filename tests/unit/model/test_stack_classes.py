"""Ranks with equal stacks are told together."""

from __future__ import annotations

from seen_ranks import call, sample, stay

from commlens.model.stack_classes import merge_stacks


def test_equal_stacks_are_one_class_and_the_odd_ones_come_first():
    logs = [
        sample(rank, stay("load_batch", 57) if rank == 7 else call("all_reduce", 81)).log
        for rank in range(10_000)
    ]
    classes = merge_stacks(logs, [""] * len(logs))
    assert [(len(each.ranks), each.frames[0].function) for each in classes] == [
        (1, "load_batch"),
        (9_999, "all_reduce"),
    ]
