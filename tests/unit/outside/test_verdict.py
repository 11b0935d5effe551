"""The verdict on stacks that are seen from outside: which rank is named, and when none is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from goldens import hold
from seen_ranks import (
    C10D,
    FUNCTIONAL,
    GROUP,
    call,
    frame,
    sample,
    seen_on,
    stay,
    synced,
    two_worlds,
)

from commlens.model.ranklog import StoreSeen
from commlens.outside.calls import find_call
from commlens.outside.sample import HostSamples
from commlens.outside.verdict import judge
from commlens.processes.pyspy import SeenFrame


def verdict(*frames: list[SeenFrame], **options: object):
    return judge(seen_on(*frames, **options))


def test_a_rank_that_is_in_no_call():
    found = verdict(*[call("all_reduce", 81)] * 2, stay("load_batch", 57), call("all_reduce", 81))
    assert (found.kind, found.why, found.culprits, found.victims, found.source) == (
        "missing",
        "data-loading",
        [2],
        [0, 1, 3],
        "train.py:57",
    )
    assert found.confidence == "high"
    hold("outside/in-no-call", found)


def test_a_group_that_is_not_known_makes_it_less_sure():
    waits = call("all_reduce", 81, passed=GROUP)
    found = verdict(waits, waits, stay("load_batch", 57), waits)
    assert (found.culprits, found.confidence) == ([2], "medium")


def test_a_rank_that_works_is_not_blamed():
    samples = [sample(rank, call("all_reduce", 81)) for rank in range(3)] + [
        sample(3, stay("evaluate", 57), cpu_s=2.4)
    ]
    found = judge([HostSamples("n1", samples, 4, [], window_s=2.5)])
    assert (found.kind, found.culprits, found.is_fault) == ("waiting", [3], False)
    hold("outside/works", found)


def test_a_stopped_rank_is_named_wherever_it_stands():
    samples = [
        sample(rank, call("all_reduce", 81), state="T" if rank == 1 else "S") for rank in range(4)
    ]
    found = judge([HostSamples("n1", samples, 4, [], window_s=2.5)])
    assert (found.why, found.culprits) == ("stopped", [1])
    hold("outside/stopped", found)


def test_the_majority_decides_where_all_ranks_must_meet():
    found = verdict(*[call("all_reduce", 81)] * 3, call("all_gather", 85))
    assert (found.kind, found.culprits, found.source, found.confidence) == (
        "mismatch/op",
        [3],
        "train.py:85",
        "medium",
    )
    hold("outside/mismatch-of-one", found)


def test_a_key_of_the_store(tmp_path: Path):
    """The methods of stores are written in C++ and have no frame: the line shows them, and the
    local variable's type.
    """
    file = tmp_path / "train.py"
    file.write_text('rate = float(rates.get("rate"))\n')
    waiting = [frame("share", 1, str(file), rates="<PrefixStore at 0x7f>")]
    assert find_call([frame("share", 1, str(file), rates={"rate": 1})], os.getpid()) is None
    found = verdict(*[waiting] * 3, call("all_reduce", 81))
    assert (found.kind, found.culprits, found.source) == ("missing", [3], "train.py:81")
    hold("outside/key-of-the-store", found)
    alone = verdict(*[call("all_reduce", 81)] * 3, waiting)
    assert (alone.culprits, alone.confidence) == ([], "low"), (
        "any rank may have been to set the key"
    )


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param([*[call("all_reduce", 81)] * 2, *[call("all_gather", 85)] * 2], id="tie"),
        pytest.param(
            [*[call("all_reduce", 81, passed=GROUP)] * 3, call("all_reduce", 85, passed=GROUP)],
            id="unknown groups",
        ),
        pytest.param(
            [*[call("all_reduce", 81)] * 3, call("recv", 85, src=0)],
            id="message whose sender went on",
        ),
        pytest.param(
            [*[call("all_reduce", 81)] * 2, call("recv", 85, src=3), call("recv", 85, src=2)],
            id="two receive first",
        ),
        pytest.param([call("all_reduce", 81)] * 4, id="all at one line"),
        pytest.param(
            [
                *[[frame("wait_tensor", 9, FUNCTIONAL), frame("step", 2)]] * 3,
                call("all_reduce", 81),
            ],
            id="unknown operations",
        ),
    ],
)
def test_no_rank_is_named_where_stacks_do_not_decide(frames: list[list[SeenFrame]]):
    found = verdict(*frames)
    assert found.culprits == []
    assert found.is_fault and found.confidence in ("low", "medium")


def test_of_two_that_wait_for_each_other_the_one_ahead_left_something_out():
    found = verdict(
        call("recv", 53, src=1),
        call("recv", 53, src=2),
        call("recv", 21, src=1, step=7),
        call("recv", 21, src=2, step=7),
    )
    assert (found.kind, found.culprits, found.source) == ("cycle", [2], "train.py:21")
    hold("outside/cycle-one-ahead", found)


def test_a_rank_in_another_round_of_the_loop():
    found = verdict(*[call("all_reduce", 81)] * 3, call("all_reduce", 81, step=7))
    assert (found.culprits, found.confidence) == ([3], "low")


@pytest.mark.parametrize(
    "op",
    [
        "barrier",
        "monitored_barrier",
        "init_process_group",
        "new_group",
        "new_subgroups",
        "split_group",
        "init_device_mesh",
        "all_gather_object",
        "broadcast_object_list",
        "scatter_object_list",
        "gather_object",
        "destroy_process_group",
    ],
)
def test_a_step_speaks_of_what_a_call_has(op: str):
    """None of these passes tensors of the program."""
    found = verdict(*[call(op, 81)] * 4)
    assert found.kind == "stuck-inside"
    assert op in found.next_step
    assert "tensor" not in found.next_step and "shapes" not in found.next_step
    tensors = verdict(*[call("all_reduce", 81)] * 4)
    assert "compare the tensors' shapes" in tensors.next_step


@pytest.mark.parametrize("busy_s", [0.0, 2.4])
def test_ranks_that_wait_where_nobody_listens(busy_s: float):
    samples = [sample(rank, call("init_process_group", 9), cpu_s=busy_s) for rank in range(4)]
    for one in samples:
        one.log.observation.store = StoreSeen("127.0.0.1:29511", listens=False, agent=True)
    found = judge([HostSamples("n1", samples, 4, [], window_s=2.5)])
    assert (found.kind, found.culprits) == ("stuck-inside", [])
    assert "nobody listens at 127.0.0.1:29511" in found.summary


def test_a_job_that_moves():
    found = verdict(*[call("all_reduce", 81)] * 4, moved=True)
    assert (found.kind, found.is_fault) == ("healthy", False)
    hold("outside/moves", found)


def test_a_rank_whose_stack_cannot_be_read_is_not_blamed():
    samples = [
        sample(rank, call("all_reduce", 81) if rank else [], moved=False if rank else None)
        for rank in range(4)
    ]
    found = judge([HostSamples("n1", samples, 4, [], window_s=2.5)])
    assert (found.culprits, found.confidence) == ([], "low")
    hold("outside/stack-unreadable", found)


def test_a_rank_without_a_process():
    samples = [sample(rank, call("all_reduce", 81)) for rank in (0, 1, 3)]
    found = judge([HostSamples("n1", samples, 4, [0, 1, 2, 3], window_s=2.5)])
    assert (found.kind, found.culprits) == ("dead", [2])
    hold("outside/without-a-process", found)
    of_two_hosts = judge(
        [
            HostSamples("n1", samples[:2], 4, [0, 1]),
            HostSamples("n2", notes=["n2 could not be asked: no route to host."]),
        ]
    )
    assert of_two_hosts.culprits == []
    hold("outside/host-not-asked", of_two_hosts)


def test_of_many_ranks_some_pids_tell_the_job_from_others():
    found = verdict(*[call("all_reduce", 81)] * 9)
    assert found.looked_at.startswith(
        "9 ranks of 9 of train.py (pids 100, 101, 102, 103, 104, 105, 106 and 107 on n1, ...) from"
        " outside"
    )


def test_a_rank_of_another_world_is_named_by_its_world():
    trainers, rollouts = [synced(81), call("barrier", 90)], [synced(81), stay("load", 57)]
    found = judge(two_worlds(trainers, rollouts))
    assert (found.kind, found.culprits, found.confidence) == ("missing", [3], "medium")
    hold("outside/of-another-world", found)
    unknown = judge(two_worlds(trainers, rollouts, linked="t0-r0"))
    assert (unknown.culprits, unknown.confidence) == ([], "low"), "it may be in no such group"


def test_all_ranks_of_two_worlds_wait():
    """Rank 0 of the trainers waits for rollout workers: the majority of its world is no sign."""
    trainers = [synced(81), *[call("barrier", 90)] * 3]
    found = judge(two_worlds(trainers, [synced(81), call("barrier", 90)]))
    assert (found.culprits, found.confidence) == ([], "low")
    assert found.kind == "stuck-inside" and not found.certain
    hold("outside/two-worlds-wait", found)
    inside = judge(
        two_worlds(
            [*[call("barrier", 90)] * 2, call("all_gather", 91)], [synced(81)], linked="t0-r0"
        )
    )
    assert (inside.kind, inside.culprits) == ("mismatch/op", [2])


def test_lines_of_logs_name_the_world():
    hosts = two_worlds([synced(81)], [stay("load", 57), synced(81)])
    hosts[1].samples[0].log_lines = ["RuntimeError: no"]
    assert "rollout 0's log: RuntimeError: no" in judge(hosts).findings[0].evidence


def by_hand(tmp_path: Path, text: str) -> list[SeenFrame]:
    """A rank in a method that is written in C++: only the line shows it."""
    file = tmp_path / f"{abs(hash(text))}.py"
    file.write_text(f"{text}\n")
    return [frame("sync", 1, str(file)), frame("main", 88)]


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("group.allreduce([weights]).wait()", "all_reduce of group `group`"),
        ("self.sync_pg.broadcast(weights, 0)", "broadcast of group `sync_pg`"),
        ("backend = ProcessGroupGloo(store, 0, 3)", "ProcessGroupGloo"),
        ("store = dist.TCPStore(host, port, 3, False)", "TCPStore"),
        ("work.wait()", "wait() for an earlier operation"),
        ("values.reduce(numbers)", None),
    ],
)
def test_calls_that_make_or_use_a_group_by_hand(tmp_path: Path, text: str, phrase: str | None):
    found = find_call(by_hand(tmp_path, text), os.getpid())
    assert (found.phrase if found is not None else None) == phrase
    if found is not None:
        assert found.by_hand is (phrase is not None and not phrase.startswith("wait"))


def test_a_group_made_by_hand_may_have_members_elsewhere(tmp_path: Path):
    """Rank 0 waits for another world, which is not on this machine."""
    waits = by_hand(tmp_path, "group.allreduce(weights).wait()")
    found = verdict(waits, *[call("barrier", 90)] * 3)
    assert (found.kind, found.culprits) == ("stuck-inside", [])
    made = [frame("_new_process_group_helper", 1, C10D), frame("join", 44)]
    assert verdict(made, *[call("barrier", 90)] * 3).culprits == []
    alone = verdict(waits, stay("load", 57), waits)
    assert (alone.kind, alone.culprits, alone.confidence) == ("missing", [], "low")
    assert verdict(waits, stay("load", 57), call("barrier", 90)).culprits == [1]
    at_two_places = verdict(waits, stay("main", 20), stay("load", 57))
    (finding,) = at_two_places.findings
    assert (finding.culprits, finding.confidence) == ([], "low")
    assert finding.summary.startswith(
        "rank 1 is in train.py:20 main and rank 2 is in train.py:57 load; rank 0 waits in all_reduce"
    )
    assert finding.next_step == "find out whether ranks 1-2 are members of the group"
