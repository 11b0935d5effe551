"""Ranks that wait before their first collective: in init_process_group, in new_group, for a mesh.
No process, no torch.
"""

from __future__ import annotations

import hashlib

import pytest
import starting_ranks
from builders import START, S
from goldens import hold
from starting_ranks import IDLE, WORLD, call, groups, init, rank, verdict

from commlens.model.cause import GroupsDiffer
from commlens.model.collective import Collective
from commlens.model.ranklog import End, Observation, RankLog


def test_a_rank_that_never_comes_to_init() -> None:
    found = verdict(rank(0, init()), rank(1, init()), rank(2, at=57), rank(3, init()))
    assert (found.kind, found.why, found.culprits, found.victims, found.source) == (
        "missing",
        "user-code",
        [2],
        [0, 1, 3],
        "train.py:57",
    )
    hold("missing/never-comes-to-init", found)


def test_a_rank_that_visibly_works_before_init_is_waited_for() -> None:
    busy = rank(2, at=57)
    busy.observation = Observation(
        End.RUNNING, window_s=6.0, stack_moved=True, cpu_s=5.0, proc_state="R"
    )
    found = verdict(rank(0, init()), rank(1, init()), busy, rank(3, init()))
    assert (found.kind, found.culprits) == ("waiting", [])
    hold("waiting/works-before-init", found)


def test_a_rank_that_ends_before_init() -> None:
    ended = rank(2)
    ended.closed, ended.observation = True, Observation(End.CLEAN, 0, ended_ns=START + 2 * S)
    found = verdict(rank(0, init()), rank(1, init()), ended, rank(3, init()))
    assert (found.kind, found.why, found.culprits) == ("missing", "finished", [2])
    hold("missing/ends-before-init", found)


def test_groups_in_another_order() -> None:
    usual, other = ([0, 1], [1, 2]), ([1, 2], [0, 1])
    found = verdict(
        rank(0, init(), *groups(usual[0])),
        rank(1, init(), *groups(*other[:1], line=20)),
        rank(2, init(), *groups(*usual)),
        rank(3, init(), *groups(*usual), inside=False, issued="all_reduce"),
    )
    assert (found.kind, found.culprits, found.source) == ("mismatch/group", [1], "train.py:21")
    assert sum(each.root_cause for each in found.findings) == 1
    hold("mismatch/group-in-another-order", found)


def test_a_rank_of_a_fifth_side_is_not_among_those_that_agree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], *[[2, 3]] * 6]
    monkeypatch.setattr(starting_ranks, "WORLD", len(asked))
    found = verdict(*(rank(number, init(), *groups(ranks)) for number, ranks in enumerate(asked)))
    assert found.culprits == [0, 1, 2, 3, 4]
    assert found.summary == (
        "rank 0 asks for ranks [0, 1], rank 1 asks for ranks [0, 2], rank 2 asks for ranks [0, 3]"
        " and ranks 3-4 ask for something else in new_group #1, the others for ranks [2, 3]"
    )


def test_two_halves_name_nobody() -> None:
    found = verdict(
        rank(0, init(), *groups([0, 1])),
        rank(1, init(), *groups([0, 1])),
        rank(2, init(), *groups([2, 3], line=20)),
        rank(3, init(), *groups([2, 3], line=20)),
    )
    assert (found.kind, found.culprits, found.confidence, found.victims) == (
        "mismatch/group",
        [],
        "low",
        [0, 1, 2, 3],
    )
    hold("mismatch/group-of-two-halves", found)


def test_meshes_of_other_shapes() -> None:
    mesh = "mesh (2, 2) named dp, tp"
    calls = [
        [init(), call("init_device_mesh", range(4), 7, asked=mesh), *groups([0, 2])],
        [
            init(),
            call("init_device_mesh", range(4), 7, asked=mesh),
            *groups([0, 2], [1, 3], [0, 1]),
        ],
        [init(), call("init_device_mesh", range(4), 8, asked="mesh (4,)")],
        [
            init(),
            call("init_device_mesh", range(4), 7, asked=mesh),
            *groups([0, 2], [1, 3], [0, 1], [2, 3]),
        ],
    ]
    logs = [
        rank(number, *made, inside=number != 2, issued="all_reduce" if number == 2 else "")
        for number, made in enumerate(calls)
    ]
    found = verdict(*logs)
    assert (found.kind, found.culprits, found.source) == ("mismatch/group", [2], "train.py:8")
    hold("mismatch/group-of-another-mesh", found)


def test_a_rank_that_skips_a_group_and_goes_on_to_a_collective() -> None:
    found = verdict(
        rank(0, init(), *groups(range(4))),
        rank(1, init(), *groups(range(4))),
        rank(2, init(), inside=False, issued="all_reduce"),
        rank(3, init(), *groups(range(4))),
    )
    assert (found.kind, found.why, found.culprits, found.source) == (
        "mismatch/group",
        "skipped",
        [2],
        "train.py:57",
    )
    hold("mismatch/group-skipped", found)


def test_a_rank_that_skips_a_group_in_which_others_are_not() -> None:
    found = verdict(
        rank(0, init(), inside=False, issued="barrier"),
        rank(1, init(), *groups([0, 1])),
        *(
            rank(number, init(), *groups([0, 1]), inside=False, issued="barrier")
            for number in (2, 3)
        ),
    )
    assert (found.kind, found.culprits, found.victims) == ("mismatch/group", [0], [1, 2, 3])


def test_a_group_made_by_its_members_alone_waits_for_the_one_that_does_not_come() -> None:
    local = {"name": "c0ffee"}
    found = verdict(
        rank(0, init(), call("new_group", [0, 1], 12, **local)),  # type: ignore[arg-type]
        rank(1, init(), inside=False),
        rank(2, init(), call("new_group", [2, 3], 12, name="beef"), inside=False),
        rank(3, init(), call("new_group", [2, 3], 12, name="beef"), inside=False),
    )
    assert (found.kind, found.culprits, found.victims, found.source) == (
        "missing",
        [1],
        [0],
        "train.py:57",
    )


def test_ranks_that_meet_at_other_ports() -> None:
    ports = [
        "tcp://localhost:29500",
        "tcp://node1:29500",
        "tcp://127.0.0.1:29501",
        "tcp://127.0.0.1:29500",
    ]
    found = verdict(*(rank(number, init(asked=port)) for number, port in enumerate(ports)))
    assert (found.kind, found.culprits) == ("mismatch/group", [2])
    hold("mismatch/group-at-another-port", found)


def test_a_rank_that_does_not_join_the_second_default_group() -> None:
    again = {"number": 2, "inc": 1}
    found = verdict(
        *(
            rank(number, init(), *([init(30, **again)] if number != 2 else []), inside=number != 2)
            for number in range(4)
        )
    )
    assert (found.kind, found.culprits, found.victims, found.source) == (
        "missing",
        [2],
        [0, 1, 3],
        "train.py:57",
    )


def test_all_inside_and_nothing_moves() -> None:
    found = verdict(*(rank(number, init()) for number in range(4)))
    assert (found.kind, found.culprits) == ("stuck-inside", [])
    assert "nvidia" not in found.next_step
    hold("stuck-inside/init", found)


def split(*members: int, number: int = 1) -> Collective:
    """A call of new_group for these ranks, where the communicator of the default group is split."""
    return call("new_group", range(WORLD), 10 + number, number=number, members=members)


def test_all_ranks_meet_in_new_group_where_it_splits_the_default_group() -> None:
    """nccl2, and NCCL with a device_id: also a rank that is not in the group is waited for."""
    calls = [[init(), *([split(0, 2)] if number != 1 else [])] for number in range(4)]
    found = verdict(*(rank(number, *made, inside=number != 1) for number, made in enumerate(calls)))
    assert (found.kind, found.culprits, found.victims) == ("missing", [1], [0, 2, 3])
    hold("missing/not-in-the-new-group", found)


def test_groups_that_split_the_default_group_are_compared_by_their_members() -> None:
    first = [split(0, 2), split(0, 2), split(1, 2), split(0, 2)]
    found = verdict(*(rank(number, init(), call) for number, call in enumerate(first)))
    assert (found.kind, found.culprits) == ("mismatch/group", [2])
    hold("mismatch/group-of-a-split", found)


def test_calls_that_returned_are_no_fault() -> None:
    """Groups that members made alone, and a second default group."""
    logs = [
        rank(
            number,
            init(),
            *groups([0, 1], [2, 3]),
            init(30, number=2, inc=1),
            call("new_group", [number], 40, name=f"local{number}"),
            inside=False,
        )
        for number in range(4)
    ]
    assert verdict(*logs).kind == "healthy"


def test_a_process_that_has_no_box_yet() -> None:
    early = RankLog(1, WORLD, "job-1", "n03", 1001, observation=IDLE)
    found = verdict(*(rank(number, init()) for number in (0, 2, 3)), early)
    assert (found.kind, found.why, found.culprits) == ("missing", "initialising", [1])
    hold("missing/initialising", found)


def test_ranks_that_all_end_unseen_while_the_job_starts_name_nobody() -> None:
    """One that waits in init_process_group may have ended first: another rank may always come
    later.
    """
    logs = [rank(0, init()), rank(1, init()), rank(2), rank(3, init())]
    for log in logs:
        log.observation = Observation(End.GONE, ended_ns=log.captured_ns)
    found = verdict(*logs)
    assert (found.kind, found.culprits) == ("dead", [])


# --- waits for keys of the store


def local(ranks: list[int], line: int, before: int) -> Collective:
    """A group whose members alone make it, in a process that is in so many groups."""
    text = "_".join(map(str, [*ranks, before]))
    return call("new_group", ranks, line, name=hashlib.sha1(text.encode()).hexdigest())


def test_members_that_wait_under_other_names() -> None:
    def made(number: int, before: int) -> RankLog:
        own = [local([0, 3], 10, 1)] if before > 1 else []
        return rank(number, init(), *own, local([0, 1, 2, 3], 20, before))

    found = verdict(made(0, 2), made(1, 1), made(2, 1), made(3, 2))
    assert (found.kind, found.culprits, found.source) == ("mismatch/group", [], "train.py:20")
    assert len(found.findings) == 1, "that they wait for each other follows from the names"
    hold("mismatch/group-of-two-names", found)
    names = [call("new_group", range(4), 20, name=name) for name in ("mine", "mine", "x", "mine")]
    unknown = verdict(*(rank(number, init(), name) for number, name in enumerate(names)))
    assert isinstance(unknown.cause, GroupsDiffer)
    assert [(each.ranks, each.groups_before) for each in unknown.cause.names] == [
        ([0, 1, 3], None),
        ([2], None),
    ]
