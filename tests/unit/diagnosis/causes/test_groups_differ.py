"""Ranks that wait before their first collective: in init_process_group, in new_group, for a mesh.
No process, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from builders import MS, SCRIPT, START, S

from commlens.diagnosis.examine import diagnose_logs
from commlens.model.collective import (
    SETUP,
    STORE,
    Channel,
    Collective,
    CollectiveArgs,
    Frame,
    ProcessGroup,
    State,
    TensorSpec,
)
from commlens.model.ranklog import End, Observation, RankLog, ThreadStack
from commlens.model.verdict import Verdict

WORLD = 4
IDLE = Observation(End.RUNNING, window_s=6.0, stack_moved=False, cpu_s=0.0, proc_state="S")


def call(
    op: str,
    ranks: Sequence[int],
    line: int,
    *,
    number: int = 1,
    name: str = "",
    asked: str | None = None,
    inc: int = 0,
) -> Collective:
    names = {
        "init_process_group": "default_pg",
        "new_group": str(number),
        "init_device_mesh": "mesh",
    }
    group = ProcessGroup(name or names[op], tuple(ranks), "", "gloo", None, inc)
    at = START + line * MS
    stack = (Frame(SCRIPT, line, "build"),)
    return Collective(
        0,
        Channel(group, SETUP),
        number,
        CollectiveArgs(op, op),
        State.COMPLETED,
        at,
        at,
        stack=stack,
        module=asked,
    )


def init(line: int = 5, **more: object) -> Collective:
    return call("init_process_group", range(WORLD), line, **more)  # type: ignore[arg-type]


def groups(*ranks: Sequence[int], line: int = 10) -> list[Collective]:
    return [call("new_group", members, line + i, number=i) for i, members in enumerate(ranks, 1)]


def rank(
    number: int,
    *calls: Collective,
    inside: bool = True,
    issued: str = "",
    at: int = 57,
    log: RankLog | None = None,
) -> RankLog:
    """A rank that made these calls and is inside the last one, or has left it; then it is in a
    collective, or at a line of its own.
    """
    log = log or RankLog(
        number,
        WORLD,
        "job-1",
        "n03",
        1000 + number,
        number,
        script=SCRIPT,
        captured_ns=START + 60 * S,
    )
    log.setups = list(calls)
    log.initialised = bool(calls) and (len(calls) > 1 or not inside)
    log.observation = IDLE
    frame = Frame(SCRIPT, at, "prepare")
    if issued:
        group = ProcessGroup("0", tuple(range(WORLD)), "default_pg", "gloo")
        frame = Frame(SCRIPT, at, "step")
        args = CollectiveArgs(issued, issued, (TensorSpec((4,), "float32"),))
        op = Collective(
            1,
            Channel(group, "cpu"),
            1,
            args,
            State.ISSUED,
            START + S,
            START + S,
            START + S,
            START + S,
            stack=(frame,),
        )
        op.issue_thread = op.wait_thread = log.pid
        log.collectives, log.issued = [op], 1
    elif calls and inside:
        calls[-1].state = State.ISSUED
        frame = calls[-1].stack[0]
    log.stacks = [ThreadStack(log.pid, "MainThread", (frame,), START + 59 * S, is_main=True)]
    return log


def verdict(*logs: RankLog) -> Verdict:
    found = diagnose_logs(logs)
    assert all(
        finding.confidence == "high" or finding.would_raise_confidence for finding in found.findings
    ), "no reason is given"
    return found


def test_a_rank_that_never_comes_to_init() -> None:
    found = verdict(rank(0, init()), rank(1, init()), rank(2, at=57), rank(3, init()))
    assert (found.kind, found.why, found.culprits, found.victims, found.source) == (
        "missing",
        "user-code",
        [2],
        [0, 1, 3],
        "train.py:57",
    )
    assert found.summary == "rank 2 never reached init_process_group; ranks 0-1,3 wait for it"


def test_a_rank_that_visibly_works_before_init_is_waited_for() -> None:
    busy = rank(2, at=57)
    busy.observation = Observation(
        End.RUNNING, window_s=6.0, stack_moved=True, cpu_s=5.0, proc_state="R"
    )
    found = verdict(rank(0, init()), rank(1, init()), busy, rank(3, init()))
    assert (found.kind, found.culprits) == ("waiting", [])


def test_a_rank_that_ends_before_init() -> None:
    ended = rank(2)
    ended.closed, ended.observation = True, Observation(End.CLEAN, 0, ended_ns=START + 2 * S)
    found = verdict(rank(0, init()), rank(1, init()), ended, rank(3, init()))
    assert (found.kind, found.why, found.culprits) == ("missing", "finished", [2])
    assert "without init_process_group" in found.summary and "iterations" not in found.next_step


def test_groups_in_another_order() -> None:
    usual, other = ([0, 1], [1, 2]), ([1, 2], [0, 1])
    found = verdict(
        rank(0, init(), *groups(usual[0])),
        rank(1, init(), *groups(*other[:1], line=20)),
        rank(2, init(), *groups(*usual)),
        rank(3, init(), *groups(*usual), inside=False, issued="all_reduce"),
    )
    assert (found.kind, found.culprits, found.source) == ("mismatch/group", [1], "train.py:21")
    assert "[1, 2] in new_group #1, the others for ranks [0, 1]" in found.summary
    assert "train.py:21 build" in found.explanation and "train.py:11 build" in found.explanation
    assert "did not begin with the group of ranks [0, 1]" in found.explanation
    assert sum(each.root_cause for each in found.findings) == 1


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
    assert "ranks [0, 1] (ranks 0-1) against ranks [2, 3] (ranks 2-3)" in found.summary
    assert "One side has the lower ranks" in found.explanation, "what separates the sides"


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
    assert "mesh (4,)" in found.summary and mesh in found.summary


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
    assert (
        found.summary == "rank 2 did not call new_group #1 of ranks [0, 1, 2, 3]; ranks 0-1,3 did"
    )


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
    assert "4 ranks at port 29501 with gloo in init_process_group" in found.summary


def test_a_rank_of_which_there_is_no_record() -> None:
    found = verdict(rank(0, init()), rank(1, init()), rank(3, init()))
    assert found.is_fault and found.culprits == [2] and "init_process_group" in found.summary


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


def test_a_rank_that_runs_here_without_being_recorded() -> None:
    """Nobody knows what it does, but it is not on another node."""
    stranger = RankLog(
        1,
        WORLD,
        "job-1",
        "n03",
        1001,
        unrecorded="COMMLENS=1 is not in its environment: start it with COMMLENS=1",
    )
    waiting = [rank(number, init(), inside=False, issued="all_reduce") for number in (0, 2, 3)]
    found = verdict(*waiting, stranger)
    assert (found.kind, found.culprits, found.confidence) == ("missing", [1], "low")
    assert (
        "rank 1 (pid 1001) runs on this node but is not recorded" in found.summary
        and "start it with COMMLENS=1" in found.next_step
    )
    assert not any("another node" in text for text in [found.summary, *found.missing_evidence])


def test_a_process_that_has_no_box_yet() -> None:
    early = RankLog(1, WORLD, "job-1", "n03", 1001, observation=IDLE)
    found = verdict(*(rank(number, init()) for number in (0, 2, 3)), early)
    assert (found.kind, found.why, found.culprits) == ("missing", "initialising", [1])
    assert (
        "has not called init_process_group yet" in found.explanation and "py-spy" in found.next_step
    )


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


def key(op: str, name: str, line: int, state: State = State.COMPLETED) -> Collective:
    group, at = ProcessGroup(name, tuple(range(WORLD)), "", ""), START + S
    return Collective(
        0,
        Channel(group, STORE),
        1,
        CollectiveArgs(op, op),
        state,
        at,
        at,
        stack=(Frame(SCRIPT, line, "share"),),
    )


def in_store(number: int, name: str, *, op: str = "store.get", line: int = 30) -> RankLog:
    log = rank(number, init(), inside=False, at=line)
    log.store_wait = key(op, name, line, State.ISSUED)
    log.store_wait.issue_thread = log.pid
    return log


def wrote(log: RankLog, *names: str) -> RankLog:
    log.keys_written = [key("store.set", name, 20) for name in names]
    return log


def test_the_rank_that_wrote_such_keys_before_is_missing() -> None:
    found = verdict(
        in_store(0, "rate-7"),
        wrote(rank(1, init(), inside=False), "rate-0"),
        rank(2, init(), inside=False),
        in_store(3, "rate-7"),
    )
    assert (found.kind, found.culprits, found.victims, found.source) == (
        "missing",
        [1],
        [0, 3],
        "train.py:57",
    )
    assert (
        found.summary
        == "rank 1 has not written the key 'rate-7'; ranks 0,3 wait for it in store.get"
    )


def test_the_only_rank_that_does_not_wait_for_a_key_is_the_one_that_should_write_it() -> None:
    found = verdict(rank(0, init(), inside=False), *(in_store(n, "config") for n in (1, 2, 3)))
    assert (found.kind, found.culprits) == ("missing", [0])


def test_a_key_with_the_ranks_own_number_is_that_ranks() -> None:
    others = [wrote(rank(n, init(), inside=False), f"ready-{n}") for n in (1, 3)]
    waiting = wrote(in_store(0, "ready-2"), "ready-0")
    found = verdict(waiting, others[0], rank(2, init(), inside=False, at=66), others[1])
    assert (found.kind, found.culprits, found.source) == ("missing", [2], "train.py:66")


def test_a_write_that_was_skipped_is_told_if_most_ranks_wait_for_it() -> None:
    writer = wrote(rank(2, init(), inside=False, issued="all_reduce"), "rate-0")
    found = verdict(in_store(0, "rate-7"), in_store(1, "rate-7"), writer, in_store(3, "rate-7"))
    assert (found.kind, found.why, found.culprits, found.victims) == (
        "missing",
        "skipped",
        [2],
        [0, 1, 3],
    )
    assert found.source == "train.py:20" and "in all_reduce #1" in found.explanation
    assert sum(each.root_cause for each in found.findings) == 1


def test_nobody_is_blamed_if_most_ranks_are_with_the_one_that_writes() -> None:
    reducing = [rank(n, init(), inside=False, issued="all_reduce") for n in (0, 1, 2)]
    found = verdict(wrote(reducing[0], "rate-0"), *reducing[1:], in_store(3, "rate-7"))
    assert (found.kind, found.culprits) == ("cycle", [])
    assert "store.get of key 'rate-7'" in found.explanation


def test_nobody_is_blamed_for_a_key_of_an_unknown_writer() -> None:
    reducing = [rank(n, init(), inside=False, issued="all_reduce", at=40) for n in (0, 1, 3)]
    found = verdict(*reducing[:2], in_store(2, "config", op="store.wait"), reducing[2])
    assert (found.kind, found.culprits, found.victims, found.confidence) == (
        "missing",
        [],
        [0, 1, 2, 3],
        "low",
    )
    assert (
        found.summary
        == "rank 2 waits in store.wait for the key 'config', which no rank is known to write"
    )
    assert "Ranks 0-1,3 wait behind it." in found.explanation


def test_ranks_that_all_wait_for_a_key_may_wait_for_another_program() -> None:
    logs = [in_store(n, "request-1") for n in range(WORLD)]
    for log in logs:
        log.stall_timeout_s = 30.0
    assert verdict(*logs).kind == "healthy"
    for log in logs:
        log.stall_timeout_s = 10.0
    assert (verdict(*logs).kind, verdict(*logs).confidence, verdict(*logs).culprits) == (
        "missing",
        "low",
        [],
    )


def test_a_rank_that_ends_without_writing_a_key() -> None:
    ended = wrote(rank(1), "rate-0")
    ended.closed, ended.observation = True, Observation(End.CLEAN, 0, ended_ns=START + 2 * S)
    found = verdict(in_store(0, "rate-7"), ended, in_store(2, "rate-7"), in_store(3, "rate-7"))
    assert (found.kind, found.why, found.culprits) == ("missing", "finished", [1])
    assert (
        "finished without writing the key 'rate-7'" in found.summary
        and "without writing" in found.next_step
    )


def test_a_writer_that_has_waited_for_less_than_the_others_is_in_the_cycle() -> None:
    writer = wrote(rank(2, init(), inside=False, issued="all_reduce"), "rate-0")
    op = writer.collectives[0]
    op.announced_ns = op.entered_ns = op.returned_ns = op.wait_began_ns = writer.captured_ns - MS
    found = verdict(in_store(0, "rate-7"), in_store(1, "rate-7"), writer, in_store(3, "rate-7"))
    assert (found.why, found.culprits, found.source) == ("skipped", [2], "train.py:20")


def test_a_rank_whose_other_threads_go_on_is_not_stuck_in_the_store() -> None:
    logs = [rank(n, init(), inside=False, issued="all_reduce") for n in range(WORLD)]
    for log in logs:
        log.stall_timeout_s = 10.0
        log.store_wait = key("store.get", "shutdown", 30, State.ISSUED)
        log.store_wait.issue_thread = log.pid
        op = log.collectives[0]
        op.state, op.issue_thread, op.announced_ns = (
            State.COMPLETED,
            log.pid + 1,
            log.captured_ns - MS,
        )
    assert verdict(*logs).kind == "healthy"


def test_ranks_that_were_never_started() -> None:
    """All meet at an address that only this machine reaches, and nobody else came."""

    def waiting(number: int, meeting: str, **more: object) -> RankLog:
        log = RankLog(
            number,
            WORLD,
            "job-1",
            "n03",
            1000 + number,
            None,
            script=SCRIPT,
            captured_ns=START + 60 * S,
            **more,
        )  # type: ignore[arg-type]
        return rank(number, init(asked=meeting), log=log)

    for known, launcher, origin in (
        (4, "", "4 comes from the variable WORLD_SIZE"),
        (4, "torchrun", "4 comes from the options of torchrun"),
        (
            2,
            "torchrun",
            (
                "4 comes from world_size in the call of init_process_group at train.py:5 build,"
                " although WORLD_SIZE is 2"
            ),
        ),
        (None, "", "correct the number of ranks"),
    ):
        here = [
            waiting(number, "tcp://127.0.0.1:29500", launcher=launcher, size_in_environment=known)
            for number in (0, 1)
        ]
        found = verdict(*here)
        assert (
            found.summary
            == "ranks 2-3 of 4 were never started: ranks 0-1 wait in init_process_group for them"
        )
        assert found.next_step.endswith(origin) and found.culprits == []
        assert not any("another node" in text for text in found.missing_evidence)
    elsewhere = verdict(
        *(
            waiting(number, "tcp://node7:29500", launcher="", size_in_environment=4)
            for number in (0, 1)
        )
    )
    assert "never started" not in elsewhere.summary and "another node" in elsewhere.next_step
    assert any("probably run on another node" in text for text in elsewhere.missing_evidence)


def test_no_gpu_tools_for_a_call_that_makes_groups() -> None:
    found = verdict(*(rank(number, init()) for number in range(WORLD)))
    assert found.kind == "stuck-inside" and "nvidia" not in found.next_step


def test_ranks_that_exist_twice() -> None:
    """Whatever the processes of such a job do to each other is a consequence, also where one of
    them ended.
    """
    for log in (logs := [rank(number, init()) for number in range(WORLD)])[:2]:
        log.twins = [(2000 + log.rank, 1000), (2010 + log.rank, 1001)]
    logs[3].observation = Observation(End.KILLED, signal="SIGABRT")
    found = verdict(*logs)
    assert (found.kind, found.culprits, found.confidence) == ("mismatch/group", [], "high")
    assert found.summary.startswith("ranks 0-1 exist twice: the launcher starts ranks")
    assert (
        "ank 0: pid 2000, started by pid 1000, pid 2010, started by pid 1001" in found.explanation
    )
    assert found.next_step.startswith("start train.py without the launcher")
    assert [finding.root_cause for finding in found.findings[1:]] == [False] * (
        len(found.findings) - 1
    )
    for log in (logs := [rank(number, init(), inside=False, issued="") for number in range(WORLD)]):
        log.twins = [(2000 + log.rank, 1000), (2010 + log.rank, 1001)]
        log.observation, log.closed = Observation(End.CLEAN), True
    assert verdict(*logs).kind == "healthy", "they met one after the other"
