"""The call that a stack waits in."""

from __future__ import annotations

import os

import pytest
from seen_ranks import C10D, FUNCTIONAL, GROUP, call, frame, stay

from commlens.outside.calls import find_call, meeting_place
from commlens.processes.pyspy import SeenFrame


@pytest.mark.parametrize(
    ("frames", "phrase"),
    [
        (call("all_reduce", 1), "all_reduce of the default group"),
        (
            [frame("all_reduce", 1, C10D, group=GROUP), frame("step", 2, rows=GROUP)],
            "all_reduce of group `rows`",
        ),
        (call("broadcast", 1, src=3), "broadcast of the default group from rank 3"),
        (call("recv", 1, src=3), "recv from rank 3"),
        (call("isend", 1, dst=0), "send to rank 0"),
        (
            [frame("_engine_run_backward", 9, "/x/torch/autograd/graph.py"), frame("step", 2)],
            "backward",
        ),
        (
            [frame("wait_tensor", 9, FUNCTIONAL), frame("f", 2)],
            "wait_tensor() for an earlier operation",
        ),
        ([frame("init_process_group", 9, C10D), frame("main", 2)], "init_process_group"),
        (stay("load_batch", 5), None),
        ([frame("mm", 9, "/x/torch/functional.py"), frame("step", 2)], None),
    ],
)
def test_the_call_that_a_stack_waits_in(frames: list[SeenFrame], phrase: str | None):
    found = find_call(frames, os.getpid())
    assert (found.phrase if found is not None else None) == phrase


def test_the_address_of_a_store_that_is_being_made():
    making = frame("_create_c10d_store", 3, C10D, hostname="'n1'", port="29511")
    assert meeting_place([making, frame("main", 2)]) == ("n1", "29511")
    assert meeting_place([frame("main", 2, hostname="'n1'", port="29511")]) is None
