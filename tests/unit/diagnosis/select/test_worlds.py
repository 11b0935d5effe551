"""Groups that programs make by hand: their members are found, worlds that meet in them are one job,
and no rank is blamed whose place in them nothing tells.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from builders import START, Job, Stay, all_reduce, collective
from goldens import hold
from hand_made import as_recorded
from judging import judge
from starting_ranks import call, init, rank

from commlens.diagnosis.select.worlds import join_worlds
from commlens.model.cause import GroupsDiffer
from commlens.model.collective import (
    QUEUE,
    Channel,
    Collective,
    CollectiveArgs,
    Frame,
    HandMade,
    ProcessGroup,
    State,
    TensorSpec,
)
from commlens.model.ranklog import RankLog
from commlens.model.worlds import JobWorld, NearProcess, Worlds
from commlens.text import members_text, naming_worlds, rank_phrase, ranks_phrase

SLEEP = Stay(25, "wait_for_batch")
STORE = "localhost:29600/weight_sync"
TRAINER, ROLLOUT = "/home/me/rl.py trainer", "/home/me/rl.py rollout"


def two_worlds(late: int) -> Job:
    """Trainers 0 and 1, rollouts 2 and 3; the group of 0, 2 and 3 is made by hand."""
    job = Job(4)
    trainers, rollouts = ProcessGroup("0", (0, 1)), ProcessGroup("0", (2, 3))
    weights = ProcessGroup("weights", (0, 2, 3))

    def program(_: Job, rank: int) -> Iterator[object]:
        world = trainers if rank < 2 else rollouts
        for _ in range(3):
            yield all_reduce(world, 100, line=10)
            if rank != 1:
                yield collective("broadcast", weights, 50, line=12, root=0)
        if rank == late:
            yield SLEEP
        if rank != 1:
            yield all_reduce(weights, 60, line=26)
        yield collective("barrier", world, line=30)

    return job.run(program)


def recorded(late: int, store: str = STORE) -> list[RankLog]:
    worlds = {TRAINER: range(2), ROLLOUT: range(2, 4)}
    return as_recorded(two_worlds(late).logs(), worlds, {"weights": store})


@pytest.mark.parametrize(("late", "name"), [(3, "rollout 1"), (2, "rollout 0"), (0, "trainer 0")])
def test_two_worlds_that_meet_are_one_job(late: int, name: str) -> None:
    logs = recorded(late)
    verdict = judge(logs)
    number = {"rollout": 0, "trainer": 2}[name.split()[0]] + int(name[-1])
    assert (verdict.kind, verdict.culprits) == ("missing", [number])
    assert verdict.summary.startswith(f"{name} never reached")
    assert [world.name for world in verdict.worlds.worlds] == ["rollout", "trainer"]
    assert verdict.group is not None
    assert verdict.group.ranks == [2, 0, 1]  # trainer 0, rollouts 0 and 1
    assert judge(logs[::-1]) == verdict
    hold(f"worlds/{name.replace(' ', '-')}-late", verdict)


@pytest.mark.parametrize(("late", "host"), [(3, "r"), (2, "r"), (0, "t")])
def test_an_action_names_the_host_of_the_culprits_world(late: int, host: str) -> None:
    """Both worlds have a rank 0 and a rank 1, on other hosts."""
    hosts = {TRAINER: "t", ROLLOUT: "r"}
    logs = recorded(late, "10.0.0.1:29600/weight_sync")
    logs = [msgspec.structs.replace(log, host=hosts[log.job]) for log in logs]
    action = judge(logs).action
    assert action is not None
    assert action.nodes == [host]


@pytest.mark.parametrize(
    ("given", "scripts", "names"),
    [
        (("actor", "critic"), (TRAINER, ROLLOUT), ["critic", "actor"]),
        (("", "critic"), (TRAINER, ROLLOUT), ["critic", "rl"]),
        (("", ""), ("/a/train.py", "/b/serve.py --port 1"), ["serve", "train"]),
        (("", ""), ("/a/run.py", "/a/run.py"), ["world 1", "world 2"]),
        (("same", "same"), ("/a/run.py", "/a/run.py"), ["world 1", "world 2"]),
    ],
)
def test_the_name_of_a_world(
    given: tuple[str, str], scripts: tuple[str, str], names: list[str]
) -> None:
    logs = [
        msgspec.structs.replace(
            log, world=given[log.job == ROLLOUT], script=scripts[log.job == ROLLOUT]
        )
        for log in recorded(3)
    ]
    assert sorted(world.name for world in judge(logs).worlds.worlds) == sorted(names)


def test_the_roots_of_a_broadcast_agree_across_worlds() -> None:
    logs = join_worlds([recorded(3)[:2], recorded(3)[2:]])
    roots = {op.args.root for log in logs for op in log.collectives if op.op == "broadcast"}
    assert roots == {2}


def test_a_rank_that_a_world_has_no_more_is_no_process_of_another_world() -> None:
    """The trainers were four, and made their group again with two."""
    logs = recorded(3)
    op = logs[0].collectives[0]
    before = Channel(msgspec.structs.replace(op.channel.group, ranks=(0, 1, 2, 3)), "cpu")
    args = msgspec.structs.replace(op.args, op="send")
    logs[0].collectives[0] = msgspec.structs.replace(op, channel=before, args=args, peer=3)
    found = join_worlds([logs[:2], logs[2:]])
    sent = next(op for log in found for op in log.collectives if op.op == "send")
    assert sent.peer is not None and sent.peer >= found[0].world_size
    assert sent.channel.group.ranks[3] == sent.peer
    with naming_worlds(found[0].worlds):
        assert rank_phrase(sent.peer) == "trainer 3"
        assert ranks_phrase(sent.channel.group.ranks) == "trainer 0-1 and trainer 2-3"
    assert "made by hand" not in str(judge(logs))


def test_one_world_alone_blames_no_rank_of_it() -> None:
    verdict = judge(recorded(3)[:2])
    assert not verdict.culprits
    assert "member 1" in verdict.summary or "members 1-2" in verdict.summary
    hold("worlds/members-out-of-sight", verdict)


@pytest.mark.parametrize(
    ("near", "said"),
    [
        (None, ""),
        (
            (),
            "No other process on this host that has loaded torch is connected with its members.",
        ),
        (
            (
                NearProcess(
                    77, "rl.py rollout", (0,), frame=Frame("/home/me/rl.py", 25, "wait_for_batch")
                ),
            ),
            "Process 77 on this host (rl.py rollout) is not recorded by commlens, and is connected"
            " with rank 0: it is in rl.py:25 wait_for_batch.",
        ),
        (
            (NearProcess(77, "rl.py", (0,), recorded=True),),
            "Process 77 on this host (rl.py) is recorded by commlens as another job, and is"
            " connected with rank 0.",
        ),
    ],
)
def test_processes_that_may_be_members_are_evidence(near, said: str) -> None:
    logs = join_worlds([recorded(3)[:2]])
    for log in logs:
        log.worlds = msgspec.structs.replace(log.worlds, near=near)
    found = judge(logs)
    assert found.findings[0].evidence == [said] * bool(said)
    assert not found.culprits


def part_of_a_world(late: int) -> list[RankLog]:
    """Ranks 1 and 2 of 3 make a group without a name."""
    job, pair = Job(3), ProcessGroup("pair", (1, 2))

    def program(job: Job, rank: int) -> Iterator[object]:
        for _ in range(3):
            yield all_reduce(job.world, 100, line=10)
        for _ in range(3 if rank else 0):
            yield all_reduce(pair, 100, line=16)
        if rank == late:
            yield SLEEP
        if rank:
            yield all_reduce(pair, 100, line=18)
        else:
            yield Stay(20, "main")

    return as_recorded(
        job.run(program).logs(), {"/home/me/serve.py": range(3)}, {"pair": "localhost:1/tcp"}
    )


@pytest.mark.parametrize("late", [1, 2])
def test_a_rank_that_is_no_member_is_not_missing(late: int) -> None:
    verdict = judge(part_of_a_world(late))
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("missing", [late], [3 - late])
    assert "default group" not in verdict.summary
    assert verdict.worlds.outsiders == ()
    hold("worlds/member-late-in-one-world", verdict) if late == 2 else None


def remade(old: str, new: str) -> list[RankLog]:
    """A group of two that is made again after three collectives; rank 1 stays away then."""
    job = Job(2)
    first, second = ProcessGroup("first", (0, 1)), ProcessGroup("second", (0, 1))

    def program(_: Job, rank: int) -> Iterator[object]:
        for _ in range(3):
            yield all_reduce(first, 100, line=10)
        for _ in range(2):
            yield all_reduce(second, 100, line=20)
        if rank == 1:
            yield SLEEP
        yield all_reduce(second, 100, line=20)

    return as_recorded(
        job.run(program).logs(),
        {"/home/me/train.py": range(2)},
        {"first": old, "second": new},
        ordinals={"second": int(old == new)},
    )


@pytest.mark.parametrize("odd", [0, 1])
def test_the_routine_goes_on_in_a_group_that_is_made_again(odd: int) -> None:
    job = Job(2)
    groups = [ProcessGroup("first", (0, 1)), ProcessGroup("second", (0, 1))]

    def program(_: Job, rank: int) -> Iterator[object]:
        for group in groups:
            for _ in range(3):
                ops = [
                    collective("broadcast", group, 50, line=12, root=0),
                    all_reduce(group, 60, line=14),
                ]
                swapped = rank == odd and group is groups[1]
                yield from reversed(ops) if swapped else ops

    stores = {"first": "localhost:1/quorum/1", "second": "localhost:1/quorum/2"}
    logs = as_recorded(job.run(program).logs(), {"/home/me/train.py": range(2)}, stores)
    assert judge(logs).culprits in ([odd], [])


@pytest.mark.parametrize("new", ["localhost:1/quorum/2", "localhost:1/quorum/1"])
def test_a_group_that_is_made_again_is_another_group(new: str) -> None:
    verdict = judge(remade("localhost:1/quorum/1", new))
    assert (verdict.kind, verdict.culprits) == ("missing", [1])
    assert verdict.collective is not None
    assert verdict.collective.sequence_number == 3


def with_made(log: RankLog, made: HandMade) -> RankLog:
    """Return the log with other facts about its group made by hand."""
    changed = [
        msgspec.structs.replace(
            op,
            channel=msgspec.structs.replace(
                op.channel, group=msgspec.structs.replace(op.channel.group, hand_made=made)
            ),
        )
        if op.channel.group.hand_made is not None
        else op
        for op in log.collectives
    ]
    return msgspec.structs.replace(log, collectives=changed)


@pytest.mark.parametrize(
    "made",
    [
        HandMade(1, 2, ""),  # the store is not known
        HandMade(0, 2, "localhost:1/tcp"),  # as another process says of itself
        HandMade(7, 2, "localhost:1/tcp"),  # no such member
        HandMade(1, 2, "localhost:2/tcp"),
        HandMade(1, 3, "localhost:1/tcp"),
    ],
)
def test_claims_that_do_not_fit_blame_no_rank(made: HandMade) -> None:
    logs = part_of_a_world(2)
    verdict = judge([*logs[:2], with_made(logs[2], made)])
    assert not verdict.culprits


def test_stores_of_two_hosts_are_two_stores() -> None:
    logs = part_of_a_world(2)
    logs[2] = msgspec.structs.replace(logs[2], host="other")
    assert not judge(logs).culprits


def test_a_store_is_one_whether_its_own_host_or_another_one_names_it() -> None:
    """Rollouts on another node call the trainers' host by its name."""
    logs = recorded(3)
    for log in logs[2:]:
        log.host = "other"
        for op in log.collectives:
            if (made := op.channel.group.hand_made) is not None:
                made = msgspec.structs.replace(made, store=STORE.replace("localhost", "n03"))
                group = msgspec.structs.replace(op.channel.group, hand_made=made)
                op.channel = Channel(group, op.channel.device, op.channel.runs_ahead)
    verdict = judge(logs)
    assert (verdict.kind, verdict.culprits) == ("missing", [1])
    assert verdict.summary.startswith("rollout 1 never reached")


def test_logs_without_groups_made_by_hand_stay_as_they_are() -> None:
    logs = Job(2).run(lambda job, _: iter([all_reduce(job.world, line=1)])).logs()
    assert all(a is b for a, b in zip(join_worlds([logs]), logs, strict=True))


@pytest.mark.parametrize("runs", [[], [[]], [[], []]])
def test_no_logs_are_no_worlds(runs: list[list[RankLog]]) -> None:
    assert join_worlds(runs) == []


def test_healthy_worlds_get_no_word() -> None:
    verdict = judge(recorded(late=-1))
    assert verdict.kind == "healthy"


def waits_for_members(member: int, size: int, store: str) -> Collective:
    """Waits in the constructor of gloo's backend."""
    made = call("new_group", (), 10)
    group = ProcessGroup("", (), backend="gloo", hand_made=HandMade(member, size, store))
    return msgspec.structs.replace(made, channel=msgspec.structs.replace(made.channel, group=group))


def in_a_world(size: int, *logs: RankLog) -> list[RankLog]:
    return [msgspec.structs.replace(log, world_size=size) for log in logs]


STORE_1, STORE_2 = "localhost:1/dp", "localhost:2/dp"


def test_the_rank_that_does_not_come_to_a_group_of_its_world() -> None:
    waits = [waits_for_members(member, 3, STORE_1) for member in range(2)]
    verdict = judge(
        in_a_world(3, rank(0, waits[0]), rank(1, waits[1]), rank(2, inside=False, at=57))
    )
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("missing", [2], [0, 1])
    hold("worlds/one-never-joins", verdict)


def test_the_rank_that_does_not_come_when_the_group_is_made_again() -> None:
    first = [waits_for_members(member, 2, STORE_1) for member in range(2)]
    logs = [
        rank(0, init(), first[0], waits_for_members(0, 2, STORE_2)),
        rank(1, init(), first[1], inside=False),
    ]
    verdict = judge(in_a_world(2, *logs))
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("missing", [1], [0])


@pytest.mark.parametrize(
    "logs",
    [
        # nothing tells that the missing member is of this world: it has a default group
        (rank(0, init(), waits_for_members(0, 2, STORE_1)), rank(1, init(), inside=False)),
        # it has another rank in the group than in its world, which is larger
        (
            rank(0, init(), inside=False),
            rank(1, init(), waits_for_members(0, 2, STORE_1)),
            rank(2, init(), inside=False),
        ),
        # it waits for the same place in another group
        (rank(0, waits_for_members(0, 2, STORE_1)), rank(1, waits_for_members(0, 2, STORE_2))),
    ],
)
def test_a_member_that_nothing_tells_is_not_named(logs: tuple[RankLog, ...]) -> None:
    verdict = judge(in_a_world(len(logs), *logs))
    assert not verdict.culprits
    assert "never reached" not in verdict.summary


@pytest.mark.parametrize(
    ("claims", "culprits", "name"),
    [
        ([(0, 3, STORE_1), (1, 3, STORE_2), (2, 3, STORE_1)], [1], "another-store"),
        ([(0, 3, STORE_1), (1, 4, STORE_1), (2, 3, STORE_1)], [1], "another-size"),
        ([(0, 2, STORE_1), (1, 2, STORE_2)], [], "two-stores"),
        # the group may be of two of three processes, or of these and one that is out of sight
        ([(0, 3, STORE_1), (1, 2, STORE_1)], [], "two-sizes"),
    ],
)
def test_members_that_wait_for_each_other_in_two_places(
    claims: list[tuple[int, int, str]], culprits: list[int], name: str
) -> None:
    logs = [rank(number, waits_for_members(*claim)) for number, claim in enumerate(claims)]
    verdict = judge(in_a_world(len(claims), *logs))
    assert (verdict.kind, verdict.culprits) == ("mismatch/group", culprits)
    assert "do not meet" in verdict.summary
    hold(f"worlds/{name}", verdict)


def test_a_member_that_waits_in_the_first_collective_tells_its_size_too() -> None:
    """As soon as the members are there that a process was told, gloo's constructor returns."""
    logs = [rank(number, waits_for_members(number, 3 - number, STORE_1)) for number in range(2)]
    made = logs[1].setups[0]
    made.state, logs[1].setups = State.COMPLETED, [made]
    args = CollectiveArgs("broadcast", "broadcast", (TensorSpec((8,), "float32"),))
    channel = Channel(made.channel.group, "cpu")
    logs[1].collectives = [
        Collective(1, channel, 1, args, State.ISSUED, made.announced_ns + 1, made.announced_ns + 1)
    ]
    logs[1].collectives[0].wait_thread = logs[1].pid
    logs[1].issued = 1
    verdict = judge(in_a_world(2, *logs))
    assert (verdict.kind, verdict.culprits) == ("mismatch/group", [])
    assert isinstance(verdict.cause, GroupsDiffer) and verdict.cause.difference == "size"


def test_a_world_that_only_the_members_of_a_group_tell_is_on_another_node() -> None:
    """Its watcher has told who they are before the place ended where the worlds met."""
    logs = recorded(late=0)
    verdict = judge(join_worlds([logs[:2], logs[2:]])[:2])  # those of the rollouts
    assert (verdict.kind, verdict.confidence) == ("missing", "low")
    hold("worlds/out-of-sight", verdict)


def test_groups_of_two_pairs_are_not_one_group() -> None:
    logs = [
        rank(0, waits_for_members(0, 2, STORE_1)),
        rank(1, inside=False),
        rank(2, inside=False),
        rank(3, waits_for_members(1, 2, STORE_2)),
    ]
    assert "do not meet" not in judge(in_a_world(4, *logs)).summary


def test_the_only_rank_that_waits_for_nobody_may_be_the_missing_member() -> None:
    logs = [
        rank(0, init(), waits_for_members(0, 2, STORE_1)),
        rank(1, init(), inside=False),
    ]
    verdict = judge(in_a_world(2, *logs))
    assert not verdict.culprits
    assert verdict.summary.endswith("which may be rank 1")
    hold("worlds/may-be-one-rank", verdict)


@pytest.mark.parametrize(
    ("name", "size", "number", "said"),
    [
        ("trainer", 2, 1, "trainer 1"),
        ("replica 1", 2, 1, "replica 1 rank 1"),
        ("replica 1", 1, 0, "replica 1"),
    ],
)
def test_a_process_is_named_by_its_world(name: str, size: int, number: int, said: str) -> None:
    worlds = Worlds((JobWorld(name, 0, size), JobWorld("other", size, 2)))
    with naming_worlds(worlds):
        assert rank_phrase(number) == said
        assert ranks_phrase([number, size + 1]) == f"{said} and other 1"


def test_a_number_that_no_world_has_is_a_rank() -> None:
    with naming_worlds(Worlds((JobWorld("trainer", 0, 2), JobWorld("rollout", 2, 2)))):
        assert rank_phrase(9) == "rank 9"
        assert ranks_phrase([1, 8, 9]) == "trainer 1 and ranks 8-9"
        assert members_text([1, 9]) == "trainer 1, rank 9"


# --- message queues in shared memory


def end_of_queue(member: int, number: int, *, waits: bool = False) -> Collective:
    """Return where a process is in a queue: member 0 writes, the others read."""
    made = HandMade(member, 3, "host/psm_1")
    channel = Channel(ProcessGroup("psm_1", (), QUEUE, hand_made=made), QUEUE)
    state = State.ISSUED if waits else State.COMPLETED
    return Collective(0, channel, number, CollectiveArgs("dequeue", "dequeue"), state, START, START)


def with_queue(*, writer: bool, read: int) -> list[RankLog]:
    """Three ranks; rank 0 waits to write into a queue that is full until message 7 is read."""
    job = Job(3)

    def program(_: Job, rank: int) -> Iterator[object]:
        for _ in range(3):
            yield all_reduce(job.world, 100, line=10)
        yield Stay(25, ("enqueue", "decode", "wait_for_lock")[rank])

    logs = job.run(program).logs()
    logs[1].setups = [end_of_queue(1, 11)]
    logs[2].setups = [end_of_queue(2, read)]
    if writer:
        logs[0].setups = [end_of_queue(0, 0), end_of_queue(0, 7, waits=True)]
    return logs


def test_the_slowest_reader_of_a_full_queue_is_named() -> None:
    verdict = judge(with_queue(writer=True, read=6))
    assert (verdict.kind, verdict.culprits, verdict.victims) == ("missing", [2], [0])
    assert verdict.summary == (
        "rank 2 never reached dequeue #7 of group message queue [0-2]; rank 0 waits for it"
    )


def test_a_reader_that_is_about_to_read_is_not_named() -> None:
    assert judge(with_queue(writer=True, read=7)).culprits == []


def test_a_queue_whose_writer_is_no_rank_says_nothing() -> None:
    verdict = judge(with_queue(writer=False, read=6))
    assert (verdict.culprits, verdict.missing_evidence) == ([], [])
